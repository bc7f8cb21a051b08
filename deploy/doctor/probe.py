"""A program that asks the CUDA driver or torch for the GPUs, and prints the answer as JSON.

It runs in a process of its own, because a broken driver can hang or kill the process that loads it. It imports nothing
of Baton, and makes no CUDA context, so it takes no memory of a GPU.
"""

from __future__ import annotations

import ctypes
import json
import sys
import warnings
from typing import Any

_CAN_SHARE = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED


def driver() -> dict[str, Any]:
    """Return the CUDA version of the driver, its GPUs, and the pairs of them that cannot reach each other's memory."""
    try:
        lib = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"failure": "there is no libcuda.so.1"}
    found = ctypes.c_int()
    lib.cuDriverGetVersion(ctypes.byref(found))
    cuda = [found.value // 1000, found.value % 1000 // 10]
    if status := lib.cuInit(0):
        return {"cuda": cuda, "failure": f"cuInit says {_error_name(lib, status)}"}
    lib.cuDeviceGetCount(ctypes.byref(found))
    handles = [_handle(lib, index) for index in range(found.value)]
    return {
        "cuda": cuda,
        "gpus": [_gpu(lib, handle) for handle in handles],
        "apart": [[i, j] for i, a in enumerate(handles) for j, b in enumerate(handles) if i < j and _apart(lib, a, b)],
    }


def torch() -> dict[str, Any]:
    """Return the versions of torch and of its CUDA, the number of GPUs, and torch's warning if it sees none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            import torch
        except Exception as error:  # whatever a broken installation raises
            return {"failure": f"import torch: {type(error).__name__}: {error}"}
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    words = next((str(each.message) for each in caught if "CUDA" in str(each.message)), "")
    return {"version": torch.__version__, "cuda": torch.version.cuda, "num_gpus": num_gpus, "words": words}


def _handle(lib: ctypes.CDLL, index: int) -> int:
    handle = ctypes.c_int()
    lib.cuDeviceGet(ctypes.byref(handle), index)
    return handle.value


def _gpu(lib: ctypes.CDLL, handle: int) -> dict[str, Any]:
    name, bus = ctypes.create_string_buffer(128), ctypes.create_string_buffer(32)
    size, can_share = ctypes.c_size_t(), ctypes.c_int()
    lib.cuDeviceGetName(name, len(name), handle)
    lib.cuDeviceGetPCIBusId(bus, len(bus), handle)
    lib.cuDeviceTotalMem_v2(ctypes.byref(size), handle)
    lib.cuDeviceGetAttribute(ctypes.byref(can_share), _CAN_SHARE, handle)
    return {
        "name": name.value.decode(),
        "bus": bus.value.decode().lower(),
        "num_bytes": size.value,
        "can_share": bool(can_share.value),
    }


def _apart(lib: ctypes.CDLL, one: int, other: int) -> bool:
    reaches = ctypes.c_int()
    for a, b in ((one, other), (other, one)):
        if lib.cuDeviceCanAccessPeer(ctypes.byref(reaches), a, b) or not reaches.value:
            return True
    return False


def _error_name(lib: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    lib.cuGetErrorName(status, ctypes.byref(text))
    return f"{(text.value or b'error').decode()} ({status})"


if __name__ == "__main__":
    print(json.dumps({"driver": driver, "torch": torch}[sys.argv[1]]()))
