"""Products of blocks of pairs with the weights of their experts by tensor cores, on a GPU: plain weights and FP8.

A program multiplies one block of pairs, all of one expert, by some rows of that expert's weight. Programs of one block
follow each other, and blocks of one expert do, so that rows and weights are read from memory once, and then from the
L2 cache.

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

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import gpu
from .experts import ExpertWeight, Places
from .fp8 import BLOCK
from .silu import SwigluClamp
from .triton_silu import clamped_silu_mul_of, silu_mul_of


class BlockTiles(NamedTuple):
    """The tile of a program beside its block of pairs, and how programs are launched."""

    block_n: int  # rows of W; of each half if the product is gated
    block_k: int  # columns that are multiplied at once
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, block: int, *, is_fp8: bool, is_gated: bool) -> BlockTiles:
        """Return the tiles of blocks of `block` pairs; `is_fp8`: the weights are. Measured on an H200."""
        del is_gated
        if block <= 32:
            return cls(64, 128, 4, 4)
        return cls(128, 128 if is_fp8 else 64, 8, 3)


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
    num_pairs, block, size = places.chosen.numel(), places.block, out.shape[1]
    out_size, in_size = len(weight.values) // places.num_experts, weight.values.shape[1]
    scales, is_scaled = weight.scales, weight.scales is not None
    num_groups = 1 if scales is None else scales.shape[1]
    if tiles is None:
        tiles = BlockTiles.choose(block, is_fp8=is_scaled, is_gated=is_gated)
    limit, alpha = clamp or (0.0, 0.0)
    dependent = gpu.dependent_launch(len(places.chosen))
    _block_kernel[triton.cdiv(size, tiles.block_n), len(places.experts)](
        x, x_scales, weight.values, scales, weight.bias, out, places.pairs, places.experts,
        num_pairs // len(x), places.num_experts, size, out_size, in_size, x.stride(0), num_groups, limit, alpha,
        ROWS=1 if scales is None or len(scales) == len(weight.values) else BLOCK, BLOCK_M=block,
        BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, IS_EVEN=in_size % tiles.block_k == 0,
        IS_GROUPED=num_groups > 1, IS_GATED=is_gated, IS_CLAMPED=clamp is not None,
        DEPENDENT=dependent, num_warps=tiles.num_warps, num_stages=tiles.num_stages, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit
def _part_of(weight_at, x, is_k, IS_EVEN: tl.constexpr):
    """Return the product of a tile of W, loaded, and one of x."""
    weight = tl.load(weight_at) if IS_EVEN else tl.load(weight_at, mask=is_k, other=0.0)
    if weight.dtype != x.dtype:
        weight = weight.to(tl.float16).to(x.dtype)  # exact in both
    return tl.dot(weight, x, input_precision="ieee")


@triton.jit(do_not_specialize=["num_active"])
def _block_kernel(
    x_ptr,  # [num_rows, in_size] or [num_pairs, in_size]
    x_scales_ptr,  # [num_rows or num_pairs, num_groups] float32; None: they are 1
    weight_ptr,  # [num_experts * out_size, in_size]
    scales_ptr,  # [num_experts * out_size / ROWS, num_groups] float32; None: the weight is plain
    bias_ptr,  # [num_experts * out_size]; None: there is none
    out_ptr,  # [num_pairs, size], written
    pairs_ptr,  # [num_blocks * BLOCK_M] int32
    experts_ptr,  # [num_blocks] int32
    num_active,  # pairs of a row of x
    num_experts,
    size,
    out_size,
    in_size,
    x_stride,
    num_groups,
    limit,
    alpha,
    ROWS: tl.constexpr,  # of a scale
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,  # BLOCK_K divides in_size
    IS_GROUPED: tl.constexpr,  # a scale belongs to BLOCK_K columns; else to all of them
    IS_GATED: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (blocks of rows of W, blocks of pairs). Works on y^T = W x^T, [BLOCK_N, BLOCK_M]."""
    if DEPENDENT:
        gdc_wait()
    expert = tl.load(experts_ptr + tl.program_id(1)).to(tl.int64)
    if expert < num_experts:
        pairs = tl.load(pairs_ptr + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))
        is_m = pairs >= 0
        rows = (tl.maximum(pairs, 0) // num_active).to(tl.int64)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        own = tl.minimum(n, size - 1)  # rows of the expert
        k = tl.arange(0, BLOCK_K)
        x_at = x_ptr + rows[None, :] * x_stride + k[:, None]
        at = weight_ptr + expert * out_size * in_size + (own[:, None] * in_size + k[None, :])
        up_at = at + size * in_size
        y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for start in range(0, in_size, BLOCK_K):
            is_k = start + k < in_size
            is_x = is_m[None, :] if IS_EVEN else is_m[None, :] & is_k[:, None]
            x = tl.load(x_at + start, mask=is_x, other=0.0)
            part = _part_of(at + start, x, is_k[None, :], IS_EVEN)
            if IS_GATED:
                up_part = _part_of(up_at + start, x, is_k[None, :], IS_EVEN)
            if IS_GROUPED:
                group = start // BLOCK_K
                scales_at = scales_ptr + group
                x_scale = tl.full((1, BLOCK_M), 1.0, dtype=tl.float32)
                if x_scales_ptr is not None:
                    x_scale = tl.load(x_scales_ptr + rows * num_groups + group, mask=is_m, other=0.0)[None, :]
                scale_rows = (expert * out_size + own) // ROWS
                part *= x_scale * tl.load(scales_at + scale_rows * num_groups)[:, None]
                if IS_GATED:
                    scale_rows = (expert * out_size + size + own) // ROWS
                    up_part *= x_scale * tl.load(scales_at + scale_rows * num_groups)[:, None]
            y += part
            if IS_GATED:
                up += up_part
        if DEPENDENT:
            gdc_launch_dependents()
        weight_rows = expert * out_size + own
        if scales_ptr is not None and not IS_GROUPED:
            x_scale = tl.full((1, BLOCK_M), 1.0, dtype=tl.float32)
            if x_scales_ptr is not None:
                x_scale = tl.load(x_scales_ptr + rows * num_groups, mask=is_m, other=0.0)[None, :]
            y *= x_scale * tl.load(scales_ptr + weight_rows // ROWS * num_groups)[:, None]
            if IS_GATED:
                up *= x_scale * tl.load(scales_ptr + (weight_rows + size) // ROWS * num_groups)[:, None]
        if bias_ptr is not None:
            y += tl.load(bias_ptr + weight_rows).to(tl.float32)[:, None]
            if IS_GATED:
                up += tl.load(bias_ptr + weight_rows + size).to(tl.float32)[:, None]
        if IS_CLAMPED:
            y = clamped_silu_mul_of(y, up, limit, alpha)
        y = y.to(out_ptr.dtype.element_ty)
        if IS_GATED and not IS_CLAMPED:
            y = silu_mul_of(y, up.to(y.dtype))
        out_at = out_ptr + tl.maximum(pairs, 0).to(tl.int64)[None, :] * size + n[:, None]
        tl.store(out_at, y, mask=(n < size)[:, None] & is_m[None, :])
