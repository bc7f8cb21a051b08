"""Rounds on the device: what their inputs hold, what may overwrite them, and what catching up asks of the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import settings, target_of
from node_pair import params
from solo import Solo
from torch.utils._python_dispatch import TorchDispatchMode

from baton.engine.drafters.base import DraftState, RoundRows
from baton.engine.rounds.inputs import InputBlock
from baton.engine.rounds.rounds import RoundStats
from baton.engine.work import Accepted, Masking


def test_a_bucket_takes_the_columns_that_a_round_may_reach(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Its inputs are static: what a round before left beyond is not copied, and what it left in these is cleared."""
    model = target_of("eagle", checkpoint)
    solo = Solo(model, num_pages=60, context_len=400, buckets=(3,), **settings("eagle", model, tmp_path))
    long, short = (solo.start(list(range(1, num_tokens)), params(4)) for num_tokens in (40, 4))
    buckets, shape = solo.executor.buckets, solo.rounds.shape.with_steps(0)
    both = solo.rounds.make_round([long, short], shape, [0, 0])
    used = [buckets.fill_round(both) for _ in buckets.free_blocks]  # all there are
    for each in used:
        buckets.free(each)
    inputs = buckets.fill_round(solo.rounds.make_round([short], shape, [0]))
    assert any(inputs.block is each.block for each in used)
    page_size = solo.engine.pool.page_size
    reach = -(-(len(short.pages) * page_size + 2 * solo.rounds.shape.num_slots) // page_size)
    table = inputs.block[:, : inputs.num_used][:, 3 + inputs.max_steps :]
    assert len(short.pages) < reach <= table.shape[1] < inputs.for_round.block_table.shape[1]
    assert table[0].tolist() == [*short.pages, *[0] * (table.shape[1] - len(short.pages))]
    assert not table[1:].any()


def test_what_the_device_may_still_read_is_not_written(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a round is collected its inputs, and those of catching up before it, belong to nobody else; then they are
    free, and none is lost."""
    model = target_of("eagle", checkpoint)
    solo = Solo(model, num_pages=100, buckets=(2,), **settings("eagle", model, tmp_path))
    rounds, sequence = solo.rounds, solo.start([1, 2, 3, 4], params(40))
    buckets = solo.executor.buckets
    filled: list[int] = []

    def noting(fill: Callable[[Any], InputBlock]) -> Callable[[Any], InputBlock]:
        def fill_and_note(work: Any) -> InputBlock:
            block = fill(work)
            filled.append(block.block.data_ptr())
            return block

        return fill_and_note

    monkeypatch.setattr(buckets, "fill_round", noting(buckets.fill_round))
    monkeypatch.setattr(buckets, "fill_catch_up", noting(buckets.fill_catch_up))
    for _ in range(2):
        under_way = []
        for num_steps in (0, *[0] * 7, 2):
            under_way.append(rounds.submit([sequence], rounds.shape.with_steps(num_steps), [num_steps]))
            while len(under_way) > 1 + (num_steps > 0):
                solo.take([sequence], rounds.collect(under_way.pop(0)))
        blocks = set(filled[-4:])  # of a round, of catching up twice, and of the round after it
        assert len(blocks) == 4 and not blocks & {each.block.data_ptr() for each in buckets.free_blocks}
        for submitted in under_way:
            solo.take([sequence], rounds.collect(submitted))
        assert {each.block.data_ptr() for each in buckets.free_blocks} == blocks


def test_drafts_that_a_sequence_may_not_take_count_for_nothing(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Neither as drafted nor as accepted, however many others of the batch take."""
    model = checkpoint("llama")
    solo = Solo(model, num_pages=100, speculative="standalone", draft_model=str(model))  # always right
    sequences = [solo.start([index + 1, 2, 3, 4], params(40)) for index in range(4)]
    limits = [5, 1, 0, 3]
    results = solo.round(sequences, 5, limits)
    assert [each.num_drafted for each in results] == [each.num_accepted for each in results] == limits
    assert [len(each.token_ids) for each in results] == [limit + 1 for limit in limits]
    stats = solo.rounds.stats
    assert (stats.num_verified, stats.num_drafted, stats.num_accepted) == (3, 9, 9)
    assert stats.accepted_at == [3, 2, 2, 1, 1]
    assert [each.num_drafted for each in solo.round(sequences, 2, [5, 1, 0, 2])] == [2, 1, 0, 2]


class Operations(TorchDispatchMode):
    """Counts those that a device would be asked for each time: `counted` keeps its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten.arange.start_step:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["eagle", "eagle3", "standalone"])
def test_catching_up_asks_as_much_for_many_sequences_as_for_two(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Sequence by sequence, 64 of them kept the host busy for 14 to 30 ms, and the GPU waited."""
    solo = Solo(target_of(name, checkpoint), num_pages=400, **settings(name, target_of(name, checkpoint), tmp_path))
    counts: list[Counter[str]] = []
    for num_seqs in (2, 7):
        prompts = [[index + 1, 2, 3, 4, 5] for index in range(num_seqs)]
        sequences = solo.start_many(prompts, [params(40)] * num_seqs)
        for _ in range(3):
            solo.round(sequences, 0)
        with torch.inference_mode(), Operations() as operations:
            solo.rounds.catch_up(sequences)
        assert not any(each.num_missed for each in sequences)
        counts.append(operations.counts)
    assert sum(counts[0].values()) > 10 and counts[0] == counts[1]


@pytest.mark.parametrize("name", ["eagle", "mtp3-deepseek", "standalone", "ngram"])
def test_catching_up_is_warmed_up_with_padding(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It warms up with each number of rows that it takes at a time, and nothing of that reaches a sequence."""
    model = target_of(name, checkpoint)
    solo = Solo(model, num_slots=4, num_pages=200, buckets=(1, 2, 4), **settings(name, model, tmp_path))
    sizes: list[tuple[int, ...]] = []
    observe = solo.drafter.observe

    def observing(rows: RoundRows, hidden: Any, targets: torch.Tensor, num_accepted: torch.Tensor) -> DraftState:
        num_pages = -(-targets.shape[1] // solo.engine.pool.page_size)
        assert not rows.was_drafted and not rows.block_table[:, :num_pages].any()
        sizes.append(tuple(targets.shape))
        return observe(rows, hidden, targets, num_accepted)

    wants = params(40, seed=3, temperature=0.8)
    expected = solo.run(solo.start([1, 2, 3, 4], wants), 30, 2)
    sequence = solo.start([1, 2, 3, 4], wants)
    solo.run(sequence, 12, 2)
    solo.round([sequence], 0)
    with monkeypatch.context() as patched:
        patched.setattr(solo.drafter, "observe", observing)
        solo.rounds.executor.warm_up()
    assert sizes == [(1, 1), (1, solo.drafter.shape.num_steps + 1)] * (name != "ngram")
    assert solo.run(sequence, 30, 2) == expected


def test_drafts_are_counted_by_position() -> None:
    stats = RoundStats([0] * 3)
    for num_accepted, num_drafted in ((2, 3), (0, 2), (0, 0), (3, 3)):
        stats.count(Accepted([1] * (num_accepted + 1), [None] * (num_accepted + 1), num_accepted, num_drafted))
    assert stats == RoundStats([2, 2, 1], num_verified=3, num_drafted=8, num_accepted=5)


def test_masks_are_counted_by_round() -> None:
    stats = RoundStats([])
    for masking in (Masking(0.25, is_late=True), None, Masking(0.5, is_late=False)):
        stats.count_masks(masking)
    assert stats == RoundStats([], masked_rounds=2, late_masks=1, mask_s=0.75)
