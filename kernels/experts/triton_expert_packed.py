"""Products of blocks of pairs with MXFP4 weights of their experts, on a GPU.

The weights stay packed in memory. A program unpacks its bytes to x's dtype in registers. The low and the high halves of
a tile's bytes are the weights of two runs of columns (mxfp4.py), which are multiplied one after the other, each with
its own columns of x.

The pairs of one row have different experts. They are not placed, and each is a block.

If the product is gated, a program's rows of W alternate between gate and up, so that a thread has the sums of both.
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

from .. import gpu
from ..formats import SwigluClamp
from .experts import ExpertWeight, Places
from .triton_expert_blocks import rows_of_expert, store_sums

_MIN_BLOCK = 8  # pairs, the fewest that tensor cores multiply


class PackedTiles(NamedTuple):
    """The tile of a program beside its block of pairs, and how programs are launched."""

    block_n: int  # rows of W, those of gate and of up if the product is gated
    block_k: int  # bytes of a row of W that are unpacked at once
    is_weight_left: bool  # compute W x^T; else x W^T
    num_warps: int
    num_stages: int
    has_halves: bool = False  # a block whose second half is empty is multiplied as a smaller one

    @classmethod
    def choose(cls, block: int, item_size: int) -> PackedTiles:
        """Return the tiles for blocks of `block` pairs. `item_size` are the bytes of a number of x.

        A thread has 64 bytes of a tile or more, and so 4 scales or more, which is the least that is copied
        asynchronously."""
        if item_size == 4:
            return cls(64, 32, True, 4, 3)
        if block == _MIN_BLOCK:
            return cls(64, 128, True, 4, 4)
        if block == 16:
            return cls(64, 128, True, 2, 3, has_halves=True)
        return cls(128, 64, False, 4, 3, has_halves=block == 64) if block <= 64 else cls(256, 64, False, 8, 3)


def packed_product(
    x: Tensor,
    x_scales: Tensor | None,
    weight: ExpertWeight,
    places: Places,
    out: Tensor,
    *,
    is_gated: bool,
    clamp: SwigluClamp | None = None,
    tiles: PackedTiles | None = None,
) -> None:
    """Write the products of all pairs to `out` [num_pairs, size]. Other arguments as for `experts_linear`, but `places`
    may be those of `places_of_row`."""
    assert weight.scales is not None and x_scales is None, (weight.scales, x_scales)
    assert weight.scales.stride(1) == 1, weight.scales.stride()
    num_pairs, is_row = places.chosen.numel(), not len(places.pairs)
    block = _MIN_BLOCK if is_row else places.block
    out_size, row_size = len(weight.values) // places.num_experts, weight.values.shape[1]
    if tiles is None:
        tiles = PackedTiles.choose(block, x.element_size())
    limit, alpha, offset = clamp or (0.0, 0.0, 0.0)
    dependent = gpu.dependent_launch(len(places.chosen))
    _packed_kernel[triton.cdiv(out_size, tiles.block_n), len(places.experts)](
        x, weight.values, weight.scales, weight.bias, out, None if is_row else places.pairs, places.experts,
        num_pairs // len(x), places.num_experts, out_size, row_size, x.stride(0), weight.scales.stride(0), limit, alpha,
        offset, BLOCK_M=block, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, HALF=weight.group // 2,
        HAS_HALVES=tiles.has_halves, IS_PAIRED=x.dtype is torch.bfloat16,
        IS_WEIGHT_LEFT=tiles.is_weight_left,
        IS_GATED=is_gated, IS_CLAMPED=clamp is not None, DEPENDENT=dependent, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit
def _numbers_of(packed, scales, part: tl.constexpr, DTYPE: tl.constexpr):
    """Return the low (`part` 0) or high (1) halves of bytes as numbers. `scales` are bytes, of `packed`'s shape.

    A value's three low bits are the exponent and the mantissa of a float16 that is 2^14 times smaller."""
    value = (packed.to(tl.int16) >> (4 * part)) & 15
    halves = ((value & 7) << 9) | ((value & 8) << 12)
    power = tl.minimum(scales.to(tl.int32) + 14, 254) << 23
    return (halves.to(tl.float16, bitcast=True).to(tl.float32) * power.to(tl.float32, bitcast=True)).to(DTYPE)


# Of four bytes $4 in the order 0, 2, 1, 3, a mask takes the same half of two bytes that become a pair of bfloat16. A
# product moves the sign to bit 15, and the exponent and the mantissa to bits 8 to 6. That is the value times 2^-126.
_UNPACK_PAIRS = tl.constexpr("""{
.reg .b32 bytes, above, pair, power;
mov.b32 power, 0x7E007E00;
prmt.b32 bytes, $4, $4, 0x3120;
shr.u32 above, bytes, 8;
and.b32 pair, bytes, 0x000F000F;
mul.lo.u32 pair, pair, 0x1040;
and.b32 pair, pair, 0x81C081C0;
mul.bf16x2 pair, pair, power;
mul.bf16x2 $0, pair, $5;
and.b32 pair, above, 0x000F000F;
mul.lo.u32 pair, pair, 0x1040;
and.b32 pair, pair, 0x81C081C0;
mul.bf16x2 pair, pair, power;
mul.bf16x2 $1, pair, $6;
and.b32 pair, bytes, 0x00F000F0;
mul.lo.u32 pair, pair, 0x0104;
and.b32 pair, pair, 0x81C081C0;
mul.bf16x2 pair, pair, power;
mul.bf16x2 $2, pair, $5;
and.b32 pair, above, 0x00F000F0;
mul.lo.u32 pair, pair, 0x0104;
and.b32 pair, pair, 0x81C081C0;
mul.bf16x2 pair, pair, power;
mul.bf16x2 $3, pair, $6;
}""")


@triton.jit
def _paired_numbers_of(packed, scales):
    """Return the low and the high halves of bytes as numbers, bfloat16: exact if the scale is below 254. `scales` are
    bytes, of `packed`'s shape. The interpreter cannot do this."""
    power = ((scales.to(tl.int16) + 1) << 7).to(tl.bfloat16, bitcast=True)  # 2^(scale - 126)
    return tl.inline_asm_elementwise(
        _UNPACK_PAIRS, "=r,=r,=r,=r,r,r,r", [packed, power], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@triton.jit
def _write_products(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, pairs_ptr, expert, num_active, out_size, row_size, x_stride,
    scale_stride, limit, alpha, offset,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALF: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    IS_WEIGHT_LEFT: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the products of one block of pairs, `pairs_ptr` [BLOCK_M]. Other arguments as for `_packed_kernel`."""
    if pairs_ptr is not None:
        pairs = tl.load(pairs_ptr + tl.arange(0, BLOCK_M))
    else:
        pairs = tl.where(tl.arange(0, BLOCK_M) == 0, tl.program_id(1), -1)
    is_m = pairs >= 0
    rows = (tl.maximum(pairs, 0) // num_active).to(tl.int64)
    weight_rows = expert * out_size + rows_of_expert(out_size, BLOCK_N, IS_GATED)
    k = tl.arange(0, BLOCK_K)
    groups = tl.arange(0, BLOCK_K // HALF)
    x_at = x_ptr + rows[:, None] * x_stride + (k // HALF * (2 * HALF) + k % HALF)[None, :]
    weight_at = weight_ptr + weight_rows[:, None] * row_size + k[None, :]
    scales_at = scales_ptr + weight_rows[:, None] * scale_stride + groups[None, :]
    y = tl.zeros((BLOCK_N, BLOCK_M) if IS_WEIGHT_LEFT else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, row_size, BLOCK_K):
        is_k = (start + k < row_size)[None, :]
        low_x = tl.load(x_at + 2 * start, mask=is_m[:, None] & is_k, other=0.0)
        high_x = tl.load(x_at + 2 * start + HALF, mask=is_m[:, None] & is_k, other=0.0)
        packed = tl.load(weight_at + start, mask=is_k, other=0)
        is_group = (start // HALF + groups < scale_stride)[None, :]  # groups beyond the row have no weights
        scales = tl.load(scales_at + start // HALF, mask=is_group, other=0)
        scales = tl.broadcast_to(scales[:, :, None], (BLOCK_N, BLOCK_K // HALF, HALF))
        scales = tl.reshape(scales, (BLOCK_N, BLOCK_K))
        if IS_PAIRED:
            low, high = _paired_numbers_of(packed, scales)
        else:
            low = _numbers_of(packed, scales, 0, low_x.dtype)
            high = _numbers_of(packed, scales, 1, low_x.dtype)
        if IS_WEIGHT_LEFT:
            y = tl.dot(low, low_x.T, y, input_precision="ieee")
            y = tl.dot(high, high_x.T, y, input_precision="ieee")
        else:
            y = tl.dot(low_x, low.T, y, input_precision="ieee")
            y = tl.dot(high_x, high.T, y, input_precision="ieee")
    if DEPENDENT:
        gdc_launch_dependents()
    if IS_WEIGHT_LEFT:
        y = y.T
    store_sums(
        y, bias_ptr, weight_rows, out_ptr, pairs, out_size, limit, alpha, offset, BLOCK_M, BLOCK_N, IS_GATED, IS_CLAMPED
    )


@triton.jit(do_not_specialize=["num_active"])
def _packed_kernel(
    x_ptr,  # [num_rows, in_size] or [num_pairs, in_size]
    weight_ptr,  # [num_experts * out_size, row_size] bytes
    scales_ptr,  # [num_experts * out_size, row_size / HALF] bytes
    bias_ptr,  # [num_experts * out_size]; None: there is none
    out_ptr,  # [num_pairs, out_size, or half of it if the product is gated], written
    pairs_ptr,  # [num_blocks * BLOCK_M] int32; None: block i is pair i
    experts_ptr,  # [num_blocks] int32 or int64
    num_active,  # pairs of a row of x
    num_experts,
    out_size,
    row_size,
    x_stride,
    scale_stride,  # at least row_size / HALF
    limit,
    alpha,
    offset,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # bytes
    HALF: tl.constexpr,  # bytes that share a scale
    HAS_HALVES: tl.constexpr,  # a block whose second half is empty is multiplied as a smaller one
    IS_PAIRED: tl.constexpr,  # unpack two weights at once; only to bfloat16
    IS_WEIGHT_LEFT: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (blocks of rows of W, blocks of pairs)."""
    if DEPENDENT:
        gdc_wait()
    expert = tl.load(experts_ptr + tl.program_id(1)).to(tl.int64)
    own_pairs_ptr = pairs_ptr
    is_half = False
    if pairs_ptr is not None:
        own_pairs_ptr += tl.program_id(1) * BLOCK_M
    if HAS_HALVES:
        is_half = tl.load(own_pairs_ptr + BLOCK_M // 2) < 0
    if expert < num_experts:
        if is_half:
            _write_products(
                x_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, own_pairs_ptr, expert, num_active, out_size, row_size,
                x_stride, scale_stride, limit, alpha, offset, BLOCK_M // 2, BLOCK_N, BLOCK_K, HALF, IS_PAIRED,
                IS_WEIGHT_LEFT, IS_GATED, IS_CLAMPED, DEPENDENT,
            )  # fmt: skip
        else:
            _write_products(
                x_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, own_pairs_ptr, expert, num_active, out_size, row_size,
                x_stride, scale_stride, limit, alpha, offset, BLOCK_M, BLOCK_N, BLOCK_K, HALF, IS_PAIRED,
                IS_WEIGHT_LEFT, IS_GATED, IS_CLAMPED, DEPENDENT,
            )  # fmt: skip
