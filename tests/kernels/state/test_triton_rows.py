"""Rows of several tensors are copied as torch does it one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, random

pytest.importorskip("triton")

from baton.engine.drafters.base import DraftState
from baton.kernels.operations import preferring
from baton.kernels.state import rows, triton_rows

NUM_ROWS = 7


def tables(num_tables: int, num_rows: int = NUM_ROWS, seed: int = 0) -> list[Tensor]:
    """Of all that slots and rounds have: tokens, truths, scores, states, rows of states."""
    numbers = random(num_rows, 3, 1100, seed=seed)
    flags, ids = numbers[:, 0, 0] > 0, (numbers[:, 0, :5] * 1000).long()
    return [ids, flags, numbers[:, :, 1].contiguous(), numbers[:, 1].bfloat16(), numbers, ids[:, 0].clone()][
        :num_tables
    ]


@pytest.fixture(autouse=True)
def by_triton() -> Iterator[None]:
    with preferring("triton"):
        yield


@pytest.mark.parametrize("num_tables", [0, 1, 4, 6])
@pytest.mark.parametrize("index", [[3], [6, 0, 3], [6, 0, 3, 3], []], ids=str)
def test_gathered_and_assigned(num_tables: int, index: list[int]) -> None:
    """By an index that is a column of something, in one launch and in two."""
    column = torch.tensor([[each, 99] for each in index], dtype=torch.int64, device=DEVICE).view(-1, 2)[:, 0]
    ours = tables(num_tables)
    gathered = rows.gather_rows(ours, column)
    assert len(gathered) == num_tables
    for table, new in zip(ours, gathered, strict=True):
        assert new.dtype == table.dtype and torch.equal(new, table.index_select(0, column))
    if len(set(index)) == len(index):
        new, expected = tables(num_tables, len(index), seed=1), tables(num_tables)
        rows.assign_rows_(ours, column, new)
        for table, before, values in zip(ours, expected, new, strict=True):
            assert torch.equal(table, before.index_copy(0, column, values))


def test_rows_that_lie_apart_in_memory() -> None:
    table, states = torch.zeros(NUM_ROWS, 4, device=DEVICE), random(2, 3, 4)
    rows.assign_rows_([table], torch.tensor([5, 1], device=DEVICE), [states[:, 1]])
    assert torch.equal(table[[5, 1]], states[:, 1]) and table.count_nonzero() == 8


def test_rows_of_another_width_are_refused() -> None:
    table = torch.zeros(NUM_ROWS, 4, device=DEVICE)
    with pytest.raises(AssertionError):
        triton_rows.copy_rows_([table], [torch.zeros(1, 3, device=DEVICE)], to=torch.tensor([0], device=DEVICE))


@pytest.mark.parametrize("num_rows", [0, 1, NUM_ROWS])
def test_packed_and_unpacked(num_rows: int) -> None:
    ours = tables(6, num_rows)
    block = rows.packed(ours)
    assert block.dtype is torch.uint8 and block.ndim == 1
    for table, copy in zip(ours, rows.unpacked(block.cpu(), ours), strict=True):
        assert copy.dtype == table.dtype and torch.equal(copy, table.cpu())


def test_a_draft_state_travels_in_one_block() -> None:
    state, blocks = DraftState(tokens=tables(1)[0], hidden=tables(4)[3]), list[Tensor]()
    moved = state._moved("elsewhere", lambda block: blocks.append(block.cpu()) or blocks[-1])
    assert len(blocks) == 1 and [name for name, _ in moved.present()] == ["tokens", "hidden"]
    for (_, ours), (_, theirs) in zip(state.present(), moved.present(), strict=True):
        assert theirs.dtype == ours.dtype and torch.equal(ours.cpu(), theirs)
    assert state.to(torch.device(DEVICE)) is state and not DraftState().to_host().present()
