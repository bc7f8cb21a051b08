"""Inputs of steps: views of one block per step, in buckets that hand out no block twice, and block tables of slots."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from baton.engine.pace.draft_length import DraftShape
from baton.engine.rounds.inputs import BlockTables, Buckets, InputBlock
from baton.engine.rounds.slots import missed_row
from baton.engine.sampling.state import Needs
from baton.engine.work import MAX_MISSED, CatchUp, Round, TableChange

NUM_SEQS, NUM_SLOTS, NUM_COLUMNS, NUM_SPARE, MAX_STEPS = 3, 6, 9, 2, 3


@pytest.mark.parametrize("kind", ["for_round", "for_catch_up"])
def test_every_input_has_columns_of_its_own(kind: str) -> None:
    block = InputBlock.allocate(NUM_SEQS, NUM_COLUMNS, MAX_STEPS, "cpu")
    inputs = [each for each in getattr(block, kind) if each is not None]
    for value, each in enumerate(inputs, 1):
        assert not each.any(), "it overlaps another"
        each.fill_(value)
    for value, each in enumerate(inputs, 1):
        assert bool((each == value).all())
    assert inputs[-1].shape == (NUM_SEQS, NUM_COLUMNS)
    num_written = sum(each.numel() for each in inputs)
    assert int(block.block.count_nonzero()) == num_written
    assert num_written == block.block.numel() - (0 if kind == "for_round" else NUM_SEQS * MAX_STEPS)


def test_the_columns_in_use_end_in_the_block_table() -> None:
    block = InputBlock.allocate(NUM_SEQS, NUM_COLUMNS, MAX_STEPS, "cpu")
    assert block.num_used == block.block.shape[1]
    used = block.using(4)
    used.for_round.block_table[:, 4:] = 9
    assert used.num_used == block.num_used - (NUM_COLUMNS - 4) and not used.block[:, : used.num_used].any()
    assert used.block is block.block and used.to(torch.device("cpu")) is used


def test_a_block_of_padding_names_no_row_of_a_sequence() -> None:
    """The capture of a graph runs over such a block while sequences hold slots and rows that were left out."""
    block = InputBlock.allocate(3, 4, 2, "cpu")
    block.block.fill_(7)
    block.fill_with_padding(5)
    padding_row = int(missed_row(np.array(5), np.array(0)))
    inputs, catch_up = block.for_round, block.for_catch_up
    assert inputs.slots.tolist() == [5] * 3
    assert inputs.missed_rows.tolist() == catch_up.first_rows.tolist() == [padding_row] * 3
    assert not inputs.limits.any() and not inputs.proposed.any() and not inputs.block_table.any()


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


def rows_of(tables: BlockTables, slots: list[int], num_rows: int, num_columns: int) -> list[list[int]]:
    table = np.full((num_rows, num_columns), 99, dtype=np.int64)
    tables.copy_rows(slots, table)
    return table.tolist()


def test_tables_follow_every_change() -> None:
    """Slots grow by a page, get other pages, or fewer: columns behind the pages are 0."""
    choose = random.Random(1)
    tables = BlockTables(NUM_SLOTS, NUM_COLUMNS)
    expected: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
    for _ in range(300):
        slot = choose.randrange(NUM_SLOTS)
        first = choose.choice([0, len(expected[slot])])
        new = [choose.randrange(1, 99) for _ in range(choose.randrange(NUM_COLUMNS - first + 1))]
        expected[slot] = expected[slot][:first] + new
        tables.apply([TableChange(slot, first, new)])
        slots = choose.sample(range(NUM_SLOTS), 3)
        padded = [(expected[each] + [0] * NUM_COLUMNS)[:NUM_COLUMNS] for each in slots]
        assert rows_of(tables, slots, 3, NUM_COLUMNS) == padded


def test_rows_behind_the_sequences_name_the_padding_page() -> None:
    tables = BlockTables(NUM_SLOTS, NUM_COLUMNS)
    tables.apply([TableChange(1, 0, [5, 6, 7]), TableChange(3, 0, [8])])
    assert rows_of(tables, [3, 1], 4, 2) == [[8, 0], [5, 6], [0, 0], [0, 0]]


@pytest.mark.parametrize("change", [TableChange(1, 2, [5]), TableChange(1, 0, [5] * (NUM_COLUMNS + 1))], ids=str)
def test_a_change_behind_a_hole_or_beyond_the_table_is_our_bug(change: TableChange) -> None:
    tables = BlockTables(NUM_SLOTS, NUM_COLUMNS)
    tables.apply([TableChange(1, 0, [5])])
    with pytest.raises(AssertionError):
        tables.apply([change])
