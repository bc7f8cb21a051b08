"""The Triton kernels of experts against kernels/experts/experts.py's specification."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, ULP, random

pytest.importorskip("triton")

from expert_case import DTYPES, check_products, choose

from baton.kernels.experts import triton_experts
from baton.kernels.experts.experts import ExpertWeight, mix_parts_ref, place_experts_ref
from baton.kernels.formats import SwigluClamp
from baton.kernels.products.fp8 import E4M3, round_rows_ref

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's exp overflows aloud


def test_a_gate_is_clamped_and_experts_have_biases_in_any_format() -> None:
    chosen, clamp = choose(33, 7, 3), SwigluClamp(0.5, 0.9, 0.0)
    plain = ExpertWeight(random(7 * 88, 72, seed=1), None, 72, random(7 * 88, seed=2))
    check_products(random(33, 72), None, plain, chosen, 7, torch.float32, clamp)
    scales = random(7 * 88, 1, seed=3).abs() * 0.02 + 0.01
    rounded = ExpertWeight(plain.values.to(E4M3), scales, 72, plain.bias)
    x, x_scales = round_rows_ref(random(33, 72), 72)
    check_products(x, x_scales, rounded, chosen, 7, torch.float16, clamp)


def test_what_is_not_served_is_left_to_the_reference() -> None:
    places = place_experts_ref(choose(2, 3, 1), 3)
    weight = ExpertWeight(random(24, 16), None, 16)
    assert not triton_experts.serves(random(2, 16).half(), None, weight, places, torch.float16)
    assert not triton_experts.serves(random(2, 32)[:, ::2], None, weight, places, torch.float32)
    halves = ExpertWeight(random(24, 200).to(E4M3), torch.ones(24, 4, device=DEVICE), 50)
    assert not triton_experts.serves(random(2, 200).to(E4M3), None, halves, places, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_active", "size"), [(1, 8, 1030), (5, 1, 7), (0, 2, 8)])
def test_parts_are_mixed(num_rows: int, num_active: int, size: int, dtype: torch.dtype) -> None:
    parts = random(num_rows * num_active, size, dtype=dtype)
    shares = random(num_rows, num_active, seed=1).abs()
    summands = random(3, num_rows, size, seed=2)
    for others in (None, summands[0].to(dtype), summands):
        assert triton_experts.serves_mix(parts, shares, others)
        actual = triton_experts.mix_parts(parts, shares, others)
        torch.testing.assert_close(actual, mix_parts_ref(parts, shares, others), atol=1e-5, rtol=2 * ULP[dtype])
