"""The norm and the gate that numba compiles, against their specifications."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import operations
from baton.kernels.products.norm import rms_norm_ref
from baton.kernels.products.numba_rows import add_rms_norm_, silu_mul
from baton.kernels.products.silu import silu_mul_ref

pytestmark = pytest.mark.skipif(not operations.is_installed("numba"), reason="needs numba")


@pytest.mark.parametrize("shape", [(1, 256), (5, 64), (3, 7), (0, 8)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("has_delta", [False, True])
def test_add_rms_norm(shape: tuple[int, int], scale: float, has_delta: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, delta = scale * torch.randn(2, *shape, generator=generator)
    weight = torch.randn(shape[1], generator=generator)
    total = hidden + delta if has_delta else hidden.clone()
    normed = add_rms_norm_(hidden, delta if has_delta else None, weight, 1e-6)
    rtol = (shape[1] / 2 + 8) * 2.0**-24  # the sum of n squares has n roundings at most, and the root halves the effect
    torch.testing.assert_close(normed, rms_norm_ref(total, weight, 1e-6), atol=0, rtol=rtol)
    assert torch.equal(hidden, total)


def test_silu_mul() -> None:
    gate = torch.tensor([0.0, -0.0, 1.0, -1.0, 30.0, -30.0, 88.0, -88.0, 500.0, -500.0, 1e30, -1e30, float("nan")])
    generator = torch.Generator().manual_seed(0)
    gate = torch.cat((gate, 20 * torch.randn(987, generator=generator)))
    gate_up = torch.cat((gate, torch.ones(1000))).repeat(2, 1)
    expected = silu_mul_ref(gate_up)
    torch.testing.assert_close(silu_mul(gate_up), expected, atol=1e-30, rtol=1e-6, equal_nan=True)
