"""The books of a KV pool: the owner of each page. The KV tensors lie elsewhere and share these page numbers.

free --allocate--> request | ticket --insert--> cache --evict--> free
                      '-----------release-----------------------^
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from enum import IntEnum

import numpy as np

from ...metadata.errors import OutOfPages
from ...metadata.wire.node_info import PoolLedger


class Owner(IntEnum):
    """Kinds of owner. A page has exactly one at any time. FREE is zero: `PagePool` searches its books for zeros."""

    FREE = 0
    PADDING = 1
    REQUEST = 2
    TICKET = 3
    CACHE = 4


_HOLDERS = (Owner.REQUEST, Owner.TICKET)  # the owners that allocate, hand over and release pages


def pages_in(num_bytes: int, bytes_of: Callable[[int], int]) -> int:
    """Return the largest number of pages whose pools have `num_bytes` bytes or fewer. `bytes_of` returns the bytes of
    the pools of a number of pages."""
    return bisect.bisect_right(range(max(0, num_bytes) + 1), num_bytes, key=bytes_of) - 1


class PagePool:
    """Pages 0 .. num_pages - 1 of `page_size` tokens each; page 0 is padding and never allocated. Behind them come
    `num_tails` tail pages (tail_pages.py), whose first is padding, too. They have books of their own.

    Host memory only, one thread. The caller that allocates a page releases it, or hands it to the prefix cache, which
    frees it later. The pool does not know which pages the device still uses: the caller must not free these.
    """

    def __init__(
        self, num_pages: int, page_size: int, generations: np.ndarray | None = None, *, num_tails: int = 0
    ) -> None:
        """`generations` [num_pages + num_tails] int64, zeros, counts the allocations of each page. It lies in the
        pool's shared memory, so that a peer that reads a page notices at once that the page was allocated again. None:
        the pool makes an array."""
        assert num_pages >= 1 and page_size >= 1, (num_pages, page_size)
        self.num_pages = num_pages
        self.num_tails = num_tails
        self.page_size = page_size
        self._owners = bytearray(num_pages + num_tails)  # an Owner each
        self._owners[0] = Owner.PADDING
        if num_tails:
            self._owners[num_pages] = Owner.PADDING
        self._generations = np.zeros(num_pages + num_tails, np.int64) if generations is None else generations
        self._num_free = num_pages - 1
        self._num_free_tails = self.num_usable_tails

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_usable(self) -> int:
        """All pages but the padding: the most that one request alone could get."""
        return self.num_pages - 1

    @property
    def num_usable_tails(self) -> int:
        """All tail pages but their padding."""
        return max(0, self.num_tails - 1)

    @property
    def num_free_tails(self) -> int:
        return self._num_free_tails

    def owner(self, page: int) -> Owner:
        return Owner(self._owners[page])

    def generation(self, page: int) -> int:
        """Return how often `page` was allocated. The number tells a page's present content from earlier contents."""
        return int(self._generations[page])

    def allocate(self, n: int, owner: Owner) -> list[int]:
        """Take `n` pages for a request or ticket, in ascending order. They are neighbours if the pool has a free run
        of `n` pages.

        Raises OutOfPages and takes nothing if fewer are free. `PrefixCache.allocate` also uses evictable pages.
        """
        assert n >= 0 and owner in _HOLDERS, (n, owner)
        if n > self._num_free:
            raise OutOfPages(f"{n} pages were asked for and {self._num_free} of {self.num_usable} are free")
        self._num_free -= n
        return self._take(self._find_free(n, 0), owner)

    def allocate_tails(self, n: int, owner: Owner) -> list[int]:
        """Take `n` tail pages for a request or ticket, as `allocate` takes kept pages.

        Raises OutOfPages and takes nothing if fewer are free."""
        assert n >= 0 and owner in _HOLDERS, (n, owner)
        if n > self._num_free_tails:
            raise OutOfPages(
                f"{n} tail pages were asked for and {self._num_free_tails} of {self.num_usable_tails} are free"
            )
        self._num_free_tails -= n
        return self._take(self._find_free(n, self.num_pages), owner)

    def release(self, pages: Iterable[int], owner: Owner | None = None) -> None:
        """Free pages that a request or ticket holds. The prefix cache frees its own with `owner=Owner.CACHE`."""
        for page in pages:
            self._assert_held(page, _HOLDERS if owner is None else (owner,))
            self._owners[page] = Owner.FREE
            if page < self.num_pages:
                self._num_free += 1
            else:
                self._num_free_tails += 1

    def transfer(self, pages: Iterable[int], to: Owner) -> None:
        """Give pages of a request or ticket to a request, a ticket or the cache. Their generation stays."""
        assert to in (*_HOLDERS, Owner.CACHE), to
        for page in pages:
            self._assert_held(page, _HOLDERS)
            self._owners[page] = to

    def ledger(self, cache_referenced: int = 0) -> PoolLedger:
        """Count the pages of each owner. `PrefixCache.ledger` gives `cache_referenced`."""
        ledger = self._count(0, self.num_pages, cache_referenced)
        assert ledger.free == self._num_free, (ledger.free, self._num_free)
        return ledger

    def tail_ledger(self, cache_referenced: int = 0) -> PoolLedger:
        """Count the tail pages of each owner."""
        ledger = self._count(self.num_pages, self.num_pages + self.num_tails, cache_referenced)
        assert ledger.free == self._num_free_tails, (ledger.free, self._num_free_tails)
        return ledger

    def _count(self, start: int, stop: int, cache_referenced: int) -> PoolLedger:
        free, padding, request, ticket, cache = (self._owners.count(owner, start, stop) for owner in Owner)
        assert free + padding + request + ticket + cache == stop - start, bytes(self._owners)
        return PoolLedger(
            free=free, padding=padding, request=request, ticket=ticket, cache=cache, cache_referenced=cache_referenced
        )

    def _take(self, pages: list[int], owner: Owner) -> list[int]:
        for page in pages:
            self._owners[page] = owner
            self._generations[page] += 1
        return pages

    def _find_free(self, n: int, first: int) -> list[int]:
        """Return `n` free pages of those from `first` on, which is padding: kept pages or tail pages."""
        stop = self.num_pages if first == 0 else len(self._owners)
        start = self._owners.find(bytes(n), first, stop)  # n times Owner.FREE
        if start >= 0:
            return list(range(start, start + n))
        pages: list[int] = []
        page = first
        for _ in range(n):
            page = self._owners.find(Owner.FREE, page + 1, stop)
            pages.append(page)
        return pages

    def _assert_held(self, page: int, owners: tuple[Owner, ...]) -> None:
        assert 0 < page < len(self._owners), f"page {page} of a pool of {self.num_pages} and {self.num_tails}"
        assert self._owners[page] in owners, f"page {page} is owned by {self.owner(page)!r}, not by one of {owners}"
