"""Buckets write every input of a step, for sequences and for padding, and hand out no block twice."""

from __future__ import annotations

import pytest
import torch

from baton.engine.rounds.buckets import Buckets
from baton.engine.rounds.draft_shape import DraftShape
from baton.engine.sampling.state import Needs
from baton.engine.work import MAX_MISSED, CatchUp, Round, TableChange

NUM_SLOTS, NUM_COLUMNS, NUM_SPARE, MAX_STEPS = 6, 9, 2, 3
ROW = MAX_MISSED + 1  # kept rows per slot
CHANGES = [TableChange(4, 0, [11, 12, 13]), TableChange(0, 0, [14])]


@pytest.fixture
def buckets() -> Buckets:
    """Buckets of two and four sequences, with garbage in all blocks."""
    made = Buckets(
        (4, 2),
        2,
        num_slots=NUM_SLOTS,
        num_columns=NUM_COLUMNS,
        num_spare=NUM_SPARE,
        max_steps=MAX_STEPS,
        device=torch.device("cpu"),
    )
    for block in made.free_blocks:
        block.block.fill_(77)
    return made


def make_round(slots: list[int], **fields: object) -> Round:
    count = len(slots)
    defaults: dict[str, object] = {
        "num_pages": [3] * count,
        "changes": CHANGES,
        "limits": [2] * count,
        "num_missed": [0] * count,
        "num_logprobs": [None] * count,
        "shape": DraftShape(MAX_STEPS),
        "needs": Needs(),
    }
    return Round(slots=slots, **(defaults | fields))  # type: ignore[arg-type]


def test_a_round_gets_all_its_inputs_and_padding(buckets: Buckets) -> None:
    block = buckets.fill_round(
        make_round([4, 0, 2], limits=[3, 1, 0], num_missed=[0, 5, 400], proposed=[[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    )
    inputs = block.for_round
    assert block.num_seqs == 4 and block.num_used == 3 + MAX_STEPS + 3 + NUM_SPARE
    assert inputs.slots.tolist() == [4, 0, 2, NUM_SLOTS]
    assert inputs.limits.tolist() == [3, 1, 0, 0]
    assert inputs.missed_rows.tolist() == [4 * ROW, 5, 2 * ROW + MAX_MISSED, NUM_SLOTS * ROW]
    assert inputs.proposed[:3].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    table = block.block[:, : block.num_used][:, 3 + MAX_STEPS :]
    assert table.tolist() == [[11, 12, 13, 0, 0], [14, 0, 0, 0, 0], [0] * 5, [0] * 5]


def test_catching_up_gets_all_its_inputs_and_padding(buckets: Buckets) -> None:
    work = CatchUp([4], [3], CHANGES, [2], [5], 4, Needs())
    block = buckets.fill_catch_up(work)
    inputs = block.for_catch_up
    assert inputs.slots.tolist() == [4, NUM_SLOTS]
    assert inputs.num_missed.tolist() == [5, 0]
    assert inputs.first_rows.tolist() == [4 * ROW + 2, NUM_SLOTS * ROW]
    assert inputs.block_table[:, : 3 + NUM_SPARE].tolist() == [[11, 12, 13, 0, 0], [0] * 5]


def test_a_batch_takes_the_smallest_bucket_that_holds_it(buckets: Buckets) -> None:
    assert buckets.sizes == [2, 4]
    sizes = [buckets.fill_round(make_round(list(range(count)))).num_seqs for count in (1, 2, 3, 4, 5)]
    assert sizes == [2, 2, 4, 4, 5]
    sizes = [buckets.fill_round(make_round(list(range(count))), 3).num_seqs for count in (1, 2, 4, 5)]
    assert sizes == [4, 4, 4, 5], "room for three sequences at least"


def test_a_block_is_not_given_out_until_it_is_free_again(buckets: Buckets) -> None:
    """Beyond the blocks that a bucket has, it gets more."""
    pointers = {each.block.data_ptr() for each in buckets.free_blocks}
    taken = [buckets.fill_round(make_round([1])) for _ in range(3)]
    used = {each.block.data_ptr() for each in taken}
    assert len(used) == 3 and len(used & pointers) == 2
    for block in taken:
        buckets.free(block)
    assert {each.block.data_ptr() for each in buckets.free_blocks} == pointers | used


def test_columns_stay_within_the_table(buckets: Buckets) -> None:
    block = buckets.fill_round(make_round([1], num_pages=[NUM_COLUMNS], changes=[TableChange(1, 0, [3] * NUM_COLUMNS)]))
    assert block.num_used == block.block.shape[1]
    assert block.for_round.block_table.tolist() == [[3] * NUM_COLUMNS, [0] * NUM_COLUMNS]
