"""A transfer: the decode node's side of one claimed ticket.

It knows which pages were offered and which have arrived; pages.py compares their checksums. From the claim until its
end (Arrived, Revoked, TransferFailed, or `drop`) the transfer owns our target pages; tickets.py says who owns them
before and after.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import TransferError
from ..wire.messages import Offer
from ..wire.node_info import HandoffSchema
from ..wire.request import PullTimes, Unit
from .offers import read_offer
from .schema.schema import page_bytes
from .transports.base import Move


class Arrived(NamedTuple):
    """All pages are in our pool and checked, and the row has arrived. `transfer_s` counts the seconds in which at least
    one page was offered and had not arrived."""

    unit: Unit
    row: bytes
    transfer_s: float
    num_pages: int  # pulled, cached ones not counted
    num_bytes: int
    times: PullTimes = PullTimes()


class TransferFailed(NamedTuple):
    """The pages will not arrive. `is_refused`: the two nodes can never hand over. `code`: of the error that the router
    gets, TransferError's or OutOfMemory's."""

    unit: Unit
    reason: str
    is_refused: bool = False
    code: str = TransferError.code


class Revoked(NamedTuple):
    """The prefill node took the ticket back: `finished` if the first token ended the request, else because of an
    error."""

    unit: Unit
    finished: bool
    reason: str


Event = Arrived | TransferFailed | Revoked


@dataclass(slots=True)
class Transfer:
    """The state of one claim. `pages` are our page numbers by index in the ticket. The first `num_cached_pages` hold
    their contents already and are never written."""

    unit: Unit
    epoch: str  # the peer's
    num_cached_pages: int
    pages: tuple[int, ...]
    row: bytes | None = None
    num_asked: int = 0  # how often missing offers were asked for
    num_passed_over: int = 0  # how often the peer sent something after that, but not all that is missing
    asked_at: float | None = None
    moving_s: float = 0.0  # seconds with at least one page on its way
    _moves: dict[int, Move] = field(default_factory=dict[int, Move])  # offered, not arrived yet
    _offered: set[int] = field(default_factory=set[int])
    _num_pulls: dict[int, int] = field(default_factory=dict[int, int])
    _moving_since: float | None = None
    _offered_at: float = 0.0  # when the last offer was taken

    @property
    def is_offered(self) -> bool:
        """Whether every page and the row have been offered."""
        return self.row is not None and len(self._offered) == len(self.pages) - self.num_cached_pages

    @property
    def is_whole(self) -> bool:
        """Whether the row and every page have arrived and been checked."""
        return not self._moves and self.is_offered

    def missing(self) -> list[Move]:
        """Return the moves of pages that were offered and have not arrived."""
        return list(self._moves.values())

    def take_offer(self, offer: Offer, schema: HandoffSchema, num_peer_pages: int) -> list[Move]:
        """Return the offer's pages as moves, without those offered before. `num_peer_pages` is the size of the peer's
        pool. Raises ProtocolError as `read_offer` does."""
        pages = read_offer(offer, schema, len(self.pages), self.num_cached_pages, num_peer_pages)
        new = [page for page in pages if page.index not in self._offered]
        moves = [
            Move(self.unit, page.index, page.source, self.pages[page.index], page.generation, page.checksums)
            for page in new
        ]
        self._offered |= {page.index for page in new}
        self._moves |= {move.index: move for move in moves}
        self.row = self.row or offer.row
        return moves

    def land(self, index: int, now: float) -> None:
        """Record that the page has arrived and been checked."""
        del self._moves[index]
        if not self._moves:
            self.stop_clock(now)

    def count_pull(self, index: int) -> int:
        """Count one more pull of this page that brought a wrong checksum. Return how many there were."""
        self._num_pulls[index] = self._num_pulls.get(index, 0) + 1
        return self._num_pulls[index]

    def start_clock(self, now: float) -> None:
        """Start counting time, if a page is on its way: an offer has been taken."""
        self._offered_at = now
        if self._moving_since is None and self._moves:
            self._moving_since = now

    def stop_clock(self, now: float) -> None:
        """Stop counting time: no page is on its way."""
        if self._moving_since is not None:
            self.moving_s += now - self._moving_since
            self._moving_since = None

    def arrived(self, now: float, schema: HandoffSchema, transport: str) -> Arrived:
        """Return the event for this whole transfer, which ends now."""
        assert self.row is not None and self.is_whole, self.unit
        self.stop_clock(now)
        num_pages = len(self.pages) - self.num_cached_pages
        num_repeated = sum(self._num_pulls.values())
        times = PullTimes(transport, max(0.0, now - self._offered_at), num_repeated=num_repeated)
        return Arrived(self.unit, self.row, self.moving_s, num_pages, num_pages * page_bytes(schema), times)
