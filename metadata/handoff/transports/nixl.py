"""Transport `nixl`, for any two hosts whose operators have said --plain-pages: the decode node reads the peer's pools
by NIXL (UCX: RDMA, TCP, or shared memory).

Each page is one read into a slot of a staging ring, followed by a read of its generation, and is then copied to its
place (nixl_agents.py). So a late byte meets no page of ours. Ranks have an agent each. A peer's pools on a GPU are read
where they are. The ring lies in the host's memory, and pages go from there to our GPU by the host mirror, as those of
`zmq` do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import uuid4

import msgspec
import numpy as np

from ...bus.addresses import parse_address
from ...errors import TransferError, Unreachable
from ...wire.data_link import LinkHello, LinkWelcome, NixlWelcome
from ...wire.request import Unit
from ..memory import PageMemory, bytes_of, memory_size, unpack_page
from ..nixl_agents import PoolAgent, Region, RingAgent, has_nixl
from ..pages import OfferedPages
from .base import Landed, Move, PullEnd, Transport

logger = logging.getLogger(__name__)

MAX_READS = 16  # of pages in flight on a link
SPIN_S = 0.0002  # after a read began or ended, for so long the next end is waited for without sleep
LOOK_S = 0.001  # then between two looks: NIXL wakes nobody
_GENERATION_BYTES = 8
_ALIGNMENT = 64


@dataclass(eq=False, slots=True)
class _Read:
    """A page on its way. The first handle is of its bytes, the second one of its generation."""

    move: Move
    slot: int
    handle: Any
    has_bytes: bool = False


class NixlTransport(Transport):
    """Reads pages of the prefill node that said `welcome` through the ring."""

    name: ClassVar[str] = "nixl"
    is_readable: ClassVar[bool] = True
    is_automatic: ClassVar[bool] = False  # UCX takes no keys
    since: ClassVar[int] = NixlWelcome.since

    def __init__(self, end: PullEnd, ring: RingAgent, welcome: NixlWelcome, clock: Callable[[], float]) -> None:
        """Raises TransferError if the pools do not fit ours, or if NIXL cannot reach the peer."""
        super().__init__(end.memory, end.part)
        self._ring, self._welcome, self._clock = ring, welcome, clock
        self._reads: list[_Read] = []
        self._moved_at = 0.0  # when a read began or ended last
        self._crowded_since: float | None = None  # when this peer's quarantine took more than half of the ring
        self._is_closed = False
        self._check_sizes()
        ring.meet(welcome.agent, welcome.metadata)

    @classmethod
    def missing(cls) -> str:
        return "" if has_nixl() else "NIXL (pip install nixl-cu13, or nixl-cu12)"

    @classmethod
    def can_serve(cls, pages: OfferedPages) -> bool:
        # a page on a GPU is complete when its checksums have been computed; without them nothing waits for it
        return (pages.device is None or pages.has_checksums) and has_nixl()

    @classmethod
    def begin_serving(cls, pages: OfferedPages) -> None:
        if cls.can_serve(pages):
            try:
                host = parse_address(pages.data_address).host
                kind, gpu, *pools = pages.readable
                regions = [Region(address, size, gpu) for address, size in zip(*pools, strict=True)]
                pages.agent = PoolAgent(f"pools-{uuid4().hex}", regions, kind, pages.generations, host)
            except TransferError as error:
                logger.warning("no page will go by NIXL: %s", error)

    @classmethod
    def begin_pulls(cls, memory: Sequence[PageMemory], own_host: str) -> None:
        slot_bytes = _slot_bytes(memory)
        if slot_bytes not in rings and has_nixl():
            try:
                rings[slot_bytes] = RingAgent(f"ring-{uuid4().hex}", slot_bytes, own_host)
            except TransferError as error:
                logger.warning("no page will come by NIXL: %s", error)

    @classmethod
    def welcome(cls, welcome: LinkWelcome, pages: OfferedPages, hello: LinkHello) -> LinkWelcome:  # noqa: ARG003
        """Return the welcome with the agent that lets the peer read the pools. Raises TransferError."""
        if pages.agent is None:
            raise TransferError("NIXL did not start")
        sized = msgspec.structs.replace(welcome, sizes=tuple(pool.size for pool in pages.memory))
        agent = pages.agent
        return NixlWelcome(
            **msgspec.structs.asdict(sized),
            agent=agent.name,
            metadata=agent.metadata,
            pools=pages.readable.addresses,
            generations=agent.generations,
            kind=pages.readable.kind,
            gpu=pages.readable.gpu,
        )

    @classmethod
    def open(cls, end: PullEnd, welcome: LinkWelcome) -> NixlTransport:
        """Meet the peer's agent. Raises TransferError."""
        ring = rings.get(_slot_bytes(end.memory))
        if not isinstance(welcome, NixlWelcome) or end.peer is None or ring is None:
            raise TransferError(f"{type(welcome).__name__} cannot be used: it is no NixlWelcome, or NIXL did not start")
        return cls(end, ring, welcome, end.peer.clock)

    @property
    def is_busy(self) -> bool:
        return bool(self._queue and self._ring.num_free and self._has_room)

    @property
    def _has_room(self) -> bool:
        """Whether another page may be read. Those whose bytes are here wait for their generations alone, which come
        behind the bytes of the others."""
        return sum(not read.has_bytes for read in self._reads) < MAX_READS

    @property
    def is_waiting(self) -> bool:
        return bool(self._reads)

    @property
    def wait_s(self) -> float | None:
        if self.is_busy or (self._reads and self._clock() - self._moved_at < SPIN_S):
            return 0.0
        return LOOK_S if self._reads or self._queue else None

    def step(self, max_bytes: int) -> Iterator[Landed]:
        """Begin reads, and copy pages whose reads are over."""
        self._ring.sweep()
        self._check_quarantine()
        self._begin_reads()
        num_bytes = 0
        for read in list(self._reads):
            if num_bytes > max_bytes or read not in self._reads:
                continue  # the unit was forgotten, or the link is over
            if not self._ring.is_over(read.handle):
                continue
            self._moved_at = self._clock()
            if not read.has_bytes:
                self._read_generation(read)
                continue
            yield self._land(read)
            num_bytes += self.page_bytes
            self._begin_reads()

    def forget(self, unit: Unit) -> None:
        super().forget(unit)
        self._abandon([read for read in self._reads if read.move.unit == unit])

    def close(self) -> None:
        super().close()
        self._abandon(list(self._reads))
        if not self._is_closed:
            self._is_closed = True
            self._ring.leave(self._welcome.agent)

    def _check_sizes(self) -> None:
        welcome, num_counted = self._welcome, self._welcome.num_pages + self._welcome.num_tails
        expected = tuple(
            memory_size(layout, welcome.num_tails if own.first else welcome.num_pages, num_counted)
            for own, (layout, _, _) in zip(self.memory, self.part.pools, strict=True)
        )
        if not len(welcome.pools) == len(expected) or welcome.sizes != expected:
            raise TransferError(f"the peer's pools have {welcome.sizes} bytes, pools like ours have {expected}")

    def _begin_reads(self) -> None:
        while self._queue and self._has_room:
            slot = self._ring.take()
            if slot is None:
                if not self._reads and self._ring.num_quarantined() == self._ring.num_slots:
                    raise Unreachable("the whole staging ring is in quarantine: NIXL has not ended its reads")
                return
            move = self._queue.popleft()
            sources, at = self._places(move)
            welcome = self._welcome
            handle = self._ring.read(welcome.agent, slot, sources, at, welcome.kind, welcome.gpu)
            self._reads.append(_Read(move, slot, handle))
            self._moved_at = self._clock()

    def _places(self, move: Move) -> tuple[np.ndarray, np.ndarray]:
        """Return where the page lies at the peer, uint64 [n, 2] of address and bytes, and where each piece begins in
        the slot, uint64 [n], in the order of `pack_pages`."""
        welcome = self._welcome
        rows: list[np.ndarray] = []
        pools = zip(self.memory, welcome.pools, self.part.pools, strict=True)
        for own, base, (layout, _, spans) in pools:
            num_pages, first = (welcome.num_tails, welcome.num_pages) if own.first else (welcome.num_pages, 0)
            for source, _, num_bytes in spans if own.holds(move.target) else ():
                layers = np.arange(layout.num_layers, dtype=np.uint64)
                pages = layers * np.uint64(num_pages) + np.uint64(move.source - first)
                row = np.empty((layout.num_layers, 2), np.uint64)
                row[:, 0] = np.uint64(base + source) + pages * np.uint64(layout.page_layer_bytes)
                row[:, 1] = num_bytes
                rows.append(row)
        found = np.concatenate(rows)
        return found, np.concatenate([np.zeros(1, np.uint64), np.cumsum(found[:-1, 1], dtype=np.uint64)])

    def _read_generation(self, read: _Read) -> None:
        """Begin to read the page's generation, which counts only if it is read after the bytes."""
        address = self._welcome.generations + _GENERATION_BYTES * read.move.source
        at = np.array([self._ring.slot_bytes - _GENERATION_BYTES], np.uint64)
        self._ring.end(read.handle)
        self._reads.remove(read)
        source = np.array([[address, _GENERATION_BYTES]], np.uint64)
        read.handle = self._ring.read(self._welcome.agent, read.slot, source, at)
        read.has_bytes = True
        self._reads.append(read)

    def _land(self, read: _Read) -> Landed:
        """Copy a page from its slot to its place."""
        self._reads.remove(read)
        self._ring.end(read.handle)
        data = self._ring.bytes_of(read.slot)
        unpack_page(
            self.memory, read.move.target, data[: bytes_of(self.memory, read.move.target, self.part)], self.part
        )
        generation = int(data[-_GENERATION_BYTES:].view(np.int64)[0])
        self._ring.give_back(read.slot)
        return Landed(read.move, generation)

    def _abandon(self, reads: Iterable[_Read]) -> None:
        for read in reads:
            self._reads.remove(read)
            self._ring.abandon(self._welcome.agent, read.handle, read.slot)

    def _check_quarantine(self) -> None:
        """Raise TransferError if this peer's reads have held more than half of the ring for a lease."""
        if 2 * self._ring.num_quarantined(self._welcome.agent) <= self._ring.num_slots:
            self._crowded_since = None
            return
        now = self._clock()
        self._crowded_since = now if self._crowded_since is None else self._crowded_since
        if now - self._crowded_since > self._welcome.lease_s:
            raise TransferError("reads from it hold more than half of the staging ring and do not end")


rings: dict[int, RingAgent] = {}  # of this process, by the bytes of a slot


def _slot_bytes(memory: Sequence[PageMemory]) -> int:
    """Return the bytes of a slot: of a page, and of its generation at the end."""
    page_bytes = sum(pool.page_bytes for pool in memory) + _GENERATION_BYTES
    return -(-page_bytes // _ALIGNMENT) * _ALIGNMENT


def num_quarantined() -> int:
    """Return the number of slots of this process that are in quarantine now."""
    for ring in rings.values():
        ring.sweep()
    return sum(ring.num_quarantined() for ring in rings.values())
