"""Products of blocks of pairs with MXFP4 weights of their experts, on a GPU.

The weights stay packed in memory. A program unpacks its bytes to x's dtype, and multiplies even and odd columns one
after the other.
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
from .experts import ExpertWeight, Places
from .silu import SwigluClamp
from .triton_silu import clamped_silu_mul_of, silu_mul_of

MAX_SMALL = 32  # pairs of a block that few threads multiply


def packed_product(
    x: Tensor,
    x_scales: Tensor | None,
    weight: ExpertWeight,
    places: Places,
    out: Tensor,
    *,
    is_gated: bool,
    clamp: SwigluClamp | None = None,
) -> None:
    """Write the products of all pairs to `out` [num_pairs, size]. Other arguments as for `experts_linear`."""
    assert weight.scales is not None and x_scales is None, (weight.scales, x_scales)
    num_pairs, block, size = places.chosen.numel(), places.block, out.shape[1]
    out_size, row_size = len(weight.values) // places.num_experts, weight.values.shape[1]
    tiles, launch = tiles_of(block, x.element_size())
    limit, alpha = clamp or (0.0, 0.0)
    dependent = gpu.dependent_launch(len(places.chosen))
    _packed_kernel[triton.cdiv(size, tiles["BLOCK_N"]), len(places.experts)](
        x, weight.values, weight.scales, weight.bias, out, places.pairs, places.experts, num_pairs // len(x),
        places.num_experts, size, out_size, row_size, x.stride(0), weight.scales.shape[1], limit, alpha, **tiles,
        IS_GATED=is_gated, IS_CLAMPED=clamp is not None, GROUP=weight.group, DEPENDENT=dependent, **launch,
        launch_pdl=dependent,
    )  # fmt: skip


def tiles_of(block: int, item_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of the tiles of a product in blocks of `block` pairs, and how its programs are launched.
    `item_size` are the bytes of a number of x."""
    if item_size == 4:
        return {"BLOCK_M": block, "BLOCK_N": 64, "BLOCK_K": 32}, {"num_warps": 4, "num_stages": 3}
    if block <= MAX_SMALL:
        return {"BLOCK_M": block, "BLOCK_N": 64, "BLOCK_K": 64}, {"num_warps": 4, "num_stages": 4}
    return {"BLOCK_M": block, "BLOCK_N": 128, "BLOCK_K": 64}, {"num_warps": 8, "num_stages": 3}


@triton.jit
def _numbers_of(packed, scales, part: tl.constexpr):
    """Return the even (`part` 0) or odd (1) columns of bytes as mxfp4.py says, float32. `scales` are bytes, of
    `packed`'s shape.

    A value's three low bits are the exponent and the mantissa of a float16 that is 2^14 times smaller."""
    value = (packed.to(tl.int16) >> (4 * part)) & 15
    halves = ((value & 7) << 9) | ((value & 8) << 12)
    power = tl.minimum(scales.to(tl.int32) + 14, 254) << 23
    return halves.to(tl.float16, bitcast=True).to(tl.float32) * power.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_active"])
def _packed_kernel(
    x_ptr,  # [num_rows, in_size] or [num_pairs, in_size]
    weight_ptr,  # [num_experts * out_size, row_size] bytes
    scales_ptr,  # [num_experts * out_size, num_groups] bytes
    bias_ptr,  # [num_experts * out_size]; None: there is none
    out_ptr,  # [num_pairs, size], written
    pairs_ptr,  # [num_blocks * BLOCK_M] int32
    experts_ptr,  # [num_blocks] int32
    num_active,  # pairs of a row of x
    num_experts,
    size,
    out_size,
    row_size,
    x_stride,
    num_groups,
    limit,
    alpha,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # bytes
    IS_GATED: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale
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
        is_n = n < size
        weight_rows = expert * out_size + tl.minimum(n, size - 1)
        k = tl.arange(0, BLOCK_K)
        y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for start in range(0, row_size, BLOCK_K):
            is_k = start + k < row_size
            x_at = x_ptr + rows[None, :] * x_stride + 2 * (start + k)[:, None]
            even = tl.load(x_at, mask=is_m[None, :] & is_k[:, None], other=0.0)
            odd = tl.load(x_at + 1, mask=is_m[None, :] & is_k[:, None], other=0.0)
            at = weight_ptr + weight_rows[:, None] * row_size + (start + k)[None, :]
            is_read = is_n[:, None] & is_k[None, :]
            for half in tl.static_range(2 if IS_GATED else 1):
                weight = tl.load(at + half * size * row_size, mask=is_read, other=0)
                scale_at = scales_ptr + (weight_rows + half * size)[:, None] * num_groups
                scale = tl.load(scale_at + ((start + k) * 2 // GROUP)[None, :], mask=is_read, other=0)
                part = tl.dot(_numbers_of(weight, scale, 0).to(even.dtype), even, input_precision="ieee")
                part = tl.dot(_numbers_of(weight, scale, 1).to(odd.dtype), odd, part, input_precision="ieee")
                if half == 0:
                    y += part
                else:
                    up += part
        if DEPENDENT:
            gdc_launch_dependents()
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
        tl.store(out_at, y, mask=is_n[:, None] & is_m[None, :])
