"""`gated_experts_of_row` and `experts_of_row` of experts.py on a GPU, without tensor cores.

    first     inner = the gated product of each pair: a program has a few rows of one expert
    second    the products of all pairs, times their shares: a program has the same few rows of all chosen experts

One row's experts are different, so that nothing is placed. A warp has some rows of W, which it loads whole, in chunks
of columns that its threads load at once, and sums by itself. So few threads load columns that are not there, and each
number of x is made ready once for all rows of a warp.

MXFP4 weights pass through tensor cores (triton_expert_packed.py), and their sum is a launch of its own.

With a dependent launch (gpu.py) the second kernel loads weights while the kernels before it still run.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803, N806, RUF005
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from ..formats import SwigluClamp
from ..products.fp8 import BLOCK
from ..products.triton_silu import clamped_silu_mul_of, silu_mul_of
from .experts import ExpertWeight, mix_parts, places_of_row
from .triton_expert_packed import PackedTiles, packed_product

_LOAD_BYTES = 512  # that a warp loads at once
_MOST_WARPS = 32  # of a program
_GATED_NUMBERS = 4096  # of the gate that a warp has, twice as many of 16 bits; the fastest on an H200


class RowTiles(NamedTuple):
    """How a program divides its work. It has a warp, or if it sums, a warp for each pair."""

    rows: int  # of the product for each warp; a gated one has two rows of W for each
    chunk: int  # columns that are loaded at once

    @classmethod
    def of_gated(cls, in_size: int, item_size: int) -> RowTiles:
        """Return the tiles of a gated product."""
        rows = max(1, min(8, _GATED_NUMBERS * item_size // in_size))
        return cls(1 << (rows.bit_length() - 1), min(_LOAD_BYTES // item_size, triton.next_power_of_2(in_size)))

    @classmethod
    def of_sum(cls, in_size: int, item_size: int) -> RowTiles:
        """Return the tiles of a sum of products."""
        return cls(2 if item_size == 1 else 1, min(_LOAD_BYTES // 2, triton.next_power_of_2(in_size)))


def gated_experts_of_row(
    x: Tensor,
    x_scales: Tensor | None,
    weight: ExpertWeight,
    chosen: Tensor,
    num_experts: int,
    dtype: torch.dtype,
    clamp: SwigluClamp | None = None,
    *,
    tiles: RowTiles | PackedTiles | None = None,
) -> Tensor:
    """Return `gated_experts_of_row_ref`: sums in another order."""
    num_active, size, in_size = chosen.shape[1], len(weight.values) // num_experts // 2, x.shape[1]
    inner = torch.empty((num_active, size), dtype=dtype, device=x.device)
    if weight.is_packed:
        packed = tiles if isinstance(tiles, PackedTiles) else None
        places = places_of_row(chosen, num_experts)
        packed_product(x, x_scales, weight, places, inner, is_gated=True, clamp=clamp, tiles=packed)
        return inner
    _check(x, x_scales, weight, chosen, 1)
    if not isinstance(tiles, RowTiles):
        tiles = RowTiles.of_gated(in_size, weight.values.element_size())
    limit, alpha, offset = clamp or (0.0, 0.0, 0.0)
    _gated_kernel[triton.cdiv(size, tiles.rows), num_active](
        x, x_scales, weight.values, weight.scales, weight.bias, inner, chosen, size, limit, alpha, offset, K=in_size,
        CHUNK=tiles.chunk, **_groups(weight), N=tiles.rows, IS_CLAMPED=clamp is not None, **_launch(1),
    )  # fmt: skip
    return inner


def experts_of_row(
    x: Tensor,
    x_scales: Tensor | None,
    weight: ExpertWeight,
    chosen: Tensor,
    num_experts: int,
    shares: Tensor,
    dtype: torch.dtype,
    others: Tensor | None = None,
    *,
    tiles: RowTiles | PackedTiles | None = None,
) -> Tensor:
    """Return `experts_of_row_ref`: sums in another order."""
    num_active, size, in_size = chosen.shape[1], len(weight.values) // num_experts, x.shape[1]
    if weight.is_packed:
        packed = tiles if isinstance(tiles, PackedTiles) else None
        parts = torch.empty((num_active, size), dtype=dtype, device=x.device)
        packed_product(x, x_scales, weight, places_of_row(chosen, num_experts), parts, is_gated=False, tiles=packed)
        return mix_parts(parts, shares, others)
    _check(x, x_scales, weight, chosen, num_active)
    assert shares.shape == chosen.shape and shares.is_contiguous(), (shares.shape, shares.stride())
    assert others is None or (others.is_contiguous() and others.shape[-2:] == (1, size)), others.shape
    if not isinstance(tiles, RowTiles):
        tiles = RowTiles.of_sum(in_size, weight.values.element_size())
    warps = triton.next_power_of_2(num_active)
    out = torch.empty((1, size), dtype=dtype, device=x.device)
    _summed_kernel[triton.cdiv(size, tiles.rows),](
        x, x_scales, weight.values, weight.scales, weight.bias, others, out, chosen, shares, num_active, size,
        K=in_size, CHUNK=tiles.chunk, **_groups(weight), N=tiles.rows, WARPS=warps,
        OTHERS=0 if others is None else others.numel() // size, **_launch(min(warps, _MOST_WARPS)),
    )  # fmt: skip
    return out


def _check(x: Tensor, x_scales: Tensor | None, weight: ExpertWeight, chosen: Tensor, num_rows: int) -> None:
    assert x.shape == (num_rows, weight.values.shape[1]) and x.is_contiguous(), (x.shape, weight.values.shape)
    assert len(chosen) == 1 and chosen.is_contiguous() and weight.values.is_contiguous(), chosen.shape
    assert x_scales is None or (len(x_scales) == num_rows and x_scales.is_contiguous()), x_scales.shape


def _launch(num_warps: int) -> dict[str, Any]:
    dependent = gpu.dependent_launch(1)
    return {"DEPENDENT": dependent, "launch_pdl": dependent, "num_warps": num_warps}


def _groups(weight: ExpertWeight) -> dict[str, int]:
    """Return which numbers of a weight share a scale: columns, 0 for all of them, and rows."""
    scales = weight.scales
    if scales is None:
        return {"GROUP": 0, "ROWS": 1}
    return {"GROUP": BLOCK if scales.shape[1] > 1 else 0, "ROWS": 1 if len(scales) == len(weight.values) else BLOCK}


@triton.jit
def _chunks(ptr, is_row, K: tl.constexpr, CHUNK: tl.constexpr):
    """Load rows of W at `ptr` [N, WARPS] in chunks of columns, each [N, WARPS, CHUNK]. A row that `is_row` [1, WARPS]
    denies is 0; None: there are all of them."""
    chunks = ()
    for start in tl.static_range(0, K, CHUNK):
        k = start + tl.arange(0, CHUNK)[None, None, :]
        at = ptr[:, :, None] + k
        if is_row is None and start + CHUNK <= K:
            chunk = tl.load(at, eviction_policy="evict_first")
        else:
            is_in = k < K if is_row is None else is_row[:, :, None] & (k < K)
            chunk = tl.load(at, mask=is_in, other=0.0, eviction_policy="evict_first")
        chunks = chunks + (chunk,)
    return chunks


@triton.jit
def _products(
    chunks,  # of rows of W
    rows,  # [N, WARPS], which rows of W they are
    x_ptr,  # [1, WARPS] pointers to the row of x of each warp, [K]
    x_scales_ptr,  # [1, WARPS] pointers to its scales, [ceil(K / GROUP)], or [1] if GROUP is 0; None: they are 1
    scales_ptr,  # of all W; None: they are 1
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return the products of rows of W and the row of x of their warp, [N, WARPS] float32."""
    N: tl.constexpr = rows.shape[0]
    WARPS: tl.constexpr = rows.shape[1]
    WIDTH: tl.constexpr = GROUP if GROUP > 0 else CHUNK
    PARTS: tl.constexpr = CHUNK // WIDTH
    sums = tl.zeros((N, WARPS, PARTS, WIDTH), dtype=tl.float32)
    for start in tl.static_range(0, K, CHUNK):
        k = start + tl.arange(0, CHUNK)[None, None, :]
        x = tl.load(x_ptr[:, :, None] + k, mask=k < K, other=0.0).to(tl.float32)
        products = tl.reshape(chunks[start // CHUNK].to(tl.float32) * x, sums.shape)
        if GROUP > 0:
            group = start // GROUP + tl.arange(0, PARTS)[None, None, :]
            is_group = group < (K + GROUP - 1) // GROUP
            scales_at = scales_ptr + (rows // ROWS)[:, :, None] * ((K + GROUP - 1) // GROUP) + group
            scales = tl.load(scales_at, mask=is_group, other=0.0)
            if x_scales_ptr is not None:
                scales *= tl.load(x_scales_ptr[:, :, None] + group, mask=is_group, other=0.0)
            products *= scales[:, :, :, None]
        sums += products
    y = tl.sum(tl.sum(sums, 3), 2)
    if GROUP == 0 and scales_ptr is not None:
        y *= tl.load(scales_ptr + rows // ROWS)
    if GROUP == 0 and x_scales_ptr is not None:
        y *= tl.load(x_scales_ptr)
    return y


@triton.jit
def _gated_kernel(
    x_ptr,  # [1, K]
    x_scales_ptr,  # [1, ceil(K / GROUP)] float32, [1, 1] if GROUP is 0; None: they are 1
    weight_ptr,  # [num_experts * 2 * size, K]
    scales_ptr,  # [num_experts * 2 * size / ROWS, ceil(K / GROUP)] float32, or 1 column; None: the weight is plain
    bias_ptr,  # [num_experts * 2 * size]; None: there is none
    out_ptr,  # [num_active, size], written
    chosen_ptr,  # [1, num_active] int64
    size,
    limit,
    alpha,
    offset,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a scale; 0: all
    ROWS: tl.constexpr,  # of a scale
    N: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (ceil(size / N), num_active). A program is a warp, with N rows of the gate and the same ones of up."""
    pair, each = tl.program_id(1), tl.arange(0, 2 * N)[:, None]
    n = tl.minimum(tl.program_id(0) * N + each // 2, size - 1)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()  # `chosen` is complete, as the kernel that sums asks
    rows = tl.load(chosen_ptr + pair) * 2 * size + each % 2 * size + n
    chunks = _chunks(weight_ptr + rows * K, None, K, CHUNK)
    row = tl.zeros((1, 1), dtype=tl.int32)
    own_scales_ptr = x_scales_ptr
    if x_scales_ptr is not None:
        own_scales_ptr += row
    y = _products(chunks, rows, x_ptr + row, own_scales_ptr, scales_ptr, K, CHUNK, GROUP, ROWS)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows).to(tl.float32)
    gate, up = tl.split(tl.reshape(y, (N, 2)))
    if IS_CLAMPED:
        gated = clamped_silu_mul_of(gate, up, limit, alpha, offset).to(out_ptr.dtype.element_ty)
    else:
        gate = gate.to(out_ptr.dtype.element_ty)
        gated = silu_mul_of(gate, up.to(gate.dtype))
    columns = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + pair.to(tl.int64) * size + columns, gated, mask=columns < size)


@triton.jit
def _summed_kernel(
    x_ptr,  # [num_active, K]
    x_scales_ptr,  # [num_active, ceil(K / GROUP)] float32, [num_active, 1] if GROUP is 0; None: they are 1
    weight_ptr,  # [num_experts * size, K]
    scales_ptr,  # [num_experts * size / ROWS, ceil(K / GROUP)] float32, or 1 column; None: the weight is plain
    bias_ptr,  # [num_experts * size]; None: there is none
    others_ptr,  # [OTHERS, size]; None: there are none
    out_ptr,  # [1, size], written
    chosen_ptr,  # [1, num_active] int64
    shares_ptr,  # [1, num_active] float32
    num_active,
    size,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a scale; 0: all
    ROWS: tl.constexpr,  # of a scale
    N: tl.constexpr,
    WARPS: tl.constexpr,  # at least num_active; a program has 32 at most, which then have several pairs each
    OTHERS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (ceil(size / N),). A warp has N rows of one expert. What the kernel before the last one wrote is complete
    when this one starts."""
    n, pair = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, WARPS)
    is_pair = pair < num_active
    expert = tl.load(chosen_ptr + pair, mask=is_pair, other=0)
    rows = expert[None, :] * size + tl.minimum(n, size - 1)[:, None]
    chunks = _chunks(weight_ptr + rows * K, is_pair[None, :], K, CHUNK)
    share = tl.load(shares_ptr + pair, mask=is_pair, other=0.0)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    known_pair = tl.minimum(pair, num_active - 1)[None, :]
    own_scales_ptr = x_scales_ptr
    if x_scales_ptr is not None:
        own_scales_ptr += known_pair * ((K + GROUP - 1) // GROUP if GROUP > 0 else 1)
    y = _products(chunks, rows, x_ptr + known_pair * K, own_scales_ptr, scales_ptr, K, CHUNK, GROUP, ROWS)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=is_pair[None, :], other=0.0).to(tl.float32)
    total = tl.sum(y.to(out_ptr.dtype.element_ty).to(tl.float32) * share[None, :], 1)
    for other in tl.static_range(OTHERS):
        total += tl.load(others_ptr + other * size + n, mask=n < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), mask=n < size)
