"""Inputs are views of one block: what is written by one name is in the block, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from baton.engine.round_inputs import InputBlock

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
