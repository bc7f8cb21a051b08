"""The product of few rows with a matrix, and what is done on its way, against float64 and the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, ULP, random

pytest.importorskip("triton")

from baton.kernels.products.norm import Norm, rms_norm_ref
from baton.kernels.products.silu import silu_mul_ref
from baton.kernels.products.triton_vector import MAX_ROWS, vector_product

NAN, EPS = float("nan"), 1e-3
SHAPES = [  # (num_rows, out_size, in_size, block_n, block_k)
    (1, 1, 1, 1, 16),
    (1, 7, 10, 4, 16),  # a program beyond the last row of W
    (1, 33, 272, 2, 64),  # columns in steps, the last one not full
    (1, 5, 576, 8, 1024),  # fewer rows than a program has
    (3, 70, 72, 4, 128),
    (MAX_ROWS, 5, 320, 2, 512),
]
DTYPES = [torch.bfloat16, torch.float16]


class Operands:
    """x, weight, bias and out, each inside a larger tensor of NaN, so that a read or a write beyond it shows."""

    def __init__(self, num_rows: int, out_size: int, in_size: int, dtype: torch.dtype, is_gated: bool = False) -> None:
        def inside(rows: int, columns: int, before: int, after: int, values: Tensor) -> Tensor:
            around = torch.full((rows + before + after, columns), NAN, dtype=dtype, device=DEVICE)
            self.around.append((around, before, rows))
            return around[before : before + rows].copy_(values)

        self.around: list[tuple[Tensor, int, int]] = []
        wide = torch.full((num_rows + 2, in_size + 8), NAN, dtype=dtype, device=DEVICE)
        self.x = wide[1:-1, :in_size].copy_(random(num_rows, in_size))  # strided by row
        matrix_size = 2 * out_size if is_gated else out_size
        self.weight = inside(matrix_size, in_size, 2, 2, random(matrix_size, in_size, seed=1, scale=in_size**-0.5))
        self.bias = inside(out_size, 1, 8, 8, random(out_size, 1, seed=2)).view(-1)
        self.norm = Norm(inside(in_size, 1, 8, 8, random(in_size, 1, seed=3)).view(-1), EPS)
        self.residual = random(num_rows, out_size, dtype=dtype, seed=4)
        self.out = inside(num_rows, out_size, 1, 1, self.residual)

    def check(self, expected: Tensor, slack: int = 1) -> None:
        """Assert that `out` is near `expected`, of its dtype, and that nothing was written beside it."""
        unit = ULP[self.out.dtype] * slack
        torch.testing.assert_close(self.out, expected, rtol=2 * unit, atol=3 * unit)
        for around, before, count in self.around:
            assert around[:before].isnan().all() and around[before + count :].isnan().all()


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds", [False, True], ids=["stored", "added"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("num_rows", "out_size", "in_size", "block_n", "block_k"), SHAPES)
def test_a_product(
    num_rows: int,
    out_size: int,
    in_size: int,
    block_n: int,
    block_k: int,
    has_bias: bool,
    adds: bool,
    dtype: torch.dtype,
) -> None:
    """The product with its bias is rounded once, and once more with what `out` held."""
    it = Operands(num_rows, out_size, in_size, dtype)
    if not adds:
        it.out.fill_(NAN)
    bias = it.bias if has_bias else None
    vector_product(it.x, it.weight, bias, it.out, block_n, block_k, num_warps=2, adds=adds)
    product = (exact(it.x, it.weight) + (it.bias.double() if has_bias else 0.0)).to(dtype)
    it.check(it.residual + product if adds else product)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(("num_rows", "out_size", "in_size", "block_n", "block_k"), SHAPES)
def test_a_gated_product(
    num_rows: int, out_size: int, in_size: int, block_n: int, block_k: int, with_norm: bool, dtype: torch.dtype
) -> None:
    """The first half of the matrix gates the second. Both products are rounded before."""
    it = Operands(num_rows, out_size, in_size, dtype, is_gated=True)
    it.out.fill_(NAN)
    norm = it.norm if with_norm else None
    vector_product(it.x, it.weight, None, it.out, block_n, block_k, num_warps=2, norm=norm, is_gated=True)
    x = rms_norm_ref(it.x, *it.norm) if with_norm else it.x
    it.check(silu_mul_ref(exact(x, it.weight).to(dtype)), slack=3)  # x, gate and up are rounded


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_wide", [False, True], ids=["weight of 16 bits", "weight in float32"])
@pytest.mark.parametrize(("num_rows", "out_size", "in_size", "block_n", "block_k"), SHAPES)
def test_a_norm_before_and_a_residual_after(
    num_rows: int, out_size: int, in_size: int, block_n: int, block_k: int, is_wide: bool, dtype: torch.dtype
) -> None:
    """Rows of unlike size are normed each by itself, also a row of zeros, which eps keeps finite. A weight in float32
    (norms of Gemma and Qwen3.5) multiplies numbers that were not rounded."""
    it = Operands(num_rows, out_size, in_size, dtype)
    if is_wide:
        it.norm = Norm(it.norm.weight.float() + 2**-12, EPS)
    it.x.mul_(torch.logspace(-1, 1, num_rows, device=DEVICE).unsqueeze(1))
    it.x[-1] = 0.0 if num_rows > 1 else it.x[-1]
    vector_product(it.x, it.weight, it.bias, it.out, block_n, block_k, num_warps=2, norm=it.norm, adds=True)
    product = (exact(rms_norm_ref(it.x, *it.norm), it.weight) + it.bias.double()).to(dtype)
    it.check(it.residual + product)


def test_nan_stays_in_its_row() -> None:
    it, clean = (Operands(3, 20, 40, torch.bfloat16) for _ in range(2))
    it.x[1, 5] = NAN
    for each in (it, clean):
        vector_product(each.x, each.weight, None, each.out, 4, 64, num_warps=2, norm=each.norm)
    assert it.out[1].isnan().all() and torch.equal(it.out[::2], clean.out[::2])


def test_what_cannot_be_launched_is_refused() -> None:
    """More rows than one need whole rows in a program; a gate has neither bias nor residual."""
    it = Operands(2, 20, 40, torch.float16)
    with pytest.raises(AssertionError):
        vector_product(it.x, it.weight, None, it.out, 4, 32, num_warps=2)
    many = torch.zeros(MAX_ROWS + 1, 40, dtype=torch.float16, device=DEVICE)
    with pytest.raises(AssertionError):
        vector_product(many, it.weight, None, many.new_zeros(MAX_ROWS + 1, 20), 4, 64, num_warps=2)
    for options in ({"adds": True}, {"bias": it.bias[:10]}):
        with pytest.raises(AssertionError, match="gated"):
            vector_product(
                it.x, it.weight, options.pop("bias", None), it.out[:, :10].contiguous(), 4, 64, num_warps=2,
                is_gated=True, **options,
            )  # fmt: skip
