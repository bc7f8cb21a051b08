"""The Triton gate against kernels/products/silu.py's specification."""

from __future__ import annotations

import pytest
import torch
from triton_device import ULP, random

pytest.importorskip("triton")

from baton.kernels.formats import SwigluClamp
from baton.kernels.operations import preferring
from baton.kernels.products import silu, triton_silu
from baton.kernels.products.silu import clamped_silu_mul_ref, silu_mul_ref

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's exp overflows aloud


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1024), (3, 1025), (5, 7), (0, 8), (2, 0)])
def test_equals_the_reference(num_rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = random(num_rows, 2 * size, dtype=dtype, scale=3.0)
    before = gate_up.clone()
    actual = triton_silu.silu_mul(gate_up)
    torch.testing.assert_close(actual, silu_mul_ref(gate_up), rtol=2 * ULP[dtype], atol=1e-6)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("offset", [1.0, 0.0])
def test_a_clamped_gate_equals_the_reference(offset: float, dtype: torch.dtype) -> None:
    gate_up, clamp = random(3, 50, dtype=dtype, scale=3.0), SwigluClamp(2.0, 1.702, offset)
    actual = triton_silu.clamped_silu_mul(gate_up, clamp)
    torch.testing.assert_close(actual, clamped_silu_mul_ref(gate_up, clamp), rtol=2 * ULP[dtype], atol=1e-6)


def test_far_values() -> None:
    gate_up = random(1, 8)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.0])
    torch.testing.assert_close(triton_silu.silu_mul(gate_up), silu_mul_ref(gate_up), rtol=1e-6, atol=0)


def test_strided_rows_are_not_served() -> None:
    gate_up = random(2, 16)[:, ::2]
    assert not triton_silu.serves(gate_up) and triton_silu.serves(gate_up.contiguous())
    with preferring("triton"):
        torch.testing.assert_close(silu.silu_mul(gate_up), silu_mul_ref(gate_up))
