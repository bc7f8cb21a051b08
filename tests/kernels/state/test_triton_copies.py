"""Copies of a few numbers by kernels, to the device and back."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE

pytest.importorskip("triton")

from baton.kernels.state.rows import load_column_ref_
from baton.kernels.state.triton_rows import copy_columns_, copy_numbers_, load_column_


def host(*shape: int) -> torch.Tensor:
    numbers = torch.randint(0, 1 << 60, shape, generator=torch.Generator().manual_seed(1))
    return numbers.pin_memory() if DEVICE == "cuda" else numbers


@pytest.mark.parametrize("num_columns", [1, 6, 1025, 1500])
def test_columns_in_use_and_no_others(num_columns: int) -> None:
    source = host(3, 1500)
    target = torch.full((3, 1500), -1, device=DEVICE)
    assert copy_columns_(target, source, num_columns) is target
    assert torch.equal(target[:, :num_columns].cpu(), source[:, :num_columns])
    assert (target[:, num_columns:] == -1).all()


@pytest.mark.parametrize("shape", [(1, 3), (256, 8), (0, 4)])
def test_all_numbers(shape: tuple[int, int]) -> None:
    source, back = host(*shape), torch.zeros_like(host(*shape))
    target = copy_numbers_(torch.full(shape, -1, device=DEVICE), source)
    copy_numbers_(back.pin_memory() if DEVICE == "cuda" else back, target)
    assert torch.equal(target.cpu(), source)


@pytest.mark.parametrize(("num_ints", "num_floats", "num_doubles"), [(7, 5, 1), (1, 0, 2), (30, 3, 0)])
def test_a_column_of_three_tables(num_ints: int, num_floats: int, num_doubles: int) -> None:
    """Other columns stay as they are. Integers keep all bits, and infinities their sign."""
    numbers = host(num_ints + num_floats + num_doubles)
    reals = torch.arange(num_floats + num_doubles).double() / 3
    reals[:1] = -torch.inf
    numbers[num_ints:] = reals.view(torch.int64)
    sizes = ((num_ints, torch.int64), (num_floats, torch.float32), (num_doubles, torch.float64))
    found = [torch.full((size, 9), 5, dtype=dtype, device=DEVICE) for size, dtype in sizes]
    expected = [table.clone() for table in found]
    for row in (8, 0, 3):
        load_column_(*found, numbers, row)
        load_column_ref_(*expected, numbers, row)
    assert all(map(torch.equal, found, expected))
    assert found[0][:, 3].tolist() == numbers[:num_ints].tolist() and (found[0][:, 4] == 5).all()
