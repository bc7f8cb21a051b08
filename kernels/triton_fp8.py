"""`fp8_linear` of kernels/fp8.py on a GPU.

    few rows (up to MAX_FEW)   the time is that of reading W once. Values of x and W become float16, which holds them
                               exactly, and tensor cores multiply those
    more rows                  FP8 tensor cores. They add up 128 columns with fewer bits than float32; these sums are
                               added in float32 (DeepSeek-V3, arXiv:2412.19437, 3.3.2)

With scales for groups of columns, a sum is multiplied by both scales and added once per group. The result of a row
does not depend on the values of other rows; it depends on which of the two ways computes it.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import gpu
from .fp8 import BLOCK, E4M3

MAX_FEW = 64
_X_DTYPES = (E4M3, torch.bfloat16, torch.float16)


def serves(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    group: int,
    *_: object,
    **__: object,
) -> bool:
    """Return whether `fp8_linear` takes these tensors."""
    del bias
    is_whole = scales.shape[1] == 1 and (x_scales is None or x_scales.shape[1] == 1)
    in_order = x.stride(1) == 1 and weight.is_contiguous() and scales.is_contiguous()
    return x.dtype in _X_DTYPES and in_order and (is_whole or group == BLOCK)


def fp8_linear(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    group: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return `fp8_linear_ref`: sums in another order."""
    del group  # the scales tell it
    (num_rows, in_size), out_size = x.shape, weight.shape[0]
    out = torch.empty((num_rows, out_size), dtype=dtype, device=x.device)
    if not num_rows:
        return out
    tiles, launch = tiles_of(num_rows)
    dependent = gpu.dependent_launch(num_rows)
    _linear_kernel[triton.cdiv(out_size, tiles["BLOCK_N"]), triton.cdiv(num_rows, tiles["BLOCK_M"])](
        x, scales if x_scales is None else x_scales, weight, scales, out if bias is None else bias, out,
        num_rows, out_size, in_size, x.stride(0), scales.shape[1],
        ROWS=1 if len(scales) == out_size else BLOCK, **tiles,
        IS_GROUPED=scales.shape[1] > 1, HAS_X_SCALES=x_scales is not None, HAS_BIAS=bias is not None,
        IS_FP8=x.dtype == E4M3 and num_rows > MAX_FEW, IS_EVEN=in_size % BLOCK == 0, DEPENDENT=dependent,
        **launch, launch_pdl=dependent,
    )  # fmt: skip
    return out


def tiles_of(num_rows: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of the tiles of a product of so many rows, and how its programs are launched."""
    if num_rows <= MAX_FEW:
        block_m = max(16, 1 << (num_rows - 1).bit_length())
        return {"BLOCK_M": block_m, "BLOCK_N": 32, "BLOCK_K": BLOCK}, {"num_warps": 4, "num_stages": 6}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": BLOCK}, {"num_warps": 8, "num_stages": 3}


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,  # [num_rows, in_size] e4m3 or 16 bits
    x_scales_ptr,  # [num_rows, num_groups] float32
    weight_ptr,  # [out_size, in_size] e4m3
    scales_ptr,  # [out_size / ROWS, num_groups] float32
    bias_ptr,  # [out_size]
    out_ptr,  # [num_rows, out_size], written
    num_rows,
    out_size,
    in_size,
    x_stride,
    num_groups,
    ROWS: tl.constexpr,  # of a scale
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_GROUPED: tl.constexpr,  # a scale belongs to BLOCK_K columns; else to all of them
    HAS_X_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_FP8: tl.constexpr,  # multiply by FP8 tensor cores
    IS_EVEN: tl.constexpr,  # BLOCK_K divides in_size
    DEPENDENT: tl.constexpr,
):
    """Grid: (blocks of rows of W, blocks of rows of x). Works on y^T = W x^T, [BLOCK_N, BLOCK_M]."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    is_n, is_m = n < out_size, m < num_rows
    weight_at = weight_ptr + tl.minimum(n, out_size - 1).to(tl.int64)[:, None] * in_size + k[None, :]
    x_at = x_ptr + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    scales_at = scales_ptr + tl.minimum(n, out_size - 1) // ROWS * num_groups
    x_scales_at = x_scales_ptr + m * num_groups
    if DEPENDENT:
        gdc_wait()
    y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(0, in_size, BLOCK_K):
        is_weight, is_x = is_n[:, None], is_m[None, :]
        if not IS_EVEN:
            is_weight = is_weight & (start + k < in_size)[None, :]
            is_x = is_x & (start + k < in_size)[:, None]
        weight = tl.load(weight_at + start, mask=is_weight, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_at + start, mask=is_x, other=0.0)
        if not IS_FP8:
            dtype = tl.float16 if x.dtype == tl.float8e4nv else x.dtype
            x = x.to(dtype)
            weight = weight.to(tl.float16).to(dtype)  # exact in both
        if IS_GROUPED:
            part = tl.dot(weight, x)
            if HAS_X_SCALES:
                part *= tl.load(x_scales_at + start // BLOCK_K, mask=is_m, other=0.0)[None, :]
            y += part * tl.load(scales_at + start // BLOCK_K)[:, None]
        elif IS_FP8:
            y += tl.dot(weight, x)
        else:
            y = tl.dot(weight, x, y)
    if DEPENDENT:  # not before: programs of the next kernel would take the place of those that are to come
        gdc_launch_dependents()
    if not IS_GROUPED:
        if HAS_X_SCALES:
            y *= tl.load(x_scales_at, mask=is_m, other=0.0)[None, :]
        y *= tl.load(scales_at)[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=is_n, other=0.0).to(tl.float32)[:, None]
    out_at = out_ptr + m.to(tl.int64)[None, :] * out_size + n[:, None]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=is_n[:, None] & is_m[None, :])
