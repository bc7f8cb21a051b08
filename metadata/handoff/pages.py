"""Access to the pages of this node's KV pools, in host memory or elsewhere. Imports no torch.

In host memory a pool and its `PageMemory` are the same bytes. Otherwise the pool lies in the memory of a GPU, and the
`PageMemory` is a host mirror with the same page numbers. A page lies in the mirror only while it travels through the
host. `DevicePool` is the interface of such pools (engine/state/cuda_pool.py). A page number names one page in every
pool: target, then draft.

    OfferedPages   used by the prefill node's HandoffServer: checksums and bytes of pages that it offers
    ReceivedPages  used by the decode node's HandoffClient: checks of pages that have been copied

Checksums catch faults, not attackers. Pages in host memory have xxh3_64 of each (layer, plane, head), pages on a GPU
multilinear64 (kernels/state/pages.py). kv_layout.py says which bytes a block has. One checksum per block is slower than
one per layer, but it says which head is wrong, and still fits after heads are split over ranks. The decode node checks
each page right after its copy, while it lies in the processor's cache.
"""

from __future__ import annotations

import functools
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np
from xxhash import xxh3_64_intdigest

from ..errors import OutOfMemory
from ..wire.node_info import HandoffSchema, HostMemory
from .memory import PageMemory, PeerMemory, pack_pages, whole_part
from .nixl_agents import MemoryKind, PoolAgent
from .ranks.shards import PagePart
from .schema.kv_layout import KvLayout
from .schema.schema import GPU_CHECKSUM, blocks_per_page

CHECKSUM_BYTES = 8


class Readable(NamedTuple):
    """Where NIXL reads the pools of a node."""

    kind: MemoryKind
    gpu: int  # its index in this process; 0 for the host's memory
    addresses: tuple[int, ...]  # of the pools, [num_layers, num_pages, page_layer_bytes] uint8 each
    sizes: tuple[int, ...]  # bytes


class Shared(NamedTuple):
    """GPU memory of one pool: a file descriptor, which its owner keeps open, and the size in bytes."""

    descriptor: int
    size: int


class LentPages(NamedTuple):
    """Pages of a prefix cache that may be lent, by their numbers in the pool."""

    pages: list[int]  # from the start of a text
    tails: list[int]  # the tail pages of the last ones


class CachedText(NamedTuple):
    """Tokens whose pages are cached, and the next ones by which the last page is keyed."""

    token_ids: list[int]
    salt: str
    num_pages: int


class Gather(Protocol):
    """A copy of pages into our pools, or the computation of their checksums, that the device is working on."""

    @property
    def is_done(self) -> bool:
        """Whether all pages have been copied, and their checksums computed in our pools. Does not wait."""
        ...

    def wait(self) -> None:
        """Wait until the work is done."""
        ...

    def checksums(self) -> list[bytes]:
        """Return the checksums of each page, in the format of an Offer; empty ones if the schema has no checksums.
        Must not be called before the work is done."""
        ...


class MappedPools(Protocol):
    """The pools of a peer, readable from our device."""

    def close(self) -> None:
        """Unmap the pools, after all gathers from them are done."""
        ...


class DevicePool(Protocol):
    """The pools of this node, or of this rank of it, on its GPU. Only the main thread uses them."""

    @property
    def device(self) -> str:
        """The UUID of the GPU."""
        ...

    @property
    def shared(self) -> tuple[Shared, ...]:
        """Values that other processes of this host need to map the pools, one per pool; empty if they cannot do so. If
        ranks of this node have pages of their own, these are the pools of rank 0, then those of rank 1, and so on."""
        ...

    @property
    def readable(self) -> Readable:
        """Where other nodes' NIXL reads the pools."""
        ...

    def map(
        self,
        descriptors: Sequence[int],
        sizes: Sequence[int],
        num_pages: int,
        part: PagePart | None = None,
        num_tails: int = 0,
    ) -> MappedPools:
        """Map a peer's pools of `num_pages` pages, or of `num_tails` tail pages, for reading. `sizes` are those of its
        target pools and its draft pools; if its ranks have pages of their own, each rank has as many of these, and
        `descriptors` go from rank to rank. `part` names the part that the peer gives of our pages, and the layouts of
        its pools; None: the whole pages. The caller closes the descriptors. Raises TransferError, with nothing left
        mapped, if a pool cannot be mapped."""
        ...

    def expect(self, pages: Sequence[int]) -> None:
        """Announce that `gather` or `load` will write these pages of ours, or that `digest` will read them. That waits
        for all work that has been submitted so far, because that work may still read or write the pages."""
        ...

    def gather(self, peer: MappedPools, sources: Sequence[int], targets: Sequence[int]) -> Gather:
        """Begin to copy pages `sources` of the peer to pages `targets` of ours, which are all tail pages or all others,
        or the part for which the peer's pools were mapped. The checksums are those of our whole pages. Raises
        OutOfMemory; no page is written after that."""
        ...

    def digest(self, pages: Sequence[int]) -> list[bytes]:
        """Return the checksums of complete pages of ours, as `Gather.checksums`. Waits only for this computation, and
        for what `expect` announced. Raises OutOfMemory."""
        ...

    def begin_digest(self, pages: Sequence[int]) -> Gather:
        """Begin to compute the checksums of pages of ours, all tail pages or all others, when all work is done that was
        submitted so far. Raises OutOfMemory."""
        ...

    def store(self, pages: Sequence[int]) -> None:
        """Copy complete pages into the host mirror. Waits only for this copy. Raises OutOfMemory; then the mirror holds
        any bytes for them."""
        ...

    def load(self, pages: Sequence[int]) -> list[bytes]:
        """Copy pages from the host mirror into the pools. Return their checksums there. Raises OutOfMemory; no page is
        written after that."""
        ...


_MOST_BEGUN = 4  # launches whose checksums nobody has asked for


class _Begun(NamedTuple):
    """Checksums that the device computes or has computed."""

    ages: dict[int, int]  # by page: its generation
    gather: Gather


class OfferedPages:
    """Pages that a prefill node offers: their checksums, and their bytes if they travel through the host. Methods raise
    OutOfMemory as the DevicePool does.

    A page's checksums are kept until the page is allocated again. On rank 1 or above of a node, `counted` says where
    rank 0 counts the generations of the node's pages. Raises TransferError if that memory cannot be mapped.
    """

    def __init__(
        self,
        schema: HandoffSchema,
        memory: Sequence[PageMemory],
        device: DevicePool | None,
        counted: HostMemory | None = None,
    ) -> None:
        _check_digest(schema, device)
        self.has_checksums = blocks_per_page(schema) > 0
        self.memory, self.device, self.counted = tuple(memory), device, counted
        self._first = None if counted is None else memory_of_rank_0(counted, memory[0])
        self.data_address = ""  # of the node's data links, set by them
        self.agent: PoolAgent | None = None  # made by the transport that needs it
        self.generations = memory[0].generations if self._first is None else self._first.generations
        self._whole = whole_part(memory)
        self._known: dict[int, tuple[int, bytes]] = {}  # by page: its generation, its checksums
        self._begun: list[_Begun] = []
        self._on_host: dict[int, int] = {}  # by page: the generation that lies in the mirror

    @property
    def readable(self) -> Readable:
        """Where NIXL reads the pages: the pools themselves, on a GPU too."""
        if self.device is not None:
            return self.device.readable
        addresses = tuple(int(pool.pages.ctypes.data) for pool in self.memory)
        return Readable("DRAM", 0, addresses, tuple(pool.size for pool in self.memory))

    def await_work(self, pages: Sequence[int], generations: Sequence[int]) -> None:
        """Let the next checksums of these pages wait for all work that has been submitted so far: it computes them.
        Checksums that are known or begun wait for nothing more."""
        new = self._unbegun(dict(zip(pages, generations, strict=True)))
        if self.device is not None and new:
            self.device.expect(new)

    def checksums(self, pages: Sequence[int], generations: Sequence[int]) -> list[bytes]:
        """Return the checksums of each of these complete pages. A GPU computes all unknown ones in one launch."""
        ages = dict(zip(pages, generations, strict=True))
        for begun in [each for each in self._begun if any(each.ages.get(page) == ages[page] for page in ages)]:
            self._take(begun)
        new = self._unknown(ages)
        if new:
            self._known |= {page: (ages[page], digest) for page, digest in zip(new, self._digest(new), strict=True)}
        return [self._known[page][1] for page in pages]

    def digest_ahead(self, pages: Sequence[int], generations: Sequence[int]) -> None:
        """Begin to compute the checksums of pages that will be complete when the device has done all work submitted so
        far, if it is a GPU. So they are there when the pages are offered. Without memory for them nothing happens. If
        the schema has no checksums, `are_digested` says in this way when the pages are complete."""
        ages = dict(zip(pages, generations, strict=True))
        new = self._unbegun(ages)
        if self.device is None or not new:
            return
        with suppress(OutOfMemory):
            self._begun.append(_Begun({page: ages[page] for page in new}, self.device.begin_digest(new)))
        if len(self._begun) > _MOST_BEGUN:
            self._take(self._begun[0])

    def are_digested(self, pages: Sequence[int]) -> bool:
        """Whether checksums of none of these pages are being computed now."""
        begun = [each for each in self._begun if not each.ages.keys().isdisjoint(pages)]
        return all(each.gather.is_done for each in begun)

    def bring(self, pages: Sequence[int]) -> None:
        """Copy pages into `memory`, if they are on a GPU and not there yet. Their checksums must be known."""
        if self.device is None:
            return
        new = [page for page in dict.fromkeys(pages) if self._on_host.get(page) != int(self.generations[page])]
        if new:
            self.device.store(new)
            self._on_host |= {page: int(self.generations[page]) for page in new}

    def pack(self, pages: Sequence[int], part: PagePart | None = None) -> tuple[np.ndarray, bytes]:
        """Return a part of the pages (None: the whole pages) as one frame for a `Pages` message, and their generations,
        read after the copy, int64 [num_pages]. Pages on a GPU are copied anew at each call, because a repeated pull
        means that a copy was damaged."""
        if self.device is not None:
            self.device.store(pages)
        frame = pack_pages(self.memory, pages, part or self._whole)
        return frame, self.generations[list(pages)].astype("<i8").tobytes()

    def close(self) -> None:
        """Unmap the generations of rank 0, and end reads by NIXL."""
        if self.agent is not None:
            self.agent.close()
            self.agent = None
        if self._first is not None:
            del self.generations
            self._first.close()
            self._first = None

    def _unknown(self, ages: Mapping[int, int]) -> list[int]:
        return [page for page, age in ages.items() if self._known.get(page, (None,))[0] != age]

    def _unbegun(self, ages: Mapping[int, int]) -> list[int]:
        return [page for page in self._unknown(ages) if all(each.ages.get(page) != ages[page] for each in self._begun)]

    def _take(self, begun: _Begun) -> None:
        """Wait for checksums that were begun."""
        self._begun.remove(begun)
        begun.gather.wait()
        for (page, age), digest in zip(begun.ages.items(), begun.gather.checksums(), strict=True):
            self._known[page] = (age, digest)

    def _digest(self, pages: Sequence[int]) -> list[bytes]:
        if self.device is not None:
            return self.device.digest(pages)
        return [page_checksums(self.memory, page) if self.has_checksums else b"" for page in pages]


class ReceivedPages:
    """Pages that a decode node receives. They are checked in the pools that its rounds read."""

    def __init__(self, schema: HandoffSchema, memory: Sequence[PageMemory], device: DevicePool | None) -> None:
        _check_digest(schema, device)
        self._has_checksums = blocks_per_page(schema) > 0
        self._memory, self._device = tuple(memory), device

    def expect(self, pages: Sequence[int]) -> None:
        """Announce that a transfer will write these pages of ours."""
        if self._device is not None:
            self._device.expect(pages)

    def first_difference(
        self, page: int, ours: bytes | None, offered: bytes, blocks: np.ndarray | None = None
    ) -> int | None:
        """Return the index of the first block of our page whose checksum is not the offered one; None if all agree, or
        if the schema has no checksums. Only `blocks` are compared if they are given, in this order.

        `ours` is the page's checksums if a transport has computed them already. If it is None, the page lies unchecked
        in `memory`, and this method first loads it into the pool on the GPU, if there is one. Raises OutOfMemory if the
        GPU has no memory for that.
        """
        if ours is None and self._device is not None:
            [ours] = self._device.load([page])
        elif ours is None and self._has_checksums:
            ours = page_checksums(self._memory, page)
        if not self._has_checksums or ours is None:
            return None
        if blocks is None:
            return first_difference(ours, offered)
        wrong = np.frombuffer(ours, "<u8")[blocks] != np.frombuffer(offered, "<u8")[blocks]
        return int(blocks[int(wrong.argmax())]) if wrong.any() else None


def memory_of_rank_0(counted: HostMemory, ours: PageMemory) -> PeerMemory:
    """Return the target's pool of rank 0, which has the generations of the pages of all ranks. `ours` is that of a rank
    of the same node, and so has as many bytes."""
    where = counted.pid, counted.fd, counted.size
    return PeerMemory(*where, ours.layout, ours.num_pages, num_counted=ours.num_counted)


def _check_digest(schema: HandoffSchema, device: DevicePool | None) -> None:
    has_gpu = device is not None
    assert schema.checksum == "none" or (schema.checksum == GPU_CHECKSUM) == has_gpu, schema.checksum


class HostPool(Protocol):
    """A pool in host memory."""

    layout: KvLayout
    num_pages: int
    first: int  # number of the first page
    pages: np.ndarray  # uint8 [num_layers, num_pages, page_layer_bytes]


def page_checksums(memory: Sequence[HostPool], page: int) -> bytes:
    """Return the checksums of page number `page` in all pools (target, then draft), as little-endian uint64 [sum of
    num_layers * blocks_per_layer]. Those of a pool that has no page of this number are 0."""
    digests: list[int] = []
    for pool in memory:
        size = pool.pages.shape[2]
        if not pool.first <= page < pool.first + pool.num_pages:
            digests += [0] * (pool.layout.num_layers * pool.layout.blocks_per_layer)
            continue
        blocks = _blocks(pool.layout)
        data = pool.pages.reshape(-1).data
        first = (page - pool.first) * size  # the page's offset in the first layer
        for start in range(first, data.nbytes, pool.num_pages * size):
            digests += map(xxh3_64_intdigest, blocks.unpack_from(data, start))
    column = array("Q", digests)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def row_checksum(row: bytes) -> int:
    """Return the checksum of a metadata row, 62 bits (a Count on the wire)."""
    return xxh3_64_intdigest(row) >> 2


def first_difference(ours: bytes, theirs: bytes) -> int | None:
    """Return the index of the first block whose checksum differs; None if all agree."""
    if ours == theirs:
        return None
    if len(ours) != len(theirs):
        return min(len(ours), len(theirs)) // CHECKSUM_BYTES
    starts = range(0, len(ours), CHECKSUM_BYTES)
    return next(i for i, s in enumerate(starts) if ours[s : s + CHECKSUM_BYTES] != theirs[s : s + CHECKSUM_BYTES])


@functools.cache  # of the pools of this process
def _blocks(layout: KvLayout) -> struct.Struct:
    """Return a struct that splits a page of a layer into blocks. It copies them, and is still faster than slices: the
    copies stay in the processor's cache, and the loop runs in C."""
    return struct.Struct("".join(f"{run.block_bytes}s" * run.num_blocks for run in layout.runs))
