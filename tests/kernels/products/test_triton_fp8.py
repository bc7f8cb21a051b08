"""The Triton kernels of FP8 against kernels/products/fp8.py's specification."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from thinned import thinned
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, ULP, random

pytest.importorskip("triton")

from baton.kernels.operations import preferring
from baton.kernels.products import fp8, triton_fp8
from baton.kernels.products.fp8 import BLOCK, E4M3, Fp8Weight, RoundedRows, fp8_linear_ref
from baton.kernels.products.linear import sum_parts_ref
from baton.kernels.products.silu import silu_mul_ref

HALVES = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]


def test_no_rows() -> None:
    rows, weight = RoundedRows(random(0, 64).to(E4M3), None), weight_of(8, 64, 1, 64)
    assert triton_fp8.fp8_linear(rows, weight, None, torch.float16).shape == (0, 8)
    assert triton_fp8.fp8_linear_parts(rows, weight, torch.float16).shape == (0, 8)
    assert triton_fp8.fp8_gated_linear(rows, weight, torch.float16).shape == (0, 4)


# out_size, in_size, rows of W and columns that share a scale
FORMATS = [
    (256, 256, BLOCK, BLOCK),
    (200, 300, BLOCK, BLOCK),
    (200, 300, 1, BLOCK),
    (200, 272, 1, 272),
    (16, 64, 1, 64),
]
FORMATS += [(128, 2304, BLOCK, BLOCK), (128, 2304, 1, 2304)]  # with parts


def weight_of(out_size: int, in_size: int, rows: int, group: int) -> Fp8Weight:
    scales = random(-(-out_size // rows), -(-in_size // group), seed=3).abs() * 0.02 + 0.01
    return Fp8Weight(random(out_size, in_size, seed=1).to(E4M3), scales, group)


def check(actual: Tensor, expected: Tensor) -> None:
    """Check a product in halves against one in float32: FP8 tensor cores add 128 products with 14 bits or more."""
    bound = 2e-3 * float(expected.abs().max())
    torch.testing.assert_close(actual.float(), expected, atol=bound, rtol=ULP[actual.dtype])


def some(formats: list[tuple[int, int, int, int]], counts: list[int], step: int) -> list[Any]:
    """Return formats with counts of rows. The gate runs one cell in `step`, on diagonals."""
    cells = itertools.product(enumerate(formats), enumerate(counts), HALVES)
    chosen = [((sizes, count, dtype), (i + j) % step == 0) for (i, sizes), (j, count), dtype in cells]
    return thinned([cell for cell, _ in chosen], lambda i, *_: chosen[i][1])


@pytest.mark.parametrize(("sizes", "num_rows", "dtype"), some(FORMATS, [1, 3, 17, 64, 65, 130], 3), ids=str)
def test_a_product_equals_the_reference(sizes: tuple[int, int, int, int], num_rows: int, dtype: torch.dtype) -> None:
    out_size, in_size, rows, group = sizes
    weight, bias = weight_of(out_size, in_size, rows, group), random(out_size, seed=2, dtype=dtype)
    x = fp8.round_rows_ref(random(num_rows, in_size), group)
    for given, with_bias in ((x, bias), (RoundedRows(x.values, None), None)):
        assert triton_fp8.serves(given, weight)
        expected = fp8_linear_ref(given, weight, with_bias, torch.float32)
        check(triton_fp8.fp8_linear(given, weight, with_bias, dtype), expected)
        if with_bias is None:
            parts = triton_fp8.fp8_linear_parts(given, weight, dtype)
            is_whole = (
                in_size <= 2048
                or num_rows == 1
                or (num_rows > triton_fp8._MAX_SPLIT and triton_fp8.library_serves(given, weight, dtype))
            )
            assert parts.ndim == (2 if is_whole else 3)
            check(sum_parts_ref(parts, dtype) if parts.ndim == 3 else parts, expected)


@pytest.mark.parametrize(
    ("sizes", "num_rows", "dtype"), some([(512, 256, BLOCK, BLOCK), *FORMATS], [1, 3, 33, 65], 4), ids=str
)
def test_a_gated_product_equals_the_reference(
    sizes: tuple[int, int, int, int], num_rows: int, dtype: torch.dtype
) -> None:
    out_size, in_size, rows, group = sizes
    weight = weight_of(out_size, in_size, rows, group)
    given = fp8.round_rows_ref(random(num_rows, in_size), group)
    assert triton_fp8.gates_fp8(given, weight) == (num_rows <= triton_fp8.MAX_FEW)
    actual = triton_fp8.fp8_gated_linear(given, weight, dtype)
    check(actual, silu_mul_ref(fp8_linear_ref(given, weight, None, torch.float32)))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs cuBLASLt")
@pytest.mark.parametrize("num_rows", [65, 300, 1001, 1024])
@pytest.mark.parametrize(("rows", "group"), [(BLOCK, BLOCK), (1, 4096)])
def test_many_rows_are_multiplied_by_the_library(num_rows: int, rows: int, group: int) -> None:
    weight, bias = weight_of(4096, 4096, rows, group), random(4096, seed=2, dtype=torch.bfloat16)
    x = fp8.round_rows_ref(random(num_rows, 4096), group)
    assert triton_fp8.library_serves(x, weight, torch.bfloat16) == (rows == 1 or num_rows % 4 == 0)
    check(triton_fp8.fp8_linear(x, weight, bias, torch.bfloat16), fp8_linear_ref(x, weight, bias, torch.float32))
    if rows == 1:
        x = RoundedRows(x.values, None)
        check(triton_fp8.fp8_linear(x, weight, None, torch.bfloat16), fp8_linear_ref(x, weight, None, torch.float32))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("num_rows", [2, 80])
def test_rows_of_16_bits_are_multiplied_as_they_are(num_rows: int, dtype: torch.dtype) -> None:
    rows, weight = RoundedRows(random(num_rows, 160, dtype=dtype), None), weight_of(48, 160, 1, 160)
    actual = triton_fp8.fp8_linear(rows, weight, None, dtype)
    expected = fp8_linear_ref(rows, weight, None, torch.float32)
    torch.testing.assert_close(actual.float(), expected, atol=1e-3, rtol=2 * ULP[dtype])
    gated = triton_fp8.fp8_gated_linear(rows, weight, dtype)
    torch.testing.assert_close(gated.float(), silu_mul_ref(expected), atol=1e-3, rtol=4 * ULP[dtype])


def test_what_it_does_not_serve_is_left_to_the_reference() -> None:
    rows, weight = RoundedRows(random(2, 64), None), weight_of(8, 64, 1, 64)
    assert not triton_fp8.serves(rows, weight)
    assert not triton_fp8.serves(RoundedRows(rows.values.half()[:, ::2], None), weight_of(8, 32, 1, 32))
    with preferring("triton"):
        ours = fp8.fp8_linear(rows, weight, None, torch.float32)
    assert torch.equal(ours, fp8_linear_ref(rows, weight, None, torch.float32))
