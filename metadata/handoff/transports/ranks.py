"""Transport `ranks`, if either node has several ranks: every rank of the decode node fetches its own heads.

This transport belongs to the data link of rank 0, which has the tickets. It copies nothing. It gives every rank of its
node the order to fetch, and a page has landed when all of them report it. The ranks fetch by the other transports, over
links of their own (ranks/puller.py). No configuration names it: the prefill node answers with it when it meets.

    fetch --FetchPages to each rank--> waiting --FetchedPages of all ranks--> Landed
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ...errors import ConfigError, OutOfMemory, RankLost, Refused, TransferError
from ...wire.data_link import LinkWelcome, RanksWelcome
from ...wire.node_info import Peer
from ...wire.request import Unit
from ..ranks.orders import (
    CloseSource,
    FetchedPages,
    FetchFailed,
    FetchPages,
    ForgetUnit,
    OpenSource,
    PullReport,
    SourceLost,
)
from ..ranks.shards import digest_columns, page_parts
from ..schema.kv_layout import Shard
from .base import Checked, Landed, Move, PullEnd, PullTeam, Transport

RANKS = "ranks"
_numbers = itertools.count(1)  # of openings and fetches of this process: a late report names no other one


@dataclass(slots=True)
class _Waiting:
    """A page of a fetch that some ranks have not reported. `generation` and `wrong_block` are the first bad ones."""

    move: Move
    ranks: set[int]
    generation: int
    wrong_block: int | None = None


@dataclass(slots=True)
class _Fetch:
    """A fetch that is under way: its pages that have not landed, by index."""

    unit: Unit
    pages: dict[int, _Waiting] = field(default_factory=dict[int, _Waiting])


class RanksTransport(Transport):
    """Gives orders to the ranks of the decode node, by `team`."""

    name: ClassVar[str] = RANKS
    since: ClassVar[int] = RanksWelcome.since

    def __init__(self, end: PullEnd, team: PullTeam, peer: Peer, addresses: Iterable[str]) -> None:
        super().__init__(end.memory)
        self._team, self._epoch = team, peer.epoch
        self._columns = [digest_columns(team.layouts, Shard(rank, team.size)) for rank in range(team.size)]
        self._fetches: dict[int, _Fetch] = {}
        self._done: deque[Landed] = deque()
        self._failed: deque[FetchFailed] = deque()
        self._lost: SourceLost | None = None
        self._is_closed = False
        self._number = next(_numbers)
        self._order(OpenSource(self._number, peer, tuple(addresses)))

    @classmethod
    def open(cls, end: PullEnd, welcome: LinkWelcome) -> RanksTransport:
        """Let all ranks open their links. Raises TransferError if the heads cannot be split over the ranks."""
        if end.team is None or not isinstance(welcome, RanksWelcome):
            raise TransferError(f"{type(welcome).__name__} does not say how to use transport {welcome.transport}")
        try:
            for rank in range(end.team.size):
                page_parts(end.team.layouts, len(welcome.addresses), Shard(rank, end.team.size))
        except ConfigError as error:
            raise TransferError(f"{len(welcome.addresses)} ranks there, {end.team.size} here: {error}") from error
        peer = Peer(node_id=welcome.node_id, epoch=welcome.epoch, protocol=end.protocol)
        return cls(end, end.team, peer, welcome.addresses)

    @property
    def is_busy(self) -> bool:
        return bool(self._done or self._failed or self._lost)

    @property
    def next_unit(self) -> Unit:
        return self._failed[0].unit

    def fetch(self, moves: Iterable[Move]) -> None:
        by_unit: dict[Unit, list[Move]] = {}
        for move in moves:
            by_unit.setdefault(move.unit, []).append(move)
        for unit, of_unit in by_unit.items():
            self._fetch(unit, of_unit)

    def take(self, rank: int, report: PullReport) -> None:
        """Record a rank's report about this link. The next `step` returns the pages that the report names."""
        match report:
            case FetchedPages(number=number, indices=indices, generations=generations, wrong_blocks=wrong_blocks):
                for index, generation in zip(indices, generations, strict=True):
                    self._take_page(rank, number, index, generation, wrong_blocks.get(index))
            case FetchFailed(number=number):
                if number in self._fetches:
                    self._failed.append(report)
            case SourceLost(number=number):
                if number == self._number:
                    self._lost = self._lost or report

    def step(self, max_bytes: int) -> Iterator[Landed]:  # noqa: ARG002
        """Yield the pages that all ranks have. Raises OutOfMemory for a rank without memory, TransferError if a rank's
        link is over, and Refused if the two nodes can never hand over."""
        while self._done:
            yield self._done.popleft()
        if self._lost is not None:
            raise (Refused if self._lost.is_refused else TransferError)(self._lost.reason)
        if self._failed:
            raise OutOfMemory(self._failed[0].reason)

    def forget(self, unit: Unit) -> None:
        self._fetches = {number: fetch for number, fetch in self._fetches.items() if fetch.unit != unit}
        self._done = deque(landed for landed in self._done if landed.move.unit != unit)
        self._failed = deque(failed for failed in self._failed if failed.unit != unit)
        with suppress(RankLost):  # then all ranks were ended, so they write no page
            self._order(ForgetUnit(unit))

    def close(self) -> None:
        super().close()
        self._fetches.clear()
        self._done.clear()
        self._failed.clear()
        if not self._is_closed:
            self._is_closed = True
            with suppress(RankLost):
                self._order(CloseSource(self._epoch))

    def _fetch(self, unit: Unit, moves: list[Move]) -> None:
        number = next(_numbers)
        ranks = range(self._team.size)
        pages = {move.index: _Waiting(move, set(ranks), move.generation) for move in moves}
        self._fetches[number] = _Fetch(unit, pages)
        offered = np.frombuffer(b"".join(move.checksums for move in moves), "<u8").reshape(len(moves), -1)
        for rank in ranks:
            own = offered[:, self._columns[rank]] if offered.size else offered
            self._team.send(
                rank,
                FetchPages(
                    number,
                    self._epoch,
                    unit,
                    indices=[move.index for move in moves],
                    sources=[move.source for move in moves],
                    targets=[move.target for move in moves],
                    generations=[move.generation for move in moves],
                    checksums=own.tobytes(),
                ),
            )

    def _take_page(self, rank: int, number: int, index: int, generation: int, wrong_block: int | None) -> None:
        fetch = self._fetches.get(number)
        if fetch is None:
            return  # forgotten meanwhile
        page = fetch.pages[index]
        page.ranks.remove(rank)
        if page.generation == page.move.generation:
            page.generation = generation
        page.wrong_block = wrong_block if page.wrong_block is None else page.wrong_block
        if page.ranks:
            return
        self._done.append(Landed(page.move, page.generation, checked=Checked(page.wrong_block)))
        del fetch.pages[index]
        if not fetch.pages:
            del self._fetches[number]

    def _order(self, order: OpenSource | ForgetUnit | CloseSource) -> None:
        for rank in range(self._team.size):
            self._team.send(rank, order)
