"""Host memory of a KV pool, and a peer's read-only view of it.

The owner puts the pool into a memfd, maps it writable, and then seals it. The seal F_SEAL_FUTURE_WRITE keeps every
other process from writing. The seals SHRINK and GROW fix the size, so a mapping can never fault. A peer of the same
user opens /proc/PID/fd/FD and maps it read-only.

    | layer 0: page 0, page 1, ... | layer 1: ... | generations |

A page's generation is one int64 behind the pages. It counts how often the page has been allocated. A reader compares it
after its copy with the offered one, and so learns whether the page was reused meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import stat
from collections.abc import Sequence

import numpy as np

from ..errors import ConfigError, TransferError
from ..logs import size_in_words
from ..wire.node_info import HostMemory
from .ranks.shards import PagePart
from .schema.kv_layout import KvLayout

logger = logging.getLogger(__name__)

F_SEAL_FUTURE_WRITE = 0x0010
_OWNER_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
_ALIGNMENT = 64


def memory_size(layout: KvLayout, num_pages: int, num_counted: int | None = None) -> int:
    """Return the size of a pool's memory with its generations, bytes. `num_counted`: pages that have generations in it,
    those of pools with other numbers included; None: its own."""
    return _generations_offset(layout, num_pages) + 8 * (num_pages if num_counted is None else num_counted)


class PageMemory:
    """The pages of one pool in this process.

    `pages` is uint8 [num_layers, num_pages, page_layer_bytes]; `layout` says where the heads lie in it. The engine's
    tensor is a view of shape `layout.stacked_shape(num_pages)`. `generations` is int64 [num_pages]. The allocator of
    the pages may count in it; `HandoffServer.offer` writes it too. For a pool on a GPU this is a host mirror
    (pages.py). If no page travels through the host, only the generations take physical memory.

    Raises ConfigError if the machine does not have that much memory. The owner calls `close`.
    """

    def __init__(self, layout: KvLayout, num_pages: int, first: int = 0, *, num_counted: int | None = None) -> None:
        """`first`: the number of the first page, which is that of the first tail page for a pool of tail pages.
        `num_counted`: as for `memory_size`."""
        self.layout, self.num_pages, self.first = layout, num_pages, first
        self.num_counted = num_pages if num_counted is None else num_counted
        self.page_bytes = layout.page_bytes
        self.size = memory_size(layout, num_pages, num_counted)
        self.fd: int | None = None
        self._map = self._map_memory()
        with contextlib.suppress(OSError):  # advice: a kernel without huge pages may refuse it
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.pages, self.generations = _views(self._map, layout, num_pages, self.num_counted)

    def holds(self, page: int) -> bool:
        """Return whether the pool has a page of this number."""
        return self.first <= page < self.first + self.num_pages

    @property
    def is_shared(self) -> bool:
        """Whether a peer on this host can map the pool. False if the system has no memfd or no seals."""
        return self.fd is not None

    @property
    def where(self) -> HostMemory:
        """Return the place where a peer on this host finds the pool, which is shared."""
        assert self.fd is not None
        return HostMemory(os.getpid(), self.fd, self.size)

    def close(self) -> None:
        """Free the memory as soon as no view of it is left."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        del self.pages, self.generations
        with contextlib.suppress(BufferError):  # the engine's tensors still view it; it is freed with them
            self._map.close()

    def _map_memory(self) -> mmap.mmap:
        words = f"{self.num_pages} pages need {size_in_words(self.size)}"
        if self.size > _total_memory():
            raise ConfigError(f"{words}, more than this machine has; use fewer --num-pages")
        try:
            return self._map_shared()
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
    """A peer's pool, mapped read-only. `pages` and `generations` have the shapes of PageMemory's. The owner calls
    `close`. Raises TransferError if the size does not fit the layout, or as `map_readonly` does."""

    def __init__(
        self,
        pid: int,
        fd: int,
        size: int,
        layout: KvLayout,
        num_pages: int,
        first: int = 0,
        *,
        num_counted: int | None = None,
    ) -> None:
        """`first` and `num_counted` are those of the peer's PageMemory."""
        expected = memory_size(layout, num_pages, num_counted)
        if size != expected:
            raise TransferError(f"peer's pool has {size} bytes, {num_pages} pages of this layout have {expected}")
        self.num_pages, self.first = num_pages, first
        self._map = map_readonly(pid, fd, size)
        counted = num_pages if num_counted is None else num_counted
        self.pages, self.generations = _views(self._map, layout, num_pages, counted)

    def close(self) -> None:
        """Unmap at once. Any later use of the views is a defect of ours and raises."""
        del self.pages, self.generations
        self._map.close()


def map_readonly(pid: int, fd: int, size: int) -> mmap.mmap:
    """Map `size` bytes of the memfd that process `pid` holds as descriptor `fd`, for reading.

    Raises TransferError unless it is a memfd of this user, of that size, sealed against writing and resizing.
    """
    path = f"/proc/{pid}/fd/{fd}"
    with contextlib.ExitStack() as stack:

        def opened(name: str, flags: int) -> int:
            handle = os.open(name, flags | os.O_CLOEXEC)
            stack.callback(os.close, handle)
            return handle

        try:
            named = opened(path, os.O_PATH)  # only names the file: to open a device could start it
            _check_file(named, path, size)
            readable = opened(f"/proc/self/fd/{named}", os.O_RDONLY)
            _check_seals(readable, path)
            return mmap.mmap(readable, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            raise TransferError(f"cannot open the peer's pool {path}: {error.strerror}") from error


def pack_pages(memory: Sequence[PageMemory], pages: Sequence[int], part: PagePart | None = None) -> np.ndarray:
    """Return a part of the pages as one frame, uint8. Each page holds, for each pool that has a page of its number,
    [num_layers, bytes of its spans], target then draft. The pools are those of the rank that gives the part. None: the
    whole pages."""
    part = part or whole_part(memory)
    frame = np.empty(sum(bytes_of(memory, page, part) for page in pages), np.uint8)
    at = 0
    for page in pages:
        for pool, (layout, _, spans) in zip(memory, part.pools, strict=True):
            for source, _, num_bytes in spans if pool.holds(page) else ():
                size, own = layout.num_layers * num_bytes, pool.pages[:, page - pool.first]
                frame[at : at + size].reshape(-1, num_bytes)[:] = own[:, source : source + num_bytes]
                at += size
    return frame


def bytes_of(memory: Sequence[PageMemory], page: int, part: PagePart) -> int:
    """Return the bytes of a part of the page of this number, in all pools that have it."""
    pools = zip(memory, part.pools, strict=True)
    return sum(of_pool.page_bytes for pool, of_pool in pools if pool.holds(page))


def unpack_page(memory: Sequence[PageMemory], page: int, data: np.ndarray, part: PagePart | None = None) -> None:
    """Write one page of a `pack_pages` frame into page number `page` of our pools. `data` has exactly the bytes of the
    part. None: the whole page."""
    at = 0
    for pool, (layout, _, spans) in zip(memory, (part or whole_part(memory)).pools, strict=True):
        for _, target, num_bytes in spans if pool.holds(page) else ():
            size, own = layout.num_layers * num_bytes, pool.pages[:, page - pool.first]
            own[:, target : target + num_bytes] = data[at : at + size].reshape(-1, num_bytes)
            at += size


def whole_part(memory: Sequence[PageMemory]) -> PagePart:
    """Return the part that is the whole page of these pools."""
    return PagePart.whole([pool.layout for pool in memory])


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


def _generations_offset(layout: KvLayout, num_pages: int) -> int:
    return -(-num_pages * layout.page_bytes // _ALIGNMENT) * _ALIGNMENT


def _views(mapped: mmap.mmap, layout: KvLayout, num_pages: int, num_counted: int) -> tuple[np.ndarray, np.ndarray]:
    offset = _generations_offset(layout, num_pages)
    # an array of frombuffer, unlike one of ndarray(buffer=), keeps the mapping open; otherwise close() could segfault
    pages = np.frombuffer(mapped, np.uint8, num_pages * layout.page_bytes)
    generations = np.frombuffer(mapped, np.int64, num_counted, offset)
    return pages.reshape(layout.num_layers, num_pages, layout.page_layer_bytes), generations
