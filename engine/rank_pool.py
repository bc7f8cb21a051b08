"""The KV pools of a node whose ranks compute on CPUs. Each rank has its own heads; whole pages are handed over.

    rank i: RankMemory <--mapped too-- rank 0: RankPool <--copies heads--> PageMemory, the mirror <--> transports

Each rank keeps its pools in a memfd, which rank 0 maps. `RankPool` is the `DevicePool` of rank 0: it puts the heads of
all ranks together when a page is offered, and gives each rank its heads of a page that has come. The checksum of a head
is that of the bytes in the pool of its rank.

The other ranks take no part, so none may work on such a page. They may be behind rank 0, but by less than one
collective operation. Therefore every work that reads or writes pages has a collective operation after it (`Ranks.meet`
if nothing else).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..metadata.errors import ConfigError, TransferError
from ..metadata.handoff.checksums import page_checksums
from ..metadata.handoff.kv_layout import KvLayout, Shard
from ..metadata.handoff.memory import PageMemory
from ..metadata.handoff.pages import Gather, MappedPools
from ..metadata.handoff.shards import PagePart
from .ranks import Ranks

_WHOLE = Shard(0, 1)


def new_memory(size: int) -> int:
    """Return a descriptor of new memory of `size` bytes, which never changes its size. Raises OSError, and
    AttributeError on a system without memfd."""
    fd = os.memfd_create("baton-rank", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


class RankMemory:
    """One pool of one rank: `pages` uint8 [num_layers, num_pages, page_layer_bytes]. The owner calls `close`.

    Raises ConfigError if the machine does not have that much memory, or no memory that processes share."""

    def __init__(self, layout: KvLayout, num_pages: int, open_memory: Callable[[int], int] = new_memory) -> None:
        """`open_memory` returns a descriptor of memory of this size, bytes, which the pool keeps open."""
        self.layout, self.num_pages = layout, num_pages
        size = num_pages * layout.page_bytes
        try:
            self.fd = open_memory(size)
            self._map = mmap.mmap(self.fd, size)
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{num_pages} pages of a rank need {size / 2**30:.1f} GiB of memory that processes share, which this "
                f"machine does not give ({error}); use fewer --num-pages, or --tp 1"
            ) from error
        flat = np.frombuffer(self._map, np.uint8, size)
        self.pages = flat.reshape(layout.num_layers, num_pages, layout.page_layer_bytes)

    def close(self) -> None:
        """Free the memory as soon as no view of it is left in any rank."""
        os.close(self.fd)
        del self.pages


class RankPool:
    """The pools of all ranks as one `DevicePool` (metadata/handoff/pages.py), on rank 0. Nothing runs behind its back:
    every method is done when it returns."""

    device = ""  # no GPU
    shared = ()  # other processes map the mirror

    def __init__(
        self, mirror: Sequence[PageMemory], ranks: Sequence[Sequence[RankMemory]], *, has_checksums: bool
    ) -> None:
        """`mirror` has the whole pages of each pool; `ranks[i]` has the pools of rank i, as many."""
        self._has_checksums = has_checksums
        shards = [Shard(rank, len(ranks)) for rank in range(len(ranks))]
        self._pools = [
            (whole, [_Part.of(whole.layout, shard, own[index]) for shard, own in zip(shards, ranks, strict=True)])
            for index, whole in enumerate(mirror)
        ]

    def map(
        self, descriptors: Sequence[int], sizes: Sequence[int], num_pages: int, part: PagePart | None = None
    ) -> MappedPools:
        """Raise TransferError: no rank has a GPU."""
        del part
        raise TransferError(f"{len(descriptors)} pools of {num_pages} pages ({sizes} bytes) lie on a GPU, ours do not")

    def expect(self, pages: Sequence[int]) -> None:
        """Do nothing: no work is under way."""

    def gather(self, peer: MappedPools, sources: Sequence[int], targets: Sequence[int]) -> Gather:
        """Fail: `map` returns nothing to copy from."""
        raise AssertionError((peer, sources, targets))

    def digest(self, pages: Sequence[int]) -> list[bytes]:
        """Return the checksums of whole pages, computed where each head lies."""
        if not self._has_checksums:
            return [b""] * len(pages)
        return [b"".join(self._checksums(whole, parts, page) for whole, parts in self._pools) for page in pages]

    def begin_digest(self, pages: Sequence[int]) -> None:
        """Begin nothing: the other ranks may not have computed their heads yet."""

    def store(self, pages: Sequence[int]) -> None:
        """Put the heads of all ranks together in the mirror."""
        for whole, parts in self._pools:
            for part in parts:
                for there, here in zip(part.there, part.here, strict=True):
                    whole.pages[:, pages, there] = part.memory.pages[:, pages, here]

    def load(self, pages: Sequence[int]) -> list[bytes]:
        """Give each rank its heads of pages in the mirror. Return the checksums of what the ranks have."""
        for whole, parts in self._pools:
            for part in parts:
                for there, here in zip(part.there, part.here, strict=True):
                    part.memory.pages[:, pages, here] = whole.pages[:, pages, there]
        return self.digest(pages)

    def _checksums(self, whole: PageMemory, parts: Sequence[_Part], page: int) -> bytes:
        """Return the checksums of a page of one pool, [num_layers, blocks_per_layer] uint64. If several ranks have the
        same head, the last one's counts."""
        layout = whole.layout
        found = np.empty((layout.num_layers, layout.blocks_per_layer), "<u8")
        for part in parts:
            own = page_checksums([part.memory], page)
            found[:, part.blocks] = np.frombuffer(own, "<u8").reshape(layout.num_layers, -1)
        return found.tobytes()


class _Part(NamedTuple):
    """One rank's part of a pool."""

    memory: RankMemory
    blocks: tuple[int, ...]  # of the whole page in one layer
    there: list[slice]  # its bytes in the whole page of a layer, by plane
    here: list[slice]  # the same bytes in its own

    @classmethod
    def of(cls, whole: KvLayout, shard: Shard, memory: RankMemory) -> _Part:
        there = [slice(each.start, each.stop) for each in whole.bytes_of(shard)]
        here = [slice(each.start, each.stop) for each in memory.layout.bytes_of(_WHOLE)]
        return cls(memory, whole.blocks_of(shard), there, here)


class SharedPools(NamedTuple):
    """The pools of one process of a node."""

    own: list[RankMemory]  # of this rank
    mirror: list[PageMemory]  # whole pages, on rank 0; else empty
    pool: RankPool | None  # of all ranks, on rank 0
    others: list[RankMemory]  # of the other ranks, mapped by rank 0

    @classmethod
    def make(
        cls, ranks: Ranks, whole: Sequence[KvLayout], own: Sequence[KvLayout], num_pages: int, *, has_checksums: bool
    ) -> SharedPools:
        """Make the pools of this rank. `whole` and `own` are the layouts of each pool, of all heads and of this rank's.
        All ranks must call it. Raises ConfigError as `RankMemory`."""
        mine = [RankMemory(layout, num_pages) for layout in own]
        places = ranks.gather_numbers([os.getpid(), *(memory.fd for memory in mine)])
        if ranks.group.rank != 0:
            ranks.meet()  # rank 0 has mapped the memory
            return cls(mine, [], None, [])
        by_rank = [mine, *(_mapped(own, num_pages, *place) for place in places[1:])]
        ranks.meet()
        mirror = [PageMemory(layout, num_pages) for layout in whole]
        pool = RankPool(mirror, by_rank, has_checksums=has_checksums)
        return cls(mine, mirror, pool, [memory for each in by_rank[1:] for memory in each])

    def close(self) -> None:
        """Free all of this process's memory."""
        for memory in (*self.own, *self.mirror, *self.others):
            memory.close()


def _mapped(layouts: Sequence[KvLayout], num_pages: int, pid: int, *fds: int) -> list[RankMemory]:
    """Return the pools that process `pid` of another rank holds as descriptors `fds`."""

    def opened(fd: int) -> Callable[[int], int]:
        return lambda _size: os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)

    return [RankMemory(layout, num_pages, opened(fd)) for layout, fd in zip(layouts, fds, strict=True)]
