"""The prefill scheduler: order, chunks and pages of requests, with a real pool and prefix cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.engine.engine import Engine
from baton.engine.state.pages import Owner
from baton.prefill_node import chunk_length
from baton.prefill_node.request import Request
from baton.prefill_node.scheduler import PrefillScheduler

from .conftest import MakeRequest

CHUNK = 8


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[PrefillScheduler]:
    yield PrefillScheduler(engine.cache, max_running=3, chunk_tokens=CHUNK)
    engine.cache.flush()
    ledger = engine.cache.ledger()
    assert ledger.free + ledger.padding == engine.pool.num_pages, ledger


def submit_chunks(scheduler: PrefillScheduler) -> dict[str, int]:
    """Plan a step and record it as submitted. Return the number of tokens by rid."""
    plan = scheduler.plan()
    for request, row in plan:
        assert row.position == request.num_submitted
        assert row.input_ids == request.token_ids[row.position : row.position + len(row.input_ids)]
        request.submit_chunk(len(row.input_ids))
        assert bool(row.num_logits) == request.is_submitted, "only the last token needs logits"
        if request.is_submitted:
            scheduler.hand_over(request)
    return {request.rid: len(row.input_ids) for request, row in plan}


def remove_all(scheduler: PrefillScheduler) -> None:
    for request in list(scheduler):
        scheduler.remove(request)


def test_requests_start_in_order_when_the_pool_holds_all_their_pages(
    scheduler: PrefillScheduler, make_request: MakeRequest
) -> None:
    big, bigger, small = make_request("a", 40), make_request("bb", 44), make_request("ccc", 4)
    for request in (big, bigger, small):
        scheduler.submit(request)
    assert scheduler.start() == [big], "the second does not fit, and the third does not overtake it"
    assert list(scheduler.waiting) == [bigger, small] and not bigger.pages
    assert scheduler.num_queued_tokens == 88
    scheduler.remove(big)
    assert scheduler.start() == [bigger, small]
    remove_all(scheduler)


def test_no_more_than_max_running_requests_compute(scheduler: PrefillScheduler, make_request: MakeRequest) -> None:
    requests = [make_request("r" * index, 4) for index in range(1, 5)]
    for request in requests:
        scheduler.submit(request)
    assert scheduler.start() == requests[:3]
    assert scheduler.start() == []
    remove_all(scheduler)


def test_prompts_beyond_a_routers_grant_wait_for_those_of_other_routers(
    scheduler: PrefillScheduler, make_request: MakeRequest
) -> None:
    scheduler.num_routers = 2
    requests = [make_request(rid, 4) for rid in ("a1", "a2", "a3", "a4", "a5", "b1", "b2")]
    for request in requests:
        request.router = request.rid[0]
        scheduler.submit(request)
    assert scheduler.max_prompts == 3
    order: list[str] = []
    while any(True for _ in scheduler):
        order += [request.rid for request in scheduler.start()]
        scheduler.remove(scheduler.computing[0])
    assert order == ["a1", "a2", "a3", "b1", "b2", "a4", "a5"]
    scheduler.num_routers = 1
    for request in requests[::-1]:
        scheduler.submit(request)
    assert scheduler.start() == requests[:3:-1], "a single router's prompts start in order"
    remove_all(scheduler)


def test_a_step_takes_one_chunk_of_tokens_oldest_first(scheduler: PrefillScheduler, make_request: MakeRequest) -> None:
    for request in (make_request("a", 11), make_request("bb", 4), make_request("ccc", 3)):
        scheduler.submit(request)
    scheduler.start()
    assert submit_chunks(scheduler) == {"a": 8}
    assert submit_chunks(scheduler) == {"a": 3, "bb": 4, "ccc": 1}
    assert [request.rid for request in scheduler.handing_over] == ["a", "bb"]
    assert submit_chunks(scheduler) == {"ccc": 2}
    assert scheduler.plan() == []
    remove_all(scheduler)


def test_prompts_share_a_chunk_while_it_is_small(scheduler: PrefillScheduler, make_request: MakeRequest) -> None:
    """Those before would wait for a longer one. A prompt alone has the whole chunk, and none is divided to fill one."""
    scheduler.share_up_to(6)
    scheduler.max_running = 9
    for request in [make_request("a" * index, size) for index, size in enumerate((2, 4, 3, 4, 7, 12, 1), 1)]:
        scheduler.submit(request)
    scheduler.start()
    chunks = [list(submit_chunks(scheduler).values()) for _ in range(6)]
    assert chunks == [[2, 4], [3], [4], [7], [8], [4, 1]]
    remove_all(scheduler)


def test_chunks_that_are_all_shared_are_filled(scheduler: PrefillScheduler, make_request: MakeRequest) -> None:
    scheduler.share_up_to(None)
    for request in (make_request("a", 5), make_request("bb", 6)):
        scheduler.submit(request)
    scheduler.start()
    assert submit_chunks(scheduler) == {"a": 5, "bb": 3}
    remove_all(scheduler)


@pytest.fixture
def tails(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Iterator[PrefillScheduler]:
    """A scheduler for which 7 tokens are a long prompt."""
    for name, value in {"LEAST_TAIL": 2, "_UNIT": 4, "_LONG": 7}.items():
        monkeypatch.setattr(chunk_length, name, value)
    yield PrefillScheduler(engine.cache, max_running=3, chunk_tokens=CHUNK, has_tails=True)
    engine.cache.flush()


@pytest.mark.parametrize(
    ("num_tokens", "chunks"), [(6, [6]), (7, [4, 3]), (8, [4, 4]), (9, [8, 1]), (15, [8, 4, 3]), (22, [8, 8, 6])]
)
def test_the_tail_of_a_long_prompt_is_a_chunk_of_its_own(
    num_tokens: int, chunks: list[int], tails: PrefillScheduler, make_request: MakeRequest
) -> None:
    """If the rest of the prompt is long and fits in one chunk."""
    tails.submit(make_request("a", num_tokens))
    tails.start()
    assert [submit_chunks(tails)["a"] for _ in chunks] == chunks
    assert not tails.computing
    remove_all(tails)


def test_a_prompt_has_no_tail_if_another_is_here_before_it_begins(
    tails: PrefillScheduler, make_request: MakeRequest
) -> None:
    for request in (make_request("a", 8), make_request("bb", 4)):
        tails.submit(request)
    tails.start()
    assert submit_chunks(tails) == {"a": 8}
    assert submit_chunks(tails) == {"bb": 4}
    remove_all(tails)


def test_a_tail_is_alone_in_its_chunk(tails: PrefillScheduler, make_request: MakeRequest) -> None:
    """A prompt that comes meanwhile does not delay the first token. Without the first request, it is as if alone."""
    for is_stopped in (False, True):
        first, second = make_request("a", 8), make_request("bb", 8)
        tails.submit(first)
        tails.start()
        assert submit_chunks(tails) == {"a": 4}
        tails.submit(second)
        tails.start()
        if is_stopped:
            tails.stop(first)
        else:
            assert submit_chunks(tails) == {"a": 4}
        assert submit_chunks(tails) == {"bb": 4}
        assert submit_chunks(tails) == {"bb": 4}
        remove_all(tails)
        tails.cache.flush()


def test_a_prompt_that_is_not_handed_over_has_no_tail(tails: PrefillScheduler, make_request: MakeRequest) -> None:
    tails.submit(make_request("a", 8, has_decode=False))
    tails.start()
    assert submit_chunks(tails) == {"a": 8}
    remove_all(tails)


def test_a_prompt_that_was_handed_over_is_found_by_the_next_one(
    scheduler: PrefillScheduler, make_request: MakeRequest
) -> None:
    def compute() -> Request:
        request = make_request("a", 10)
        scheduler.submit(request)
        scheduler.start()
        while not request.is_submitted:
            submit_chunks(scheduler)
        return request

    first, second = compute(), compute()
    assert (first.num_cached, second.num_cached) == (0, 8)
    assert second.pages[:2] == first.pages[:2] and second.pages[2] != first.pages[2]
    remove_all(scheduler)


@pytest.mark.parametrize("more", [{"cache_salt": "other"}, {"prompt_logprobs": True}])
def test_another_salt_or_prompt_logprobs_find_no_cached_page(
    more: dict[str, object], scheduler: PrefillScheduler, make_request: MakeRequest
) -> None:
    for kwargs in ({}, more):
        request = make_request("a", 10, **kwargs)
        scheduler.submit(request)
        scheduler.start()
        assert request.num_cached == 0
        while not request.is_submitted:
            scheduler.plan()[0].request.submit_chunk(len(scheduler.plan()[0].row.input_ids))
        scheduler.hand_over(request)
    remove_all(scheduler)


def test_pages_belong_to_the_ticket_or_to_the_request(scheduler: PrefillScheduler, make_request: MakeRequest) -> None:
    for rid, has_decode, owner in (("a", True, Owner.TICKET), ("bb", False, Owner.REQUEST)):
        request = make_request(rid, 6, has_decode=has_decode)
        scheduler.submit(request)
        scheduler.start()
        assert {scheduler.cache.pool.owner(page) for page in request.pages} == {owner}
    remove_all(scheduler)


def test_a_stopped_request_computes_no_more_and_keeps_its_pages(
    scheduler: PrefillScheduler, make_request: MakeRequest
) -> None:
    request, waiting = make_request("a", 20), make_request("bb", 60)
    for each in (request, waiting):
        scheduler.submit(each)
    scheduler.start()
    for each in (request, waiting):
        scheduler.stop(each)
    assert scheduler.plan() == [] and scheduler.handing_over == [request, waiting]
    assert len(request.pages) == 5 and not waiting.pages
    remove_all(scheduler)
    assert not request.pages and not list(scheduler)


def test_a_request_with_an_open_ticket_cannot_be_removed(
    scheduler: PrefillScheduler, make_request: MakeRequest
) -> None:
    request = make_request("a", 4)
    scheduler.submit(request)
    scheduler.start()
    (unit,) = request.choices
    request.open_ticket(unit)
    with pytest.raises(AssertionError):
        scheduler.remove(request)
    request.end_ticket(unit)
    scheduler.remove(request)


def test_find_returns_this_and_earlier_attempts(scheduler: PrefillScheduler, make_request: MakeRequest) -> None:
    requests = [make_request("a", 4, attempt=attempt) for attempt in range(3)]
    for request in (*requests, make_request("bb", 4)):
        scheduler.submit(request)
    assert scheduler.find("a", 1) == requests[:2]
