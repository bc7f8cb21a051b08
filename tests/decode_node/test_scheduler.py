"""The decode scheduler: reservation, rounds, preemption and pages of sequences, with a real pool and prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from imports import check_imports

from baton.decode_node.chunk_length import ChunkRoom, Queue
from baton.decode_node.scheduler import DecodeScheduler, StepPlan
from baton.decode_node.sequence import PromptScores, Sequence
from baton.engine.engine import Engine
from baton.engine.pace.draft_length import NO_DRAFTS, DraftShape
from baton.engine.pace.mixed_sizes import MixedSize, MixedSizes
from baton.engine.work import MAX_MISSED, Accepted

from .conftest import MakeSequence

MakeScheduler = Callable[..., DecodeScheduler]
USABLE = 19  # pages of the engine's pool, without padding


@pytest.fixture
def make_scheduler(engine: Engine) -> Iterator[MakeScheduler]:
    made: list[DecodeScheduler] = []

    def make(*, chunk_tokens: int = 8, **more: Any) -> DecodeScheduler:
        made.append(DecodeScheduler(engine.cache, 4, chunk_tokens, context_len=engine.context_len, **more))
        return made[-1]

    yield make
    for scheduler in made:
        for sequence in list(scheduler):
            scheduler.finish(sequence)
    engine.cache.flush()
    ledger = engine.cache.ledger()
    assert ledger.free + ledger.padding == engine.pool.num_pages, ledger


def start(scheduler: DecodeScheduler, sequence: Sequence, token: int = 5) -> Sequence:
    """Reserve the sequence, and start it as if its pages had been pulled."""
    assert scheduler.reserve(sequence)
    scheduler.start_pulled(sequence.unit)
    sequence.append_first(token, None, num_cached=0)
    scheduler.share_computed(sequence)
    return sequence


def run_round(plan: StepPlan, token: int = 5) -> None:
    """Append one token to each sequence of the round."""
    for sequence in plan.decoding:
        sequence.accept(Accepted([token], [None], 0, 0), 1 << 30)


def compute_chunks(plan: StepPlan) -> list[int]:
    """Record the chunks as computed. Return their lengths."""
    for sequence, row in zip(plan.sequences, plan.rows, strict=True):
        assert row.position == sequence.num_computed
        assert row.input_ids == sequence.token_ids[row.position : row.position + len(row.input_ids)]
        sequence.compute(len(row.input_ids))
    return [len(row.input_ids) for row in plan.rows]


def test_a_reservation_takes_pages_for_two_rounds(make_scheduler: MakeScheduler, make_sequence: MakeSequence) -> None:
    for steps, num_pages in ((0, 3), (3, 5)):  # 10 tokens and 2, or 10 tokens and 8 (1 + 3 and the slots of 4 rows)
        scheduler, sequence = make_scheduler(shape=DraftShape(steps)), make_sequence("r", 10)
        assert scheduler.reserve(sequence)
        assert len(sequence.pages) == num_pages
        scheduler.finish(sequence)
        assert not sequence.pages and sequence.lease is None


def test_reserved_local_prompts_count_as_queued(make_scheduler: MakeScheduler, make_sequence: MakeSequence) -> None:
    scheduler = make_scheduler()
    assert scheduler.reserve(make_sequence("pulled", 10))
    assert scheduler.num_queued_tokens == 0
    sequence = make_sequence("local", 10, is_local=True)
    assert scheduler.reserve(sequence)
    assert scheduler.num_queued_tokens == 9
    scheduler.start_local(sequence.unit)
    assert scheduler.num_queued_tokens == 9


def test_the_budget_limits_chunks_beside_sequences_that_decode(
    make_scheduler: MakeScheduler, make_sequence: MakeSequence
) -> None:
    asked: list[tuple[int, int, Queue]] = []
    scheduler = make_scheduler(budget=lambda *figures: asked.append(figures) or ChunkRoom(3))
    local = make_sequence("local", 20, is_local=True)
    assert scheduler.reserve(local)
    scheduler.start_local(local.unit)
    assert compute_chunks(scheduler.plan()) == [8] and not asked, "nothing decodes"
    start(scheduler, make_sequence("stream", 5))
    plan = scheduler.plan()
    assert compute_chunks(plan) == [3] and len(plan.decoding) == 1
    assert asked == [(1, 0, Queue(11, depth=8, num_done=8))], "streams, draft steps, tokens that need KV"
    for _ in range(3):
        assert len(scheduler.plan().rows) == 1
        compute_chunks(scheduler.plan())
    assert not scheduler.plan().rows and len(scheduler.plan().decoding) == 2


def test_the_budget_limits_chunks_before_a_sequence_whose_pages_are_on_the_way(
    make_scheduler: MakeScheduler, make_sequence: MakeSequence
) -> None:
    asked: list[tuple[int, int, Queue]] = []
    scheduler = make_scheduler(budget=lambda *figures: asked.append(figures) or ChunkRoom(3))
    local = make_sequence("local", 20, is_local=True)
    assert scheduler.reserve(local)
    scheduler.start_local(local.unit)
    assert scheduler.reserve(make_sequence("pulled", 5))
    assert compute_chunks(scheduler.plan()) == [3] and asked == [(0, 0, Queue(19))]


def test_a_chunk_that_is_to_share_a_forward_has_few_prompts_and_none_that_is_scored(
    make_scheduler: MakeScheduler, make_sequence: MakeSequence
) -> None:
    rooms = [ChunkRoom(9, 2, is_mixed=True)]
    scheduler = make_scheduler(budget=lambda *_: rooms[0])
    start(scheduler, make_sequence("stream", 5))
    for name in "abc":
        local = make_sequence(name, 4, is_local=True)
        assert scheduler.reserve(local)
        scheduler.start_local(local.unit)
    assert [len(row.input_ids) for row in scheduler.plan().rows] == [3, 3]
    rooms[0] = ChunkRoom(9)
    assert [len(row.input_ids) for row in scheduler.plan().rows] == [3, 3, 2], "of 8 tokens at most"
    scheduler.running[2].prompt_scores = PromptScores(3)
    assert scheduler.plan().is_scored and len(scheduler.plan().rows) == 3
    rooms[0] = ChunkRoom(9, None, is_mixed=True)
    assert not scheduler.plan().is_scored and len(scheduler.plan().rows) == 1


def test_a_sequence_that_does_not_fit_takes_nothing(make_scheduler: MakeScheduler, make_sequence: MakeSequence) -> None:
    scheduler = make_scheduler()
    assert scheduler.reserve(make_sequence("a", 40))
    free = scheduler.cache.available
    assert not scheduler.reserve(make_sequence("bb", 40))
    assert scheduler.cache.available == free


def test_finished_sequences_leave_full_pages_to_the_next_one(
    make_scheduler: MakeScheduler, make_sequence: MakeSequence
) -> None:
    finished: list[Sequence] = []
    scheduler = make_scheduler(on_finish=finished.append)
    first = start(scheduler, make_sequence("r", 10))
    scheduler.finish(first)
    assert finished == [first] and scheduler.pages.num_releases == 1
    second = make_sequence("r", 10)
    assert scheduler.reserve(second)
    assert second.lease is not None and len(second.lease.pages) == 2


def test_pages_with_missed_rows_are_not_cached(make_scheduler: MakeScheduler, make_sequence: MakeSequence) -> None:
    scheduler = make_scheduler()
    first = start(scheduler, make_sequence("r", 7))
    for _ in range(5):
        run_round(scheduler.plan())
    assert first.num_computed == 12
    first.num_missed = 5
    scheduler.finish(first)
    assert scheduler.cache.match(first.token_ids) == 1, "of three full pages"


def test_a_local_prompt_is_computed_in_chunks_beside_rounds(
    make_scheduler: MakeScheduler, make_sequence: MakeSequence
) -> None:
    scheduler = make_scheduler(chunk_tokens=8)
    decoding, local = start(scheduler, make_sequence("a", 5)), make_sequence("bb", 20, is_local=True)
    assert scheduler.reserve(local)
    scheduler.start_local(local.unit)
    lengths: list[int] = []
    for _ in range(3):
        plan = scheduler.plan()
        assert plan.decoding == [decoding]
        lengths += compute_chunks(plan)
        run_round(plan)
    assert lengths == [8, 8, 3], "the last token is left to a round"
    assert scheduler.plan().decoding == [decoding, local]


def test_a_sequence_takes_part_in_the_round_whose_forward_computes_its_last_chunk(
    make_scheduler: MakeScheduler, make_sequence: MakeSequence
) -> None:
    sizes = [MixedSize(num_seqs, shape, 8) for num_seqs in (1, 2) for shape in (NO_DRAFTS, DraftShape(3))]
    mixed = MixedSizes(sizes, DraftShape(3))
    scheduler = make_scheduler(chunk_tokens=8, shape=DraftShape(3), mixed=mixed)
    first, second = (make_sequence(name, 13, is_local=True) for name in "ab")
    for local in (first, second):
        assert scheduler.reserve(local)
        scheduler.start_local(local.unit)
    plan = scheduler.plan()
    assert compute_chunks(plan) == [8] and not plan.decoding, "the chunk is not the last one"
    plan = scheduler.plan()
    assert [len(row.input_ids) for row in plan.rows] == [4, 4], "the rest of the first, and a part of the second"
    assert plan.decoding == [first] and plan.limits == [0] and plan.shape == NO_DRAFTS
    compute_chunks(plan)
    run_round(plan)
    assert first.num_generated == 1 and first.num_to_compute == 1
    plan = scheduler.plan()
    assert [len(row.input_ids) for row in plan.rows] == [8]
    assert plan.decoding == [first, second] and plan.limits == [3, 0] and plan.shape == DraftShape(3)
    second.num_missed = 1
    assert scheduler.plan().decoding == [first], "the drafter must catch up after the chunk"
    second.num_missed, second.prompt_scores = 0, PromptScores(12)
    assert scheduler.plan().decoding == [first], "scores are collected before the round"
    second.prompt_scores = None
    scheduler.mixed = MixedSizes(sizes[:2], DraftShape(3))
    assert scheduler.plan().decoding == [first], "no forward holds a round of two"


def test_choices_of_a_local_prompt_wait_for_the_oldest_and_take_its_pages(
    make_scheduler: MakeScheduler, make_sequence: MakeSequence
) -> None:
    scheduler = make_scheduler(chunk_tokens=8)
    choices = [make_sequence("r", 14, choice=choice, is_local=True) for choice in range(3)]
    for sequence in choices:
        assert scheduler.reserve(sequence)
        scheduler.start_local(sequence.unit)
    free = scheduler.cache.available
    assert compute_chunks(scheduler.plan()) == [8], "of the oldest alone"
    scheduler.preempt(choices[2])
    assert compute_chunks(scheduler.plan()) == [5]
    scheduler.share_computed(choices[0])
    plan = scheduler.plan()
    assert plan.decoding == choices[:1] and [row.position for row in plan.rows] == [12, 12]
    assert compute_chunks(plan) == [1, 1] and scheduler.num_queued_tokens == 0
    assert choices[1].pages[:3] == choices[0].pages[:3] == choices[2].pages[:3] and choices[1].num_cached == 0
    assert scheduler.cache.available == free + 6
    assert scheduler.plan().decoding == choices


def test_a_choice_computes_the_prompt_itself_if_the_oldest_loses_its_pages(
    make_scheduler: MakeScheduler, make_sequence: MakeSequence
) -> None:
    scheduler = make_scheduler(chunk_tokens=8)
    older, younger = (make_sequence("r", 14, choice=choice, is_local=True) for choice in range(2))
    for sequence in (older, younger):
        assert scheduler.reserve(sequence)
        scheduler.start_local(sequence.unit)
    assert scheduler.plan().sequences == [older]
    scheduler.finish(older)
    assert scheduler.plan().sequences == [younger]


def test_positions_whose_states_a_drafter_needs_are_computed_although_they_are_cached(
    make_scheduler: MakeScheduler, make_sequence: MakeSequence
) -> None:
    for num_states, num_pages in ((0, 3), (1, 2), (5, 1), (9, 0)):
        scheduler = make_scheduler(num_prompt_states=num_states)
        first = start(scheduler, make_sequence("r", 13))
        scheduler.finish(first)
        local = make_sequence("r", 13, is_local=True)
        assert scheduler.reserve(local)
        scheduler.start_local(local.unit)
        assert (len(local.pages) > 0, local.num_cached) == (True, 4 * num_pages), num_states
        scheduler.finish(local)
        scheduler.cache.flush()


def test_nothing_is_drafted_before_a_token_has_kv(make_scheduler: MakeScheduler, make_sequence: MakeSequence) -> None:
    scheduler = make_scheduler(shape=DraftShape(3))
    one, other = make_sequence("r", 1, is_local=True), start(scheduler, make_sequence("bb", 5))
    assert scheduler.reserve(one)
    scheduler.start_local(one.unit)
    plan = scheduler.plan()
    assert set(plan.decoding) == {one, other} and plan.shape.num_steps == 0 and not one.lacks_draft
    run_round(plan)
    assert scheduler.plan().shape.num_steps == 3


def test_the_youngest_is_preempted_and_resumed_before_new_reservations(
    make_scheduler: MakeScheduler, make_sequence: MakeSequence
) -> None:
    scheduler = make_scheduler()
    old, young = (start(scheduler, make_sequence(rid, 34, max_tokens=40)) for rid in ("a", "bb"))
    plan = scheduler.plan()
    while young in plan.decoding:
        run_round(plan)
        plan = scheduler.plan()
    assert plan.decoding == [old] and scheduler.preempted == [young]
    assert not young.pages and young.num_computed == 0 and scheduler.num_preemptions == 1
    assert not scheduler.reserve(make_sequence("ccc", 2)), "the preempted one comes first"
    scheduler.finish(old)
    scheduler.cache.flush()
    plan = scheduler.plan()
    assert scheduler.running == [young] and not scheduler.preempted
    assert plan.sequences == [young] and compute_chunks(plan) == [8], "its tokens are computed again"


def test_a_sequence_that_can_never_fit_fails(make_scheduler: MakeScheduler, make_sequence: MakeSequence) -> None:
    scheduler = make_scheduler()
    sequence = start(scheduler, make_sequence("r", 70, max_tokens=40))
    plan = scheduler.plan()
    while plan.decoding:
        run_round(plan)
        plan = scheduler.plan()
    assert plan.failed == [sequence] and len(sequence.token_ids) == 1 + USABLE * 4
    assert not list(scheduler)


def test_drafts_are_limited_per_sequence(make_scheduler: MakeScheduler, make_sequence: MakeSequence) -> None:
    """A sequence drafts no more than it asks for and has tokens left. A sequence that is left behind drafts nothing."""
    scheduler = make_scheduler(shape=DraftShape(4))
    sequences = [
        start(scheduler, make_sequence("a", 4, max_tokens=20)),
        start(scheduler, make_sequence("bb", 4, max_tokens=20, draft_steps=2)),
        start(scheduler, make_sequence("ccc", 4, max_tokens=3)),
        start(scheduler, make_sequence("dddd", 4, max_tokens=20)),
    ]
    sequences[3].num_missed = MAX_MISSED + 1
    plan = scheduler.plan()
    assert (plan.decoding, plan.limits, plan.shape.num_steps) == (sequences, [4, 2, 1, 0], 4)
    scheduler.finish(sequences[0])
    assert scheduler.plan().shape.num_steps == 2, "no more than the one that can use most"


def test_nothing_is_drafted_when_the_node_rests(make_scheduler: MakeScheduler, make_sequence: MakeSequence) -> None:
    scheduler = make_scheduler(shape=DraftShape(4), rests=lambda: True)
    start(scheduler, make_sequence("a", 4, max_tokens=20))
    plan = scheduler.plan()
    assert (plan.shape.num_steps, plan.limits) == (0, [0])


def test_a_sequence_that_ends_in_the_round_under_way_is_left_out_of_the_next(
    make_scheduler: MakeScheduler, make_sequence: MakeSequence
) -> None:
    scheduler = make_scheduler()
    ends, goes_on = (start(scheduler, make_sequence(rid, 4, max_tokens=num)) for rid, num in (("a", 2), ("bb", 9)))
    for sequence in scheduler.plan().decoding:
        sequence.join_round(0)
    plan = scheduler.plan()
    assert plan.decoding == [goes_on] and not plan.is_premature
    ends.leave_round(), goes_on.leave_round()
    assert scheduler.plan().decoding == [ends, goes_on]


def test_no_sequence_is_preempted_while_a_round_is_under_way(
    make_scheduler: MakeScheduler, make_sequence: MakeSequence
) -> None:
    scheduler = make_scheduler()
    sequences = [start(scheduler, make_sequence(rid, 34, max_tokens=40)) for rid in ("a", "bb")]
    plan = scheduler.plan()
    for _ in range(40):
        if plan.is_premature:
            break
        for sequence in plan.decoding:
            sequence.join_round(0)
        next_plan = scheduler.plan()
        for sequence in plan.decoding:
            sequence.leave_round()
        run_round(plan)
        plan = next_plan
    assert plan.is_premature and scheduler.running == sequences
    assert scheduler.plan().decoding == sequences[:1] and scheduler.preempted == sequences[1:]


def test_sequences_are_found_in_every_phase_until_they_finish(
    make_scheduler: MakeScheduler, make_sequence: MakeSequence
) -> None:
    scheduler = make_scheduler()
    reserved, running, preempted = (make_sequence("r", 5, choice=choice, attempt=1) for choice in range(3))
    other = start(scheduler, make_sequence("other", 5))
    start(scheduler, preempted)
    start(scheduler, running)
    assert scheduler.reserve(reserved)
    scheduler.preempt(preempted)
    assert set(scheduler.find("r", 1, None)) == {reserved, running, preempted} == set(scheduler) - {other}
    assert scheduler.find("r", 0, None) == [] == scheduler.find("s", 1, None)
    assert scheduler.find("r", 2, (1,)) == [running]
    assert all(scheduler.get(each.unit) is each for each in (reserved, running, preempted, other))
    for left, sequence in ((3, running), (2, preempted), (1, reserved)):
        scheduler.finish(sequence)
        assert scheduler.get(sequence.unit) is None and sequence not in scheduler.find("r", 1, None)
        assert len(scheduler) == len(list(scheduler)) == left
    assert scheduler.find("other", 0, None) == [other]


@pytest.mark.parametrize("module", ["node", "scheduler", "sequence", "reservations", "outbox"])
def test_scheduling_imports_no_torch(module: str) -> None:
    check_imports([f"baton.decode_node.{module}"], ["torch"])
