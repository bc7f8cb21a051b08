"""Triton kernels of residual streams: what lies between two sublayers is two launches. streams.py has the formulas.

    mix      programs of some tokens and columns add the output of a sublayer to the streams, and multiply the new
             streams with their columns of the next site: parts of its products, and of the sum of squares
    finish   one program per token sums the parts, and reads the next input; another one makes the shares

A stream in bfloat16 is multiplied with float32 weights exactly: three numbers in bfloat16 make one in float32, and
tensor cores add in float32. A token's numbers depend on no other token.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..products.norm import Norm
from .streams import PendingStreams, StreamRules, StreamShares, StreamWeights


class _Tiles(NamedTuple):
    """Division of streams among the programs of `mix`."""

    num_tokens: int  # of a program
    num_columns: int  # of a step
    num_steps: int  # of a program
    num_warps: int

    @classmethod
    def choose(cls, num_tokens: int, size: int) -> _Tiles:
        """Choose by shapes alone."""
        if num_tokens <= 64:
            return cls(16, 64, 1, 4)
        return cls(64, 64, max(1, triton.cdiv(size, 64 * 8)), 8)


def cross_streams(
    pending: PendingStreams, weights: StreamWeights, norm: Norm, rules: StreamRules
) -> tuple[Tensor, Tensor, StreamShares]:
    """Return `cross_streams_ref`. Outputs and streams have contiguous rows, weights are contiguous."""
    streams, parts = _mixed(pending, weights)
    num_tokens, hc_mult, size = streams.shape
    x = torch.empty((num_tokens, size), dtype=streams.dtype, device=streams.device)
    shares = StreamShares(
        parts.new_empty(num_tokens, hc_mult),
        parts.new_empty(num_tokens, hc_mult, hc_mult),
    )
    _finish(x, streams, parts, weights, rules, norm, shares)
    return streams, x, shares


def end_streams(pending: PendingStreams, weights: StreamWeights, rules: StreamRules) -> tuple[Tensor, Tensor]:
    """Return `end_streams_ref`. Arguments as for `cross_streams`."""
    streams, parts = _mixed(pending, weights)
    x = torch.empty((streams.shape[0], streams.shape[2]), dtype=streams.dtype, device=streams.device)
    _finish(x, streams, parts, weights, rules)
    return streams, x


def write_streams(streams: Tensor, y: Tensor, shares: StreamShares) -> Tensor:
    """Return `write_streams_ref`. Arguments as for `cross_streams`."""
    return _mixed(PendingStreams(streams, y, shares), None)[0]


def _mixed(pending: PendingStreams, weights: StreamWeights | None) -> tuple[Tensor, Tensor]:
    """Return the new streams, and the parts of their products, [num_parts, num_tokens, width] float32: the products,
    and behind them the sum of squares."""
    streams, y, shares = pending
    num_tokens, hc_mult, size = streams.shape
    assert streams.stride(2) == 1, streams.stride()
    num_shares = 0 if weights is None else len(weights.fn)
    width = max(16, triton.next_power_of_2(num_shares + 1))
    tiles = _Tiles.choose(num_tokens, size)
    num_parts = triton.cdiv(size, tiles.num_columns * tiles.num_steps)
    parts = torch.empty((num_parts, num_tokens, width), dtype=torch.float32, device=streams.device)
    new = streams
    if y is not None and shares is not None:
        assert y.shape == (num_tokens, size) and y.stride(1) == 1, (y.shape, y.stride())
        assert shares.mix.is_contiguous() and shares.write.is_contiguous(), shares
        new = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    if weights is not None:
        assert weights.fn.shape == (num_shares, hc_mult * size) and weights.fn.is_contiguous(), weights.fn.shape
    if num_tokens:
        _mix_kernel[(triton.cdiv(num_tokens, tiles.num_tokens), num_parts)](
            new, parts, streams, y, *(shares or (None, None)), None if weights is None else weights.fn, num_tokens,
            streams.stride(0), streams.stride(1), 0 if y is None else y.stride(0), SIZE=size, HC=hc_mult,
            SHARES=num_shares, WIDTH=width, BLOCK_T=tiles.num_tokens, BLOCK_C=tiles.num_columns,
            STEPS=tiles.num_steps, IS_SPLIT=streams.dtype == torch.bfloat16, num_warps=tiles.num_warps, num_stages=1,
        )  # fmt: skip
    return new, parts


def _finish(
    x: Tensor,
    streams: Tensor,
    parts: Tensor,
    weights: StreamWeights,
    rules: StreamRules,
    norm: Norm | None = None,
    shares: StreamShares | None = None,
) -> None:
    """Write the collapsed streams to `x` [num_tokens, hidden_size], normed if there is a norm, and the shares."""
    (num_tokens, hc_mult, size), (num_parts, _, width) = streams.shape, parts.shape
    if not num_tokens:
        return
    block, write, mix = triton.next_power_of_2(size), *(shares or (None, None))
    weight, norm_eps = norm or (None, 0.0)
    _finish_kernel[(num_tokens, 1 if shares is None else 2)](
        x, write, mix, streams, parts, weights.base, weights.scale, weight, num_tokens, streams.stride(0),
        streams.stride(1), rules.eps, rules.norm_eps, norm_eps,
        SIZE=size, HC=hc_mult, SHARES=len(weights.fn), WIDTH=width, PARTS=num_parts,
        BLOCK_P=triton.next_power_of_2(num_parts), BLOCK=block, BLOCK_HC=triton.next_power_of_2(hc_mult),
        STEPS=rules.num_steps, num_warps=min(16, max(4, block // 512)),
    )  # fmt: skip


@triton.jit(do_not_specialize=("num_tokens",))
def _mix_kernel(
    out_ptr,  # [num_tokens, HC, SIZE], written if there is y
    parts_ptr,  # [num_parts, num_tokens, WIDTH] float32, written if SHARES
    streams_ptr,  # [num_tokens, HC, SIZE], strides token_stride and stream_stride
    y_ptr,  # [num_tokens, SIZE], tokens y_stride apart; None: nothing is added
    write_ptr,  # [num_tokens, HC] float32
    mix_ptr,  # [num_tokens, HC, HC] float32, from, to
    fn_ptr,  # [SHARES, HC * SIZE] float32; None: no products
    num_tokens,
    token_stride,
    stream_stride,
    y_stride,
    SIZE: tl.constexpr,
    HC: tl.constexpr,
    SHARES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STEPS: tl.constexpr,
    IS_SPLIT: tl.constexpr,  # streams are bfloat16
):
    """Grid: (ceil(num_tokens / BLOCK_T), num_parts). A program has BLOCK_T tokens and STEPS * BLOCK_C columns of each
    stream."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token, shares = tokens < num_tokens, tl.arange(0, WIDTH)
    rows = tokens.to(tl.int64)
    sums = tl.zeros([BLOCK_T, WIDTH], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    for step in range(STEPS):
        columns = (tl.program_id(1) * STEPS + step) * BLOCK_C + tl.arange(0, BLOCK_C)
        is_in = is_token[:, None] & (columns < SIZE)[None, :]
        from_ptrs = streams_ptr + (rows * token_stride)[:, None] + columns[None, :]
        for to in tl.static_range(HC):
            if y_ptr is None:
                new = tl.load(from_ptrs + to * stream_stride, mask=is_in, other=0.0)
            else:
                wide = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
                for each in tl.static_range(HC):
                    stream = tl.load(from_ptrs + each * stream_stride, mask=is_in, other=0.0).to(tl.float32)
                    mix = tl.load(mix_ptr + rows * (HC * HC) + each * HC + to, mask=is_token, other=0.0)
                    wide += mix[:, None] * stream
                y = tl.load(y_ptr + (rows * y_stride)[:, None] + columns[None, :], mask=is_in, other=0.0)
                write = tl.load(write_ptr + rows * HC + to, mask=is_token, other=0.0)
                new = (wide + write[:, None] * y.to(tl.float32)).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + (rows * (HC * SIZE))[:, None] + to * SIZE + columns[None, :], new, mask=is_in)
            if fn_ptr is not None:
                is_weight = (columns < SIZE)[:, None] & (shares < SHARES)[None, :]
                fn_ptrs = fn_ptr + shares[None, :] * (HC * SIZE) + to * SIZE + columns[:, None]
                sums = _add_products(new, tl.load(fn_ptrs, mask=is_weight, other=0.0), sums, IS_SPLIT)
                squares += tl.sum(new.to(tl.float32) * new.to(tl.float32), 1)
    if fn_ptr is not None:
        sums = tl.where((shares == SHARES)[None, :], squares[:, None], sums)
        parts = (tl.program_id(1) * num_tokens + tokens).to(tl.int64) * WIDTH
        tl.store(parts_ptr + parts[:, None] + shares[None, :], sums, mask=is_token[:, None])


@triton.jit
def _add_products(x, weights, sums, IS_SPLIT: tl.constexpr):
    """Return `sums` + x [BLOCK_T, BLOCK_C] times weights [BLOCK_C, WIDTH] float32. IS_SPLIT: x is bfloat16."""
    if IS_SPLIT:
        high = weights.to(tl.bfloat16)
        rest = weights - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        sums = tl.dot(x, low, sums)
        sums = tl.dot(x, middle, sums)
        return tl.dot(x, high, sums)
    return tl.dot(x.to(tl.float32), weights, sums, input_precision="ieee")


@triton.jit(do_not_specialize=("num_tokens",))
def _finish_kernel(
    x_ptr,  # [num_tokens, SIZE] of the streams' dtype, written
    write_ptr,  # [num_tokens, HC] float32, written by programs (.., 1)
    mix_ptr,  # [num_tokens, HC, HC] float32, likewise
    streams_ptr,  # [num_tokens, HC, SIZE], strides token_stride and stream_stride
    parts_ptr,  # [PARTS, num_tokens, WIDTH] float32
    base_ptr,  # [SHARES] float32
    scale_ptr,  # [3] float32, or [1] without shares
    norm_ptr,  # [SIZE] of the streams' dtype or float32; None: x is not normed
    num_tokens,
    token_stride,
    stream_stride,
    eps,
    streams_eps,
    norm_eps,
    SIZE: tl.constexpr,
    HC: tl.constexpr,
    SHARES: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HC: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Grid: (num_tokens, 1 or 2). Program (token, 0) reads the next input, (token, 1) makes the shares."""
    token, parts = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_P)
    parts_ptrs = parts_ptr + (parts * num_tokens + token) * WIDTH
    is_part = parts < PARTS
    square = tl.sum(tl.load(parts_ptrs + SHARES, mask=is_part, other=0.0), 0)
    scale = tl.rsqrt(square / (HC * SIZE) + streams_eps)
    if tl.program_id(1) == 0:
        columns = tl.arange(0, BLOCK)
        x = tl.zeros([BLOCK], tl.float32)
        for each in tl.static_range(HC):
            ptrs = streams_ptr + token * token_stride + each * stream_stride + columns
            stream = tl.load(ptrs, mask=columns < SIZE, other=0.0).to(tl.float32)
            product = tl.sum(tl.load(parts_ptrs + each, mask=is_part, other=0.0), 0) * scale
            read = tl.sigmoid(product * tl.load(scale_ptr) + tl.load(base_ptr + each)) + eps
            x += read * stream
        out = x.to(x_ptr.dtype.element_ty)
        if norm_ptr is not None:
            wide = out.to(tl.float32)
            weight = tl.load(norm_ptr + columns, mask=columns < SIZE, other=0.0)
            wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + norm_eps)
            out = (wide.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + token * SIZE + columns, out, mask=columns < SIZE)
    elif write_ptr is not None:
        each = tl.arange(0, BLOCK_HC)
        is_read = is_part[:, None] & (each < HC)[None, :]
        write = tl.sum(tl.load(parts_ptrs[:, None] + HC + each[None, :], mask=is_read, other=0.0), 0) * scale
        base = tl.load(base_ptr + HC + each, mask=each < HC, other=0.0)
        write = 2 * tl.sigmoid(write * tl.load(scale_ptr + 1) + base)
        tl.store(write_ptr + token * HC + each, write, mask=each < HC)
        places = tl.arange(0, BLOCK_HC * BLOCK_HC)
        source, target = places // BLOCK_HC, places % BLOCK_HC
        at, is_share = 2 * HC + source * HC + target, (source < HC) & (target < HC)
        mix = tl.load(parts_ptrs[:, None] + at[None, :], mask=is_part[:, None] & is_share[None, :], other=0.0)
        base = tl.load(base_ptr + at, mask=is_share, other=0.0)
        mix = tl.where(is_share, tl.sum(mix, 0) * scale * tl.load(scale_ptr + 2) + base, float("-inf"))
        mix = _doubly_stochastic(tl.reshape(mix, [BLOCK_HC, BLOCK_HC]), eps, HC, BLOCK_HC, STEPS)
        tl.store(mix_ptr + token * (HC * HC) + source * HC + target, tl.reshape(mix, [BLOCK_HC * BLOCK_HC]), is_share)


@triton.jit
def _doubly_stochastic(mix, eps, HC: tl.constexpr, BLOCK_HC: tl.constexpr, STEPS: tl.constexpr):
    """Return Sinkhorn's normalisation of `mix` [BLOCK_HC, BLOCK_HC], -inf outside of [HC, HC]; zeros there."""
    each = tl.arange(0, BLOCK_HC)
    is_share = (each < HC)[:, None] & (each < HC)[None, :]
    highest = tl.max(mix, 1)
    weights = tl.exp(mix - tl.where(each < HC, highest, 0.0)[:, None])
    total = tl.where(each < HC, tl.sum(weights, 1), 1.0)
    mix = tl.where(is_share, weights / total[:, None] + eps, 0.0)
    mix = mix / (tl.sum(mix, 0) + eps)[None, :]
    for _ in range(STEPS - 1):
        mix = mix / (tl.sum(mix, 1) + eps)[:, None]
        mix = mix / (tl.sum(mix, 0) + eps)[None, :]
    return mix
