"""The page pool's books: all or nothing, one owner a page, generations, and assertions that name the values."""

from __future__ import annotations

import pytest

from baton.engine.state.pages import Owner, PagePool
from baton.metadata.errors import OutOfPages
from baton.metadata.wire.node_info import PoolLedger


def test_fresh_pool_is_free_but_for_the_padding():
    pool = PagePool(8, 16)
    assert pool.ledger() == PoolLedger(free=7, padding=1, request=0, ticket=0, cache=0, cache_referenced=0)
    assert (pool.num_free, pool.num_usable) == (7, 7)
    assert pool.owner(0) is Owner.PADDING and pool.owner(1) is Owner.FREE


def test_allocation_takes_one_run_where_there_is_one():
    pool = PagePool(12, 16)
    pages = pool.allocate(6, Owner.REQUEST)
    assert pages == [1, 2, 3, 4, 5, 6]
    pool.release([2, 4])
    assert pool.allocate(3, Owner.REQUEST) == [7, 8, 9], "a run of three exists behind the holes"
    assert pool.allocate(4, Owner.TICKET) == [2, 4, 10, 11], "no run is left: ascending"
    assert pool.num_free == 0


def test_shortage_takes_nothing():
    pool = PagePool(5, 16)
    pool.allocate(2, Owner.REQUEST)
    before = pool.ledger()
    with pytest.raises(OutOfPages, match=r"3 pages were asked for and 2 of 4 are free"):
        pool.allocate(3, Owner.REQUEST)
    assert pool.ledger() == before
    assert [pool.generation(page) for page in range(5)] == [0, 1, 1, 0, 0]
    assert pool.allocate(0, Owner.REQUEST) == []


def test_generation_counts_allocations_and_nothing_else():
    pool = PagePool(2, 16)
    for generation in (1, 2, 3):
        assert pool.allocate(1, Owner.REQUEST) == [1]
        pool.transfer([1], Owner.TICKET)
        assert pool.generation(1) == generation
        pool.release([1])
        assert pool.generation(1) == generation


def test_transfer_moves_the_owner():
    pool = PagePool(5, 16)
    pages = pool.allocate(3, Owner.REQUEST)
    pool.transfer(pages[:1], Owner.TICKET)
    pool.transfer(pages[1:2], Owner.CACHE)
    assert pool.ledger() == PoolLedger(free=1, padding=1, request=1, ticket=1, cache=1, cache_referenced=0)
    pool.release([pages[1]], Owner.CACHE)
    pool.release([pages[0], pages[2]])
    assert pool.num_free == 4


@pytest.mark.parametrize(
    ("page", "message"),
    [(0, "page 0 of a pool"), (9, "page 9 of a pool of 6"), (-1, "page -1"), (4, "FREE"), (3, "CACHE")],
)
def test_release_and_transfer_of_a_page_not_held(page: int, message: str):
    pool = PagePool(6, 16)
    pool.allocate(3, Owner.REQUEST)
    pool.transfer([3], Owner.CACHE)
    with pytest.raises(AssertionError, match=message):
        pool.release([page])
    with pytest.raises(AssertionError, match=message):
        pool.transfer([page], Owner.TICKET)
    assert pool.ledger().request == 2


def test_double_release_within_one_call():
    pool = PagePool(4, 16)
    (page,) = pool.allocate(1, Owner.REQUEST)
    with pytest.raises(AssertionError, match=r"page 1 is owned by <Owner\.FREE"):
        pool.release([page, page])


def test_a_request_cannot_be_freed_as_the_cache():
    pool = PagePool(4, 16)
    pages = pool.allocate(1, Owner.REQUEST)
    with pytest.raises(AssertionError, match="REQUEST"):
        pool.release(pages, Owner.CACHE)


@pytest.mark.parametrize("owner", [Owner.FREE, Owner.PADDING, Owner.CACHE])
def test_only_requests_and_tickets_allocate(owner: Owner):
    with pytest.raises(AssertionError):
        PagePool(4, 16).allocate(1, owner)
