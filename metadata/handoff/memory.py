"""A KV pool's host memory, and a peer's read-only view of it.

The owner puts the pool in a memfd, maps it writable and only then seals it: F_SEAL_FUTURE_WRITE lets nobody else write
it, SHRINK and GROW keep its size, so that a mapping can never fault. A peer of the same user opens
/proc/PID/fd/FD and maps it read-only. Behind the pages lies one int64 a page: its generation, how often it had been
allocated, which a reader compares after its copy.

    | layer 0: page 0, page 1, ... | layer 1: ... | generations |
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import stat

import numpy as np

from ..errors import ConfigError, TransferError

logger = logging.getLogger(__name__)

F_SEAL_FUTURE_WRITE = 0x0010
_OWNER_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
_ALIGNMENT = 64


def memory_size(num_layers: int, num_pages: int, page_layer_bytes: int) -> int:
    """Bytes of a pool's memory with its generations."""
    return _generations_offset(num_layers, num_pages, page_layer_bytes) + 8 * num_pages


class PageMemory:
    """The pages of one pool in this process.

    `pages` is uint8 [num_layers, num_pages, page_layer_bytes]; the engine's tensor is a view of it:
    `torch.from_numpy(memory.pages).view(dtype).view(num_layers, num_pages, 2, num_kv_heads, page_size, head_dim)`.
    `generations` is int64 [num_pages]; whoever allocates pages may count in it, `HandoffServer.offer` writes it too.
    For a pool on a GPU this is a host mirror with the same page numbers: pages lie in it while they travel by way of
    the host. Where none do, only the generations take memory.
    """

    def __init__(
        self, num_layers: int, num_pages: int, page_layer_bytes: int, block_bytes: int, *, shared: bool = True
    ) -> None:
        assert page_layer_bytes % block_bytes == 0, (page_layer_bytes, block_bytes)
        self.num_layers, self.num_pages = num_layers, num_pages
        self.page_layer_bytes, self.block_bytes = page_layer_bytes, block_bytes
        self.size = memory_size(num_layers, num_pages, page_layer_bytes)
        self.fd: int | None = None
        self._map = self._map_memory(shared)
        with contextlib.suppress(OSError):  # advice: a kernel without huge pages may refuse it
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.pages, self.generations = _views(self._map, num_layers, num_pages, page_layer_bytes)

    @property
    def is_shared(self) -> bool:
        """Whether a peer on this host can map it. False where memfd or seals are missing: pages then travel by zmq."""
        return self.fd is not None

    def close(self) -> None:
        """Gives the memory back as soon as no view of it is left."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        del self.pages, self.generations
        with contextlib.suppress(BufferError):  # the engine's tensors still look at it: it goes with them
            self._map.close()

    def _map_memory(self, shared: bool) -> mmap.mmap:
        words = f"{self.num_pages} pages need {self.size / 2**30:.1f} GiB"
        if self.size > _total_memory():
            raise ConfigError(f"{words}, more than this machine has; use fewer --num-pages")
        try:
            return self._map_shared() if shared else mmap.mmap(-1, self.size)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{words}, which this machine does not give ({error}); use fewer --num-pages") from error

    def _map_shared(self) -> mmap.mmap:
        fd = -1
        try:
            fd = os.memfd_create("baton-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, self.size)
            mapped = mmap.mmap(fd, self.size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _OWNER_SEALS)
        except (OSError, AttributeError) as error:
            if fd >= 0:
                os.close(fd)
            logger.warning("no shared memory (%s): pages will travel by zmq only", error)
            return mmap.mmap(-1, self.size)
        self.fd = fd
        return mapped


class PeerMemory:
    """A peer's pool, mapped read-only. `pages` and `generations` as in PageMemory, not writable."""

    def __init__(self, pid: int, fd: int, size: int, *, num_layers: int, num_pages: int, page_layer_bytes: int) -> None:
        expected = memory_size(num_layers, num_pages, page_layer_bytes)
        if size != expected:
            raise TransferError(f"peer's pool has {size} bytes, {num_pages} pages of this layout have {expected}")
        self.num_pages = num_pages
        self._map = map_readonly(pid, fd, size)
        self.pages, self.generations = _views(self._map, num_layers, num_pages, page_layer_bytes)

    def close(self) -> None:
        """Unmaps at once; any later use of the views is our bug and raises."""
        del self.pages, self.generations
        self._map.close()


def map_readonly(pid: int, fd: int, size: int) -> mmap.mmap:
    """Maps `size` bytes of the memfd that process `pid` holds as `fd`.

    Raises TransferError unless it is a memfd of this user, of that size, sealed against writing and resizing.
    """
    path = f"/proc/{pid}/fd/{fd}"
    with contextlib.ExitStack() as stack:

        def opened(name: str, flags: int) -> int:
            handle = os.open(name, flags | os.O_CLOEXEC)
            stack.callback(os.close, handle)
            return handle

        try:
            named = opened(path, os.O_PATH)  # opens nothing yet: to open a device may be to set it going
            _check_file(named, path, size)
            readable = opened(f"/proc/self/fd/{named}", os.O_RDONLY)
            _check_seals(readable, path)
            return mmap.mmap(readable, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            raise TransferError(f"cannot open the peer's pool {path}: {error.strerror}") from error


def _check_file(fd: int, path: str, size: int) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        raise TransferError(f"{path} is no pool of this user (uid {os.getuid()} here, {status.st_uid} there)")
    if status.st_size != size:
        raise TransferError(f"{path} has {status.st_size} bytes, the peer said {size}")


def _check_seals(fd: int, path: str) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise TransferError(f"{path} is no memfd: {error.strerror}") from error
    if seals & _OWNER_SEALS != _OWNER_SEALS:
        raise TransferError(f"{path} is not sealed: seals {seals:#x}, needed {_OWNER_SEALS:#x}")


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _generations_offset(num_layers: int, num_pages: int, page_layer_bytes: int) -> int:
    return -(-num_layers * num_pages * page_layer_bytes // _ALIGNMENT) * _ALIGNMENT


def _views(mapped: mmap.mmap, num_layers: int, num_pages: int, page_layer_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    offset = _generations_offset(num_layers, num_pages, page_layer_bytes)
    # frombuffer, unlike ndarray(buffer=), keeps the mapping from being closed under an array's feet (a segfault)
    pages = np.frombuffer(mapped, np.uint8, num_layers * num_pages * page_layer_bytes)
    generations = np.frombuffer(mapped, np.int64, num_pages, offset)
    return pages.reshape(num_layers, num_pages, page_layer_bytes), generations
