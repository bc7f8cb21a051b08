"""One scheduler for several ranks: each has its own pages, and all draft in one shape."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from baton.decode_node.chunk_length import ChunkRoom, PromptTokens, Queue
from baton.decode_node.ranked_scheduler import RankedDecodeScheduler
from baton.decode_node.scheduler import Budget, DecodeScheduler, StepPlan
from baton.decode_node.sequence import Sequence, new_sequence
from baton.engine.rounds.draft_shape import NO_DRAFTS, DraftShape
from baton.engine.state.pages import PagePool
from baton.engine.state.prefix_cache import PrefixCache
from baton.engine.work import MAX_MISSED, Accepted
from baton.metadata.wire.messages import Compute, Reserve
from baton.metadata.wire.node_info import Peer, RankLoad
from baton.metadata.wire.request import GenerationRequest, SamplingParams, Unit, pack_ids

PAGE_SIZE, USABLE = 4, 19  # pages of each rank, without padding
CHAIN, TREE = DraftShape(3), DraftShape(3, 2, 4)
_ORDERS = itertools.count()


def ranked(
    num_ranks: int = 2,
    *,
    shape: DraftShape = NO_DRAFTS,
    max_running: int = 4,
    budget: Budget | None = None,
    **more: Any,
) -> RankedDecodeScheduler:
    ranks = [
        DecodeScheduler(
            PrefixCache(PagePool(USABLE + 1, PAGE_SIZE)), max_running, 8, shape=shape, context_len=64, budget=budget
        )
        for _ in range(num_ranks)
    ]
    return RankedDecodeScheduler(ranks, **more)


def a_sequence(rid: str, ids: list[int], *, choice: int = 0, is_local: bool = False, **params: Any) -> Sequence:
    wanted = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params})
    request = GenerationRequest(prompt_ids=pack_ids(ids), params=wanted)
    more: dict[str, Any] = {} if is_local else {"prefill": Peer("", "", "")}
    kind = Compute if is_local else Reserve
    message = kind(router_epoch="", rid=rid, attempt=0, choices=(choice,), request=request, **more)
    return new_sequence(message, choice, next(_ORDERS), vocab_size=99, context_len=64)


def start(scheduler: RankedDecodeScheduler, rid: str, ids: list[int], **more: Any) -> Sequence:
    """Reserve a sequence and start it, as if its pages had been pulled."""
    sequence = a_sequence(rid, ids, **more)
    assert scheduler.reserve(sequence)
    scheduler.start_pulled(sequence.unit)
    sequence.append_first(5, None, num_cached=0)
    scheduler.share_computed(sequence)
    return sequence


def run_round(plans: list[StepPlan], num_tokens: int = 1) -> None:
    for plan in plans:
        for sequence in plan.decoding:
            sequence.accept(Accepted([5] * num_tokens, [None] * num_tokens, num_tokens - 1, 0), 1 << 30)


def check_books(scheduler: RankedDecodeScheduler) -> None:
    """Finish all, and check that every page of every rank is free."""
    for sequence in list(scheduler):
        scheduler.finish(sequence)
    assert len(scheduler) == 0 and not scheduler._rank_of
    for rank in scheduler.ranks:
        rank.cache.flush()
        assert rank.cache.ledger().free == USABLE


def test_sequences_are_spread_over_the_ranks_and_use_their_pools() -> None:
    scheduler = ranked(3)
    started = [start(scheduler, f"r{number}", [number] * 9) for number in range(6)]
    assert [sequence.rank for sequence in started] == [0, 1, 2, 0, 1, 2]
    assert started[0].pages == started[1].pages == started[2].pages, "a page is known by its rank and number"
    for rank, own in enumerate(scheduler.ranks):
        assert own.running == [started[rank], started[rank + 3]]
        assert own.cache.available < USABLE
        assert scheduler.rank_loads[rank] == RankLoad(own.cache.available, 2)
    assert len(scheduler.rank_loads) == 3 and scheduler.ranks[0].rank_loads == ()
    assert [scheduler.get(sequence.unit) for sequence in started] == started == sorted(scheduler, key=lambda s: s.order)
    assert scheduler.get(Unit("r0", 0, 1)) is None and scheduler.find("r4", 0, None) == [started[4]]
    check_books(scheduler)


def test_a_prompt_that_a_rank_knows_goes_there() -> None:
    scheduler = ranked(2)
    ids = list(range(20, 33))
    first, other = start(scheduler, "a", [1, 2, 3]), start(scheduler, "b", ids)
    assert (first.rank, other.rank) == (0, 1)
    scheduler.finish(first)
    again = start(scheduler, "c", ids)
    assert again.rank == 1 and again.lease is not None and len(again.lease.pages) == 3
    assert not scheduler.ranks[0].running
    check_books(scheduler)


def test_choices_of_a_request_share_a_rank_or_wait() -> None:
    scheduler = ranked(2, max_running=2)
    ids = list(range(20, 30))
    first = a_sequence("a", ids)
    assert scheduler.reserve(first) and first.rank == 0
    second, third = (a_sequence("a", ids, choice=choice) for choice in (1, 2))
    assert scheduler.reserve(second) and second.rank == 0
    assert not scheduler.reserve(third), "the other rank has room, but not the pages of the prompt"
    scheduler.finish(first)
    assert scheduler.reserve(third) and third.rank == 0
    for sequence in (second, third):
        scheduler.finish(sequence)
    moved = a_sequence("a", ids, choice=3)
    start(scheduler, "b", [1])
    assert scheduler.reserve(moved) and moved.rank == 1, "no choice is left that has pages"
    check_books(scheduler)


def test_a_request_must_fit_into_the_pool_of_one_rank() -> None:
    scheduler = ranked(2)
    start(scheduler, "a", [1] * 40)
    start(scheduler, "b", [2] * 40)
    assert (
        sum(rank.cache.available for rank in scheduler.ranks)
        >= 12
        > max(rank.cache.available for rank in scheduler.ranks)
    )
    assert not scheduler.reserve(a_sequence("c", [3] * 40))
    assert scheduler.get(Unit("c", 0, 0)) is None
    check_books(scheduler)


def test_a_full_rank_is_passed_over() -> None:
    scheduler = ranked(2, max_running=4)
    big = start(scheduler, "a", [1] * 56)
    start(scheduler, "b", [2]), start(scheduler, "c", [3])
    assert big.rank == 0 and len(scheduler.ranks[1].running) == 2, "rank 0 has fewer sequences, but no pages"
    check_books(scheduler)


def test_all_ranks_draft_what_was_chosen_for_all_sequences() -> None:
    asked: list[tuple[list[str], list[int]]] = []

    def choose(sequences: list[Sequence], usable: list[int]) -> DraftShape:
        asked.append(([sequence.unit.rid for sequence in sequences], usable))
        return DraftShape(2)

    scheduler = ranked(3, shape=CHAIN, choose=choose)
    start(scheduler, "a", [1] * 5), start(scheduler, "b", [2] * 5, draft_steps=1)
    plans = scheduler.plan_ranks()
    assert asked == [(["a", "b"], [3, 1])]
    assert [own.shape for own in plans] == [DraftShape(2)] * 3
    assert [own.limits for own in plans] == [[2], [1], []]
    again = scheduler.plan(DraftShape(2))
    assert len(asked) == 1 and again.shape == DraftShape(2), "an earlier choice stands"
    check_books(scheduler)


def test_a_rank_that_can_use_no_drafts_takes_part() -> None:
    for shape in (CHAIN, TREE):
        scheduler = ranked(2, shape=shape)
        start(scheduler, "a", [1] * 5), start(scheduler, "b", [2] * 5, max_tokens=2)
        plans = scheduler.plan_ranks()
        assert [own.shape for own in plans] == [shape] * 2
        assert [own.limits for own in plans] == [[3], [0]]
        check_books(scheduler)


def test_a_narrower_round_has_the_steps_of_the_sequence_that_can_use_most() -> None:
    scheduler = ranked(2, shape=CHAIN)
    start(scheduler, "a", [1] * 5, max_tokens=3), start(scheduler, "b", [2] * 5, max_tokens=4)
    plan = scheduler.plan()
    assert plan.shape == DraftShape(2) and plan.limits == [1, 2]
    check_books(scheduler)


def test_no_rank_drafts_if_one_of_them_has_no_position_to_draft_from() -> None:
    scheduler = ranked(2, shape=CHAIN)
    start(scheduler, "a", [1] * 5)
    alone = a_sequence("b", [7], is_local=True)
    assert scheduler.reserve(alone) and alone.rank == 1
    scheduler.start_local(alone.unit)
    plan = scheduler.plan()
    assert plan.shape == NO_DRAFTS and plan.limits == [0, 0]
    run_round([plan])
    assert scheduler.plan().shape == CHAIN
    check_books(scheduler)


def test_a_rest_is_asked_for_once_for_all_ranks() -> None:
    rests: Callable[[], bool] = iter([True, False]).__next__
    scheduler = ranked(2, shape=CHAIN, rests=rests)
    start(scheduler, "a", [1] * 5), start(scheduler, "b", [2] * 5)
    assert [scheduler.plan().shape, scheduler.plan().shape] == [NO_DRAFTS, CHAIN]
    check_books(scheduler)


def test_a_rank_without_pages_preempts_its_own_sequences_and_resumes_them() -> None:
    """The other rank has pages, and takes new sequences meanwhile."""
    scheduler = ranked(2)
    old = start(scheduler, "a", [1] * 29, max_tokens=30)
    other = start(scheduler, "b", [2] * 5, max_tokens=30)
    young = a_sequence("a", [1] * 29, choice=1, max_tokens=30)
    assert scheduler.reserve(young) and (old.rank, young.rank, other.rank) == (0, 0, 1)
    scheduler.start_pulled(young.unit)
    young.append_first(5, None, num_cached=0)
    while not scheduler.ranks[0].preempted:
        run_round([scheduler.plan()])
    assert scheduler.ranks[0].preempted == [young] and scheduler.ranks[1].cache.available > 4
    assert start(scheduler, "c", [3]).rank == 1, "no reservation is granted where a sequence is preempted"
    scheduler.finish(old)
    own, others = scheduler.plan_ranks()
    assert scheduler.ranks[0].running == [young] == [*own.sequences, *own.decoding]
    assert {sequence.unit.rid for sequence in others.decoding} == {"b", "c"}
    check_books(scheduler)


def test_a_sequence_that_can_never_go_on_is_forgotten() -> None:
    scheduler = ranked(2)
    sequence = start(scheduler, "a", [1] * 56, max_tokens=60)
    scheduler.ranks[0].context_len = 1 << 30
    failed: list[Sequence] = []
    while not failed:
        plan = scheduler.plan()
        failed = plan.failed
        run_round([plan])
    assert failed == [sequence] and scheduler.get(sequence.unit) is None
    check_books(scheduler)


def test_plans_of_all_ranks_are_one_plan_of_the_node() -> None:
    """Sequences stand rank by rank. The longest chunk of a rank counts as the node's."""
    scheduler = ranked(2)
    running = [start(scheduler, rid, [number] * 5) for number, rid in enumerate("ab", start=1)]
    local = [a_sequence(rid, [number] * length, is_local=True) for number, rid, length in ((3, "c", 4), (4, "d", 7))]
    for sequence in local:
        assert scheduler.reserve(sequence)
        scheduler.start_local(sequence.unit)
    assert [each.rank for each in (*running, *local)] == [0, 1, 0, 1]
    plan = scheduler.plan()
    assert plan.decoding == running and plan.limits == [0, 0] and plan.sequences == local
    assert [len(row.input_ids) for row in plan.rows] == [3, 6]
    assert plan.chunk == PromptTokens(6, 0), "the ranks compute at the same time"
    assert scheduler.running == [running[0], local[0], running[1], local[1]]
    assert (scheduler.num_streams, scheduler.num_queued_tokens) == (2, 9)
    for sequence in local:
        sequence.compute(sequence.num_to_compute - 1)
    assert scheduler.plan().chunk is None
    check_books(scheduler)


def test_a_chunk_on_one_rank_is_as_short_as_the_streams_of_others_need() -> None:
    asked: list[tuple[int, int]] = []

    def budget(num_streams: int, num_steps: int, queue: Queue) -> ChunkRoom:
        asked.append((num_streams, queue.num_tokens))
        return ChunkRoom(2)

    scheduler = ranked(2, budget=budget)
    start(scheduler, "a", [1] * 5)
    local = a_sequence("b", [2] * 8, is_local=True)
    assert scheduler.reserve(local) and local.rank == 1
    scheduler.start_local(local.unit)
    own, other = scheduler.plan_ranks()
    assert not own.rows and [len(row.input_ids) for row in other.rows] == [2]
    assert asked == [(1, 7)], "the rank of the prompt has no stream itself"
    check_books(scheduler)


def test_reservations_are_granted_while_one_rank_has_nobody_to_resume() -> None:
    scheduler = ranked(2)
    first, other = start(scheduler, "a", [1] * 5), start(scheduler, "b", [2] * 5)
    scheduler.preempt(first)
    assert scheduler.is_open and scheduler.preempted == [first] and scheduler.num_preemptions == 1
    scheduler.preempt(other)
    assert not scheduler.is_open and scheduler.num_releases == 2
    assert scheduler.plan().sequences == [first, other]
    check_books(scheduler)


def outcomes(scheduler: RankedDecodeScheduler, seed: int) -> list[Any]:
    """Run many sequences of drawn lengths, in rounds that bring drawn numbers of tokens and overlap at times. Return
    all that was planned."""
    draw, planned, number = random.Random(seed), list[Any](), 0
    for step in range(150):
        if step < 60 and draw.random() < 0.3:
            draft_steps = draw.choice([None, None, 0, 1, 5])
            more = {"max_tokens": draw.randint(1, 30), "draft_steps": draft_steps}
            sequence = a_sequence(f"r{number}", [number] * draw.randint(2, 20), **more)
            number += 1
            if scheduler.reserve(sequence):
                scheduler.start_pulled(sequence.unit)
                sequence.append_first(5, None, num_cached=0)
                scheduler.share_computed(sequence)
        plan = scheduler.ranks[0].plan()
        while plan.is_premature:
            settle(scheduler)
            plan = scheduler.ranks[0].plan(plan.shape)
        planned.append(([each.unit.rid for each in plan.decoding], plan.limits, plan.shape, len(plan.rows)))
        for sequence, row in zip(plan.sequences, plan.rows, strict=True):
            sequence.compute(len(row.input_ids))
        settle(scheduler)
        for sequence, limit in zip(plan.decoding, plan.limits, strict=True):
            if sequence.slot is None:  # it has not ended
                sequence.join_round(limit)
        if draw.random() < 0.5:
            settle(scheduler)
        for sequence in plan.decoding:
            if draw.random() < 0.02 and sequence.ended is None and not sequence.num_coming:
                sequence.num_missed = MAX_MISSED + 1
    return planned


def settle(scheduler: RankedDecodeScheduler) -> None:
    """End the round under way. Each sequence gets all that may come, or half of it."""
    for sequence in list(scheduler):
        num, num_tokens = sequence.num_coming, len(sequence.token_ids)
        if not num:
            continue
        sequence.leave_round()
        num = max(1, num // 2) if num_tokens % 2 else num
        sequence.accept(Accepted([5] * num, [None] * num, num - 1, 0), 64)
        if sequence.ended is not None:
            sequence.slot = 0
            scheduler.finish(sequence)


@pytest.mark.parametrize("shape", [NO_DRAFTS, CHAIN, TREE])
def test_sequences_that_need_no_decision_are_planned_as_all_others(
    shape: DraftShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, num_preemptions = list[list[Any]](), 0
    for is_short in (True, False):
        if not is_short:
            monkeypatch.setattr(DecodeScheduler, "_routine_until", lambda *_: -1)
        for seed in range(10):
            scheduler = ranked(1, shape=shape, max_running=8)
            seen.append(outcomes(scheduler, seed))
            num_preemptions += scheduler.ranks[0].num_preemptions
            check_books(scheduler)
    assert seen[:10] == seen[10:] and num_preemptions > 5


@pytest.mark.parametrize("shape", [NO_DRAFTS, CHAIN, TREE])
def test_one_rank_plans_as_a_scheduler_without_ranks(shape: DraftShape) -> None:
    """All pages run out on the way, so that sequences are preempted, too."""
    outcomes: list[list[Any]] = []
    for is_ranked in (False, True):
        scheduler = ranked(1, shape=shape)
        for number in range(3):
            start(scheduler, f"r{number}", [number] * 13, max_tokens=25)
        seen: list[Any] = []
        for _ in range(60):
            plan = scheduler.plan() if is_ranked else scheduler.ranks[0].plan()
            for sequence, row in zip(plan.sequences, plan.rows, strict=True):
                sequence.compute(len(row.input_ids))
            seen.append(([each.unit.rid for each in plan.decoding], plan.limits, plan.shape, len(plan.rows)))
            run_round([plan], 1 + min(plan.limits, default=0))
            for sequence in plan.decoding:
                if sequence.ended is not None:
                    scheduler.finish(sequence)
        assert scheduler.ranks[0].num_preemptions > 0 and len(scheduler) == 0
        outcomes.append(seen)
    assert outcomes[0] == outcomes[1]
