"""`gated_experts_of_row` and `experts_of_row` of kernels/experts.py on a GPU, without tensor cores.

    first     inner = the gated product of each pair: a program has a few rows of one expert
    second    the products of all pairs, times their shares: a program has the same few rows of all chosen experts

One row's experts are different, so that nothing is placed. Rows of W are multiplied as in triton_row_products.py.

MXFP4 weights pass through tensor cores (triton_expert_packed.py), and their sum is a launch of its own.

With a dependent launch (gpu.py) the second kernel loads weights while the kernels before it still run.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803, RUF005
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import gpu
from .experts import ExpertWeight, mix_parts, places_of_row
from .fp8 import BLOCK
from .silu import SwigluClamp
from .triton_expert_packed import PackedTiles, packed_product
from .triton_row_products import chunk_of, row_chunks, row_products
from .triton_silu import clamped_silu_mul_of, silu_mul_of

_EARLY_BYTES = 20480  # of W that a warp's registers hold


class RowTiles(NamedTuple):
    """How the work is divided among programs."""

    block_n: int  # rows of the product; a gated one has two of W for each, a sum one of each expert
    chunk: int  # columns that are loaded at once

    @classmethod
    def choose(cls, in_size: int, item_size: int, *, is_gated: bool) -> RowTiles:
        """Return the tiles of a product."""
        return cls(2 if is_gated else 1, chunk_of(in_size, item_size))


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
        tiles = RowTiles.choose(in_size, weight.values.element_size(), is_gated=True)
    limit, alpha = clamp or (0.0, 0.0)
    _gated_kernel[triton.cdiv(size, tiles.block_n), num_active](
        x, x_scales, weight.values, weight.scales, weight.bias, inner, chosen, size, limit, alpha, K=in_size,
        CHUNK=tiles.chunk, **_groups(weight), BLOCK_N=tiles.block_n, IS_CLAMPED=clamp is not None, **_launch(),
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
        tiles = RowTiles.choose(in_size, weight.values.element_size(), is_gated=False)
    early = min(num_active, max(1, _EARLY_BYTES // (tiles.block_n * in_size * weight.values.element_size())))
    out = torch.empty((1, size), dtype=dtype, device=x.device)
    _summed_kernel[triton.cdiv(size, tiles.block_n),](
        x, x_scales, weight.values, weight.scales, weight.bias, others, out, chosen, shares, size, K=in_size,
        CHUNK=tiles.chunk, **_groups(weight), ACTIVE=num_active, EARLY=early,
        OTHERS=0 if others is None else others.numel() // size, BLOCK_N=tiles.block_n, **_launch(),
    )  # fmt: skip
    return out


def _check(x: Tensor, x_scales: Tensor | None, weight: ExpertWeight, chosen: Tensor, num_rows: int) -> None:
    assert x.shape == (num_rows, weight.values.shape[1]) and x.is_contiguous(), (x.shape, weight.values.shape)
    assert len(chosen) == 1 and chosen.is_contiguous() and weight.values.is_contiguous(), chosen.shape
    assert x_scales is None or (len(x_scales) == num_rows and x_scales.is_contiguous()), x_scales.shape


def _launch() -> dict[str, Any]:
    dependent = gpu.dependent_launch(1)
    return {"DEPENDENT": dependent, "launch_pdl": dependent, "num_warps": 1}


def _groups(weight: ExpertWeight) -> dict[str, int]:
    """Return which numbers of a weight share a scale: columns, 0 for all of them, and rows."""
    scales = weight.scales
    if scales is None:
        return {"GROUP": 0, "ROWS": 1}
    return {"GROUP": BLOCK if scales.shape[1] > 1 else 0, "ROWS": 1 if len(scales) == len(weight.values) else BLOCK}


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
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a scale; 0: all
    ROWS: tl.constexpr,  # of a scale
    BLOCK_N: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (ceil(size / BLOCK_N), num_active). Rows of gate and up take turns in a tile."""
    pair, both = tl.program_id(1), tl.arange(0, 2 * BLOCK_N)
    n = tl.minimum(tl.program_id(0) * BLOCK_N + both // 2, size - 1)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()  # `chosen` is complete, as the kernel that sums asks
    rows = tl.load(chosen_ptr + pair) * 2 * size + both % 2 * size + n
    chunks = row_chunks(weight_ptr + rows * K, K, CHUNK)
    y = row_products(chunks, rows, x_ptr, x_scales_ptr, scales_ptr, K, CHUNK, GROUP, ROWS)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows).to(tl.float32)
    gate, up = tl.split(tl.reshape(y, (BLOCK_N, 2)))
    if IS_CLAMPED:
        gated = clamped_silu_mul_of(gate, up, limit, alpha).to(out_ptr.dtype.element_ty)
    else:
        gate = gate.to(out_ptr.dtype.element_ty)
        gated = silu_mul_of(gate, up.to(gate.dtype))
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + pair.to(tl.int64) * size + columns, gated, mask=columns < size)


@triton.jit
def _summed_kernel(
    x_ptr,  # [ACTIVE, K]
    x_scales_ptr,  # [ACTIVE, ceil(K / GROUP)] float32, [ACTIVE, 1] if GROUP is 0; None: they are 1
    weight_ptr,  # [num_experts * size, K]
    scales_ptr,  # [num_experts * size / ROWS, ceil(K / GROUP)] float32, or 1 column; None: the weight is plain
    bias_ptr,  # [num_experts * size]; None: there is none
    others_ptr,  # [OTHERS, size]; None: there are none
    out_ptr,  # [1, size], written
    chosen_ptr,  # [1, ACTIVE] int64
    shares_ptr,  # [1, ACTIVE] float32
    size,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a scale; 0: all
    ROWS: tl.constexpr,  # of a scale
    ACTIVE: tl.constexpr,
    EARLY: tl.constexpr,  # pairs whose weights are loaded before x is there
    OTHERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (ceil(size / BLOCK_N),). What the kernel before the last one wrote is complete when this one starts."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, weights = (), ()
    for pair in tl.static_range(ACTIVE):
        rows = rows + (tl.load(chosen_ptr + pair) * size + tl.minimum(n, size - 1),)
    for pair in tl.static_range(EARLY):
        weights = weights + (row_chunks(weight_ptr + rows[pair] * K, K, CHUNK),)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    num_groups = (K + GROUP - 1) // GROUP if GROUP > 0 else 1
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for pair in tl.static_range(ACTIVE):
        own_scales_ptr = x_scales_ptr
        if x_scales_ptr is not None:
            own_scales_ptr += pair * num_groups
        own = weights[pair] if pair < EARLY else row_chunks(weight_ptr + rows[pair] * K, K, CHUNK)
        y = row_products(own, rows[pair], x_ptr + pair * K, own_scales_ptr, scales_ptr, K, CHUNK, GROUP, ROWS)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + rows[pair]).to(tl.float32)
        total += y.to(out_ptr.dtype.element_ty).to(tl.float32) * tl.load(shares_ptr + pair)
    for other in tl.static_range(OTHERS):
        total += tl.load(others_ptr + other * size + n, mask=n < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), mask=n < size)
