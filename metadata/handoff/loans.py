"""Pages that a node lends: those of its prefix cache, to nodes that compute a prompt with the same beginning.

    Borrow --LendingCache.lend--> a ticket, claimed already --> offers, a bounded number of bytes at a time --> Ack
                                     '-- a page was taken for something else --> Revoke

A loan pins nothing. The cache may evict a lent page for a reservation at any time, which ends the loan. The page's
generation counts up before anything is written into it. So the lender sees it, and so does the borrower, who compares
the generation after its copy, and then the checksums. Therefore no reservation ever waits for a loan, and two nodes
that borrow from each other cannot block each other, however full they are.

If layers have tail pages, a loan ends with a page behind which work may continue. The tail pages that this needs come
last. Pages that lie in the host tier of the lender come back into its pool for the loan.

A lookup in the cache compares all tokens and the salt. A name of a page, by which the router has found the lender, is a
hint alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ..wire.data_link import Borrow
from ..wire.request import Unit
from .endpoint import Endpoint
from .pages import LentPages, OfferedPages
from .schema.schema import page_bytes, tail_window, tails_before
from .tickets import Holder, Ticket, TicketBook
from .transfer import unpack_column

LENT_SHARE = 4  # one page of so many that are free or evictable is on loan at most
STEP_BYTES = 32 << 20  # of pages whose checksums are computed for one offer, so that other work gets its turn


class LendingCache(Protocol):
    """A prefix cache whose pages may be lent (engine/state/prefix_cache.py)."""

    @property
    def available(self) -> int:
        """Number of pages that are free or can be evicted."""
        ...

    @property
    def is_settled(self) -> bool:
        """Whether all pages that came from the node's host tier are there for other processes."""
        ...

    def lend(self, token_ids: Sequence[int], salt: str, limit_pages: int, num_tails: int) -> LentPages:
        """Return the cached pages that cover these tokens from the start, at most `limit_pages`, up to the last one
        behind which work may continue: the last `num_tails` of them have tail pages. They are not pinned. Pages may
        come from the host tier for that, and are there when the cache `is_settled`."""
        ...


DigestAhead = Callable[[Sequence[int], Sequence[int]], None]  # pages and their generations


class NoCache:
    """The cache of a node that lends nothing."""

    available = 0
    is_settled = True

    def lend(self, token_ids: Sequence[int], salt: str, limit_pages: int, num_tails: int) -> LentPages:  # noqa: ARG002
        """Return no page."""
        return LentPages([], [])


class DuePages(NamedTuple):
    """Pages of a loan that are to be offered now, by their indices in the ticket."""

    ticket: Ticket
    indices: list[int]


class Loans:
    """The loans of our `end`. `book` has their tickets; nothing of a loan stands in the book of handoffs."""

    def __init__(
        self, end: Endpoint, pages: OfferedPages, cache: LendingCache, lease_s: float, digest_ahead: DigestAhead
    ) -> None:
        """`digest_ahead` lets all ranks begin to digest pages (HandoffServer.digest_ahead)."""
        self.book = TicketBook(end.clock, lease_s)
        self._pages, self._cache, self._digest_ahead = pages, cache, digest_ahead
        self._num_tails = tails_before(tail_window(end.schema), end.schema.page_size)
        largest = max(page_bytes(end.schema, of_tails=is_tail) for is_tail in (False, True))
        self._most_at_once = max(1, STEP_BYTES // max(1, largest))
        self._rest: dict[Unit, list[int]] = {}  # by unit: indices that are not offered yet

    @property
    def num_pages(self) -> int:
        """Number of pages on loan."""
        return sum(ticket.num_pages - ticket.num_cached_pages for ticket in self.book)

    @property
    def has_due(self) -> bool:
        """Whether pages are still to be offered."""
        return bool(self._rest)

    def begin(self, holder: Holder, ask: Borrow) -> Ticket | None:
        """Begin a loan, or repeat the one that this link has for the unit. Return None if there is nothing to lend.
        Raises ProtocolError if another link has one for the unit."""
        ticket, first = self.book.get(ask.unit), ask.num_cached_pages
        if ticket is not None and ticket.holder == holder:
            self._rest[ask.unit] = sorted(ticket.pages)
            return ticket
        room = max(0, self._cache.available // LENT_SHARE - self.num_pages)
        found = self._cache.lend(unpack_column(ask.token_ids), ask.cache_salt, first + room, self._num_tails)
        if len(found.pages) <= first:
            return None
        pages = [*found.pages, *found.tails]
        ticket = self.book.lend(ask.unit, holder, len(pages), first)
        indices, lent = range(first, len(pages)), pages[first:]
        generations: list[int] = self._pages.generations[lent].tolist()
        ticket.offer(indices, lent, generations)
        for kind in (found.pages[first:], found.tails):  # work that is submitted already may still compute them
            self._digest_ahead(kind, self._pages.generations[kind].tolist())
        self._pages.await_work(lent, generations)
        self._rest[ask.unit] = list(indices)
        return ticket

    def due(self) -> list[DuePages]:
        """Return the pages that are to be offered now. With the last of them comes the end of the loan's offers."""
        found: list[DuePages] = []
        if not self._cache.is_settled:
            return found
        self._rest = {unit: rest for unit, rest in self._rest.items() if self.book.get(unit) is not None}
        num_left = self._most_at_once
        for unit, rest in list(self._rest.items()):
            ticket = self.book.get(unit)
            assert ticket is not None, unit
            now = rest[:num_left]
            if not now or not self._pages.are_digested([ticket.pages[index] for index in rest]):
                continue
            num_left -= len(now)
            self._rest[unit] = rest[len(now) :]
            if not self._rest[unit]:
                del self._rest[unit]
                ticket.row = b""
            found.append(DuePages(ticket, now))
        return found

    def stale(self) -> list[Ticket]:
        """Return the loans of which a page was taken for something else."""
        return [ticket for ticket in self.book if not self.is_intact(ticket, list(ticket.pages))]

    def is_intact(self, ticket: Ticket, indices: Sequence[int]) -> bool:
        """Whether these pages of a loan still hold what was lent."""
        known = [index for index in indices if index in ticket.pages]
        now: list[int] = self._pages.generations[[ticket.pages[index] for index in known]].tolist()
        return now == [ticket.generations[index] for index in known]
