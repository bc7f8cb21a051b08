"""The FP8 product of one row with a matrix W, without tensor cores, on a GPU.

A program loads all columns of a few rows of W at once, or its part of them, as in triton_vector.py. It can also gate,
silu(gate) * up of two products. If several programs share the columns of a row, each leaves its float32 sum.

With a dependent launch (gpu.py) a program fetches its part of W while the kernel before still runs.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from .fp8 import BLOCK, E4M3, Fp8Weight, RoundedRows
from .triton_silu import silu_mul_of

MAX_SIZE = 16384  # columns, which a program may have all at once


def serves(rows: RoundedRows, weight: Fp8Weight, *, is_gated: bool = False) -> bool:
    """Return whether the kernel multiplies these rows by this weight."""
    (out_size, in_size), num_groups = weight.values.shape, weight.scales.shape[1]
    if len(rows.values) != 1 or rows.values.dtype != E4M3 or in_size % 16 or in_size > MAX_SIZE:
        return False
    if num_groups == 1:
        return len(weight.scales) == out_size
    is_whole = out_size % (2 * BLOCK if is_gated else BLOCK) == 0  # so that the rows of a program share their scales
    return is_whole and len(weight.scales) == out_size // BLOCK


def num_splits(out_size: int, in_size: int) -> int:
    """Return how many programs had better share the columns of a row."""
    return 2 if in_size > 8192 and out_size <= 8192 else 1


def vector_product(
    rows: RoundedRows, weight: Fp8Weight, bias: Tensor | None, out: Tensor, *, is_gated: bool = False
) -> None:
    """Write the product of a row to `out`, of 16 bits, [1, out_size], or if it is gated, [1, out_size / 2]. Or write
    its parts to `out` [num_parts, 1, out_size] float32."""
    size, in_size = out.shape[-1], weight.values.shape[1]
    assert serves(rows, weight, is_gated=is_gated), (rows.values.shape, weight.values.shape)
    assert len(weight.values) == (2 * size if is_gated else size) and out.is_contiguous(), (weight.values.shape, out)
    assert weight.values.is_contiguous() and weight.scales.is_contiguous(), weight.values.stride()
    assert bias is None or not (is_gated or out.ndim == 3), "gated products and parts have no bias"
    num_parts, num_groups = out.shape[0] if out.ndim == 3 else 1, weight.scales.shape[1]
    part = triton.cdiv(in_size, num_parts * BLOCK) * BLOCK if num_parts > 1 else in_size
    is_grouped = num_groups > 1
    groups, width = (triton.cdiv(part, BLOCK), BLOCK) if is_grouped else (1, triton.next_power_of_2(part))
    block_n = 2 if is_gated else 4
    dependent = gpu.dependent_launch(1)
    _vector_kernel[triton.cdiv(size, block_n), num_parts](
        rows.values, rows.scales, weight.values, weight.scales, bias, out, size, num_groups, K=in_size, PART=part,
        ROWS=BLOCK if is_grouped else 1, BLOCK_N=block_n, GROUPS=triton.next_power_of_2(groups), WIDTH=width,
        IS_GATED=is_gated, DEPENDENT=dependent, num_warps=4 if part <= 4096 else 8, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit
def _vector_kernel(
    x_ptr,  # [K] e4m3
    x_scales_ptr,  # [num_groups] float32; None: they are 1
    weight_ptr,  # [size, K] e4m3; IS_GATED: [2 * size, K]
    scales_ptr,  # [size / ROWS, num_groups] float32; IS_GATED: of 2 * size rows
    bias_ptr,  # [size]; None: there is none
    out_ptr,  # [size], or parts [splits, size] float32, written
    size,
    num_groups,
    K: tl.constexpr,
    PART: tl.constexpr,  # columns of a program
    ROWS: tl.constexpr,  # of a scale
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,  # at least those of PART columns. 1: a scale belongs to all columns
    WIDTH: tl.constexpr,  # columns of a group, at least
    IS_GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (ceil(size / BLOCK_N), ceil(K / PART))."""
    first_row, begin = tl.program_id(0) * BLOCK_N, tl.program_id(1) * PART
    rows = first_row + tl.arange(0, BLOCK_N)
    known_rows = tl.minimum(rows, size - 1).to(tl.int64)
    inner = tl.arange(0, GROUPS * WIDTH)
    is_in = (inner < PART) & (begin + inner < K)
    at = weight_ptr + known_rows[:, None] * K + (begin + inner)[None, :]
    weight = tl.load(at, mask=is_in[None, :], other=0.0, eviction_policy="evict_first")
    scales = _scales(scales_ptr, known_rows, first_row, begin // WIDTH, num_groups, ROWS, GROUPS)
    if IS_GATED:
        up_at = at + size.to(tl.int64) * K
        up_weight = tl.load(up_at, mask=is_in[None, :], other=0.0, eviction_policy="evict_first")
        up_scales = _scales(scales_ptr, known_rows + size, first_row + size, 0, num_groups, ROWS, GROUPS)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + begin + inner, mask=is_in, other=0.0).to(tl.float32)
    x_scales = tl.full((GROUPS,), 1.0, dtype=tl.float32)
    if x_scales_ptr is not None:
        groups = (begin // WIDTH if GROUPS > 1 else 0) + tl.arange(0, GROUPS)
        x_scales = tl.load(x_scales_ptr + groups, mask=groups < num_groups, other=0.0)
    y = _product(weight, x, scales, x_scales, GROUPS, WIDTH)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + known_rows).to(tl.float32)
    y = y.to(out_ptr.dtype.element_ty)
    if IS_GATED:
        y = silu_mul_of(y, _product(up_weight, x, up_scales, x_scales, GROUPS, WIDTH).to(y.dtype))
    tl.store(out_ptr + tl.program_id(1) * size + rows, y, mask=rows < size)


@triton.jit
def _scales(ptr, rows, first_row, first_group, num_groups, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Return the scales of rows of W [rows], or those of the groups of columns that all of them share [GROUPS]."""
    if GROUPS == 1:
        scales = tl.load(ptr + rows)
    else:
        groups = first_group + tl.arange(0, GROUPS)
        scales = tl.load(ptr + first_row // ROWS * num_groups + groups, mask=groups < num_groups, other=0.0)
    return scales


@triton.jit
def _product(weight, x, scales, x_scales, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the products of rows of W [rows, GROUPS * WIDTH] e4m3 and x [GROUPS * WIDTH], float32. `x_scales`
    [GROUPS]; `scales` as of `_scales`."""
    if GROUPS == 1:
        y = tl.sum(weight.to(tl.float32) * x[None, :], axis=1) * tl.sum(x_scales, axis=0) * scales
    else:
        scaled = tl.reshape(x, (GROUPS, WIDTH)) * (scales * x_scales)[:, None]
        y = tl.sum(weight.to(tl.float32) * tl.reshape(scaled, (GROUPS * WIDTH,))[None, :], axis=1)
    return y
