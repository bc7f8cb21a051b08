"""The gate, by each backend that runs here."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from triton_device import random

from baton.kernels.formats import SwigluClamp
from baton.kernels.operations import preferring
from baton.kernels.products.silu import clamped_silu_mul, silu_mul

pytest.importorskip("triton")


@pytest.mark.parametrize("kind", ["reference", "numba", "triton"])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 10), (3, 576), (0, 4)])
def test_equals_the_formula(kind: str, num_rows: int, size: int) -> None:
    gate_up = random(num_rows, 2 * size, scale=3.0)
    with preferring(kind):  # type: ignore[arg-type]
        actual = silu_mul(gate_up)
    torch.testing.assert_close(actual, F.silu(gate_up[:, :size]) * gate_up[:, size:], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("offset", [1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clamped_gate_equals_the_formula(dtype: torch.dtype, offset: float) -> None:
    gate_up, clamp = random(5, 40, scale=3.0, dtype=dtype), SwigluClamp(2.0, 1.702, offset)
    expected = torch.empty(5, 20, dtype=torch.float64)
    for row, numbers in enumerate(gate_up.double().tolist()):
        for i in range(20):
            gate, up = min(numbers[i], 2.0), max(-2.0, min(2.0, numbers[20 + i]))
            expected[row, i] = (up + offset) * gate / (1 + math.exp(-1.702 * gate))
    actual = clamped_silu_mul(gate_up, clamp)
    assert actual.dtype is dtype and (gate_up.abs() > 2).any()
    torch.testing.assert_close(
        actual.cpu(), expected.to(dtype), rtol=2e-6 if dtype is torch.float32 else 1e-2, atol=1e-6
    )
