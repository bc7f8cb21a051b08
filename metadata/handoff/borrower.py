"""Borrows pages of other nodes' prefix caches for prompts that this node computes.

    begin --Borrow--> the pages come, in parts if the lender lends them so --> over: the node computes the rest
                         '-- the lender takes a page back, is lost, or the time is over --^

The prompt has all its pages before it asks, and the node waits for no page meanwhile. The pages that have come go into
its prefix cache, and so into the prompt's lease. Tail pages, which work behind a page may need, are taken for the loan
alone, and then belong to the cache, too. A pull may last as long as computing its tokens would; then the node
computes what has not come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ..estimate import Estimate, Fading
from ..wire.data_link import Borrow
from ..wire.node_info import Lender
from ..wire.request import Unit
from .client import HandoffClient
from .schema.schema import tail_window, tails_before
from .transfer import LoanOver

logger = logging.getLogger(__name__)

UNKNOWN_TOKEN_S = 1e-3  # in which a node is thought to compute a token before it has computed any
FIRST_S = 0.5  # that the first loan of a lender may take: a link is opened for it
MAX_LENDERS = 1024  # whose times are remembered


class CacheLease(Protocol):
    """References on the cached pages of a prompt."""

    @property
    def salt(self) -> str: ...
    @property
    def pages(self) -> list[int]: ...


L = TypeVar("L", bound=CacheLease)
L_contra = TypeVar("L_contra", bound=CacheLease, contravariant=True)


class BorrowingCache(Protocol[L_contra]):
    """The prefix cache of the node that borrows (engine/state/prefix_cache.py)."""

    def take_tails(self, n: int) -> list[int] | None:
        """Take tail pages of the pool for a loan; None: there are not so many."""
        ...

    def land_tails(self, lease: L_contra, tails: Sequence[int], num_landed: int) -> None:
        """Give the first `num_landed` tail pages of a loan, which are those of the lease's last pages, to the cache,
        and free the others. The lease pins them."""
        ...

    @property
    def page_size(self) -> int: ...
    @property
    def lookahead(self) -> int: ...
    def insert(self, token_ids: Sequence[int], pages: Sequence[int], salt: str, lease: L_contra) -> object:
        """Give pages of a prompt to the cache, and extend its lease by them."""
        ...


def _estimate() -> Estimate:
    """Return an estimate of seconds that begins with nothing, so that each lender is tried. A lender that was slow is
    tried again after a while."""
    return Estimate(0.0, num_kept=3, memory=8, fading=Fading(to=0.0, after=10.0, half_life=10.0))


@dataclass(slots=True)
class _LenderTimes:
    """Times of one lender in seconds."""

    answer_s: Estimate = field(default_factory=_estimate)  # from the question until pages begin to move
    page_s: Estimate = field(default_factory=_estimate)

    def expected_s(self, num_pages: int, now: float) -> float:
        """Return how long it takes to borrow so many pages."""
        return self.answer_s.at(now) + num_pages * self.page_s.at(now)


@dataclass(slots=True)
class BorrowTotals:
    """Sums over all loans since the start. `seconds` are those of the copies."""

    num_pages: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def add(self, num_pages: int, over: LoanOver) -> None:
        """Add a loan."""
        self.num_pages += num_pages
        self.num_bytes += over.num_bytes
        self.seconds += over.moving_s


@dataclass(slots=True)
class _Loan(Generic[L]):
    lender: Lender
    token_ids: Sequence[int]  # those of the pages that are wanted, and the next ones by which a page is keyed
    pages: Sequence[int]  # of this node, from the start of the prompt
    tails: Sequence[int]  # taken for the tail pages of the last page that comes and of those before it
    lease: L
    num_pages: int  # the first ones that are here
    asked_at: float
    until: float


class Borrower(Generic[L]):
    """The loans that one node has taken. `token_s` returns the seconds in which it computes a token of a prompt now;
    0: unknown."""

    def __init__(self, cache: BorrowingCache[L], client: HandoffClient, token_s: Callable[[], float]) -> None:
        self._cache, self._client, self._token_s = cache, client, token_s
        schema = client.end.schema
        self.num_tails = tails_before(tail_window(schema), schema.page_size)
        self._loans: dict[Unit, _Loan[L]] = {}
        self._times: dict[str, _LenderTimes] = {}  # by epoch of the lender
        self.totals = BorrowTotals()

    def begin(
        self, unit: Unit, lender: Lender, token_ids: Sequence[int], pages: Sequence[int], lease: L, most: int
    ) -> bool:
        """Borrow pages of a prompt if that is sooner than to compute their tokens. Return whether the node does: then
        the client's `poll` returns a LoanOver for `take` later, unless `drop` comes first.

        `pages` are those of the prompt. The first ones are those of `lease`, which this node had cached. At most the
        first `most` pages come from caches."""
        page_size, num_here, now = self._cache.page_size, len(lease.pages), self._client.end.clock()
        most = min(most, (len(token_ids) - self._cache.lookahead) // page_size)
        num_wanted = min(most, lender.num_pages) - num_here
        if lender.peer.protocol < Borrow.since or num_wanted <= 0:
            return False
        compute_s = num_wanted * page_size * (self._token_s() or UNKNOWN_TOKEN_S)
        times = self._times_of(lender)
        if times.expected_s(num_wanted, now) >= compute_s:
            return False
        tails = self._cache.take_tails(min(self.num_tails, most))
        if tails is None:
            return False
        most_s = compute_s if times.answer_s.count else max(FIRST_S, compute_s)
        ids = token_ids[: most * page_size + self._cache.lookahead]
        loan = self._loans[unit] = _Loan(lender, ids, pages[:most], tails, lease, num_here, now, now + most_s)
        self._ask(unit, loan)
        return True

    def take(self, over: LoanOver) -> Unit | None:
        """Take the end of a loan. Return its unit, or None if the lender may have more: then another loan begins."""
        unit, now = over.unit, self._client.end.clock()
        loan = self._loans[unit]
        num_new, times = over.num_pages - loan.num_pages, self._times_of(loan.lender)
        times.answer_s.observe(max(0.0, now - loan.asked_at - over.moving_s), now)
        if num_new:
            times.page_s.observe(over.moving_s / num_new, now)
        self.totals.add(num_new, over)
        self._land(loan, over.num_pages)
        num_told = min(len(loan.pages), loan.lender.num_pages)
        if num_new and not (over.reason or loan.tails) and over.num_pages < num_told and now < loan.until:
            loan.asked_at = now
            self._ask(unit, loan)
            return None
        self._end(unit, over.reason)
        return unit

    def drop(self, unit: Unit, reason: str) -> None:
        """End a loan, if there is one. Nothing of it is written any more, and nobody names its unit."""
        loan = self._loans.pop(unit, None)
        if loan is not None:
            self._client.drop(unit, reason)
            self._cache.land_tails(loan.lease, loan.tails, 0)

    def units(self) -> list[Unit]:
        """Return the units of all loans."""
        return list(self._loans)

    def _ask(self, unit: Unit, loan: _Loan[L]) -> None:
        where = loan.lender.peer, loan.num_pages, loan.pages, loan.tails
        self._client.borrow(unit, *where, loan.token_ids, loan.lease.salt, loan.until)

    def _land(self, loan: _Loan[L], num_pages: int) -> None:
        """Give pages that have come to the prefix cache."""
        num_landed = 0
        if num_pages > loan.num_pages:
            loan.num_pages, num_landed = num_pages, min(len(loan.tails), num_pages)
            self._cache.insert(loan.token_ids, loan.pages[:num_pages], loan.lease.salt, loan.lease)
        self._cache.land_tails(loan.lease, loan.tails, num_landed)

    def _end(self, unit: Unit, reason: str) -> None:
        loan = self._loans.pop(unit)
        logger.info(
            "borrowed: it has %d of %d pages of %s%s",
            loan.num_pages,
            len(loan.pages),
            loan.lender.peer.node_id,
            reason and f": {reason}",
            extra={"rid": unit.rid},
        )

    def _times_of(self, lender: Lender) -> _LenderTimes:
        epoch = lender.peer.epoch
        if epoch not in self._times and len(self._times) >= MAX_LENDERS:
            self._times.clear()
        return self._times.setdefault(epoch, _LenderTimes())
