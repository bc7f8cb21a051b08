"""Products of MXFP4 weights against kernels/experts/experts.py's specification."""

from __future__ import annotations

import itertools

import pytest
import torch
from thinned import thinned
from triton_device import DEVICE, IS_INTERPRETED, random

pytest.importorskip("triton")

from expert_case import DTYPES, check_products, choose

from baton.kernels.experts import triton_experts
from baton.kernels.experts.experts import ExpertWeight, place_experts_ref
from baton.kernels.formats import SwigluClamp

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's exp overflows aloud


@pytest.mark.parametrize(
    ("routing", "sizes", "dtype"),
    thinned(
        itertools.product([(1, 7, 2), (33, 7, 3), (200, 3, 2)], [(256, 256, 32), (88, 96, 32), (88, 48, 16)], DTYPES),
        lambda i, *_: i in (0, 9, 13, 16) or not IS_INTERPRETED,
    ),
    ids=str,
)
def test_products_of_mxfp4_with_biases(
    routing: tuple[int, int, int], sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    (num_rows, num_experts, num_active), (out_size, in_size, group) = routing, sizes
    """All bytes, and scales from 2^-12 to 2^0, with a gate that is clamped."""
    chosen, generator = choose(num_rows, num_experts, num_active), torch.Generator().manual_seed(1)
    rows = num_experts * out_size
    values = torch.randint(256, (rows, in_size // 2), dtype=torch.uint8, generator=generator).to(DEVICE)
    scales = torch.randint(115, 128, (rows, in_size // group), dtype=torch.uint8, generator=generator).to(DEVICE)
    weight = ExpertWeight(values, scales, group, random(rows, seed=2).to(dtype))
    clamp = SwigluClamp(7.0, 1.702, 0.0)
    x = random(num_rows, in_size, seed=3, scale=0.3, dtype=dtype)
    check_products(x, None, weight, chosen, num_experts, dtype, clamp)
    check_products(x, None, weight._replace(bias=None), chosen, num_experts, dtype)


EXACT = [(torch.float32, scale) for scale in (0, 1, 100, 127, 140, 200)]
EXACT += [] if IS_INTERPRETED else [(torch.bfloat16, scale) for scale in (3, 100, 127, 140, 200, 250)]


@pytest.mark.parametrize(("dtype", "scale"), EXACT)
@pytest.mark.parametrize("num_rows", [1, 24, 64, 128, 129])
def test_numbers_of_mxfp4_are_exact(num_rows: int, dtype: torch.dtype, scale: int) -> None:
    """Each of the 16 values in each half of a byte, by a product with unit rows, in blocks of each size."""
    values = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(16, 16)
    weight = ExpertWeight(values, torch.full((16, 1), scale, dtype=torch.uint8, device=DEVICE), 32)
    chosen = torch.zeros(num_rows, 1, dtype=torch.int64, device=DEVICE)
    columns = torch.arange(num_rows, device=DEVICE) % 32
    places, x = place_experts_ref(chosen, 1, is_packed=True), torch.eye(32, dtype=dtype, device=DEVICE)[columns]
    found = triton_experts.experts_linear(x, None, weight, places, torch.float32)
    assert torch.equal(found, weight.numbers(1, torch.float32)[0].T[columns])
