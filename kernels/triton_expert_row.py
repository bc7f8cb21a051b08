"""`experts_of_row` of kernels/experts.py on a GPU: all experts of one row, in two launches without tensor cores.

    first     inner = the gated product of each pair: a program has a few rows of one expert
    second    the products of all pairs, times their shares: a program has the same few rows of all chosen experts

One row's experts are different, so that nothing is placed. A program loads its rows of W whole, multiplies them by the
row of x, and sums. If the rows of x are rounded to FP8, each program does it, to the same numbers.

With a dependent launch (gpu.py) the second kernel loads its weights while the first one still runs.
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
from .experts import ExpertWeight
from .fp8 import BLOCK
from .silu import SwigluClamp
from .triton_fp8 import e4m3
from .triton_silu import clamped_silu_mul_of, silu_mul_of


class RowTiles(NamedTuple):
    """How many rows of W a program has, and how many warps."""

    block_n: int  # of each half if the product is gated; of each expert if it is summed
    num_warps: int

    @classmethod
    def choose(cls, in_size: int, num_at_once: int, item_size: int) -> RowTiles:
        """Return the tiles of a product whose program has the rows of `num_at_once` matrices. Measured on an H200."""
        row = triton.next_power_of_2(in_size) * num_at_once * item_size
        return cls(max(1, 32768 // row), 4 if row <= 32768 else 8)


def experts_of_row(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    num_experts: int,
    *,
    is_rounded: bool = False,
    has_power_of_two_scales: bool = False,
    clamp: SwigluClamp | None = None,
    tiles: tuple[RowTiles, RowTiles] | None = None,
) -> Tensor:
    """Return `experts_of_row_ref`: sums in another order."""
    num_active, size, inner_size = chosen.shape[1], x.shape[1], down.values.shape[1]
    assert len(x) == 1 and chosen.shape == shares.shape, (x.shape, chosen.shape, shares.shape)
    assert gate_up.values.shape == (num_experts * 2 * inner_size, size), gate_up.values.shape
    assert down.values.shape == (num_experts * size, inner_size), down.values.shape
    inner = torch.empty((num_active, inner_size), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    active = triton.next_power_of_2(num_active)
    item_size = gate_up.values.element_size()
    if tiles is None:
        tiles = RowTiles.choose(size, 2, item_size), RowTiles.choose(inner_size, active, item_size)
    limit, alpha = clamp or (0.0, 0.0)
    dependent = gpu.dependent_launch(1)
    common = {
        "IS_ROUNDED": is_rounded,
        "IS_POWER": has_power_of_two_scales,
        "DEPENDENT": dependent,
        "launch_pdl": dependent,
    }
    _gated_kernel[triton.cdiv(inner_size, tiles[0].block_n), num_active](
        x, gate_up.values, gate_up.scales, gate_up.bias, inner, chosen, inner_size, limit, alpha, K=size,
        WIDTH=triton.next_power_of_2(size), **_groups(gate_up), BLOCK_N=tiles[0].block_n,
        IS_CLAMPED=clamp is not None, num_warps=tiles[0].num_warps, **common,
    )  # fmt: skip
    _summed_kernel[triton.cdiv(size, tiles[1].block_n),](
        inner, down.values, down.scales, down.bias, out, chosen, shares, num_active, size, K=inner_size,
        WIDTH=triton.next_power_of_2(inner_size), **_groups(down), ACTIVE=active, BLOCK_N=tiles[1].block_n,
        num_warps=tiles[1].num_warps, **common,
    )  # fmt: skip
    return out


def _groups(weight: ExpertWeight) -> dict[str, int]:
    """Return which numbers of a weight share a scale."""
    scales, in_size = weight.scales, weight.values.shape[1]
    if scales is None:
        return {"GROUP": triton.next_power_of_2(in_size), "ROWS": 1}
    group = BLOCK if scales.shape[1] > 1 else triton.next_power_of_2(in_size)
    return {"GROUP": group, "ROWS": 1 if len(scales) == len(weight.values) else BLOCK}


@triton.jit
def _wide(values):
    """Return float32 numbers."""
    if values.dtype == tl.float8e4nv:
        values = values.to(tl.float16)
    return values.to(tl.float32)


@triton.jit
def _rounded(x, GROUP: tl.constexpr, IS_POWER: tl.constexpr):
    """Round rows [M, WIDTH] float32 as `round_rows` does. Return the values, float32, and the scales [M, groups]."""
    groups: tl.constexpr = x.shape[1] // GROUP
    x_groups = tl.reshape(x, (x.shape[0], groups, GROUP))
    largest = tl.max(tl.abs(x_groups), 2)
    scales = tl.where(largest > 0, tl.div_rn(largest, 448.0), 1.0)
    if IS_POWER:
        bits = scales.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFFF) & -0x800000  # the next power of two
        scales = bits.to(tl.float32, bitcast=True)
    values = _wide(e4m3(tl.div_rn(x_groups, scales[:, :, None])))
    return tl.reshape(values, (x.shape[0], x.shape[1])), scales


@triton.jit
def _sums_of(weight, x, x_scales, scales_ptr, rows, K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return the products of rows of W [M, N, WIDTH] and rows of x [M, WIDTH] float32 with scales [M, groups]: [M, N].
    `rows` [M, N] are those of W."""
    products = _wide(weight) * x[:, None, :]
    if scales_ptr is None:
        return tl.sum(products, 2)
    else:
        groups: tl.constexpr = x.shape[1] // GROUP
        num_groups: tl.constexpr = (K + GROUP - 1) // GROUP
        group = tl.arange(0, groups)
        scales_at = scales_ptr + (rows // ROWS)[:, :, None] * num_groups + group[None, None, :]
        scales = tl.load(scales_at, mask=(group < num_groups)[None, None, :], other=0.0)
        parts = tl.sum(tl.reshape(products, (rows.shape[0], rows.shape[1], groups, GROUP)), 3)
        return tl.sum(parts * scales * x_scales[:, None, :], 2)


@triton.jit
def _gated_kernel(
    x_ptr,  # [1, K]
    weight_ptr,  # [num_experts * 2 * size, K]
    scales_ptr,  # [num_experts * 2 * size / ROWS, ceil(K / GROUP)] float32; None: the weight is plain
    bias_ptr,  # [num_experts * 2 * size]; None: there is none
    out_ptr,  # [num_active, size], written
    chosen_ptr,  # [1, num_active] int64
    size,
    limit,
    alpha,
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # at least K
    GROUP: tl.constexpr,  # columns of a scale
    ROWS: tl.constexpr,  # of a scale
    BLOCK_N: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    IS_POWER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (ceil(size / BLOCK_N), num_active)."""
    pair = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, WIDTH)
    is_k = (k < K)[None, :]
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()  # `chosen` is complete, as the next kernel asks
    rows = tl.load(chosen_ptr + pair) * 2 * size + tl.minimum(n, size - 1)[None, :]  # [1, BLOCK_N]
    at = weight_ptr + rows[:, :, None] * K + k[None, None, :]
    gate_weight = tl.load(at, mask=is_k[:, None, :], other=0.0, eviction_policy="evict_first")
    up_weight = tl.load(at + size * K, mask=is_k[:, None, :], other=0.0, eviction_policy="evict_first")
    x = tl.load(x_ptr + k[None, :], mask=is_k, other=0.0).to(tl.float32)
    x_scales = tl.full((1, WIDTH // GROUP), 1.0, dtype=tl.float32)
    if IS_ROUNDED:
        x, x_scales = _rounded(x, GROUP, IS_POWER)
    y = _sums_of(gate_weight, x, x_scales, scales_ptr, rows, K, GROUP, ROWS)
    up = _sums_of(up_weight, x, x_scales, scales_ptr, rows + size, K, GROUP, ROWS)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows).to(tl.float32)
        up += tl.load(bias_ptr + rows + size).to(tl.float32)
    if IS_CLAMPED:
        y = clamped_silu_mul_of(y, up, limit, alpha).to(out_ptr.dtype.element_ty)
    else:
        y = y.to(out_ptr.dtype.element_ty)
        y = silu_mul_of(y, up.to(y.dtype))
    tl.store(out_ptr + pair.to(tl.int64) * size + n[None, :], y, mask=(n < size)[None, :])


@triton.jit
def _summed_kernel(
    x_ptr,  # [num_active, K]
    weight_ptr,  # [num_experts * size, K]
    scales_ptr,  # [num_experts * size / ROWS, ceil(K / GROUP)] float32; None: the weight is plain
    bias_ptr,  # [num_experts * size]; None: there is none
    out_ptr,  # [1, size], written
    chosen_ptr,  # [1, num_active] int64
    shares_ptr,  # [1, num_active] float32
    num_active,
    size,
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # at least K
    GROUP: tl.constexpr,  # columns of a scale
    ROWS: tl.constexpr,  # of a scale
    ACTIVE: tl.constexpr,  # at least num_active
    BLOCK_N: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    IS_POWER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (ceil(size / BLOCK_N),). What the kernel before the last one wrote is complete when this one starts."""
    pair = tl.arange(0, ACTIVE)
    is_pair = pair < num_active
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, WIDTH)
    is_x = is_pair[:, None] & (k < K)[None, :]
    expert = tl.load(chosen_ptr + pair, mask=is_pair, other=0)
    share = tl.load(shares_ptr + pair, mask=is_pair, other=0.0)
    rows = (expert * size)[:, None] + tl.minimum(n, size - 1)[None, :]  # [ACTIVE, BLOCK_N]
    at = weight_ptr + rows[:, :, None] * K + k[None, None, :]
    weight = tl.load(at, mask=is_x[:, None, :], other=0.0, eviction_policy="evict_first")
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + pair[:, None] * K + k[None, :], mask=is_x, other=0.0).to(tl.float32)
    x_scales = tl.full((ACTIVE, WIDTH // GROUP), 1.0, dtype=tl.float32)
    if IS_ROUNDED:
        x, x_scales = _rounded(x, GROUP, IS_POWER)
    y = _sums_of(weight, x, x_scales, scales_ptr, rows, K, GROUP, ROWS)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows).to(tl.float32)
    y = y.to(out_ptr.dtype.element_ty).to(tl.float32) * share[:, None]
    tl.store(out_ptr + n, tl.sum(y, 0).to(out_ptr.dtype.element_ty), mask=n < size)
