"""`routes` and `shares_of` of routes.py on a GPU, by two kernels.

The first one multiplies: a program has some rows, some experts and some columns, and stores a part of their products.
The second one sums the parts of a row in their order, scores them and chooses. A weight is the sum of three bfloat16
numbers, so tensor cores multiply rows of bfloat16 by it as exactly as float32 does.
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
from .routes import LEAST_TOTAL, Routes, Routing

MAX_EXPERTS = 1024
_BLOCK_E = 64  # experts of a program
_PROGRAMS = 256  # of the product that are enough to keep a GPU at work
_SINGLE_ROWS = 512  # rows that are chosen for by a warp each; warps of more rows share a program
_ROWS = 4  # that share it
_LOWEST = tl.constexpr(-(2**31))
_NAN_KEY = tl.constexpr(0x7FC00000)


class RouteTiles(NamedTuple):
    """The tiles of a product, and how its programs are launched."""

    block_r: int  # rows of a program
    block_k: int  # columns of a step
    num_steps: int  # of a program
    num_parts: int  # programs that share the columns
    max_parts: int  # one compiled kernel sums up to so many
    num_stages: int


def tiles_of(num_rows: int, num_experts: int, size: int) -> RouteTiles:
    """Return the tiles of a product [num_rows, size] x [num_experts, size]."""
    if num_rows <= _SINGLE_ROWS:  # one step, if 16 parts are enough for it
        block_r, block_k, num_stages = 16 if num_rows <= 16 else 64, 128, 1
        max_parts = 16 if size <= 16 * block_k else 32
    else:
        block_r, block_k, num_stages = 64 if num_rows <= 2048 else 128, 64, 3
        max_parts = 8
    num_tiles = triton.cdiv(num_rows, block_r) * triton.cdiv(num_experts, _BLOCK_E)
    most_steps = triton.cdiv(size, block_k)
    num_steps = triton.cdiv(most_steps, max(1, min(max_parts, _PROGRAMS // num_tiles)))
    return RouteTiles(block_r, block_k, num_steps, triton.cdiv(most_steps, num_steps), max_parts, num_stages)


def serves(x: Tensor, weight: Tensor, product_bias: Tensor | None, bias: Tensor | None, routing: Routing) -> bool:
    """Return whether `routes` takes these tensors."""
    del product_bias, bias, routing
    is_read = x.stride(1) == 1 and weight.is_contiguous() and weight.dtype == torch.float32
    return len(x) > 0 and is_read and len(weight) <= MAX_EXPERTS


def serves_shares(x: Tensor, weight: Tensor, chosen: Tensor, routing: Routing) -> bool:
    """Return whether `shares_of` takes these tensors."""
    return serves(x, weight, None, None, routing) and chosen.is_contiguous()


def routes(x: Tensor, weight: Tensor, product_bias: Tensor | None, bias: Tensor | None, routing: Routing) -> Routes:
    """Return `routes_ref`: sums in another order."""
    return _routes(x, weight, product_bias, bias, routing, None)


def shares_of(x: Tensor, weight: Tensor, chosen: Tensor, routing: Routing) -> Routes:
    """Return `shares_of_ref`: sums in another order."""
    assert chosen.shape == (len(x), routing.num_active) and chosen.dtype == torch.int64, chosen.shape
    return _routes(x, weight, None, None, routing, chosen)


def _routes(
    x: Tensor,
    weight: Tensor,
    product_bias: Tensor | None,
    bias: Tensor | None,
    routing: Routing,
    given: Tensor | None,
) -> Routes:
    (num_rows, size), (num_experts, weight_size) = x.shape, weight.shape
    assert size == weight_size, (x.shape, weight.shape)
    assert all(each is None or each.shape == (num_experts,) for each in (product_bias, bias)), weight.shape
    tiles, dependent = tiles_of(num_rows, num_experts, size), gpu.dependent_launch(num_rows)
    parts = torch.empty((tiles.num_parts, num_rows, num_experts), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num_rows, tiles.block_r), triton.cdiv(num_experts, _BLOCK_E), tiles.num_parts)
    _product_kernel[grid](
        x, weight, parts, num_rows, num_experts, size, x.stride(0), tiles.num_steps, BLOCK_R=tiles.block_r,
        BLOCK_E=_BLOCK_E, BLOCK_K=tiles.block_k, DEPENDENT=dependent, num_stages=tiles.num_stages, launch_pdl=dependent,
    )  # fmt: skip
    chosen = torch.empty((num_rows, routing.num_active), dtype=torch.int64, device=x.device)
    shares = torch.empty((num_rows, routing.num_active), dtype=torch.float32, device=x.device)
    rows = 1 if num_rows <= _SINGLE_ROWS else _ROWS
    per_group = num_experts // routing.num_groups
    _choose_kernel[(triton.cdiv(num_rows, rows),)](
        parts, product_bias, bias, given, chosen, shares, num_rows, num_experts, tiles.num_parts, routing.scaling,
        PARTS=tiles.max_parts, ROWS=rows, GROUPS=triton.next_power_of_2(routing.num_groups),
        PER_GROUP=per_group, WIDTH=max(triton.next_power_of_2(per_group), 32 if routing.num_groups == 1 else 1),
        ACTIVE=routing.num_active, ACTIVE_GROUPS=routing.num_active_groups if routing.num_groups > 1 else 0,
        RANKING=routing.num_ranking, SCORING=routing.scoring, SUMS_TO_ONE=routing.sums_to_one,
        LEAST=LEAST_TOTAL, DEPENDENT=dependent, num_warps=rows, launch_pdl=dependent,
    )  # fmt: skip
    return Routes(chosen, shares)


@triton.jit
def _exact_dot(weight, x):
    """Return weight x. `weight` is float32; x is of any float dtype."""
    if x.dtype == tl.bfloat16:
        high = weight.to(tl.bfloat16)
        rest = weight - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        y = tl.dot(high, x, tl.dot(middle, x, tl.dot(low, x)))
    else:
        y = tl.dot(weight, x.to(tl.float32), input_precision="ieee")
    return y


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_ptr,  # [num_rows, size], rows x_stride apart
    weight_ptr,  # [num_experts, size] float32
    parts_ptr,  # [num_parts, num_rows, num_experts] float32, written
    num_rows,
    num_experts,
    size,
    x_stride,
    num_steps,  # of a program
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (tiles of rows, tiles of experts, num_parts). Works on y^T = W x^T, [BLOCK_E, BLOCK_R]."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = tl.program_id(2) * num_steps * BLOCK_K + tl.arange(0, BLOCK_K)
    is_r, is_e = r < num_rows, e < num_experts
    weight_at = weight_ptr + tl.minimum(e, num_experts - 1)[:, None] * size + k[None, :]
    x_at = x_ptr + tl.minimum(r, num_rows - 1).to(tl.int64)[None, :] * x_stride + k[:, None]
    weight = tl.load(weight_at, mask=(k < size)[None, :], other=0.0)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.zeros((BLOCK_E, BLOCK_R), dtype=tl.float32)
    for step in range(num_steps):
        x = tl.load(x_at + step * BLOCK_K, mask=(step * BLOCK_K + k < size)[:, None], other=0.0)
        behind = (step + 1) * BLOCK_K
        is_next = (behind + k < size) & (step + 1 < num_steps)
        next_weight = tl.load(weight_at + behind, mask=is_next[None, :], other=0.0)
        y += _exact_dot(weight, x)  # tensor cores cut bits off long sums, so that they sum one step
        weight = next_weight
    rows = tl.program_id(2).to(tl.int64) * num_rows + r
    tl.store(parts_ptr + rows[None, :] * num_experts + e[:, None], y, mask=is_e[:, None] & is_r[None, :])


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)), nearly as exact as float32 for all x."""
    small = tl.exp(-tl.abs(x))
    sum_of_both = 1.0 + small  # rounded; the quotient makes up for it
    is_one = sum_of_both == 1.0
    log = tl.log(sum_of_both) * tl.div_rn(small, tl.where(is_one, 1.0, sum_of_both - 1.0))
    return tl.maximum(x, 0.0) + tl.where(is_one, small, log)


@triton.jit
def _keys_of(scores):
    """Return int32 numbers that are ordered as float32 `scores` are, all above _LOWEST. NaN is above all numbers."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(scores == scores, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), _NAN_KEY)


@triton.jit
def _without_largest(keys, places, AXIS: tl.constexpr):
    """Return the largest keys along an axis, where they are, and the keys without them. Of equal keys, the first one.

    `places` are the places of the keys along the axis, of a shape that broadcasts to that of `keys`."""
    best = tl.max(keys, AXIS, keep_dims=True)
    at = tl.min(tl.where(keys == best, places, keys.shape[AXIS]), AXIS, keep_dims=True)
    is_best = places == at
    return best, is_best, tl.where(is_best, _LOWEST, keys)


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _choose_kernel(
    parts_ptr,  # [num_parts, num_rows, num_experts] float32
    product_bias_ptr,  # [num_experts] float32; None: there is none
    bias_ptr,  # [num_experts] float32; None: there is none
    given_ptr,  # [num_rows, ACTIVE] int64, experts; None: those of the best scores
    chosen_ptr,  # [num_rows, ACTIVE] int64, written
    shares_ptr,  # [num_rows, ACTIVE] float32, written
    num_rows,
    num_experts,
    num_parts,
    scaling,
    PARTS: tl.constexpr,  # at least num_parts
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,  # at least the number of groups
    PER_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,  # at least PER_GROUP
    ACTIVE: tl.constexpr,
    ACTIVE_GROUPS: tl.constexpr,  # 0: all experts may be chosen
    RANKING: tl.constexpr,
    SCORING: tl.constexpr,  # as of `Routing`
    SUMS_TO_ONE: tl.constexpr,
    LEAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (ceil(num_rows / ROWS),). A program chooses for ROWS rows. It has WIDTH places for each group."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    places = tl.arange(0, GROUPS * WIDTH)[None, :]
    experts = places // WIDTH * PER_GROUP + places % WIDTH
    is_expert = (places % WIDTH < PER_GROUP) & (experts < num_experts)
    is_read = (rows < num_rows) & is_expert
    if product_bias_ptr is not None:
        product_bias = tl.load(product_bias_ptr + experts, mask=is_expert, other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + experts, mask=is_expert, other=0.0)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    at = parts_ptr + rows * num_experts + experts
    scores = tl.load(at, mask=is_read, other=0.0)
    for part in tl.static_range(1, PARTS):  # unrolled, so that all loads are under way at once
        is_part = is_read & (part < num_parts)
        scores += tl.load(at + part * num_rows.to(tl.int64) * num_experts, mask=is_part, other=0.0)
    if product_bias_ptr is not None:
        scores += product_bias
    if SCORING == "sigmoid":
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-scores))
    elif SCORING == "sqrtsoftplus":
        scores = tl.sqrt_rn(_softplus(scores))
    else:
        scores = tl.where(is_expert, scores, float("-inf"))
        scores = tl.exp(scores - tl.max(scores, 1, keep_dims=True))
        scores = tl.div_rn(scores, tl.broadcast_to(tl.sum(scores, 1, keep_dims=True), scores.shape))
    ranking = scores
    if bias_ptr is not None:
        ranking += bias
    keys = tl.where(is_expert, _keys_of(ranking), _LOWEST)
    if ACTIVE_GROUPS > 0:
        others = tl.reshape(keys, (ROWS, GROUPS, WIDTH))
        ranks = tl.reshape(ranking, (ROWS, GROUPS, WIDTH))
        within, groups = tl.arange(0, WIDTH)[None, None, :], tl.arange(0, GROUPS)[None, :]
        of_groups = tl.zeros((ROWS, GROUPS), dtype=tl.float32)
        for _ in tl.static_range(RANKING):
            _, is_best, others = _without_largest(others, within, 2)
            of_groups += tl.sum(tl.where(is_best, ranks, 0.0), 2)
        of_groups = tl.where(groups * PER_GROUP < num_experts, _keys_of(of_groups), _LOWEST)
        is_active = groups < 0
        for _ in tl.static_range(ACTIVE_GROUPS):
            _, is_best, of_groups = _without_largest(of_groups, groups, 1)
            is_active |= is_best
        is_active = tl.broadcast_to(is_active.to(tl.int32)[:, :, None], (ROWS, GROUPS, WIDTH))
        keys = tl.where(tl.reshape(is_active, (ROWS, GROUPS * WIDTH)) != 0, keys, _LOWEST)
    order = tl.full(keys.shape, -1, dtype=tl.int32)  # 0: the best expert
    for place in tl.static_range(ACTIVE):
        if given_ptr is None:
            _, is_best, keys = _without_largest(keys, places, 1)
        else:
            is_best = experts == tl.load(given_ptr + rows * ACTIVE + place, mask=rows < num_rows, other=-1)
        order = tl.where(is_best & is_expert, place, order)
    shares = tl.where(order >= 0, scores, 0.0)
    if SUMS_TO_ONE:
        total = tl.sum(shares, 1, keep_dims=True) + (0.0 if SCORING == "softmax" else LEAST)
        shares = tl.div_rn(shares, tl.broadcast_to(total, shares.shape))
    is_written = (rows < num_rows) & (order >= 0)
    out = rows * ACTIVE + order
    tl.store(chosen_ptr + out, experts.to(tl.int64), mask=is_written)
    tl.store(shares_ptr + out, shares * scaling, mask=is_written)
