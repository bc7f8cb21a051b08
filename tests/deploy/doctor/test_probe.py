"""The program that asks the CUDA driver, against a driver that is made up, and that of this machine."""

from __future__ import annotations

import ctypes
from typing import Any

import msgspec
import pytest

from baton.deploy.doctor import probe
from baton.deploy.doctor.gpu_facts import Driver, Gpu

SYSTEM_NOT_READY = 802


class Cuda:
    """A libcuda with three GPUs. GPU 2 reads the memory of the others, and they cannot read its own."""

    def __init__(self, status: int) -> None:
        self.status = status

    def cuInit(self, _flags: int) -> int:  # noqa: N802
        return self.status

    def cuDriverGetVersion(self, out: Any) -> None:  # noqa: N802
        out._obj.value = 12080

    def cuGetErrorName(self, _status: int, out: Any) -> None:  # noqa: N802
        out._obj.value = b"CUDA_ERROR_SYSTEM_NOT_READY"

    def cuDeviceGetCount(self, out: Any) -> None:  # noqa: N802
        out._obj.value = 3

    def cuDeviceGet(self, out: Any, index: int) -> None:  # noqa: N802
        out._obj.value = index

    def cuDeviceGetName(self, out: Any, _size: int, handle: int) -> None:  # noqa: N802
        out.value = f"GPU {handle}".encode()

    def cuDeviceGetPCIBusId(self, out: Any, _size: int, handle: int) -> None:  # noqa: N802
        out.value = f"0000:{handle}B:00.0".encode()

    def cuDeviceTotalMem_v2(self, out: Any, _handle: int) -> None:  # noqa: N802
        out._obj.value = 1 << 37

    def cuDeviceGetAttribute(self, out: Any, _what: int, handle: int) -> None:  # noqa: N802
        out._obj.value = int(handle != 1)

    def cuDeviceCanAccessPeer(self, out: Any, _reader: int, owner: int) -> int:  # noqa: N802
        out._obj.value = int(owner != 2)
        return 0


def test_a_driver_tells_its_gpus_and_which_cannot_read_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Cuda(0))
    driver = msgspec.convert(probe.driver(), Driver)
    assert driver.cuda == (12, 8)
    assert driver.gpus[1] == Gpu("GPU 1", "0000:1b:00.0", 1 << 37, can_share=False)
    assert driver.apart == ((0, 2), (1, 2))


def test_a_driver_that_does_not_start_is_named_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Cuda(SYSTEM_NOT_READY))
    driver = msgspec.convert(probe.driver(), Driver)
    assert (driver.cuda, driver.gpus) == ((12, 8), ())
    assert driver.failure == "cuInit says CUDA_ERROR_SYSTEM_NOT_READY (802)"
