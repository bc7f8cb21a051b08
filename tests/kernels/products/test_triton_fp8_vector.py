"""The FP8 product of one row against kernels/products/fp8.py's specification."""

from __future__ import annotations

import pytest
import torch
from thinned import thinned
from torch import Tensor
from triton_device import DEVICE, ULP, random

pytest.importorskip("triton")

from baton.kernels.products.fp8 import BLOCK, E4M3, Fp8Weight, RoundedRows, fp8_linear_ref, round_rows_ref
from baton.kernels.products.silu import silu_mul_ref
from baton.kernels.products.triton_fp8_vector import num_splits, serves, vector_product

DTYPE = torch.float16
FORMATS = [(512, 512, BLOCK), (256, 1136, 1136), (320, 64, 64), (256, 400, BLOCK)]  # out_size, in_size, group


def weight_of(out_size: int, in_size: int, group: int) -> Fp8Weight:
    shape = -(-out_size // BLOCK) if group == BLOCK else out_size, -(-in_size // group)
    scales = random(*shape, seed=3).abs() * 0.02 + 0.01
    return Fp8Weight(random(out_size, in_size, seed=1).to(E4M3), scales, group)


def check(actual: Tensor, expected: Tensor) -> None:
    bound = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(actual.float(), expected, atol=bound, rtol=ULP[actual.dtype])


@pytest.mark.parametrize(
    ("out_size", "in_size", "group", "has_scales"),
    thinned([(*each, has_scales) for each in FORMATS for has_scales in (False, True)], lambda i, *_: i % 4 in (0, 3)),
)
def test_a_row_is_multiplied(out_size: int, in_size: int, group: int, has_scales: bool) -> None:
    weight, x = weight_of(out_size, in_size, group), round_rows_ref(random(1, in_size), group)
    rows, bias = RoundedRows(x.values, x.scales if has_scales else None), random(out_size, dtype=DTYPE, seed=5)
    for each in (None, bias):
        out = torch.empty(1, out_size, dtype=DTYPE, device=DEVICE)
        vector_product(rows, weight, each, out)
        check(out, fp8_linear_ref(rows, weight, each, torch.float32))
    if not has_scales:
        return  # float16 does not hold the gated numbers
    gated = torch.empty(1, out_size // 2, dtype=DTYPE, device=DEVICE)
    vector_product(rows, weight, None, gated, is_gated=True)
    expected = silu_mul_ref(fp8_linear_ref(rows, weight, None, torch.float32).to(DTYPE)).float()
    torch.testing.assert_close(gated.float(), expected, atol=1e-3, rtol=4 * ULP[DTYPE])


@pytest.mark.parametrize(("out_size", "in_size", "group"), thinned(FORMATS, lambda i, *_: i > 1))
def test_programs_that_share_the_columns_leave_parts(out_size: int, in_size: int, group: int) -> None:
    weight, rows = weight_of(out_size, in_size, group), round_rows_ref(random(1, in_size), group)
    parts = torch.full((2, 1, out_size), float("nan"), device=DEVICE)
    vector_product(rows, weight, None, parts)
    check(parts.sum(0), fp8_linear_ref(rows, weight, None, torch.float32))


def test_few_rows_of_many_columns_are_split() -> None:
    assert num_splits(4096, 14336) == 2
    assert num_splits(4096, 4096) == num_splits(28672, 14336) == 1


def test_what_it_does_not_serve() -> None:
    weight, rows = weight_of(384, 256, BLOCK), round_rows_ref(random(2, 256), BLOCK)
    one = RoundedRows(rows.values[:1], None)
    assert serves(one, weight)
    assert not serves(one, weight, is_gated=True)  # gate and up share a block
    assert not serves(rows, weight)
    assert not serves(RoundedRows(random(1, 256, dtype=DTYPE), None), weight)
