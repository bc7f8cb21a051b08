"""Copies of a few numbers by kernels, to the device and back."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE

pytest.importorskip("triton")

from baton.kernels.triton_copies import copy_columns_, copy_numbers_


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
