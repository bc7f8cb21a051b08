"""A rank of a decode node, in handoffs: it copies its own heads from the ranks of prefill nodes that hold them, and
checks them.

Rank 0 has the tickets. It orders pages, and hears when they are here (ranks/orders.py). Each link goes to one rank of
one prefill node, by whatever transport the two can use. A page is complete when the parts of all those ranks are here.

The puller has no thread. The rank's loop does the orders in the order of its other work, polls `sockets()`, and calls
`poll`. Rank 0 gives orders to all ranks, its own puller included (`RankTeam`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import UnionType
from typing import ClassVar

import msgspec
import numpy as np
import zmq

from ...bus.sockets import DroppedFrames
from ...errors import ConfigError, OutOfMemory, ProtocolError, TransferError
from ...wire.data_link import LinkRefused, LinkWelcome, Pages, ToDecode
from ...wire.request import Unit
from ..endpoint import Endpoint
from ..pages import CHECKSUM_BYTES, ReceivedPages
from ..pull_link import ANSWER_S, HELLO_S, PullLink, PullLinks
from ..schema.kv_layout import KvLayout, Shard
from ..schema.schema import blocks_per_page, kv_layouts
from ..transports.base import Landed, Move
from .orders import (
    CloseSource,
    ExpectPages,
    FetchedPages,
    FetchFailed,
    FetchPages,
    ForgetUnit,
    OpenSource,
    PullLine,
    PullOrder,
    PullReport,
    SourceLost,
)
from .shards import blocks_here, digest_columns, page_parts

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Page:
    """A page that is being fetched. `generation` and `wrong_block` are the first bad ones."""

    number: int  # of the fetch
    move: Move
    ranks: set[int]  # of the prefill node, whose parts have not landed
    generation: int
    wrong_block: int | None = None  # among our own blocks
    is_on_device: bool | None = None  # where the parts have landed: in the GPU's pool or in `memory`; None: nowhere yet


@dataclass(slots=True)
class _Source:
    """A prefill node whose links are open: its ranks of which we need heads, and the pages under way."""

    node_id: str
    number: int  # of the order that opened it
    links: dict[int, PullLink]  # by rank
    blocks: dict[int, np.ndarray]  # places of the blocks that the rank brings, among our own
    pages: dict[Unit, dict[int, _Page]] = field(default_factory=dict[Unit, dict[int, _Page]])  # by index in the ticket

    def moves(self, rank: int) -> list[Move]:
        """Return the moves whose part from this rank is missing."""
        return [page.move for of_unit in self.pages.values() for page in of_unit.values() if rank in page.ranks]

    def end(self, unit: Unit, index: int) -> None:
        """Forget a page that has landed."""
        del self.pages[unit][index]
        if not self.pages[unit]:
            del self.pages[unit]


class RankPuller:
    """Fetches the heads of our `end` into its pools. `answer_s` is how long a peer may owe an answer."""

    orders: ClassVar[UnionType] = PullOrder

    def __init__(self, end: Endpoint, *, answer_s: float = ANSWER_S) -> None:
        self.end, self._answer_s = end, answer_s
        self._layouts = kv_layouts(end.schema)
        self._columns = digest_columns(self._layouts, end.shard)
        self._stride = CHECKSUM_BYTES * len(self._columns) if blocks_per_page(end.schema) else 0
        self._pages = ReceivedPages(end.schema, end.memory, end.device)
        self._links: dict[Shard, PullLinks] = {}  # by rank and ranks of prefill nodes
        self._sources: dict[str, _Source] = {}  # by epoch
        self._lost: list[SourceLost] = []
        self._failed: list[FetchFailed] = []
        self._fetched: dict[tuple[str, int], list[_Page]] = {}  # by epoch and number of the fetch
        self._has_more = False
        self._transport_waits_s: list[float | None] = []  # as of the last poll
        self.dropped = DroppedFrames(logger, "rank link")

    def do(self, order: PullOrder) -> None:
        """Do an order of rank 0. `poll` returns the reports for it."""
        match order:
            case ExpectPages(pages=pages):
                self._pages.expect(pages)
            case OpenSource():
                self._open(order)
            case FetchPages():
                self._fetch(order)
            case ForgetUnit(unit=unit):
                for source in self._sources.values():
                    self._forget(source, unit)
            case CloseSource(epoch=epoch):
                self._close(epoch)

    def poll(self) -> list[PullReport]:
        """Receive, copy and check, bounded. Return reports for rank 0."""
        self._has_more = False
        self._transport_waits_s.clear()
        for links in self._links.values():
            links.begin_poll()
        for epoch, source in list(self._sources.items()):
            for rank, link in source.links.items():
                self._serve(source, rank, link)
            lost = next(((rank, link) for rank, link in source.links.items() if link.lost is not None), None)
            if lost is not None:
                self._lose(epoch, source, *lost)
        return self._take_reports()

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets that the loop polls for input. They change when links open and close."""
        return [socket for links in self._links.values() for socket in links.sockets()]

    def wait_s(self) -> float | None:
        """Return how many seconds the loop may wait on the sockets before it must poll; None: no limit."""
        if self._has_more or self._lost or self._failed or self._fetched:
            return 0.0
        waits = [HELLO_S / 2] if any(source.pages for source in self._sources.values()) else []
        return min((each for each in (*waits, *self._transport_waits_s) if each is not None), default=None)

    def close(self) -> None:
        """Close all links. No page is written after that."""
        for epoch in list(self._sources):
            self._close(epoch)
        for links in self._links.values():
            links.close_all()
        self._links.clear()

    # --- orders ----------------------------------------------------------------------------------------------------

    def _open(self, order: OpenSource) -> None:
        epoch, size = order.peer.epoch, len(order.addresses)
        source = self._sources[epoch] = _Source(order.peer.node_id, order.number, {}, {})
        try:
            own = [pool.layout for pool in self.end.memory]
            for rank, part in page_parts(self._layouts, size, self.end.shard).items():
                key = Shard(rank, size)
                if key not in self._links:
                    self._links[key] = PullLinks(self.end, self._answer_s, source=key, part=part)
                peer = msgspec.structs.replace(order.peer, data_address=order.addresses[rank])
                source.links[rank] = self._links[key].open(peer)
                source.blocks[rank] = blocks_here(part, own)
        except (TransferError, ConfigError) as error:
            self._lost.append(SourceLost(epoch, order.number, str(error), isinstance(error, ConfigError)))
            self._close(epoch)

    def _fetch(self, order: FetchPages) -> None:
        source = self._sources.get(order.epoch)
        if source is None:
            return  # its links are over, which rank 0 has been told or will be
        moves: list[Move] = []
        columns = zip(order.indices, order.sources, order.targets, order.generations, strict=True)
        for place, (index, page, target, generation) in enumerate(columns):
            checksums = order.checksums[place * self._stride : (place + 1) * self._stride]
            moves.append(Move(order.unit, index, page, target, generation, checksums))
        pages = {move.index: _Page(order.number, move, set(source.links), move.generation) for move in moves}
        source.pages[order.unit] = source.pages.get(order.unit, {}) | pages
        for link in source.links.values():
            if link.transport is not None:
                link.transport.fetch(moves)
        self._has_more = True

    def _forget(self, source: _Source, unit: Unit) -> None:
        source.pages.pop(unit, None)
        for link in source.links.values():
            if link.transport is not None:
                link.transport.forget(unit)

    def _close(self, epoch: str) -> None:
        source = self._sources.pop(epoch, None)
        if source is None:
            return
        for links in self._links.values():
            if epoch in links.by_epoch:
                links.close(links.by_epoch[epoch])

    # --- links -----------------------------------------------------------------------------------------------------

    def _serve(self, source: _Source, rank: int, link: PullLink) -> None:
        self._has_more |= not link.drain(partial(self._handle, source, rank, link), self.dropped)
        now = self.end.clock()
        link.expect_answer(now, is_used=bool(source.pages))
        self._step(source, rank, link)
        link.check(now)  # after the drain: a refusal may precede the end of the connection

    def _handle(self, source: _Source, rank: int, link: PullLink, message: ToDecode, data: memoryview | None) -> None:
        match message:
            case LinkWelcome():
                link.welcome(message)
                if link.transport is not None:
                    link.transport.fetch(source.moves(rank))
            case LinkRefused(reason=reason):
                link.refuse(reason)
            case Pages():
                assert data is not None
                if link.transport is None:
                    raise ProtocolError(f"pages of {message.unit} before the welcome", rid=message.unit.rid)
                if message.unit not in source.pages:
                    return  # the unit was forgotten while the pages were on the way
                for landed in link.transport.receive(message, data):
                    self._land(source, rank, landed)
                    if message.unit not in source.pages:
                        return  # this was its last page, or the unit has failed
            case _:
                raise ProtocolError(f"{type(message).__name__} on a link for pages alone")

    def _step(self, source: _Source, rank: int, link: PullLink) -> None:
        try:
            for landed in link.step():
                self._land(source, rank, landed)
        except OutOfMemory as error:
            assert link.transport is not None
            self._fail(source, link.transport.next_unit, error)
        self._transport_waits_s += [] if link.transport is None else [link.transport.wait_s]

    def _land(self, source: _Source, rank: int, landed: Landed) -> None:
        """Take in the part of a page that has come from one rank. Check it if it lies in its pool; else check the page
        when all parts are there."""
        move = landed.move
        page = source.pages.get(move.unit, {}).get(move.index)
        if page is None:
            return  # its unit has failed meanwhile
        page.ranks.discard(rank)
        if page.generation == move.generation:
            page.generation = landed.generation
        is_on_device = landed.checksums is not None
        if page.is_on_device not in (None, is_on_device):
            source.links[rank].lose("the pages of its ranks come by unlike transports, to the GPU and to the host")
            return
        page.is_on_device = is_on_device
        if landed.checked is not None and page.wrong_block is None:
            page.wrong_block = landed.checked.wrong_block
        try:
            if landed.checksums is not None and page.wrong_block is None:
                blocks = source.blocks[rank]
                page.wrong_block = self._pages.first_difference(move.target, landed.checksums, move.checksums, blocks)
            if page.ranks:
                return
            if not is_on_device and page.generation == move.generation and page.wrong_block is None:
                page.wrong_block = self._pages.first_difference(move.target, None, move.checksums)
        except OutOfMemory as error:
            self._fail(source, move.unit, error)
            return
        source.end(move.unit, move.index)
        self._fetched.setdefault((source.links[rank].peer.epoch, page.number), []).append(page)

    def _fail(self, source: _Source, unit: Unit, error: OutOfMemory) -> None:
        numbers = {page.number for page in source.pages[unit].values()}
        epoch = next(iter(source.links.values())).peer.epoch
        self._failed += [FetchFailed(epoch, number, unit, f"rank {self.end.shard.rank}: {error}") for number in numbers]
        self._forget(source, unit)

    def _lose(self, epoch: str, source: _Source, rank: int, link: PullLink) -> None:
        assert link.lost is not None
        why = link.lost.removeprefix(f"node {source.node_id}: ")
        reason = f"its rank {rank}, on the link of rank {self.end.shard.rank}: {why}"
        self._lost.append(SourceLost(epoch, source.number, reason, link.is_refused))
        self._close(epoch)

    def _take_reports(self) -> list[PullReport]:
        fetched = [_report(epoch, number, pages, self._columns) for (epoch, number), pages in self._fetched.items()]
        reports: list[PullReport] = [*fetched, *self._failed, *self._lost]
        self._fetched, self._failed, self._lost = {}, [], []
        return reports


def _report(epoch: str, number: int, pages: Sequence[_Page], columns: np.ndarray) -> FetchedPages:
    """Return the report of fetched pages, with blocks in the numbers of the whole page."""
    return FetchedPages(
        epoch,
        number,
        indices=[page.move.index for page in pages],
        generations=[page.generation for page in pages],
        wrong_blocks={
            page.move.index: int(columns[page.wrong_block]) for page in pages if page.wrong_block is not None
        },
    )


class RankTeam:
    """Gives orders to all ranks of a decode node, and collects what they report. `line` reaches the other ranks; None:
    there are none. A node with one rank has a puller of its own once it meets a prefill node with several; until then
    the team is not used."""

    def __init__(self, end: Endpoint, line: PullLine | None, answer_s: float) -> None:
        self._end, self._line, self._answer_s = end, line, answer_s
        self.size = 1 if line is None else line.size
        self.layouts: Sequence[KvLayout] = kv_layouts(end.schema)
        self._own: RankPuller | None = None
        self.is_used = line is not None

    def send(self, rank: int, order: PullOrder) -> None:
        """Give an order to a rank, rank 0 included. Raises RankLost."""
        if rank:
            assert self._line is not None, rank
            self._line.send(rank, order)
            return
        if self._own is None:
            self._own, self.is_used = RankPuller(self._end, answer_s=self._answer_s), True
        self._own.do(order)

    def expect(self, pages: Sequence[int]) -> None:
        """Announce to the other ranks that fetches will write these pages."""
        for rank in range(1, self.size):
            self.send(rank, ExpectPages(tuple(pages)))

    def poll(self) -> list[tuple[int, PullReport]]:
        """Let rank 0's puller work, and return the reports of all ranks, each with its rank. Raises RankLost."""
        reports: list[tuple[int, PullReport]] = []
        if self._own is not None:
            reports += [(0, report) for report in self._own.poll()]
        reports += () if self._line is None else self._line.receive()
        return reports

    def sockets(self) -> list[zmq.Socket[bytes] | int]:
        """Return the sockets, or their file descriptors, that the loop polls for input."""
        own = [] if self._own is None else self._own.sockets()
        return [*own, *(() if self._line is None else self._line.descriptors())]

    def wait_s(self) -> float | None:
        """Return how many seconds the loop may wait on the sockets before it must poll; None: no limit."""
        if self._line is not None and self._line.has_reports:
            return 0.0
        return None if self._own is None else self._own.wait_s()

    def close(self) -> None:
        """Close rank 0's links. The other ranks close theirs when they end."""
        if self._own is not None:
            self._own.close()
