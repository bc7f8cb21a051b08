"""`experts_of_row` of kernels/experts.py on a GPU: all experts of one row, in two launches without tensor cores.

    first     inner = the gated product of each pair: a program has a few rows of one expert
    second    the products of all pairs, times their shares: a program has the same few rows of all chosen experts

One row's experts are different, so that nothing is placed. A program loads its rows of W whole, multiplies them by the
row of x, and sums. If rows are rounded to FP8, each program of the first rounds x itself, as there is one row. The rows
of the second are rounded by a launch between the two.

MXFP4 weights pass through tensor cores (triton_expert_packed.py), in three launches.

With a dependent launch (gpu.py) the second kernel loads its weights while the first one still runs.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import gpu
from .experts import ExpertWeight, mix_parts
from .fp8 import BLOCK, round_rows
from .silu import SwigluClamp
from .triton_expert_packed import PackedTiles, packed_product, places_of_row
from .triton_fp8_rows import e4m3, quotients, scales_for
from .triton_silu import clamped_silu_mul_of, silu_mul_of

_BYTES = 16384  # of W that a program reads, if a row is shorter; the fastest on an H100


class RowTiles(NamedTuple):
    """How many rows of W a program has, and how many warps."""

    block_n: int  # of each half if the product is gated; of each expert if it is summed
    num_warps: int

    @classmethod
    def choose(cls, in_size: int, num_at_once: int, item_size: int) -> RowTiles:
        """Return the tiles of a product whose program has the rows of `num_at_once` matrices."""
        num_bytes = triton.next_power_of_2(in_size) * num_at_once * item_size
        return cls(max(1, _BYTES // num_bytes), 8 if num_bytes <= 4 * _BYTES else 16)


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
    others: Tensor | None = None,
    tiles: tuple[RowTiles, RowTiles] | None = None,
    packed_tiles: PackedTiles | None = None,
) -> Tensor:
    """Return `experts_of_row_ref`: sums in another order."""
    if gate_up.is_packed:
        assert down.is_packed and not is_rounded, (down.values.dtype, is_rounded)
        return _packed_row(x, chosen, shares, gate_up, down, num_experts, clamp, others, packed_tiles)
    num_active, size, inner_size = chosen.shape[1], x.shape[1], down.values.shape[1]
    assert len(x) == 1 and chosen.shape == shares.shape, (x.shape, chosen.shape, shares.shape)
    assert chosen.is_contiguous() and shares.is_contiguous() and x.stride(1) == 1, (chosen.stride(), shares.stride())
    assert gate_up.values.shape == (num_experts * 2 * inner_size, size), gate_up.values.shape
    assert others is None or (others.is_contiguous() and others.shape[-2:] == (1, size)), others.shape
    assert down.values.shape == (num_experts * size, inner_size), down.values.shape
    inner = torch.empty((num_active, inner_size), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    active = triton.next_power_of_2(num_active)
    item_size = gate_up.values.element_size()
    if tiles is None:
        tiles = RowTiles.choose(size, 2, item_size), RowTiles.choose(inner_size, active, item_size)
    limit, alpha = clamp or (0.0, 0.0)
    dependent = gpu.dependent_launch(1)
    own = {"DEPENDENT": dependent, "launch_pdl": dependent}
    _gated_kernel[triton.cdiv(inner_size, tiles[0].block_n), num_active](
        x, gate_up.values, gate_up.scales, gate_up.bias, inner, chosen, inner_size, limit, alpha, K=size,
        WIDTH=triton.next_power_of_2(size), **_groups(gate_up), BLOCK_N=tiles[0].block_n,
        IS_CLAMPED=clamp is not None, IS_ROUNDED=is_rounded, IS_POWER=has_power_of_two_scales,
        num_warps=tiles[0].num_warps, **own,
    )  # fmt: skip
    x_scales = None
    if is_rounded:
        inner, x_scales = round_rows(inner, down.group, has_power_of_two_scales=has_power_of_two_scales)
    _summed_kernel[triton.cdiv(size, tiles[1].block_n),](
        inner, x_scales, down.values, down.scales, down.bias, others, out, chosen, shares, num_active, size,
        K=inner_size, WIDTH=triton.next_power_of_2(inner_size), **_groups(down), ACTIVE=active,
        OTHERS=0 if others is None else others.numel() // size, BLOCK_N=tiles[1].block_n,
        num_warps=tiles[1].num_warps, **own,
    )  # fmt: skip
    return out


def _packed_row(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    num_experts: int,
    clamp: SwigluClamp | None,
    others: Tensor | None,
    tiles: PackedTiles | None,
) -> Tensor:
    """Return `experts_of_row` of MXFP4 weights."""
    places, num_active = places_of_row(chosen, num_experts), chosen.shape[1]
    inner = x.new_empty(num_active, 2 * down.values.shape[1])
    parts = x.new_empty(num_active, x.shape[1])
    packed_product(x, None, gate_up, places, inner, is_gated=True, clamp=clamp, tiles=tiles)
    packed_product(inner, None, down, places, parts, is_gated=False, tiles=tiles)
    return mix_parts(parts, shares, others)


def _groups(weight: ExpertWeight) -> dict[str, Any]:
    """Return which numbers of a weight share a scale."""
    scales, in_size = weight.scales, weight.values.shape[1]
    if scales is None:
        return {"GROUP": triton.next_power_of_2(in_size), "ROWS": 1}
    group = BLOCK if scales.shape[1] > 1 else triton.next_power_of_2(in_size)
    return {"GROUP": group, "ROWS": 1 if len(scales) == len(weight.values) else BLOCK}


@triton.jit
def _rounded(x, GROUP: tl.constexpr, IS_POWER: tl.constexpr):
    """Round rows [M, WIDTH] float32 as `round_rows` does. Return their values, float32, and scales [M, groups]."""
    groups: tl.constexpr = x.shape[1] // GROUP
    grouped = tl.reshape(x, (x.shape[0], groups, GROUP))
    scales = scales_for(tl.max(tl.abs(grouped), 2), IS_POWER)
    grouped = e4m3(quotients(grouped, scales[:, :, None])).to(tl.float32)
    return tl.reshape(grouped, (x.shape[0], x.shape[1])), scales


@triton.jit
def _sums_of(weight, x, x_scales, scales_ptr, rows, K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return the products of rows of W [M, N, WIDTH] and rows of x [M, WIDTH] float32 with scales [M, groups]: [M, N].
    `rows` [M, N] are the rows of all W."""
    products = weight.to(tl.float32) * x[:, None, :]
    if scales_ptr is not None:
        groups: tl.constexpr = x.shape[1] // GROUP
        group, num_groups = tl.arange(0, groups), (K + GROUP - 1) // GROUP
        scales_at = scales_ptr + (rows // ROWS)[:, :, None] * num_groups + group[None, None, :]
        scales = tl.load(scales_at, mask=(group < num_groups)[None, None, :], other=0.0) * x_scales[:, None, :]
        products = tl.sum(tl.reshape(products, (rows.shape[0], rows.shape[1], groups, GROUP)), 3) * scales
    return tl.sum(products, 2)


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
    IS_ROUNDED: tl.constexpr,  # here, to FP8
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
    x_scales_ptr,  # [num_active, ceil(K / GROUP)] float32; None: they are 1
    weight_ptr,  # [num_experts * size, K]
    scales_ptr,  # [num_experts * size / ROWS, ceil(K / GROUP)] float32; None: the weight is plain
    bias_ptr,  # [num_experts * size]; None: there is none
    others_ptr,  # [OTHERS, size]; None: there are none
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
    OTHERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
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
    if x_scales_ptr is not None:
        group, num_groups = tl.arange(0, WIDTH // GROUP), (K + GROUP - 1) // GROUP
        is_group = is_pair[:, None] & (group < num_groups)[None, :]
        x_scales = tl.load(x_scales_ptr + pair[:, None] * num_groups + group[None, :], mask=is_group, other=0.0)
    y = _sums_of(weight, x, x_scales, scales_ptr, rows, K, GROUP, ROWS)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows).to(tl.float32)
    y = tl.sum(y.to(out_ptr.dtype.element_ty).to(tl.float32) * share[:, None], 0)
    for other in tl.static_range(OTHERS):
        y += tl.load(others_ptr + other * size + n, mask=n < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < size)
