"""A node that leaves hands the texts of its prefix cache on to other nodes of its role, which borrow their pages.

    leaves, and has no request left --HandOn (a text)--> router --Keep (who has it)--> heir --Borrow--> the node
                                    <--HandedOn (whether there is an heir)--'

The heir takes pages for a text before it asks, a bounded number, and gives them to its cache when they have come. Loans
pin nothing at the node that leaves, and end by their own deadlines. So nobody waits for anybody: the node leaves when
no loan has been under way for a moment.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ..bus.membership import Membership
from ..wire.membership import HandedOn, HandOn, Keep
from ..wire.request import Unit, pack_ids, unpack_ids
from .borrower import Borrower, CacheLease
from .pages import CachedText
from .server import HandoffServer

logger = logging.getLogger(__name__)

QUIET_S = 0.5  # without a loan, after which nothing more is expected
ANSWER_S = 1.0  # that the router may take
MOST_TEXTS = 512  # that a node hands on
KEPT_SHARE = 4  # one page of so many that are free or evictable is kept for one node at most
MOST_AT_ONCE = 4  # texts that are borrowed
MOST_WAITING = 512
MOST_LEAVING = 64  # nodes that leave at a time


L = TypeVar("L", bound=CacheLease)


class TextCache(Protocol):
    """The prefix cache of a node that leaves (engine/state/prefix_cache.py)."""

    def texts(self) -> Iterator[CachedText]:
        """Yield the texts of unused pages, those used last first."""
        ...


class KeepingCache(Protocol[L]):
    """The prefix cache of a node that keeps texts of another one (engine/state/prefix_cache.py)."""

    @property
    def available(self) -> int:
        """Number of pages that are free or can be evicted."""
        ...

    def acquire(self, token_ids: Sequence[int], salt: str, limit_pages: int, num_tails: int) -> L:
        """Pin the cached pages of a text."""
        ...

    def take_pages(self, n: int) -> list[int]:
        """Take pages of the pool for a text, at most `available`."""
        ...

    def release(self, lease: L, block_table: Sequence[int] = ()) -> None:
        """Unpin the pages of a lease, and free the others of the block table."""
        ...


class HandingOn:
    """Offers the cached texts of this node, which leaves, to other nodes. The text that was used last goes first."""

    def __init__(self, cache: TextCache, membership: Membership, server: HandoffServer | None) -> None:
        self._cache, self._membership, self._server = cache, membership, server
        self._texts: Iterator[CachedText] | None = None
        self._waits_until = 0.0
        self._num_handed_on = 0

    @property
    def is_over(self) -> bool:
        """Whether the node may end: no text is left to offer, and no loan has been under way for a moment."""
        return self._server is None or (self._texts is not None and time.monotonic() >= self._waits_until)

    def go_on(self) -> None:
        """To be called at each step once the node leaves and has no request."""
        now = time.monotonic()
        if self._server is None:
            return
        if self._texts is None:
            self._texts = itertools.islice(self._cache.texts(), MOST_TEXTS)
            self._offer(now)
        if self._server.loans():
            self._waits_until = max(self._waits_until, now + QUIET_S)

    def take(self, message: HandedOn) -> None:
        """The router has found an heir, or says that there is none."""
        if self._texts is None:
            return
        if not message.has_heir:
            self._texts = iter(())
            self._waits_until = 0.0 if not self._num_handed_on else self._waits_until
            return
        self._num_handed_on += 1
        self._offer(time.monotonic())

    def _offer(self, now: float) -> None:
        """Offer the next text to a router. Nothing happens if no text is left, or no router knows the message."""
        assert self._texts is not None
        text, routers = next(self._texts, None), self._membership.routers_that_know(HandOn)
        if text is None or not routers:
            self._waits_until = now + QUIET_S if self._num_handed_on else 0.0
            if text is None and self._num_handed_on:
                logger.info("other nodes may keep %d cached texts", self._num_handed_on)
            return
        message = HandOn(token_ids=pack_ids(text.token_ids), cache_salt=text.salt, num_pages=text.num_pages)
        self._membership.send(message, routers[0])
        self._waits_until = now + ANSWER_S


@dataclass(frozen=True, slots=True)
class _Kept(Generic[L]):
    """A text whose pages are on the way."""

    lease: L
    pages: list[int]


class KeptTexts(Generic[L]):
    """Borrows texts for the cache of this node from nodes that leave, and so keeps them."""

    def __init__(self, cache: KeepingCache[L], borrower: Borrower[L]) -> None:
        self._cache, self._borrower = cache, borrower
        self._waiting: deque[Keep] = deque()
        self._kept: dict[Unit, _Kept[L]] = {}
        self._numbers = itertools.count()
        self._room: OrderedDict[str, int] = OrderedDict()  # pages to be kept yet, by epoch of the node that leaves

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._kept

    def add(self, message: Keep) -> None:
        """Borrow a text of a node that leaves, now or when fewer texts are borrowed."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(message)
        self._begin_next()

    def end(self, unit: Unit) -> None:
        """The loan of a text is over. What has come is in the cache."""
        kept = self._kept.pop(unit)
        self._cache.release(kept.lease, kept.pages)
        self._begin_next()

    def _begin_next(self) -> None:
        while self._waiting and len(self._kept) < MOST_AT_ONCE:
            self._begin(self._waiting.popleft())

    def _begin(self, message: Keep) -> None:
        token_ids, lender = unpack_ids(message.token_ids), message.lender
        epoch = lender.peer.epoch
        if epoch not in self._room:
            self._room[epoch] = self._cache.available // KEPT_SHARE
            while len(self._room) > MOST_LEAVING:
                self._room.popitem(last=False)
        lease = self._cache.acquire(token_ids, message.cache_salt, lender.num_pages, self._borrower.num_tails)
        num_new = lender.num_pages - len(lease.pages)
        if not 0 < num_new <= min(self._room[epoch], self._cache.available):
            self._cache.release(lease)
            return
        unit = Unit(f"kept-{next(self._numbers)}", 0, 0)
        kept = _Kept(lease, [*lease.pages, *self._cache.take_pages(num_new)])
        if self._borrower.begin(unit, lender, token_ids, kept.pages, lease, lender.num_pages):
            self._room[epoch] -= num_new
            self._kept[unit] = kept
        else:
            self._cache.release(lease, kept.pages)
