"""Products of blocks of pairs with the weights of their experts by tensor cores, on a GPU: plain weights and FP8.

A program multiplies one block of pairs, all of one expert, by some rows of that expert's weight. Programs of one block
follow each other, and blocks of one expert do, so that rows and weights are read from memory once, and then from the
L2 cache. If the product is gated, the program's rows of W alternate between gate and up, so that a thread has the sums
of both.

    plain numbers              sums in float32
    FP8, rows of x of FP8      FP8 tensor cores. They add up 128 columns with fewer bits than float32; these sums are
                               added in float32 (DeepSeek-V3, arXiv:2412.19437, 3.3.2)
    FP8, rows of 16 bits       the weights become numbers of 16 bits, which hold them exactly
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from ..formats import SwigluClamp
from ..products.fp8 import BLOCK
from ..products.triton_silu import clamped_silu_mul_of, silu_mul_of
from .experts import ExpertWeight, Places


class BlockTiles(NamedTuple):
    """The tile of a program beside its block of pairs, and how programs are launched."""

    block_n: int  # rows of W, those of gate and of up if the product is gated
    block_k: int  # columns that are multiplied at once; 128 for FP8
    is_weight_left: bool  # tensor cores take 64 or more rows of the left factor, 8 or more of the right one
    num_warps: int
    num_stages: int
    has_halves: bool = False  # a block whose second half is empty takes half the time

    @classmethod
    def choose(cls, block: int, item_size: int, *, is_gated: bool, is_grouped: bool) -> BlockTiles:
        """Return the fastest tiles on an H100 for blocks of `block` pairs. `item_size` are the bytes of a number of W;
        `is_grouped`: each BLOCK columns have scales."""
        is_few, is_fp8 = block <= 32, item_size == 1
        if item_size == 4:
            return cls(64, 32, True, 4, 3)
        if is_few:
            return cls(128 if is_gated else 64, 128, True, 4, 3 if is_fp8 else 4)
        if is_grouped and block > 64:
            return cls(128, 128, False, 8, 3, has_halves=True)
        if is_fp8:
            return cls(128, 128, False, 4, 3, has_halves=block > 64)
        if block == 64:
            return cls(128, 64, False, 4, 3)
        return cls(256, 64, False, 8, 4, has_halves=True)


def block_product(
    x: Tensor,
    x_scales: Tensor | None,
    weight: ExpertWeight,
    places: Places,
    out: Tensor,
    *,
    is_gated: bool,
    clamp: SwigluClamp | None = None,
    tiles: BlockTiles | None = None,
) -> None:
    """Write the products of all pairs to `out` [num_pairs, size]. Other arguments as for `experts_linear`."""
    num_pairs, block = places.chosen.numel(), places.block
    out_size, in_size = len(weight.values) // places.num_experts, weight.values.shape[1]
    scales = weight.scales
    num_groups = 1 if scales is None else scales.shape[1]
    if tiles is None:
        tiles = BlockTiles.choose(block, weight.values.element_size(), is_gated=is_gated, is_grouped=num_groups > 1)
    limit, alpha, offset = clamp or (0.0, 0.0, 0.0)
    dependent = gpu.dependent_launch(len(places.chosen))
    _block_kernel[triton.cdiv(out_size, tiles.block_n), len(places.experts)](
        x, x_scales, weight.values, scales, weight.bias, out, places.pairs, places.experts,
        num_pairs // len(x), places.num_experts, out_size, in_size, x.stride(0), num_groups, limit, alpha, offset,
        ROWS=1 if scales is None or len(scales) == len(weight.values) else BLOCK, BLOCK_M=block,
        BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, IS_EVEN=in_size % tiles.block_k == 0,
        HAS_HALVES=tiles.has_halves, IS_WEIGHT_LEFT=tiles.is_weight_left, IS_GROUPED=num_groups > 1, IS_GATED=is_gated,
        IS_CLAMPED=clamp is not None, DEPENDENT=dependent, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        launch_pdl=dependent,
    )  # fmt: skip


@triton.jit
def _sum_of(left, right, y):
    """Return y + left right; of FP8 numbers, with float32 sums of 128 columns."""
    if left.dtype == tl.float8e4nv:
        y = tl.dot(left, right, y, max_num_imprecise_acc=128)
    else:
        y = tl.dot(left, right, y, input_precision="ieee")
    return y


@triton.jit
def rows_of_expert(out_size, BLOCK_N: tl.constexpr, IS_GATED: tl.constexpr):
    """Return the program's rows of its expert's weight, [BLOCK_N]: gate and up in turns if the product is gated. Those
    beyond `out_size` are some row of the expert."""
    own = tl.minimum(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), out_size - 1)
    if IS_GATED:
        own = own % 2 * (out_size // 2) + own // 2
    return own


@triton.jit
def store_sums(
    y, bias_ptr, weight_rows, out_ptr, pairs, out_size, limit, alpha, offset,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
):  # fmt: skip
    """Write a block's products from its sums `y` [BLOCK_M, BLOCK_N]. A pair below 0 is none."""
    if bias_ptr is not None:
        y += tl.load(bias_ptr + weight_rows).to(tl.float32)[None, :]
    if IS_GATED:
        size = out_size // 2
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        gate, up = tl.split(tl.reshape(y, (BLOCK_M, BLOCK_N // 2, 2)))
        if IS_CLAMPED:
            y = clamped_silu_mul_of(gate, up, limit, alpha, offset)
        else:
            y = silu_mul_of(gate.to(out_ptr.dtype.element_ty), up.to(out_ptr.dtype.element_ty))
    else:
        size = out_size
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_at = out_ptr + tl.maximum(pairs, 0).to(tl.int64)[:, None] * size + n[None, :]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=(pairs >= 0)[:, None] & (n < size)[None, :])


@triton.jit
def _write_products(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, pairs_ptr, expert,
    num_active, out_size, in_size, x_stride, num_groups, limit, alpha, offset,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_WEIGHT_LEFT: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the products of one block of pairs, `pairs_ptr` [BLOCK_M]. Other arguments as for `_block_kernel`."""
    pairs = tl.load(pairs_ptr + tl.arange(0, BLOCK_M))
    is_m = pairs >= 0
    rows = (tl.maximum(pairs, 0) // num_active).to(tl.int64)
    own = rows_of_expert(out_size, BLOCK_N, IS_GATED)
    weight_rows = expert * out_size + own
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + rows[:, None] * x_stride + k[None, :]
    weight_at = weight_ptr + expert * out_size * in_size + (own[:, None] * in_size + k[None, :])
    y = tl.zeros((BLOCK_N, BLOCK_M) if IS_WEIGHT_LEFT else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, in_size, BLOCK_K):
        if IS_EVEN:
            x = tl.load(x_at + start, mask=is_m[:, None], other=0.0)
            weight = tl.load(weight_at + start)
        else:
            is_k = (start + k < in_size)[None, :]
            x = tl.load(x_at + start, mask=is_m[:, None] & is_k, other=0.0)
            weight = tl.load(weight_at + start, mask=is_k, other=0.0)
        if weight.dtype != x.dtype:
            weight = weight.to(tl.float16).to(x.dtype)  # exact in both
        if not IS_GROUPED:
            y = _sum_of(weight, x.T, y) if IS_WEIGHT_LEFT else _sum_of(x, weight.T, y)
        else:
            part = tl.dot(weight, x.T) if IS_WEIGHT_LEFT else tl.dot(x, weight.T)
            group = start // BLOCK_K
            scale = tl.load(scales_ptr + weight_rows // ROWS * num_groups + group)
            x_scale = tl.full((BLOCK_M,), 1.0, dtype=tl.float32)
            if x_scales_ptr is not None:
                x_scale = tl.load(x_scales_ptr + rows * num_groups + group, mask=is_m, other=0.0)
            if IS_WEIGHT_LEFT:
                part *= scale[:, None] * x_scale[None, :]
            else:
                part *= x_scale[:, None] * scale[None, :]
            y += part
    if DEPENDENT:
        gdc_launch_dependents()
    if IS_WEIGHT_LEFT:
        y = y.T
    if scales_ptr is not None and not IS_GROUPED:
        if x_scales_ptr is not None:
            y *= tl.load(x_scales_ptr + rows * num_groups, mask=is_m, other=0.0)[:, None]
        y *= tl.load(scales_ptr + weight_rows // ROWS * num_groups)[None, :]
    store_sums(
        y, bias_ptr, weight_rows, out_ptr, pairs, out_size, limit, alpha, offset, BLOCK_M, BLOCK_N, IS_GATED, IS_CLAMPED
    )


@triton.jit(do_not_specialize=["num_active"])
def _block_kernel(
    x_ptr,  # [num_rows, in_size] or [num_pairs, in_size]
    x_scales_ptr,  # [num_rows or num_pairs, num_groups] float32; None: they are 1
    weight_ptr,  # [num_experts * out_size, in_size]
    scales_ptr,  # [num_experts * out_size / ROWS, num_groups] float32; None: the weight is plain
    bias_ptr,  # [num_experts * out_size]; None: there is none
    out_ptr,  # [num_pairs, out_size, or half of it if the product is gated], written
    pairs_ptr,  # [num_blocks * BLOCK_M] int32
    experts_ptr,  # [num_blocks] int32
    num_active,  # pairs of a row of x
    num_experts,
    out_size,
    in_size,
    x_stride,
    num_groups,
    limit,
    alpha,
    offset,
    ROWS: tl.constexpr,  # of a scale
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,  # BLOCK_K divides in_size
    HAS_HALVES: tl.constexpr,  # a block whose second half is empty takes half the time
    IS_WEIGHT_LEFT: tl.constexpr,  # compute W x^T; else x W^T
    IS_GROUPED: tl.constexpr,  # a scale belongs to BLOCK_K columns; else to all of them
    IS_GATED: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (blocks of rows of W, blocks of pairs)."""
    if DEPENDENT:
        gdc_wait()
    expert = tl.load(experts_ptr + tl.program_id(1)).to(tl.int64)
    own_pairs_ptr = pairs_ptr + tl.program_id(1) * BLOCK_M
    is_half = False
    if HAS_HALVES:
        is_half = tl.load(own_pairs_ptr + BLOCK_M // 2) < 0
    if expert < num_experts:
        if is_half:
            _write_products(
                x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, own_pairs_ptr, expert, num_active,
                out_size, in_size, x_stride, num_groups, limit, alpha, offset, ROWS, BLOCK_M // 2, BLOCK_N, BLOCK_K,
                IS_EVEN, IS_WEIGHT_LEFT, IS_GROUPED, IS_GATED, IS_CLAMPED, DEPENDENT,
            )  # fmt: skip
        else:
            _write_products(
                x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, own_pairs_ptr, expert, num_active,
                out_size, in_size, x_stride, num_groups, limit, alpha, offset, ROWS, BLOCK_M, BLOCK_N, BLOCK_K,
                IS_EVEN, IS_WEIGHT_LEFT, IS_GROUPED, IS_GATED, IS_CLAMPED, DEPENDENT,
            )  # fmt: skip
