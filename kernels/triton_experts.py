"""`experts_linear`, `gated_experts_linear` and `mix_parts` of kernels/experts.py on a GPU.

A program of a product multiplies one block of pairs, all of one expert, by some rows of that expert's weight. FP8
numbers are multiplied as in triton_fp8.py: as float16 in small blocks, by FP8 tensor cores in large ones. MXFP4 stays
packed in memory: a program unpacks its bytes to x's dtype, and multiplies even and odd columns one after the other.
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
from .experts import ExpertWeight, Places
from .fp8 import BLOCK, E4M3
from .silu import SwigluClamp
from .triton_silu import silu_mul_of

MAX_SMALL = 32  # pairs of a block whose products are those of float16, if they are of FP8
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MIX_BLOCK = 1024


def serves(
    x: Tensor,
    x_scales: Tensor | None,
    weight: ExpertWeight,
    places: Places,
    dtype: torch.dtype,
    clamp: SwigluClamp | None = None,
) -> bool:
    """Return whether the products take these tensors."""
    del places, dtype, clamp
    if x.stride(1) != 1 or not weight.values.is_contiguous():
        return False
    if weight.is_packed:
        return x.dtype in _FLOATS and x_scales is None
    if weight.scales is None:
        return x.dtype == weight.values.dtype and x.dtype in _FLOATS
    is_whole = weight.scales.shape[1] == 1 and (x_scales is None or x_scales.shape[1] == 1)
    return x.dtype in (E4M3, torch.bfloat16, torch.float16) and (is_whole or weight.group == BLOCK)


def experts_linear(
    x: Tensor, x_scales: Tensor | None, weight: ExpertWeight, places: Places, dtype: torch.dtype
) -> Tensor:
    """Return `experts_linear_ref`: sums in another order."""
    return _product(x, x_scales, weight, places, dtype, is_gated=False)


def gated_experts_linear(
    x: Tensor,
    x_scales: Tensor | None,
    weight: ExpertWeight,
    places: Places,
    dtype: torch.dtype,
    clamp: SwigluClamp | None = None,
) -> Tensor:
    """Return `gated_experts_linear_ref`: sums in another order."""
    return _product(x, x_scales, weight, places, dtype, is_gated=True, clamp=clamp)


def _product(
    x: Tensor,
    x_scales: Tensor | None,
    weight: ExpertWeight,
    places: Places,
    dtype: torch.dtype,
    *,
    is_gated: bool,
    clamp: SwigluClamp | None = None,
) -> Tensor:
    num_pairs, block = places.chosen.numel(), places.block
    out_size, row_size = len(weight.values) // places.num_experts, weight.values.shape[1]
    assert x.shape[1] == row_size * (2 if weight.is_packed else 1), (x.shape, weight.values.shape)
    size = out_size // 2 if is_gated else out_size
    out = torch.empty((num_pairs, size), dtype=dtype, device=x.device)
    if not num_pairs:
        return out
    scales, is_fp8 = weight.scales, weight.scales is not None and not weight.is_packed
    num_groups = 1 if scales is None else scales.shape[1]
    tiles, launch = tiles_of(block, is_scaled=is_fp8, is_packed=weight.is_packed)
    limit, alpha = clamp or (0.0, 0.0)
    dependent = gpu.dependent_launch(len(places.chosen))
    _product_kernel[len(places.experts), triton.cdiv(size, tiles["BLOCK_N"])](
        x, x if x_scales is None else x_scales, weight.values, weight.values if scales is None else scales,
        weight.bias, out, places.pairs, places.experts, num_pairs // len(x), places.num_experts, size, out_size,
        row_size, x.stride(0), num_groups, limit, alpha,
        ROWS=1 if scales is None or len(scales) == len(weight.values) else BLOCK, **tiles,
        IS_SCALED=is_fp8, IS_GROUPED=is_fp8 and num_groups > 1, HAS_X_SCALES=x_scales is not None,
        IS_GATED=is_gated, IS_CLAMPED=clamp is not None, PACKED_GROUP=weight.group if weight.is_packed else 0,
        IS_FP8=x.dtype == E4M3 and block > MAX_SMALL, DEPENDENT=dependent, **launch, launch_pdl=dependent,
    )  # fmt: skip
    return out


def tiles_of(block: int, *, is_scaled: bool, is_packed: bool = False) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of the tiles of a product in blocks of `block` pairs, and how its programs are launched."""
    if block <= MAX_SMALL:
        block_k = BLOCK // 2 if is_packed else BLOCK  # bytes if packed
        return {"BLOCK_M": block, "BLOCK_N": 64, "BLOCK_K": block_k}, {"num_warps": 4, "num_stages": 4}
    block_k = BLOCK if is_scaled else 64
    return {"BLOCK_M": block, "BLOCK_N": 128, "BLOCK_K": block_k}, {"num_warps": 8, "num_stages": 3}


def serves_mix(parts: Tensor, shares: Tensor, others: Tensor | None = None) -> bool:
    """Return whether `mix_parts` takes these tensors."""
    return parts.is_contiguous() and shares.is_contiguous() and (others is None or others.is_contiguous())


def mix_parts(parts: Tensor, shares: Tensor, others: Tensor | None = None) -> Tensor:
    """Return `mix_parts_ref`, bit by bit but for fused multiply-adds."""
    (num_rows, num_active), size = shares.shape, parts.shape[1]
    assert others is None or others.shape[-2:] == (num_rows, size), (others.shape, num_rows, size)
    out = torch.empty((num_rows, size), dtype=parts.dtype, device=parts.device)
    if out.numel():
        num_others = 0 if others is None else 1 if others.ndim == 2 else len(others)
        dependent = gpu.dependent_launch(num_rows)
        _mix_kernel[num_rows, triton.cdiv(size, _MIX_BLOCK)](
            parts, shares, others, out, size, ACTIVE=num_active, OTHERS=num_others, BLOCK=_MIX_BLOCK,
            DEPENDENT=dependent, launch_pdl=dependent,
        )  # fmt: skip
    return out


@triton.jit
def _numbers_of(packed, scales, part: tl.constexpr):
    """Return the even (`part` 0) or odd (1) columns of bytes as mxfp4.py says, float32. `scales` are bytes, of
    `packed`'s shape.

    A value's three low bits are the exponent and the mantissa of a float16 that is 2^14 times smaller."""
    value = (packed.to(tl.int16) >> (4 * part)) & 15
    halves = ((value & 7) << 9) | ((value & 8) << 12)
    power = tl.minimum(scales.to(tl.int32) + 14, 254) << 23
    return halves.to(tl.float16, bitcast=True).to(tl.float32) * power.to(tl.float32, bitcast=True)


@triton.jit
def _clamped_silu_mul_of(gate, up, limit, alpha):
    """Return `clamped_silu_mul` of two float32 tiles of one shape."""
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return (up + 1.0) * tl.div_rn(gate, 1.0 + tl.exp(-alpha * gate))


@triton.jit(do_not_specialize=["num_active"])
def _product_kernel(
    x_ptr,  # [num_rows, in_size] or [num_pairs, in_size]
    x_scales_ptr,  # [num_rows or num_pairs, num_groups] float32
    weight_ptr,  # [num_experts * out_size, row_size]
    scales_ptr,  # [num_experts * out_size / ROWS, num_groups] float32, or bytes if packed
    bias_ptr,  # [num_experts * out_size]; None: there is none
    out_ptr,  # [num_pairs, size], written
    pairs_ptr,  # [num_blocks * BLOCK_M] int32
    experts_ptr,  # [num_blocks] int32
    num_active,  # pairs of a row of x
    num_experts,
    size,
    out_size,
    row_size,  # numbers of a row, or bytes if packed
    x_stride,
    num_groups,
    limit,
    alpha,
    ROWS: tl.constexpr,  # of a scale
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_GROUPED: tl.constexpr,  # a scale belongs to BLOCK_K columns; else to all of them
    HAS_X_SCALES: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    PACKED_GROUP: tl.constexpr,  # columns that share a scale, if a byte has two (MXFP4); 0: it is not packed
    IS_FP8: tl.constexpr,  # multiply by FP8 tensor cores
    DEPENDENT: tl.constexpr,
):
    """Grid: (blocks of pairs, blocks of rows of W). Works on y^T = W x^T, [BLOCK_N, BLOCK_M]."""
    if DEPENDENT:
        gdc_wait()
    expert = tl.load(experts_ptr + tl.program_id(0)).to(tl.int64)
    if expert < num_experts:
        m = tl.arange(0, BLOCK_M)
        pairs = tl.load(pairs_ptr + tl.program_id(0) * BLOCK_M + m)
        is_m = pairs >= 0
        rows = (tl.maximum(pairs, 0) // num_active).to(tl.int64)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_n = n < size
        weight_rows = expert * out_size + tl.minimum(n, size - 1)
        k = tl.arange(0, BLOCK_K)
        y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for start in range(0, row_size, BLOCK_K):
            is_k = start + k < row_size
            if PACKED_GROUP > 0:
                x_at = x_ptr + rows[None, :] * x_stride + 2 * (start + k)[:, None]
                odd = tl.load(x_at + 1, mask=is_m[None, :] & is_k[:, None], other=0.0)
            else:
                x_at = x_ptr + rows[None, :] * x_stride + (start + k)[:, None]
            x = tl.load(x_at, mask=is_m[None, :] & is_k[:, None], other=0.0)
            at = weight_ptr + weight_rows[:, None] * row_size + (start + k)[None, :]
            group = start // BLOCK_K
            x_scale = tl.full((1, BLOCK_M), 1.0, dtype=tl.float32)
            if IS_GROUPED and HAS_X_SCALES:
                x_scale = tl.load(x_scales_ptr + rows * num_groups + group, mask=is_m, other=0.0)[None, :]
            for half in tl.static_range(2 if IS_GATED else 1):
                is_read = is_n[:, None] & is_k[None, :]
                if PACKED_GROUP > 0:
                    weight = tl.load(at + half * size * row_size, mask=is_read, other=0)
                    scale_at = scales_ptr + (weight_rows + half * size)[:, None] * num_groups
                    scale_at += ((start + k) * 2 // PACKED_GROUP)[None, :]
                    scale = tl.load(scale_at, mask=is_read, other=0)
                    part = tl.dot(_numbers_of(weight, scale, 0).to(x.dtype), x, input_precision="ieee")
                    part = tl.dot(_numbers_of(weight, scale, 1).to(x.dtype), odd, part, input_precision="ieee")
                else:
                    weight = tl.load(at + half * size * row_size, mask=is_read, other=0.0)
                    if IS_SCALED and not IS_FP8:  # both are exact
                        dtype = tl.float16 if x.dtype == tl.float8e4nv else x.dtype
                        part = tl.dot(weight.to(tl.float16).to(dtype), x.to(dtype))
                    else:
                        part = tl.dot(weight, x, input_precision="ieee")
                if IS_GROUPED:
                    scale_rows = (weight_rows + half * size) // ROWS
                    part *= x_scale * tl.load(scales_ptr + scale_rows * num_groups + group)[:, None]
                if half == 0:
                    y += part
                else:
                    up += part
        if DEPENDENT:
            gdc_launch_dependents()
        if IS_SCALED and not IS_GROUPED:
            scale = tl.full((1, BLOCK_M), 1.0, dtype=tl.float32)
            if HAS_X_SCALES:
                scale = tl.load(x_scales_ptr + rows * num_groups, mask=is_m, other=0.0)[None, :]
            y *= scale * tl.load(scales_ptr + weight_rows // ROWS * num_groups)[:, None]
            if IS_GATED:
                up *= scale * tl.load(scales_ptr + (weight_rows + size) // ROWS * num_groups)[:, None]
        if bias_ptr is not None:
            y += tl.load(bias_ptr + weight_rows).to(tl.float32)[:, None]
            if IS_GATED:
                up += tl.load(bias_ptr + weight_rows + size).to(tl.float32)[:, None]
        if IS_CLAMPED:
            y = _clamped_silu_mul_of(y, up, limit, alpha)
        y = y.to(out_ptr.dtype.element_ty)
        if IS_GATED and not IS_CLAMPED:
            y = silu_mul_of(y, up.to(y.dtype))
        out_at = out_ptr + tl.maximum(pairs, 0).to(tl.int64)[None, :] * size + n[:, None]
        tl.store(out_at, y, mask=is_n[:, None] & is_m[None, :])


@triton.jit
def _mix_kernel(
    parts_ptr,  # [num_rows * ACTIVE, size]
    shares_ptr,  # [num_rows, ACTIVE] float32
    others_ptr,  # [OTHERS, num_rows, size]; None: there are none
    out_ptr,  # [num_rows, size], written
    size,
    ACTIVE: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_rows, ceil(size / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < size
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in tl.static_range(ACTIVE):
        part = tl.load(parts_ptr + (row * ACTIVE + place) * size + columns, mask=is_in, other=0.0).to(tl.float32)
        y += part * tl.load(shares_ptr + row * ACTIVE + place)
    for other in tl.static_range(OTHERS):
        at = (other * tl.num_programs(0) + row) * size + columns
        y += tl.load(others_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + columns, y.to(out_ptr.dtype.element_ty), mask=is_in)
