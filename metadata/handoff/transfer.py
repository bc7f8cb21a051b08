"""A transfer: the decode node's side of one claimed ticket, and the offers that move it on.

The prefill node writes offers from a ticket. The decode node reads and checks them. Its transfer knows which pages were
offered and which have arrived; pages.py compares their checksums. From the claim until its end (Arrived, Revoked,
TransferFailed, or `drop`) the transfer owns our target pages; tickets.py says who owns them before and after.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from ..errors import ProtocolError, TransferError
from ..wire.data_link import Borrow, Claim, Offer
from ..wire.node_info import HandoffSchema
from ..wire.request import PullTimes, Unit, pack_ids, unpack_ids
from .pages import CHECKSUM_BYTES, row_checksum
from .schema.schema import blocks_per_page, page_bytes, row_bytes
from .tickets import Ticket
from .transports.base import Move

OFFER_BYTES = 64 << 10  # of checksums in an offer: the decode node copies the first pages while later ones are offered


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


class LoanOver(NamedTuple):
    """A loan has ended. The first `num_pages` pages of the prompt are in our pool and checked, those that were there
    before included, and so are the tail pages of the last ones, if there are any. `reason`: why these are not all that
    was asked for; "" if all of them are."""

    unit: Unit
    num_pages: int
    num_bytes: int  # that have travelled for them
    moving_s: float  # seconds in which a page was offered and had not arrived
    reason: str = ""


Event = Arrived | TransferFailed | Revoked | LoanOver


@dataclass(slots=True)
class Transfer:
    """The state of one claim. `pages` are our page numbers by index in the ticket. Those that the claim does not need
    hold their contents already and are never written."""

    claim: Claim
    epoch: str  # the peer's
    pages: tuple[int, ...]
    num_tails: int = 0  # of `pages`, the last ones, which are tail pages; of a loan, at most
    until: float = math.inf  # when a loan is given up
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
    def unit(self) -> Unit:
        return self.claim.unit

    @property
    def num_cached_pages(self) -> int:
        """Number of the first pages that are here already."""
        return self.claim.num_cached_pages

    @property
    def is_loan(self) -> bool:
        """Whether it borrows pages of a prefix cache, which may be fewer than it has asked for."""
        return isinstance(self.claim, Borrow)

    @property
    def num_leading(self) -> int:
        """Number of the first pages that have arrived, with those that were here before. If there are tail pages, no
        work continues behind a part of the pages."""
        if self.num_tails:
            return len(self.pages) - self.num_tails if self.is_whole else self.num_cached_pages
        landed = self._offered - self._moves.keys()
        return next(index for index in range(self.num_cached_pages, len(self.pages) + 1) if index not in landed)

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

    def take_offer(
        self, offer: Offer, schema: HandoffSchema, num_peer_pages: int, num_peer_tails: int = 0
    ) -> list[Move]:
        """Return the offer's pages as moves, without those offered before. `num_peer_pages` and `num_peer_tails` are
        the pages in the peer's pools. Raises ProtocolError as `read_offer` does."""
        if self.is_loan and not self._offered:
            self._shorten(offer.num_pages)
        claimed = len(self.pages), self.num_cached_pages
        row_len = 0 if self.is_loan else row_bytes(schema)
        pages = read_offer(offer, schema, *claimed, num_peer_pages, self.num_tails, num_peer_tails, row_len=row_len)
        new = [page for page in pages if page.index not in self._offered]
        moves = [
            Move(self.unit, page.index, page.source, self.pages[page.index], page.generation, page.checksums)
            for page in new
        ]
        self._offered |= {page.index for page in new}
        self._moves |= {move.index: move for move in moves}
        self.row = offer.row if self.row is None else self.row
        return moves

    def _shorten(self, num_pages: int) -> None:
        """Keep our pages of a loan that has `num_pages` pages: as many tail pages as asked for, or as many as there are
        others. A number that no loan has is left to `read_offer`."""
        num_tails = min(self.num_tails, num_pages // 2)
        num_kept, num_asked = num_pages - num_tails, len(self.pages) - self.num_tails
        if self.num_cached_pages < num_kept <= num_asked:
            self.pages = (*self.pages[:num_kept], *self.pages[num_asked:][:num_tails])
            self.num_tails = num_tails

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

    def loan_over(self, now: float, schema: HandoffSchema, reason: str = "") -> LoanOver:
        """Return the event for this loan, which ends now."""
        self.stop_clock(now)
        num_pages = self.num_leading
        num_bytes = (num_pages - self.num_cached_pages) * page_bytes(schema)
        if self.num_tails and num_bytes:
            num_bytes += self.num_tails * page_bytes(schema, of_tails=True)
        return LoanOver(self.unit, num_pages, num_bytes, self.moving_s, reason)

    def arrived(self, now: float, schema: HandoffSchema, transport: str) -> Arrived:
        """Return the event for this whole transfer, which ends now."""
        assert self.row is not None and self.is_whole, self.unit
        self.stop_clock(now)
        num_pages = len(self.pages) - self.num_cached_pages
        num_repeated = sum(self._num_pulls.values())
        times = PullTimes(transport, max(0.0, now - self._offered_at), num_repeated=num_repeated)
        num_bytes = (num_pages - self.num_tails) * page_bytes(schema)
        num_bytes += self.num_tails * page_bytes(schema, of_tails=True)
        return Arrived(self.unit, self.row, self.moving_s, num_pages, num_bytes, times)


class OfferedPage(Struct, frozen=True):
    """One page of an offer."""

    index: int  # in the ticket
    source: int  # its number in the prefill node's pools
    generation: int
    checksums: bytes


def write_offers(ticket: Ticket, indices: Sequence[int], schema: HandoffSchema) -> Iterator[Offer]:
    """Yield offers of these pages of the ticket. The last one carries the row, if it is known."""
    most = max(1, OFFER_BYTES // max(1, CHECKSUM_BYTES * blocks_per_page(schema)))
    for start in range(0, max(1, len(indices)), most):
        chunk = indices[start : start + most]
        row = ticket.row if start + most >= len(indices) else None
        yield Offer(
            unit=ticket.unit,
            num_pages=ticket.num_pages,
            indices=pack_ids(chunk),
            pages=pack_ids(ticket.pages[index] for index in chunk),
            generations=array("q", [ticket.generations[index] for index in chunk]).tobytes(),
            checksums=b"".join(ticket.checksums[index] for index in chunk),
            row=row,
            row_checksum=0 if row is None else row_checksum(row),
        )


def read_offer(
    offer: Offer,
    schema: HandoffSchema,
    num_pages: int,
    num_cached_pages: int,
    num_peer_pages: int,
    num_tails: int = 0,
    num_peer_tails: int = 0,
    *,
    row_len: int | None = None,
) -> list[OfferedPage]:
    """Return the offer's pages. `row_len`: bytes of its row; None: those of the schema's.

    The claim is for `num_pages` pages without the first `num_cached_pages`. The last `num_tails` of them are tail
    pages. `num_peer_pages` is the size of the peer's pool, behind which its `num_peer_tails` tail pages are numbered; 0
    means not known yet, so the offer came too early. Raises ProtocolError for anything that does not fit the claim, the
    schema or the peer's pool.
    """
    _check_columns(offer, schema, row_bytes(schema) if row_len is None else row_len)
    indices, sources = unpack_column(offer.indices), unpack_column(offer.pages)
    rid = offer.unit.rid
    if offer.num_pages != num_pages:
        raise ProtocolError(f"the ticket has {num_pages} pages here, {offer.num_pages} there", rid=rid)
    wrong = [index for index in indices if not num_cached_pages <= index < num_pages]
    if wrong:
        raise ProtocolError(
            f"offered indices {wrong[:8]} were not claimed; claimed are {num_pages} pages without the first"
            f" {num_cached_pages}",
            rid=rid,
        )
    _check_unlike("indices", indices, rid)
    kept = [source for index, source in zip(indices, sources, strict=True) if index < num_pages - num_tails]
    wrong = [source for source in kept if not 0 < source < num_peer_pages]
    if wrong:
        raise ProtocolError(
            f"offered pages {wrong[:8]} are not in a pool of {num_peer_pages} pages, whose page 0 is padding", rid=rid
        )
    end = num_peer_pages + num_peer_tails
    wrong = [source for source in sorted(set(sources) - set(kept)) if not num_peer_pages < source < end]
    if wrong:
        raise ProtocolError(
            f"offered pages {wrong[:8]} are not among the peer's tail pages {num_peer_pages + 1} to {end - 1}", rid=rid
        )
    _check_unlike("pages", sources, rid)
    if offer.row is not None and schema.checksum != "none" and row_checksum(offer.row) != offer.row_checksum:
        raise ProtocolError(
            f"the metadata row has checksum {row_checksum(offer.row):#x}, the offer says {offer.row_checksum:#x}: the"
            " row was damaged on its way",
            rid=rid,
        )
    generations: list[int] = np.frombuffer(offer.generations, "<i8").tolist()
    stride = blocks_per_page(schema) * CHECKSUM_BYTES
    checksums = [offer.checksums[place * stride : (place + 1) * stride] for place in range(len(indices))]
    return list(map(OfferedPage, indices, sources, generations, checksums))


def unpack_column(ids: bytes) -> list[int]:
    """Return the ids in a column of a message. Raises ProtocolError if they are not int32."""
    try:
        return unpack_ids(ids)
    except ValueError as error:
        raise ProtocolError(f"a column of {len(ids)} bytes is not int32: its length is no multiple of 4") from error


def _check_columns(offer: Offer, schema: HandoffSchema, row_len: int) -> None:
    """Raise ProtocolError if the columns are not of one length, or the row has not `row_len` bytes."""
    num_pages = len(unpack_column(offer.indices))
    wanted = {"pages": 4, "generations": 8, "checksums": blocks_per_page(schema) * CHECKSUM_BYTES}
    for name, item_bytes in wanted.items():
        size = len(getattr(offer, name))
        if size != item_bytes * num_pages:
            raise ProtocolError(
                f"offer of {num_pages} indices has {size} bytes of {name}, not {item_bytes * num_pages}",
                rid=offer.unit.rid,
            )
    if offer.row is not None and len(offer.row) != row_len:
        raise ProtocolError(
            f"a metadata row of {len(offer.row)} bytes, but the schema's row has {row_len}",
            rid=offer.unit.rid,
        )


def _check_unlike(name: str, numbers: Sequence[int], rid: str) -> None:
    """Raise ProtocolError if a number of this column of an offer stands there twice."""
    if len(set(numbers)) < len(numbers):
        twice = sorted(number for number, count in Counter(numbers).items() if count > 1)
        raise ProtocolError(f"offered {name} {twice[:8]} are there more than once; offer each page once", rid=rid)
