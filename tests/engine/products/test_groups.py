"""Products of groups in FP8 by the kernels of experts are those of the numbers that the weights stand for."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, IS_INTERPRETED, random

pytest.importorskip("triton")

from baton.engine.products.groups import DenseGroups, Fp8Groups
from baton.kernels.experts.experts import ExpertWeight
from baton.kernels.operations import preferring
from baton.kernels.products.fp8 import E4M3, dequantized

DTYPE = torch.float16 if IS_INTERPRETED else torch.bfloat16


@pytest.mark.parametrize("num_rows", [1, 5])
def test_groups_in_fp8_give_what_their_numbers_give(num_rows: int) -> None:
    values = random(256, 128, scale=16.0).to(E4M3)
    scales = torch.tensor([[0.5], [0.125]], device=DEVICE) / 64
    numbers = dequantized(values, scales, 128).to(DTYPE).unflatten(0, (2, 128))
    x = random(num_rows, 256, dtype=DTYPE, seed=1)
    expected = DenseGroups(numbers)(x, lambda _, make: make())
    with preferring("triton"):
        found = Fp8Groups(ExpertWeight(values, scales, 128), 2)(x, lambda _, make: make())
    assert found.shape == (num_rows, 256) and not torch.equal(expected[:, :128], expected[:, 128:])
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
