"""The works of all ranks agree, and an idle rank gets work of the others' kind."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from baton.engine.prompts.sizes import PromptSizes
from baton.engine.ranks.agreement import agree, largest_shape, next_works, widened
from baton.engine.rounds.draft_shape import NO_DRAFTS, DraftShape
from baton.engine.sampling.state import Needs, SamplingState
from baton.engine.work import BatchRow, CatchUp, Chunk, ChunkRow, Forget, LoadSlot, Recompute, Round, RoundWork
from baton.metadata.wire.request import SamplingParams

CHAIN, TREE = DraftShape(5), DraftShape(3, 2, 4)
STATE = SamplingState(SamplingParams(max_tokens=1), [1], vocab_size=9)
ROW = BatchRow([1, 2, 3], 0, [1])


def a_round(num_seqs: int, shape: DraftShape, needs: Needs = Needs()) -> Round:  # noqa: B008
    ones = [1] * num_seqs
    return Round(list(range(num_seqs)), ones, [], [shape.num_steps] * num_seqs, [0] * num_seqs, shape, needs, ones)


def a_catch_up(num_seqs: int, num_missed: int, num_rows: int) -> CatchUp:
    ones = [1] * num_seqs
    return CatchUp(list(range(num_seqs)), ones, [], [0] * num_seqs, [num_missed] * num_seqs, num_rows, Needs())


def test_a_round_with_wider_drafts_accepts_no_more() -> None:
    work = Round([3, 1], [1, 1], [], [2, 5], [0, 0], DraftShape(2), Needs(), [None, None], [[7, 8], [9, 4]])
    wider = widened(work, CHAIN)
    assert wider.shape == CHAIN and wider.limits == [2, 2]
    assert wider.proposed == [[7, 8, 8, 8, 8], [9, 4, 4, 4, 4]]
    assert widened(wider, CHAIN) is wider


def test_rounds_have_the_largest_shape_and_the_sampling_of_all_ranks() -> None:
    ranking, penalized = Needs(is_random=True, ranks=True), Needs(penalizes=True, num_logprobs=2)
    agreed = agree([a_round(3, DraftShape(1), ranking), None, a_round(1, CHAIN, penalized)])
    rounds = [work for work in agreed.works if isinstance(work, Round)]
    assert len(rounds) == 3 and {work.shape for work in rounds} == {CHAIN}
    assert {work.needs for work in rounds} == {Needs(is_random=True, ranks=True, penalizes=True, num_logprobs=2)}
    assert [list(work.slots) for work in rounds] == [[0, 1, 2], [], [0]]
    assert [list(work.limits) for work in rounds] == [[1, 1, 1], [], [5]], "no rank accepts more than it asked for"
    assert agreed.lens == (3 * 6, 0, 6)


@pytest.mark.parametrize(
    ("num_seqs", "padded"), [((2, 0), (2, 2)), ((3, 1), (4, 4)), ((9, 0), (9, 0)), ((0, 0), (2, 2))]
)
def test_all_ranks_use_the_bucket_of_the_largest_batch(num_seqs: tuple[int, int], padded: tuple[int, int]) -> None:
    agreed = agree([a_round(num, TREE) for num in num_seqs], buckets=[2, 4, 8])
    assert agreed.lens == tuple(num * (TREE.num_drafts + 1) for num in padded)
    assert all(isinstance(work, Round) and work.least_seqs == max(num_seqs) for work in agreed.works)


def test_a_rank_without_a_round_has_one_of_the_same_shape() -> None:
    for shape in (NO_DRAFTS, CHAIN, TREE):
        idle, live = agree([None, a_round(2, shape)]).works
        assert isinstance(idle, Round) and isinstance(live, Round)
        assert idle.shape == live.shape == shape and not (idle.slots or idle.limits or idle.proposed)


def test_a_rank_that_leaves_rows_out_beside_one_that_drafts_is_caught() -> None:
    with pytest.raises(AssertionError, match="some ranks draft 5 steps"):
        agree([a_round(1, CHAIN), a_round(1, NO_DRAFTS)])
    assert largest_shape([NO_DRAFTS, CHAIN, DraftShape(2)]) == CHAIN and largest_shape([]) == NO_DRAFTS


def test_a_chunk_beside_a_round_is_caught() -> None:
    with pytest.raises(AssertionError, match="a chunk is work of its own"):
        agree([replace(a_round(1, CHAIN), beside=Recompute([], [])), None])


def test_ranks_catch_up_on_the_most_rows() -> None:
    agreed = agree([a_catch_up(2, 1, 1), a_catch_up(1, 9, 6), None])
    works = [work for work in agreed.works if isinstance(work, CatchUp)]
    assert [work.num_rows for work in works] == [6, 6, 6] and {work.least_seqs for work in works} == {2}
    assert [list(work.num_missed) for work in works] == [[1, 1], [9], []]
    assert agreed.lens == (0, 0, 0), "the drafter is whole on each rank, so nobody waits for another"
    with pytest.raises(AssertionError):  # the scheduler would count one row where the device brings four
        agree([a_catch_up(1, 4, 1), a_catch_up(1, 9, 6)])


def test_an_idle_rank_computes_no_rows_of_the_others_prompts() -> None:
    chunk = Chunk([ChunkRow(1, [1, 2, 3], ROW)], [])
    assert agree([None, chunk]) == ([Chunk([], []), chunk], (0, 3))
    again = Recompute([ROW, ROW], [[1, 2, 3], [1, 2, 3]])
    assert agree([again, None]) == ([again, Recompute([], [])], (6, 0))


def test_work_without_a_forward_is_one_ranks_own() -> None:
    for work in (Forget(3), LoadSlot(0, [1, 2], STATE)):
        assert agree([None, work]) == ([None, work], (0, 0))
    assert agree([None, None]) == ([None, None], (0, 0))


def test_unlike_kinds_at_once_are_caught() -> None:
    with pytest.raises(AssertionError, match="never meet"):
        agree([a_round(1, CHAIN), Recompute([], [])])


def test_rounds_come_when_no_rank_has_other_work_before_them() -> None:
    load, late, rows = LoadSlot(0, [1, 2], STATE), a_catch_up(1, 1, 1), Recompute([ROW], [[1, 2, 3, 4]])
    first, second = a_round(1, CHAIN), a_round(2, CHAIN)
    queues: list[deque[RoundWork]] = [deque([first]), deque([rows, load, late, second]), deque()]
    taken = []
    while any(queues):
        taken.append(next_works(queues))
    assert taken == [[None, rows, None], [None, load, None], [None, late, None], [first, second, None]]
    assert next_works(queues) == [None] * 3


@pytest.mark.xfail(strict=True, reason="works of one kind at a time: a chunk of one rank holds up the rounds of all")
def test_streams_of_other_ranks_do_not_wait_for_a_chunk() -> None:
    """On four GPUs each chunk of one rank stops all streams for 50 to 320 ms (docs/performance.md)."""
    streams = a_round(2, CHAIN)
    queues: list[deque[RoundWork]] = [deque([Recompute([ROW], [[1, 2, 3, 4]])]), deque([streams])]
    assert next_works(queues)[1] is streams


def test_chunks_have_the_bucket_of_the_longest_or_none() -> None:
    """A graph has as many rows of each rank, so a chunk that fits no graph keeps all ranks from theirs."""
    sizes = PromptSizes([4, 8], 100)
    long, short = Chunk([ChunkRow(1, [1] * 6, BatchRow([1] * 6, 0, [1]))], []), Chunk([ChunkRow(2, [1] * 3, ROW)], [])
    scored = Chunk([ChunkRow(3, [1] * 3, BatchRow([1, 2, 3], 0, [1], 1, 3), 0)], [])
    longest = Chunk([ChunkRow(4, [1] * 9, BatchRow([1] * 9, 0, [1]))], [])
    assert agree([short, None], prompts=sizes).lens == (4, 4)
    assert agree([short, long], prompts=sizes).lens == (8, 8)
    assert agree([scored, long], prompts=sizes).lens == (3, 6)
    assert agree([None, longest], prompts=sizes).lens == (0, 9)
    assert agree([None, Recompute([ROW], [[1, 2, 3, 4]])], prompts=sizes).lens == (4, 4)
    assert agree([short, long]).lens == (3, 6)
