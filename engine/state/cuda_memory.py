"""Device memory that other processes of this host can map, and their mapping of it.

CUDA's virtual memory management keeps an allocation apart from its mappings, and each mapping says what its device may
do there. The owner's mapping is writable. A peer gets a file descriptor of the allocation and maps it, for reading if
it asks for nothing else: a kernel or copy that writes through that mapping faults in the peer, and the owner's bytes
stay as they are.

Interface: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import stat
import weakref
from typing import Any

import torch

from ...metadata.errors import TransferError
from ...metadata.handoff.pages import Shared

logger = logging.getLogger(__name__)

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED: lies on one device for good
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_AS_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ, _READ_WRITE = 1, 3  # CU_MEM_ACCESS_FLAGS_PROT_*
_CAN_SHARE = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM


_addresses: set[int] = set()  # of the blocks that this process has allocated


class Mapping:
    """Memory mapped at `address` for one device, `size` bytes. `close` unmaps it; work on it must be done by then."""

    def __init__(self, handle: int, size: int, device: torch.device, access: int) -> None:
        """Maps the allocation that `handle` names, and keeps no other claim to it. Raises TransferError."""
        driver = _Driver.get()
        self.size = size
        reserved = ctypes.c_uint64()
        driver.call("cuMemAddressReserve", ctypes.byref(reserved), size, 0, 0, 0)
        self.address = reserved.value
        with contextlib.ExitStack() as undo:
            undo.callback(driver.call, "cuMemAddressFree", self.address, size)
            driver.call("cuMemMap", self.address, size, 0, handle, 0)
            undo.callback(driver.call, "cuMemUnmap", self.address, size)
            rights = _Access(_Location(_ON_DEVICE, _ordinal(device)), access)
            driver.call("cuMemSetAccess", self.address, size, ctypes.byref(rights), 1)
            self._unmap = undo.pop_all()

    def close(self) -> None:
        """Unmaps. May be called twice."""
        self._unmap.close()


def can_share(device: torch.device) -> bool:
    """Return whether the device's memory can be given to other processes as file descriptors."""
    try:
        value = ctypes.c_int()
        _Driver.get().call("cuDeviceGetAttribute", ctypes.byref(value), _CAN_SHARE, _ordinal(device))
    except (TransferError, OSError):
        return False
    return bool(value.value)


def pool_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros that other processes can map if the device allows that, else zeros in torch's own memory.

    Raises torch.OutOfMemoryError.
    """
    try:
        if can_share(device):
            return shareable_zeros(shape, dtype, device)
    except TransferError as error:
        logger.warning("this device does not give memory that other processes can map: %s", error)
    return torch.zeros(shape, dtype=dtype, device=device)


def shareable_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros in an allocation of their own, which `share` can hand out; it is freed with the last tensor that
    views it. Raises torch.OutOfMemoryError as torch.zeros does, TransferError when CUDA refuses for another reason.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    with torch.cuda.device(device):
        block = _Block(num_bytes, device)
        tensor = torch.as_tensor(block, device=device)[:num_bytes].view(dtype).view(shape)
    return tensor.zero_()


def share(tensor: torch.Tensor) -> Shared:
    """Return a new descriptor, which the caller closes, of the allocation that holds a tensor of `shareable_zeros`.

    Raises TransferError for any other tensor, and when CUDA refuses.
    """
    driver, handle, descriptor = _Driver.get(), ctypes.c_uint64(), ctypes.c_int(-1)
    if tensor.data_ptr() not in _addresses:
        raise TransferError("the pool lies in memory that torch allocated, which has no file descriptor")
    with torch.cuda.device(tensor.device):
        driver.call("cuMemRetainAllocationHandle", ctypes.byref(handle), tensor.data_ptr())
        try:
            driver.call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _AS_DESCRIPTOR, 0)
            return Shared(descriptor.value, _rounded(tensor.nbytes, tensor.device))
        finally:
            driver.call("cuMemRelease", handle)


def map_shared(descriptor: int, size: int, device: torch.device, *, is_writable: bool = False) -> Mapping:
    """Map another process's allocation of `size` bytes so that `device` can read it, and write it only if asked for.

    The caller closes the mapping, and the descriptor, of which the mapping is independent. Raises TransferError.
    """
    if not stat.S_ISCHR(os.fstat(descriptor).st_mode):
        raise TransferError("the descriptor that came is none of device memory")
    driver, handle = _Driver.get(), ctypes.c_uint64()
    with torch.cuda.device(device):
        driver.call("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, _AS_DESCRIPTOR)
        try:
            return Mapping(handle.value, size, device, _READ_WRITE if is_writable else _READ)
        finally:
            driver.call("cuMemRelease", handle)


class _Block:
    """An allocation with its writable mapping, as torch.as_tensor takes it: a tensor of it keeps it alive."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        driver, handle = _Driver.get(), ctypes.c_uint64()
        size = _rounded(num_bytes, device)
        properties = _properties(device)
        if driver.status("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), 0):
            torch.cuda.empty_cache()  # torch may keep what it does not use
            driver.call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), 0)
        try:
            mapping = Mapping(handle.value, size, device, _READ_WRITE)
        finally:
            driver.call("cuMemRelease", handle)
        _addresses.add(mapping.address)
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (mapping.address, False),
        }
        free = weakref.finalize(self, _free, mapping, device)
        free.atexit = False  # the process's end frees it, after all that may still use it


def _free(mapping: Mapping, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # the work under way may use it
    _addresses.discard(mapping.address)
    with torch.cuda.device(device):
        mapping.close()


def _ordinal(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _rounded(num_bytes: int, device: torch.device) -> int:
    """Return the size of an allocation that holds so many bytes: a multiple of what the device allocates."""
    unit, properties = ctypes.c_size_t(), _properties(device)
    _Driver.get().call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(properties), _MINIMUM)
    return max(1, -(-num_bytes // unit.value)) * unit.value


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


def _properties(device: torch.device) -> _Properties:
    return _Properties(_PINNED, _AS_DESCRIPTOR, _Location(_ON_DEVICE, _ordinal(device)))


_POINTER, _U64, _SIZE, _INT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuDeviceGetAttribute": (_POINTER, _INT, _INT),
    "cuMemAddressFree": (_U64, _SIZE),
    "cuMemAddressReserve": (_POINTER, _SIZE, _SIZE, _U64, _U64),
    "cuMemCreate": (_POINTER, _SIZE, _POINTER, _U64),
    "cuMemExportToShareableHandle": (_POINTER, _U64, _INT, _U64),
    "cuMemGetAllocationGranularity": (_POINTER, _POINTER, _INT),
    "cuMemImportFromShareableHandle": (_POINTER, _POINTER, _INT),  # the descriptor itself, in a pointer's place
    "cuMemMap": (_U64, _SIZE, _SIZE, _U64, _U64),
    "cuMemRelease": (_U64,),
    "cuMemRetainAllocationHandle": (_POINTER, _POINTER),
    "cuMemSetAccess": (_U64, _SIZE, _POINTER, _SIZE),
    "cuMemUnmap": (_U64, _SIZE),
}


class _Driver:
    """The few calls of libcuda that torch does not offer. Raises OSError when the machine has no libcuda."""

    _one: _Driver | None = None

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        for name, types in _SIGNATURES.items():
            getattr(self._lib, name).argtypes = types

    @classmethod
    def get(cls) -> _Driver:
        """Return the process's only one."""
        if cls._one is None:
            cls._one = cls()
        return cls._one

    def status(self, name: str, *args: Any) -> int:
        """Call the driver and return its status: 0 for success."""
        return getattr(self._lib, name)(*args)

    def call(self, name: str, *args: Any) -> None:
        """Call the driver. Raises torch.OutOfMemoryError when memory lacks, TransferError for any other failure."""
        status = self.status(name, *args)
        if not status:
            return
        text = ctypes.c_char_p()
        self._lib.cuGetErrorName(status, ctypes.byref(text))
        words = f"{name}: {(text.value or b'error').decode()} ({status})"
        raise torch.OutOfMemoryError(words) if status == _OUT_OF_MEMORY else TransferError(words)
