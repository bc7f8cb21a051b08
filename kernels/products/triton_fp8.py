"""`fp8_linear`, `fp8_linear_parts` and `fp8_gated_linear` of fp8.py on a GPU.

    one row     no tensor cores: the time is that of reading W once (triton_fp8_vector.py)
    few rows    FP8 tensor cores, tiles of W under way from memory. If W has few rows, several programs share the
                columns of a row, and the kernel that reads their float32 sums adds them
    many rows   cuBLASLt, if it takes the scales; otherwise the kernel of few rows

FP8 tensor cores add up products with fewer bits than float32. Sums of 128 columns are added in float32 (DeepSeek-V3,
arXiv:2412.19437, 3.3.2), by the kernel and by cuBLASLt without its fast accumulation. With scales for groups of
columns, a sum is multiplied by both scales and added once per group. Rows of 16 bits are multiplied by values of W in
16 bits, which hold them exactly.

The result of a row does not depend on the values of other rows; it depends on which of the ways computes it.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from .fp8 import BLOCK, E4M3, Fp8Weight, RoundedRows
from .triton_fp8_vector import num_splits, vector_product
from .triton_fp8_vector import serves as serves_vector
from .triton_silu import silu_mul, silu_mul_of

MAX_FEW = 64  # more rows go to cuBLASLt
_MAX_SPLIT = 128  # rows whose product is split among programs rather than left to cuBLASLt
_X_DTYPES = (E4M3, torch.bfloat16, torch.float16)


def serves(rows: RoundedRows, weight: Fp8Weight, *_: object, **__: object) -> bool:
    """Return whether the products take these tensors, with any bias and dtype."""
    x, x_scales = rows
    is_whole = weight.scales.shape[1] == 1 and (x_scales is None or x_scales.shape[1] == 1)
    in_order = x.stride(1) == 1 and weight.values.is_contiguous() and weight.scales.is_contiguous()
    return x.dtype in _X_DTYPES and in_order and (is_whole or weight.group == BLOCK)


def fp8_linear(rows: RoundedRows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `fp8_linear_ref`: sums in another order."""
    num_rows, out_size = len(rows.values), len(weight.values)
    if num_rows > MAX_FEW and library_serves(rows, weight, dtype):
        return _library_product(rows, weight, bias)
    out = torch.empty((num_rows, out_size), dtype=dtype, device=rows.values.device)
    if serves_vector(rows, weight):
        vector_product(rows, weight, bias, out)
    elif num_rows:
        _launch(rows, weight, bias, out)
    return out


def fp8_linear_parts(rows: RoundedRows, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Return `fp8_linear_parts_ref`: [num_parts, num_rows, out_size] float32 if programs share the columns of a row."""
    (num_rows, in_size), out_size = rows.values.shape, len(weight.values)
    if serves_vector(rows, weight):
        num_parts = num_splits(out_size, in_size)
    else:
        num_parts = tiles_of(num_rows, out_size, in_size, is_fp8=rows.values.dtype == E4M3).split_k
    if num_parts == 1 or not num_rows or (num_rows > _MAX_SPLIT and library_serves(rows, weight, dtype)):
        return fp8_linear(rows, weight, None, dtype)
    parts = torch.empty((num_parts, num_rows, out_size), dtype=torch.float32, device=rows.values.device)
    if num_rows == 1 and serves_vector(rows, weight):
        vector_product(rows, weight, None, parts)
    else:
        _launch(rows, weight, None, parts)
    return parts


def fp8_gated_linear(rows: RoundedRows, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Return `fp8_gated_linear_ref`: sums in another order."""
    if not gates_fp8(rows, weight):
        return silu_mul(fp8_linear(rows, weight, None, dtype))
    out = torch.empty((len(rows.values), len(weight.values) // 2), dtype=dtype, device=rows.values.device)
    if serves_vector(rows, weight, is_gated=True):
        vector_product(rows, weight, None, out, is_gated=True)
    else:
        _launch(rows, weight, None, out, is_gated=True)
    return out


def gates_fp8(rows: RoundedRows, weight: Fp8Weight) -> bool:
    """Return whether the kernel of the product gates it."""
    return 0 < len(rows.values) <= MAX_FEW and serves(rows, weight)


def library_serves(rows: RoundedRows, weight: Fp8Weight, dtype: torch.dtype) -> bool:
    """Return whether cuBLASLt multiplies these rows as exactly as the kernel: e4m3 by e4m3, with scales for whole rows
    or for blocks of 128."""
    (out_size, in_size), num_groups = weight.values.shape, weight.scales.shape[1]
    is_fitting = rows.values.dtype == E4M3 and dtype == torch.bfloat16 and not (out_size % 16 or in_size % 16)
    if not (is_fitting and rows.values.is_contiguous() and _has_library(rows.values.device)):
        return False
    if num_groups == 1:
        return len(weight.scales) == out_size
    is_whole = out_size % BLOCK == 0 and in_size % (4 * BLOCK) == 0 and len(rows.values) % 4 == 0
    return is_whole and rows.scales is not None and len(weight.scales) == out_size // BLOCK


@functools.cache
def _has_library(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return tuple(map(int, (torch.version.cuda or "0.0").split("."))) >= (12, 9)  # has these scales since


def _library_product(rows: RoundedRows, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    (num_rows, num_groups), scales = (len(rows.values), weight.scales.shape[1]), rows.scales
    if scales is None:
        scales = torch.ones((num_rows, 1), dtype=torch.float32, device=rows.values.device)
    elif num_groups > 1:
        scales = scales.t().contiguous().t()  # all rows of a group lie together
    product = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        rows.values, weight.values.t(), scale_a=scales, scale_b=weight.scales.t(), out_dtype=torch.bfloat16
    )
    return product if bias is None else product.add_(bias)


class Fp8Tiles(NamedTuple):
    """Sizes of the tiles of a product, and how its programs are launched."""

    block_m: int  # rows of x
    block_n: int  # rows of W; of the gate, if the product is gated
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1  # programs that had better share the columns of a row


def tiles_of(num_rows: int, out_size: int, in_size: int, *, is_fp8: bool, is_gated: bool = False) -> Fp8Tiles:
    """Return the tiles of a product of so many rows. `is_fp8`: of e4m3 by e4m3."""
    block_m = min(128, max(16, 1 << (num_rows - 1).bit_length()))
    if not is_fp8:
        return Fp8Tiles(block_m, 32, BLOCK, 4, 6) if num_rows <= MAX_FEW else Fp8Tiles(block_m, 128, BLOCK, 8, 3)
    if is_gated:
        return Fp8Tiles(block_m, 64, BLOCK, 4, 3)
    if out_size > 16384 and num_rows > 32:
        return Fp8Tiles(block_m, 128, BLOCK, 8, 6 if num_rows <= MAX_FEW else 4)
    num_blocks = -(-out_size // 64) * -(-num_rows // block_m)
    split_k, num_programs = 1, 256 if num_rows <= 32 else 128
    while split_k < 4 and num_blocks * split_k < num_programs and in_size >= 1024 * split_k:
        split_k *= 2
    return Fp8Tiles(block_m, 64, BLOCK, 4, 8 if num_rows <= MAX_FEW else 6, split_k)


def _launch(rows: RoundedRows, weight: Fp8Weight, bias: Tensor | None, out: Tensor, *, is_gated: bool = False) -> None:
    """Write the product to `out` [num_rows, size], or the float32 sums of all splits to `out` [split_k, num_rows,
    size]."""
    (x, x_scales), (num_rows, in_size) = rows, rows.values.shape
    out_size, size, num_groups = len(weight.values), out.shape[-1], weight.scales.shape[1]
    assert out.shape[-2:] == (num_rows, out_size // 2 if is_gated else out_size), (x.shape, out.shape)
    tiles = tiles_of(num_rows, out_size, in_size, is_fp8=x.dtype == E4M3, is_gated=is_gated)
    split_k = out.shape[0] if out.ndim == 3 else 1
    part = -(-in_size // (split_k * tiles.block_k)) * tiles.block_k
    dependent = gpu.dependent_launch(num_rows)
    _linear_kernel[triton.cdiv(size, tiles.block_n), split_k, triton.cdiv(num_rows, tiles.block_m)](
        x, x_scales, weight.values, weight.scales, bias, out, num_rows, size, in_size, x.stride(0), num_groups, part,
        ROWS=1 if len(weight.scales) == out_size else BLOCK, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k, IS_GROUPED=num_groups > 1, IS_PART=out.ndim == 3, IS_GATED=is_gated,
        IS_EVEN=in_size % part == 0, DEPENDENT=dependent, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,  # [num_rows, in_size] e4m3 or 16 bits
    x_scales_ptr,  # [num_rows, num_groups] float32; None: they are 1
    weight_ptr,  # [size, in_size] e4m3; IS_GATED: [2 * size, in_size]
    scales_ptr,  # [size / ROWS, num_groups] float32; IS_GATED: of 2 * size rows
    bias_ptr,  # [size]; None: there is none
    out_ptr,  # [num_rows, size]; IS_PART: [splits, num_rows, size] float32; written
    num_rows,
    size,
    in_size,
    x_stride,
    num_groups,
    part,  # columns of a program
    ROWS: tl.constexpr,  # of a scale
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_GROUPED: tl.constexpr,  # a scale belongs to BLOCK_K columns; else to all of them
    IS_PART: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,  # BLOCK_K divides the columns of all programs
    DEPENDENT: tl.constexpr,
):
    """Grid: (blocks of rows of W, splits of its columns, blocks of rows of x). Works on y^T = W x^T, [BLOCK_N,
    BLOCK_M]."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, in_size)
    is_n, is_m = n < size, m < num_rows
    known_n = tl.minimum(n, size - 1).to(tl.int64)
    weight_at = weight_ptr + known_n[:, None] * in_size + k[None, :]
    up_offset = size.to(tl.int64) * in_size
    x_at = x_ptr + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    scales_at = scales_ptr + known_n // ROWS * num_groups
    up_scales_at = scales_ptr + (known_n + size) // ROWS * num_groups
    if DEPENDENT:
        if BLOCK_M > 32:
            gdc_launch_dependents()
        gdc_wait()
    y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(begin, end, BLOCK_K):
        is_weight, is_x = is_n[:, None], is_m[None, :]
        if not IS_EVEN:
            is_weight = is_weight & (start + k < end)[None, :]
            is_x = is_x & (start + k < end)[:, None]
        weight = tl.load(weight_at + start, mask=is_weight, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_at + start, mask=is_x, other=0.0)
        x_scale = tl.full((1, BLOCK_M), 1.0, dtype=tl.float32)
        group = start // BLOCK_K
        if IS_GROUPED and x_scales_ptr is not None:
            x_scale = tl.load(x_scales_ptr + m * num_groups + group, mask=is_m, other=0.0)[None, :]
        y = _add_product(y, weight, x, x_scale, scales_at + group, IS_GROUPED)
        if IS_GATED:
            weight = tl.load(weight_at + up_offset + start, mask=is_weight, other=0.0, eviction_policy="evict_first")
            up = _add_product(up, weight, x, x_scale, up_scales_at + group, IS_GROUPED)
    if DEPENDENT and BLOCK_M <= 32:  # not before: the next kernel's programs would be spread unevenly
        gdc_launch_dependents()
    if not IS_GROUPED:
        x_scale = tl.full((1, BLOCK_M), 1.0, dtype=tl.float32)
        if x_scales_ptr is not None:
            x_scale = tl.load(x_scales_ptr + m, mask=is_m, other=0.0)[None, :]
        y *= x_scale * tl.load(scales_at)[:, None]
        if IS_GATED:
            up *= x_scale * tl.load(up_scales_at)[:, None]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + known_n).to(tl.float32)[:, None]
    y = y.to(out_ptr.dtype.element_ty)
    if IS_GATED:
        y = silu_mul_of(y, up.to(y.dtype))
    out_at = out_ptr + m.to(tl.int64)[None, :] * size + n[:, None]
    if IS_PART:
        out_at += tl.program_id(1) * num_rows.to(tl.int64) * size
    tl.store(out_at, y, mask=is_n[:, None] & is_m[None, :])


@triton.jit
def _add_product(y, weight, x, x_scale, scales_at, IS_GROUPED: tl.constexpr):
    """Return `y` with the product of two tiles added, in float32: W's [BLOCK_N, BLOCK_K] e4m3, and x's [BLOCK_K,
    BLOCK_M] e4m3 or 16 bits."""
    if x.dtype != tl.float8e4nv:
        weight = weight.to(tl.float16).to(x.dtype)  # exact
    if IS_GROUPED:
        return y + tl.dot(weight, x) * x_scale * tl.load(scales_at)[:, None]
    if x.dtype == tl.float8e4nv:
        return y + tl.dot(weight, x)
    return tl.dot(weight, x, y)
