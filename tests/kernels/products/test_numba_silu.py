"""The gate that numba compiles, against its specification."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import operations
from baton.kernels.products.numba_silu import silu_mul
from baton.kernels.products.silu import silu_mul_ref

pytestmark = pytest.mark.skipif(not operations.is_installed("numba"), reason="needs numba")


def test_silu_mul() -> None:
    gate = torch.tensor([0.0, -0.0, 1.0, -1.0, 30.0, -30.0, 88.0, -88.0, 500.0, -500.0, 1e30, -1e30, float("nan")])
    generator = torch.Generator().manual_seed(0)
    gate = torch.cat((gate, 20 * torch.randn(987, generator=generator)))
    gate_up = torch.cat((gate, torch.ones(1000))).repeat(2, 1)
    expected = silu_mul_ref(gate_up)
    torch.testing.assert_close(silu_mul(gate_up), expected, atol=1e-30, rtol=1e-6, equal_nan=True)
