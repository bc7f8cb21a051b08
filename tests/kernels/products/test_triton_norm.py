"""The Triton norms against kernels/products/norm.py's specification."""

from __future__ import annotations

import pytest
import torch
from triton_device import IS_INTERPRETED, ULP, random

pytest.importorskip("triton")

from baton.kernels.operations import preferring
from baton.kernels.products import norm, triton_norm
from baton.kernels.products.norm import rms_norm_ref

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDED = DTYPES[:2] if IS_INTERPRETED else DTYPES  # as torch rounds; the interpreter cuts bfloat16 off


def assert_normed(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> None:
    expected = rms_norm_ref(x, weight, eps)
    assert actual.shape == x.shape and actual.dtype == x.dtype and actual.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=2 * ULP[x.dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 256), (5, 300), (17, 64), (3, 1), (2, 3, 40), (2, 2, 2, 8), (0, 64), (2, 16384)])
def test_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype, scale=3.0), random(shape[-1], dtype=dtype, seed=1)
    before = x.clone()
    assert_normed(triton_norm.rms_norm(x, weight, EPS), x, weight)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", ROUNDED[1:])
def test_a_float32_weight_rounds_once(dtype: torch.dtype) -> None:
    x, weight = random(5, 300, dtype=dtype, scale=3.0), random(300, seed=1)
    assert_normed(triton_norm.rms_norm(x, weight, EPS), x, weight)
    exact = rms_norm_ref(x.float(), weight, EPS)
    torch.testing.assert_close(triton_norm.rms_norm(x, weight, EPS).float(), exact, rtol=0.51 * ULP[dtype], atol=1e-6)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_eps_and_large_numbers(scale: float) -> None:
    x, weight = random(4, 96, scale=scale), random(96, seed=1)
    assert_normed(triton_norm.rms_norm(x, weight, 1e-6), x, weight, 1e-6)


def test_a_view_of_heads_is_read_where_it_lies() -> None:
    x, weight = random(4, 6, 24)[:, 1:3, :16], random(16, seed=1)
    assert_normed(triton_norm.rms_norm(x, weight, EPS), x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 256), (9, 100), (0, 8)])
def test_add_in_place(num_rows: int, size: int, dtype: torch.dtype) -> None:
    hidden, delta = random(num_rows, size, dtype=dtype), random(num_rows, size, dtype=dtype, seed=2)
    weight, expected, kept = random(size, dtype=dtype, seed=1), hidden + delta, delta.clone()
    actual = triton_norm.add_rms_norm_(hidden, delta, weight, EPS)
    is_exact = not (IS_INTERPRETED and dtype is torch.bfloat16)
    torch.testing.assert_close(hidden, expected, rtol=0 if is_exact else ULP[dtype], atol=0)
    assert_normed(actual, hidden, weight)
    assert torch.equal(delta, kept)


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize(("num_parts", "num_rows", "size"), [(1, 3, 64), (2, 1, 256), (4, 9, 100), (8, 3, 40)])
def test_add_parts(num_parts: int, num_rows: int, size: int, dtype: torch.dtype) -> None:
    """Summed in order, rounded once, then added, as if the sum were there before."""
    hidden, parts = random(num_rows, size, dtype=dtype), random(num_parts, num_rows, size, seed=2)
    weight, same = random(size, dtype=dtype, seed=1), hidden.clone()
    delta = torch.zeros_like(parts[0])
    for part in parts:
        delta += part
    expected = triton_norm.add_rms_norm_(same, delta.to(dtype), weight, EPS)
    actual = triton_norm.add_rms_norm_(hidden, parts, weight, EPS)
    assert torch.equal(hidden, same) and torch.equal(actual, expected)


def test_parts_of_another_kind_are_refused() -> None:
    hidden, weight = random(3, 64, dtype=torch.float16), random(64, dtype=torch.float16)
    for parts in (random(2, 3, 64, dtype=torch.float16), random(2, 3, 128)[..., ::2], random(2, 4, 64)):
        with pytest.raises(AssertionError):
            triton_norm.add_rms_norm_(hidden, parts, weight, EPS)


def test_add_to_rows_apart_writes_nothing_between() -> None:
    table, deltas, weight = random(5, 80), random(5, 90, seed=2), random(70, seed=1)
    kept = table.clone()
    hidden, delta = table[:, :70], deltas[:, 5:75]
    assert_normed(triton_norm.add_rms_norm_(hidden, delta, weight, EPS), kept[:, :70] + delta, weight)
    assert torch.equal(table[:, 70:], kept[:, 70:])
    assert torch.equal(hidden, kept[:, :70] + delta)


def test_nothing_to_add() -> None:
    hidden, weight = random(3, 70), random(70, seed=1)
    kept = hidden.clone()
    assert_normed(triton_norm.add_rms_norm_(hidden, None, weight, EPS), kept, weight)
    assert torch.equal(hidden, kept)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = random(9, 48), random(48, seed=1)
    together = triton_norm.rms_norm(x, weight, EPS)
    alone = torch.cat([triton_norm.rms_norm(row.unsqueeze(0), weight, EPS) for row in x])
    assert torch.equal(together, alone)


def test_rows_that_are_not_contiguous_are_not_served() -> None:
    """The operation computes them otherwise, parts of a sum too."""
    strided, weight = random(2, 64)[:, ::2], random(32, seed=1)
    parts = random(3, 2, 32, seed=3)
    assert not triton_norm.serves(strided, weight, EPS) and not triton_norm.serves_sum(strided, parts, weight, EPS)
    with preferring("triton"):
        torch.testing.assert_close(norm.rms_norm(strided, weight, EPS), rms_norm_ref(strided, weight, EPS))
        expected = strided + parts.sum(0)
        actual = norm.add_rms_norm_(strided, parts, weight, EPS)
    torch.testing.assert_close(actual, rms_norm_ref(expected, weight, EPS))
    assert torch.equal(strided, expected)
