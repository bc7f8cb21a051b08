"""Choices of experts, and the check of their products by Triton kernels, for tests."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, ULP

from baton.kernels.experts import triton_experts
from baton.kernels.experts.experts import ExpertWeight, experts_linear_ref, gated_experts_linear_ref, place_experts_ref
from baton.kernels.formats import SwigluClamp

DTYPES = [torch.float32, torch.float16] if IS_INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


def choose(num_rows: int, num_experts: int, num_active: int, seed: int = 0) -> Tensor:
    """Return different experts for each row, the first ones more often."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_rows, num_experts, generator=generator) - torch.arange(num_experts) / num_experts / 2
    return scores.topk(num_active).indices.to(DEVICE)


def check_products(
    x: Tensor,
    x_scales: Tensor | None,
    weight: ExpertWeight,
    chosen: Tensor,
    num: int,
    dtype: torch.dtype,
    clamp: SwigluClamp | None = None,
) -> None:
    """Compare both products of rows of x with kernels/experts/experts.py's specification."""
    places = place_experts_ref(chosen, num, is_packed=weight.is_packed)
    assert triton_experts.serves(x, x_scales, weight, places, dtype)
    for ours, theirs in (
        (triton_experts.experts_linear, experts_linear_ref),
        (
            functools.partial(triton_experts.gated_experts_linear, clamp=clamp),
            functools.partial(gated_experts_linear_ref, clamp=clamp),
        ),
    ):
        actual = ours(x, x_scales, weight, places, dtype).float()
        expected = theirs(x, x_scales, weight, places, torch.float32)
        bound = max(2e-3 * float(expected.abs().max()), 1e-5)  # FP8 tensor cores add with 14 bits or more
        torch.testing.assert_close(actual, expected, atol=bound, rtol=4 * ULP[dtype])
