"""Inputs are views of one block: what is written by one name is in the block, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.engine.rounds.inputs import InputBlock
from baton.engine.rounds.slots import missed_row

NUM_SEQS, NUM_COLUMNS, MAX_STEPS = 3, 7, 2


@pytest.mark.parametrize("kind", ["for_round", "for_catch_up"])
def test_every_input_has_columns_of_its_own(kind: str) -> None:
    block = InputBlock.allocate(NUM_SEQS, NUM_COLUMNS, MAX_STEPS, "cpu")
    inputs = getattr(block, kind)
    for value, each in enumerate(inputs, 1):
        assert not each.any(), "it overlaps another"
        each.fill_(value)
    for value, each in enumerate(inputs, 1):
        assert bool((each == value).all())
    assert inputs.block_table.shape == (NUM_SEQS, NUM_COLUMNS)
    num_written = sum(each.numel() for each in inputs)
    assert int(block.block.count_nonzero()) == num_written
    assert num_written == block.block.numel() - (0 if kind == "for_round" else NUM_SEQS * MAX_STEPS)


def test_the_columns_in_use_end_in_the_block_table() -> None:
    block = InputBlock.allocate(NUM_SEQS, NUM_COLUMNS, MAX_STEPS, "cpu")
    assert block.num_used == block.block.shape[1]
    used = block.using(4)
    used.for_round.block_table[:, 4:] = 9
    assert used.num_used == block.num_used - 3 and not used.block[:, : used.num_used].any()
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
