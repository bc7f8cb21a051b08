"""The books of a node's pages, as the node sees them: of one pool, or of a pool for each rank.

    NodeCache <-- PrefixCache     one pool
              <-- RankedCache     one pool per rank: a page is known by its rank and number

On data links the pages of all ranks are numbered together: page p of rank r is r * num_pages + p (own_pools.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ...metadata.wire.node_info import PoolLedger
from .prefix_cache import PrefixCache


class NodePool(Protocol):
    """The pages of a node."""

    @property
    def page_size(self) -> int: ...

    @property
    def num_pages(self) -> int:
        """All pages, padding included."""
        ...

    @property
    def num_usable(self) -> int:
        """The most pages that one request could get."""
        ...

    def on_links(self, rank: int, pages: Sequence[int]) -> Sequence[int]:
        """Return the numbers that these pages of a rank have on data links."""
        ...

    def generation(self, page: int) -> int:
        """Return how often a page, by its number on data links, was allocated."""
        ...


class NodeCache(Protocol):
    """The pages of a node, their owners, and the prompts in them."""

    @property
    def pool(self) -> NodePool: ...

    @property
    def available(self) -> int:
        """Pages that are free, or cached without a reference."""
        ...

    def ledger(self) -> PoolLedger:
        """Count the pages by owner."""
        ...

    def flush(self) -> int:
        """Free every cached page without references. Return how many were freed."""
        ...


class RankedPool:
    """The pools of all ranks. The schedulers of the ranks own the pages."""

    def __init__(self, caches: Sequence[PrefixCache]) -> None:
        self._pools = [cache.pool for cache in caches]
        self._num_pages = self._pools[0].num_pages  # of a rank
        assert all(pool.num_pages == self._num_pages for pool in self._pools), "all ranks have equally many pages"

    @property
    def page_size(self) -> int:
        return self._pools[0].page_size

    @property
    def num_pages(self) -> int:
        return sum(pool.num_pages for pool in self._pools)

    @property
    def num_usable(self) -> int:
        """The pages of one rank but its padding: a request uses one pool."""
        return self._pools[0].num_usable

    def on_links(self, rank: int, pages: Sequence[int]) -> Sequence[int]:
        first = rank * self._num_pages
        return [first + page for page in pages]

    def generation(self, page: int) -> int:
        rank, own = divmod(page, self._num_pages)
        return self._pools[rank].generation(own)


class RankedCache:
    """The prefix caches of all ranks, each with a pool of its own."""

    def __init__(self, ranks: Sequence[PrefixCache]) -> None:
        self.ranks = list(ranks)
        self.pool = RankedPool(ranks)

    @property
    def available(self) -> int:
        """Pages of all ranks together. A request must find its pages on one of them."""
        return sum(cache.available for cache in self.ranks)

    def ledger(self) -> PoolLedger:
        ledgers = [msgspec.structs.asdict(cache.ledger()) for cache in self.ranks]
        return PoolLedger(**{name: sum(each[name] for each in ledgers) for name in ledgers[0]})

    def flush(self) -> int:
        return sum(cache.flush() for cache in self.ranks)
