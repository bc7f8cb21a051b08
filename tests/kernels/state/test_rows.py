"""Rows that are gathered, assigned, packed, advanced and copied, by each backend that runs here."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, IS_INTERPRETED, random

from baton.kernels.operations import preferring
from baton.kernels.state.rows import (
    Columns,
    advance_,
    assign_rows_,
    copy_columns_,
    copy_numbers_,
    gather_rows,
    packed,
    unpacked,
)

pytest.importorskip("triton")


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_rows(kind: str) -> None:
    tables = [random(5, 3), torch.arange(5, device=DEVICE), random(5, 2, 7) > 0]
    index = torch.tensor([4, 0, 2], device=DEVICE)
    with preferring(kind):  # type: ignore[arg-type]
        gathered = gather_rows(tables, index)
        copies = unpacked(packed(tables), tables)
        zeros = [torch.zeros_like(table) for table in tables]
        assign_rows_(zeros, index, gathered)
        assert gather_rows([], index) == []
    for table, rows, copy, assigned in zip(tables, gathered, copies, zeros, strict=True):
        assert torch.equal(rows, table[index]) and torch.equal(copy, table)
        assert torch.equal(assigned[index], rows) and not assigned[[1, 3]].any()


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_rows_grow_by_what_was_accepted_and_one(kind: str) -> None:
    """Row 2 accepts one of two drafts, row 0 both; the last row is padding."""
    table = torch.tensor([[5, 6, 7, 0], [50, 60, 70, 0]], device=DEVICE)
    targets = torch.tensor([[11, 12, 13], [21, 22, 23], [1, 1, 1]], device=DEVICE)
    is_valid = torch.tensor([[True] * 3, [True, False, True], [True] * 3], device=DEVICE)
    args = (torch.tensor([2, 0, 3], device=DEVICE), targets, is_valid, torch.tensor([1, 2, 0], device=DEVICE))
    with preferring(kind):  # type: ignore[arg-type]
        numbers = advance_(table, Columns((0,), 1), *args, torch.tensor([9, 8], device=DEVICE))
    assert table.tolist() == [[8, 6, 9, 9], [23, 60, 12, 8]]
    assert numbers.tolist() == [[1, 3, 11, 12, 13], [2, 1, 21, 22, 23], [0, 3, 1, 1, 1]]


@pytest.mark.skipif(not IS_INTERPRETED, reason="test_triton_copies.py copies between host and device")
@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("num_columns", [1, 7, 300])
def test_copies(kind: str, num_columns: int) -> None:
    source, target = torch.arange(900).view(3, 300), torch.full((3, 300), -1)
    with preferring(kind):  # type: ignore[arg-type]
        assert copy_columns_(target, source, num_columns) is target
        assert torch.equal(target[:, :num_columns], source[:, :num_columns]) and (target[:, num_columns:] == -1).all()
        assert copy_numbers_(target, source) is target
    assert torch.equal(target, source)
