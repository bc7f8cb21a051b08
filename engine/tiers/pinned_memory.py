"""Host memory of a host tier: plain, or pinned, so that a GPU reads and writes it without the processor."""

from __future__ import annotations

import logging
import mmap
import os
import resource
import weakref
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ...metadata.logs import size_in_words
from ...metadata.wire.node_info import HostMemory
from ..state.host_memory import available_memory

logger = logging.getLogger(__name__)

_STATUS = Path("/proc/self/status")
_CAP_IPC_LOCK = 14  # linux/capability.h: a process with it locks as much memory as it likes


class Grant(NamedTuple):
    """How much memory a host tier may take, and why it is not more."""

    num_bytes: int
    reason: str  # "": all that was asked for


def grant(asked: int, *, is_pinned: bool) -> Grant:
    """Return how many of the `asked` bytes the host, the control groups of this process, and, for pinned memory, its
    RLIMIT_MEMLOCK leave. The soft limit is raised to the hard one first."""
    left = {"the host's memory and the control groups of this process": available_memory()}
    if is_pinned and (lockable := _lockable_memory()) is not None:
        left["RLIMIT_MEMLOCK (raise it: ulimit -l, LimitMEMLOCK of systemd, --ulimit memlock=-1 of docker)"] = lockable
    cause, least = min(left.items(), key=lambda item: item[1])
    return Grant(asked, "") if least >= asked else Grant(least, f"{cause} leaves {size_in_words(least)}")


class SlotMemory:
    """Slots of one kind, `slots`, uint8 [num_slots, slot_bytes]. If `is_shared`, another process of this user can map
    them by their place, `where`, as long as this one runs."""

    def __init__(self, num_slots: int, slot_bytes: int, *, is_pinned: bool, is_shared: bool = False) -> None:
        size = num_slots * slot_bytes
        self.where: HostMemory | None = shared_memory(size) if is_shared and size else None
        fd = -1 if self.where is None else self.where.fd
        self.slots = tier_memory(size, is_pinned=is_pinned, fd=fd).reshape(num_slots, slot_bytes)


def shared_memory(num_bytes: int) -> HostMemory:
    """Return the place of new memory, which this process keeps until it ends."""
    fd = os.memfd_create("baton-slots", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return HostMemory(os.getpid(), fd, num_bytes)


def map_shared_memory(where: HostMemory) -> np.ndarray:
    """Map the `shared_memory` of another process of this node, uint8 [num_bytes], to read and write. Raises OSError."""
    handle = os.open(f"/proc/{where.pid}/fd/{where.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(handle, where.size), np.uint8)
    finally:
        os.close(handle)


def tier_memory(num_bytes: int, *, is_pinned: bool, fd: int = -1) -> np.ndarray:
    """Return `num_bytes` bytes of memory, uint8, which lie in the file `fd` if there is one. If it cannot be pinned, it
    is plain, with a warning: copies are slower then. It is freed with the last view of it."""
    if not num_bytes:
        return np.empty(0, np.uint8)
    memory = np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)
    if is_pinned:
        address = memory.ctypes.data
        runtime = torch.cuda.cudart()
        assert runtime is not None, "no CUDA"
        error = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if error:
            logger.warning("%s of the host tier cannot be pinned (CUDA error %d)", size_in_words(num_bytes), error)
        else:
            unpin = weakref.finalize(memory, runtime.cudaHostUnregister, address)
            unpin.atexit = False  # the process's end does it
    return memory


def _lockable_memory() -> int | None:
    """Return how many bytes this process may lock besides those that it has locked; None: as many as it likes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
            soft = hard
    status = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="utf-8").splitlines())
    if soft == resource.RLIM_INFINITY or int(status["CapEff"], 16) >> _CAP_IPC_LOCK & 1:
        return None
    return max(0, soft - 1024 * int(status["VmLck"].removesuffix("kB")))
