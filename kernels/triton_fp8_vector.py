"""The FP8 product of one row with a matrix W, without tensor cores, on a GPU (triton_row_products.py).

It can also gate, silu(gate) * up of two products. With a dependent launch (gpu.py) a program fetches its rows of W
while the kernel before still runs.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import gpu
from .fp8 import BLOCK, E4M3, Fp8Weight, RoundedRows
from .triton_row_products import ROWS_BYTES, chunk_of, row_chunks, row_products
from .triton_silu import silu_mul_of

_MOST_ROWS = 8  # of W in a program
_PROGRAMS = 1024  # that are enough to keep a GPU at work


def serves(rows: RoundedRows, weight: Fp8Weight, *, is_gated: bool = False) -> bool:
    """Return whether the kernel multiplies these rows by this weight."""
    (out_size, in_size), (num_scales, num_groups) = weight.values.shape, weight.scales.shape
    if len(rows.values) != 1 or rows.values.dtype != E4M3 or in_size % 16:
        return False
    if in_size * (2 if is_gated else 1) > ROWS_BYTES:
        return False
    return num_scales == (out_size if num_groups == 1 else triton.cdiv(out_size, BLOCK))


def rows_of(size: int, in_size: int, *, is_gated: bool = False) -> int:
    """Return how many rows of the product a program has."""
    rows = _MOST_ROWS
    while rows > 1 and (rows * in_size * (2 if is_gated else 1) > ROWS_BYTES or triton.cdiv(size, rows) < _PROGRAMS):
        rows //= 2
    return rows


def vector_product(
    rows: RoundedRows,
    weight: Fp8Weight,
    bias: Tensor | None,
    out: Tensor,
    *,
    is_gated: bool = False,
    block_n: int | None = None,
) -> None:
    """Write the product of a row to `out` [1, out_size], or if it is gated, [1, out_size / 2]. A program has `block_n`
    rows of it."""
    size, in_size = out.shape[1], weight.values.shape[1]
    assert serves(rows, weight, is_gated=is_gated), (rows.values.shape, weight.values.shape)
    assert len(weight.values) == (2 * size if is_gated else size) and out.is_contiguous(), (weight.values.shape, out)
    assert weight.values.is_contiguous() and weight.scales.is_contiguous(), weight.values.stride()
    assert bias is None or not is_gated, "gated products have no bias"
    block_n = block_n or rows_of(size, in_size, is_gated=is_gated)
    is_grouped = weight.scales.shape[1] > 1
    dependent = gpu.dependent_launch(1)
    _vector_kernel[(triton.cdiv(size, block_n),)](
        rows.values, rows.scales, weight.values, weight.scales, bias, out, size, K=in_size, CHUNK=chunk_of(in_size, 1),
        GROUP=BLOCK if is_grouped else 0, ROWS=BLOCK if is_grouped else 1, BLOCK_N=block_n, IS_GATED=is_gated,
        DEPENDENT=dependent, num_warps=1, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit
def _vector_kernel(
    x_ptr,  # [K] e4m3
    x_scales_ptr,  # [ceil(K / GROUP)] float32, [1] if GROUP is 0; None: they are 1
    weight_ptr,  # [size, K] e4m3; IS_GATED: [2 * size, K]
    scales_ptr,  # [size / ROWS, ceil(K / GROUP)] float32, or 1 column; IS_GATED: of 2 * size rows
    bias_ptr,  # [size]; None: there is none
    out_ptr,  # [size], written
    size,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a scale; 0: all
    ROWS: tl.constexpr,  # of a scale
    BLOCK_N: tl.constexpr,
    IS_GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (ceil(size / BLOCK_N),). Rows of gate and up take turns in a tile."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if IS_GATED:
        both = tl.arange(0, 2 * BLOCK_N)
        rows = both % 2 * size + tl.minimum(tl.program_id(0) * BLOCK_N + both // 2, size - 1)
    else:
        rows = tl.minimum(columns, size - 1)
    chunks = row_chunks(weight_ptr + rows.to(tl.int64) * K, K, CHUNK)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    y = row_products(chunks, rows, x_ptr, x_scales_ptr, scales_ptr, K, CHUNK, GROUP, ROWS)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows).to(tl.float32)
    y = y.to(out_ptr.dtype.element_ty)
    if IS_GATED:
        gate, up = tl.split(tl.reshape(y, (BLOCK_N, 2)))
        y = silu_mul_of(gate, up)
    tl.store(out_ptr + columns, y, mask=columns < size)
