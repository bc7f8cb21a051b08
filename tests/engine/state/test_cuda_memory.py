"""Device memory that processes share, against a driver that keeps books: whatever fails, nothing stays taken.

tests/gpu/test_cuda_memory.py holds the promise itself, that a peer can read the memory and not write it.
"""

# ruff: noqa: N802 - the functions have libcuda's names

from __future__ import annotations

import ctypes
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from host_cuda import HostCuda, with_host_cuda

from baton.engine.state import cuda_memory
from baton.engine.state.cuda_memory import can_share, map_shared, pool_zeros, share
from baton.metadata.errors import TransferError

DEVICE = torch.device("cuda:1")
UNIT = 2 << 20  # what the device allocates at a time
OUT_OF_MEMORY, FAILED = 2, 999


class HostDriver:
    """The functions of libcuda that are used. It counts what is taken, and refuses every use of what is not there.

    `fails`: by name of a function, the status of its next call. `allocations` and `mappings` are in bytes."""

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.calls: Counter[str] = Counter()
        self.handles: Counter[int] = Counter()  # claims to each allocation
        self.sizes: dict[int, int] = {}  # by handle
        self.reserved: dict[int, int] = {}  # by address, bytes
        self.mapped: dict[int, tuple[int, int]] = {}  # by address: bytes, handle
        self.rights: dict[int, tuple[int, int]] = {}  # by address: device, rights
        self.attribute = 1
        self._number = 0

    @property
    def is_empty(self) -> bool:
        return not (self.reserved or self.mapped or +self.handles)

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(HostDriver, f"do_{name}")

        def call(*args: Any) -> int:
            self.calls[name] += 1
            status = self.fails.pop(name, 0)
            if not status:
                function(self, *args)
            return status

        return call

    def _next(self) -> int:
        self._number += 1
        return self._number

    def do_cuGetErrorName(self, status: int, text: Any) -> None:
        text._obj.value = f"CUDA_ERROR_{status}".encode()

    def do_cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> None:
        assert (attribute, device) == (103, 1)
        value._obj.value = self.attribute

    def do_cuMemGetAllocationGranularity(self, unit: Any, properties: Any, which: int) -> None:
        assert which == 0 and properties._obj.location.id == 1
        unit._obj.value = UNIT

    def do_cuMemCreate(self, handle: Any, size: int, properties: Any, _: int) -> None:
        assert size > 0 and size % UNIT == 0 and properties._obj.handle_types == 1
        handle._obj.value = 1000 + self._next()
        self.handles[handle._obj.value] += 1
        self.sizes[handle._obj.value] = size

    def do_cuMemAddressReserve(self, address: Any, size: int, *_: int) -> None:
        address._obj.value = UNIT * 1000 * self._next()
        self.reserved[address._obj.value] = size

    def do_cuMemMap(self, address: int, size: int, offset: int, handle: int, _: int) -> None:
        assert self.reserved[address] == size and self.handles[handle] and offset == 0
        self.mapped[address] = size, handle
        self.handles[handle] += 1  # a mapping keeps the allocation

    def do_cuMemSetAccess(self, address: int, size: int, rights: Any, count: int) -> None:
        assert self.mapped[address][0] == size and count == 1
        self.rights[address] = rights._obj.location.id, rights._obj.flags

    def do_cuMemUnmap(self, address: int, size: int) -> None:
        mapped, handle = self.mapped.pop(address)
        assert mapped == size
        self.handles[handle] -= 1

    def do_cuMemAddressFree(self, address: int, size: int) -> None:
        assert address not in self.mapped and self.reserved.pop(address) == size

    def do_cuMemRelease(self, handle: Any) -> None:
        number = getattr(handle, "value", handle)
        assert self.handles[number] > 0
        self.handles[number] -= 1

    def do_cuMemRetainAllocationHandle(self, handle: Any, address: int) -> None:
        handle._obj.value = self.mapped[address][1]
        self.handles[handle._obj.value] += 1

    def do_cuMemExportToShareableHandle(self, descriptor: Any, handle: Any, kind: int, _: int) -> None:
        assert kind == 1 and self.handles[handle.value]
        descriptor._obj.value = 5000 + handle.value

    def do_cuMemImportFromShareableHandle(self, handle: Any, descriptor: int, kind: int) -> None:
        assert kind == 1
        handle._obj.value = 9000 + self._next()
        self.handles[handle._obj.value] += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> HostCuda:
    return with_host_cuda(monkeypatch)


@pytest.fixture
def driver(cuda: HostCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDriver]:
    """A driver in which nothing is taken when a test ends."""
    library, others = HostDriver(), set(cuda_memory._addresses)
    own = object.__new__(cuda_memory._Driver)
    own._lib = library  # type: ignore[assignment]
    monkeypatch.setattr(cuda_memory._Driver, "_one", own)
    yield library
    gc.collect()
    assert library.is_empty and cuda_memory._addresses == others


@pytest.fixture
def null() -> Iterator[int]:
    """A descriptor of a character device, as those of device memory are."""
    descriptor = os.open("/dev/null", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def memory_of(num_bytes: int) -> cuda_memory._Block:
    return cuda_memory._Block(num_bytes, DEVICE)


def address_of(block: cuda_memory._Block) -> int:
    return block.__cuda_array_interface__["data"][0]


class Tensor:
    """The parts of a tensor that `share` reads."""

    device = DEVICE

    def __init__(self, address: int, nbytes: int) -> None:
        self._address, self.nbytes = address, nbytes

    def data_ptr(self) -> int:
        return self._address


@pytest.mark.parametrize(("num_bytes", "size"), [(0, UNIT), (1, UNIT), (UNIT, UNIT), (UNIT + 1, 2 * UNIT)])
def test_an_allocation_is_a_multiple_of_what_the_device_allocates(
    num_bytes: int, size: int, driver: HostDriver
) -> None:
    block = memory_of(num_bytes)
    assert block.__cuda_array_interface__["shape"] == (size,)
    assert driver.mapped[address_of(block)][0] == driver.reserved[address_of(block)] == size


def test_the_owner_may_write_and_a_peer_may_only_read(driver: HostDriver, null: int) -> None:
    block = memory_of(100)
    mapping = map_shared(null, 3 * UNIT, DEVICE)
    assert driver.rights == {address_of(block): (1, 3), mapping.address: (1, 1)}
    assert mapping.size == driver.mapped[mapping.address][0] == 3 * UNIT
    mapping.close()
    mapping.close()
    assert list(driver.mapped) == [address_of(block)]


def test_memory_is_freed_with_the_block_after_the_work_on_it(driver: HostDriver, cuda: HostCuda) -> None:
    block = memory_of(100)
    address = address_of(block)
    assert address in cuda_memory._addresses and not cuda.log
    del block
    gc.collect()
    assert driver.is_empty and cuda.log == [("host", "waits for", "device")]


def test_shared_memory_is_named_by_a_descriptor_and_its_size(driver: HostDriver) -> None:
    block = memory_of(UNIT + 5)
    handle = driver.mapped[address_of(block)][1]
    claims = driver.handles[handle]
    assert share(Tensor(address_of(block), UNIT + 5)) == (5000 + handle, 2 * UNIT)  # type: ignore[arg-type]
    assert driver.handles[handle] == claims


def test_only_whole_blocks_of_ours_are_shared(driver: HostDriver) -> None:
    block = memory_of(UNIT)
    for address in (address_of(block) + 256, 4711):
        with pytest.raises(TransferError, match="torch allocated"):
            share(Tensor(address, 100))  # type: ignore[arg-type]


def test_a_descriptor_of_no_device_is_refused_before_the_driver_sees_it(driver: HostDriver) -> None:
    read, write = os.pipe()
    try:
        with pytest.raises(TransferError, match="is none of device memory"):
            map_shared(read, UNIT, DEVICE)
        assert not driver.calls
    finally:
        os.close(read)
        os.close(write)


# --- whatever fails, nothing stays taken ---

CREATING = ("cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess")
IMPORTING = ("cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess")
SHARING = ("cuMemRetainAllocationHandle", "cuMemExportToShareableHandle", "cuMemGetAllocationGranularity")


@pytest.mark.parametrize(("status", "kind"), [(FAILED, TransferError), (OUT_OF_MEMORY, torch.OutOfMemoryError)])
@pytest.mark.parametrize("name", CREATING)
def test_an_allocation_that_fails_takes_nothing(
    name: str, status: int, kind: type[Exception], driver: HostDriver
) -> None:
    driver.fails[name] = status
    with pytest.raises(kind, match=rf"{name}: CUDA_ERROR_{status} \({status}\)"):
        memory_of(100)
    assert driver.is_empty


@pytest.mark.parametrize("name", IMPORTING)
def test_a_mapping_that_fails_takes_nothing(name: str, driver: HostDriver, null: int) -> None:
    driver.fails[name] = FAILED
    with pytest.raises(TransferError, match=name):
        map_shared(null, UNIT, DEVICE)
    assert driver.is_empty


@pytest.mark.parametrize("name", SHARING)
def test_sharing_that_fails_leaves_the_block_as_it_was(name: str, driver: HostDriver) -> None:
    block = memory_of(100)
    before = +driver.handles
    driver.fails[name] = FAILED
    with pytest.raises(TransferError, match=name):
        share(Tensor(address_of(block), 100))  # type: ignore[arg-type]
    assert +driver.handles == before and list(driver.mapped) == [address_of(block)]


def test_torch_gives_back_what_it_does_not_use_before_memory_counts_as_full(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(driver.calls["cuMemCreate"]))
    driver.fails["cuMemCreate"] = OUT_OF_MEMORY
    block = memory_of(100)
    assert emptied == [1] and driver.calls["cuMemCreate"] == 2 and address_of(block) in driver.mapped

    def fail_again() -> None:
        driver.fails["cuMemCreate"] = OUT_OF_MEMORY

    monkeypatch.setattr(torch.cuda, "empty_cache", fail_again)
    fail_again()
    with pytest.raises(torch.OutOfMemoryError, match="cuMemCreate"):
        memory_of(100)


# --- pools of devices that share no memory ---


def test_a_device_says_whether_its_memory_can_be_shared(driver: HostDriver) -> None:
    assert can_share(DEVICE)
    driver.fails["cuDeviceGetAttribute"] = FAILED
    assert not can_share(DEVICE)
    driver.attribute = 0
    assert not can_share(DEVICE)


def test_without_libcuda_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> ctypes.CDLL:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(cuda_memory._Driver, "_one", None)
    assert not can_share(DEVICE)
    zeros = pool_zeros((2, 3), torch.int16, torch.device("cpu"))
    assert zeros.dtype == torch.int16 and zeros.tolist() == [[0] * 3] * 2


def test_a_device_that_refuses_gives_the_pool_memory_of_torch(
    driver: HostDriver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.fails["cuMemSetAccess"] = FAILED
    host = torch.device("cpu", 1)  # the driver's device 1; torch's zeros lie on the host
    assert pool_zeros((4, 5), torch.float32, host).tolist() == [[0.0] * 5] * 4
    assert "does not give memory that other processes can map: cuMemSetAccess" in caplog.text


def test_a_full_device_is_not_a_device_that_refuses(driver: HostDriver) -> None:
    """Torch would find no memory either, so the node says so at once."""
    driver.fails["cuMemSetAccess"] = OUT_OF_MEMORY
    with pytest.raises(torch.OutOfMemoryError, match="cuMemSetAccess"):
        pool_zeros((4, 5), torch.float32, torch.device("cpu", 1))
