"""Products of blocks of pairs against kernels/experts/experts.py's specification."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, IS_INTERPRETED, random

pytest.importorskip("triton")

from expert_case import DTYPES, check_products, choose

from baton.kernels.experts import triton_experts
from baton.kernels.experts.experts import ExpertWeight, place_experts_ref
from baton.kernels.products.fp8 import BLOCK, E4M3, round_rows_ref

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's exp overflows aloud


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_experts", "num_active"), [(1, 7, 2), (33, 7, 3), (200, 3, 2)])
@pytest.mark.parametrize(("out_size", "in_size"), [(256, 128), (88, 72)])
def test_products_of_plain_weights(
    num_rows: int, num_experts: int, num_active: int, out_size: int, in_size: int, dtype: torch.dtype
) -> None:
    chosen = choose(num_rows, num_experts, num_active)
    weight = ExpertWeight(random(num_experts * out_size, in_size, seed=1, scale=0.2).to(dtype), None, in_size)
    check_products(random(num_rows, in_size, dtype=dtype), None, weight, chosen, num_experts, dtype)
    check_products(random(chosen.numel(), in_size, dtype=dtype), None, weight, chosen, num_experts, dtype)


@pytest.mark.each_value
@pytest.mark.parametrize(("num_rows", "num_experts", "num_active"), [(1, 7, 2), (200, 3, 2)])
@pytest.mark.parametrize(
    ("out_size", "in_size", "rows", "group"), [(256, 256, BLOCK, BLOCK), (88, 200, 1, BLOCK), (88, 72, 1, 72)]
)
def test_products_of_fp8(
    num_rows: int, num_experts: int, num_active: int, out_size: int, in_size: int, rows: int, group: int
) -> None:
    chosen = choose(num_rows, num_experts, num_active)
    scales = random(num_experts * out_size // rows, -(-in_size // group), seed=3).abs() * 0.02 + 0.01
    weight = ExpertWeight(random(num_experts * out_size, in_size, seed=1).to(E4M3), scales, group)
    x, x_scales = round_rows_ref(random(num_rows, in_size), group)
    check_products(x, x_scales, weight, chosen, num_experts, torch.float16)
    check_products(x, None, weight, chosen, num_experts, torch.float16)
    check_products(random(num_rows, in_size, dtype=torch.float16), None, weight, chosen, num_experts, torch.float16)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_row_does_not_depend_on_how_full_its_block_is(is_fp8: bool) -> None:
    """Bit by bit on a GPU. A block with few pairs is multiplied by a smaller tile."""
    few, many = (torch.tensor([0] * (230 - n) + [1] * n + [2] * 20, device=DEVICE).unsqueeze(1) for n in (40, 120))
    x, weight = random(250, 72, dtype=torch.float16), random(3 * 264, 72, seed=1, scale=0.2).half()
    x_scales, given = None, ExpertWeight(weight, None, 72)
    if is_fp8:
        x, x_scales = round_rows_ref(x, 72)
        given = ExpertWeight(*round_rows_ref(weight, 72), 72)
    found = [
        triton_experts.gated_experts_linear(x, x_scales, given, place_experts_ref(chosen, 3), torch.float16)
        for chosen in (few, many)
    ]
    for rows in (slice(110), slice(190, None)):
        bound = 2e-3 if IS_INTERPRETED else 0  # numpy's products depend on the shape
        torch.testing.assert_close(found[0][rows], found[1][rows], atol=bound, rtol=bound)
