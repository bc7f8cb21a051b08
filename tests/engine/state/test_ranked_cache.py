"""The pages of all ranks as those of one node."""

from __future__ import annotations

import numpy as np

from baton.engine.state.pages import Owner, PagePool
from baton.engine.state.prefix_cache import PrefixCache
from baton.engine.state.ranked_cache import RankedCache

NUM_PAGES, PAGE_SIZE = 6, 4


def make() -> tuple[RankedCache, list[PrefixCache], np.ndarray]:
    counts = np.zeros(3 * NUM_PAGES, np.int64)
    parts = counts.reshape(3, NUM_PAGES)
    caches = [PrefixCache(PagePool(NUM_PAGES, PAGE_SIZE, parts[rank])) for rank in range(3)]
    return RankedCache(caches), caches, counts


def test_the_books_of_all_ranks_are_summed() -> None:
    cache, ranks, _ = make()
    pages = ranks[1].allocate(3, Owner.REQUEST)
    lease = ranks[1].insert(list(range(8)), pages[:2])
    ranks[2].allocate(1, Owner.TICKET)
    ledger = cache.ledger()
    assert (ledger.free, ledger.padding, ledger.request, ledger.ticket, ledger.cache) == (11, 3, 1, 1, 2)
    assert ledger.cache_referenced == 2 and cache.available == 11
    ranks[1].release(lease, pages)
    assert cache.available == 14 and cache.flush() == 2 and cache.ledger().free == 14


def test_a_request_gets_the_pages_of_one_rank_at_most() -> None:
    cache, _, _ = make()
    assert (cache.pool.num_pages, cache.pool.num_usable, cache.pool.page_size) == (18, 5, PAGE_SIZE)


def test_pages_are_numbered_together_on_data_links() -> None:
    """So are their generations, which peers read there."""
    cache, ranks, counts = make()
    assert list(cache.pool.on_links(0, [1, 5])) == [1, 5] and list(cache.pool.on_links(2, [1, 5])) == [13, 17]
    [page] = ranks[2].allocate(1, Owner.REQUEST)
    [linked] = cache.pool.on_links(2, [page])
    assert cache.pool.generation(linked) == counts[linked] == 1 == counts.sum()
    pages = [3, 4]
    assert ranks[0].pool.on_links(0, pages) is pages, "one pool needs no other numbers"
