"""One prefill scheduler for several ranks: each computes prompts in a pool of its own."""

from __future__ import annotations

import pytest

from baton.engine.state.pages import PagePool
from baton.engine.state.prefix_cache import PrefixCache
from baton.prefill_node.ranked_scheduler import RankedPrefillScheduler
from baton.prefill_node.request import Request
from baton.prefill_node.scheduler import PrefillScheduler

from .conftest import MakeRequest

CHUNK, PAGE_SIZE, USABLE = 8, 4, 19


@pytest.fixture
def scheduler() -> RankedPrefillScheduler:
    ranks = [PrefillScheduler(PrefixCache(PagePool(USABLE + 1, PAGE_SIZE)), 3, CHUNK) for _ in range(2)]
    return RankedPrefillScheduler(ranks)


def start(scheduler: RankedPrefillScheduler, *requests: Request) -> list[Request]:
    for request in requests:
        scheduler.submit(request)
    return scheduler.start()


def submit_chunks(scheduler: RankedPrefillScheduler) -> list[dict[str, int]]:
    """Plan a step and record it as submitted. Return the number of tokens of each rank by rid."""
    plan = scheduler.plan()
    assert [planned.request.rank for planned in plan] == sorted(planned.request.rank for planned in plan)
    for request, row in plan:
        request.submit_chunk(len(row.input_ids))
        if request.is_submitted:
            scheduler.hand_over(request)
    return [
        {request.rid: len(row.input_ids) for request, row in plan if request.rank == rank}
        for rank in range(len(scheduler.ranks))
    ]


def check_books(scheduler: RankedPrefillScheduler) -> None:
    for request in list(scheduler):
        scheduler.remove(request)
    assert scheduler.num_queued_tokens == 0
    for rank in scheduler.ranks:
        rank.cache.flush()
        assert rank.cache.ledger().free == USABLE


def test_prompts_start_on_the_rank_that_has_fewest_tokens_to_compute(
    scheduler: RankedPrefillScheduler, make_request: MakeRequest
) -> None:
    requests = [make_request("a" * number, size) for number, size in enumerate((20, 6, 9, 5), start=1)]
    assert start(scheduler, *requests) == requests
    assert [request.rank for request in requests] == [0, 1, 1, 1]
    assert scheduler.num_queued_tokens == 40
    assert submit_chunks(scheduler) == [{"a": 8}, {"aa": 6, "aaa": 2}], "each rank computes a chunk of its own"
    assert [scheduler.find(request.rid, 0) for request in requests] == [[request] for request in requests]
    check_books(scheduler)


def test_a_rank_that_knows_the_prompt_computes_least(
    scheduler: RankedPrefillScheduler, make_request: MakeRequest
) -> None:
    [first] = start(scheduler, make_request("a", 17))
    while not first.is_submitted:
        submit_chunks(scheduler)
    [short] = start(scheduler, make_request("bb", 5))
    assert (first.rank, short.rank) == (0, 0), "no rank has tokens to compute"
    again, third = make_request("a", 17, attempt=1), make_request("ccc", 17)
    assert start(scheduler, again, third) == [again, third]
    assert again.rank == 0 and again.num_cached == 16 and third.rank == 1
    check_books(scheduler)


def test_prompts_wait_in_order_until_one_rank_has_room(
    scheduler: RankedPrefillScheduler, make_request: MakeRequest
) -> None:
    big = [make_request("a", 56), make_request("bb", 56)]
    assert start(scheduler, *big) == big and {request.rank for request in big} == {0, 1}
    late, last = make_request("ccc", 40), make_request("dddd", 4)
    assert start(scheduler, late, last) == [], "the last one would fit, and does not overtake"
    assert list(scheduler.waiting) == [late, last] and scheduler.find("ccc", 0) == [late]
    scheduler.remove(big[1])
    assert scheduler.start() == [late, last] and late.rank == big[1].rank
    check_books(scheduler)


def test_a_waiting_request_is_stopped_and_removed(scheduler: RankedPrefillScheduler, make_request: MakeRequest) -> None:
    start(scheduler, make_request("a", 56), make_request("bb", 56))
    stopped, removed = make_request("ccc", 40), make_request("dddd", 40)
    start(scheduler, stopped, removed)
    scheduler.stop(stopped)
    assert list(scheduler.waiting) == [removed] and scheduler.find("ccc", 0) == [stopped]
    scheduler.remove(removed)
    assert not scheduler.waiting and scheduler.start() == []
    check_books(scheduler)


def test_counts_of_all_ranks(scheduler: RankedPrefillScheduler, make_request: MakeRequest) -> None:
    requests = [make_request("a" * number, size) for number, size in enumerate((5, 6, 40), start=1)]
    assert start(scheduler, *requests) == requests
    submit_chunks(scheduler)
    assert set(scheduler.handing_over) == set(requests[:2]) and scheduler.computing == [requests[2]]
    assert scheduler.num_pages(requests[2]) == 10
    own = [(rank.cache.available, len(rank.computing) + len(rank.handing_over)) for rank in scheduler.ranks]
    assert [(load.free_pages, load.running) for load in scheduler.rank_loads] == own
    assert sum(load.running for load in scheduler.rank_loads) == 3 and scheduler.ranks[0].rank_loads == ()
    check_books(scheduler)
