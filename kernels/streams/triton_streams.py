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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from ..products.norm import Norm
from .streams import PendingStreams, StreamRules, StreamShares, StreamWeights

_FEW, _SOME = 8, 64  # tokens


class _Tiles(NamedTuple):
    """Division of streams among the programs of `mix`."""

    num_tokens: int  # of a program; one: it multiplies without tensor cores
    num_columns: int  # of a step
    num_steps: int  # of a program
    num_warps: int

    @classmethod
    def choose(cls, num_tokens: int, size: int) -> _Tiles:
        """Choose by shapes alone."""
        if num_tokens <= _FEW:
            return cls(1, 64, 1, 4)
        if num_tokens <= _SOME:
            return cls(16, 32, 2, 4)
        return cls(64, 16, max(1, triton.cdiv(size, 16 * 8)), 8)


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
    width = _width(hc_mult)
    tiles = _Tiles.choose(num_tokens, size)
    num_parts = triton.cdiv(size, tiles.num_columns * tiles.num_steps)
    parts = torch.empty((num_parts, num_tokens, width), dtype=torch.float32, device=streams.device)
    new = streams
    if y is not None and shares is not None:
        assert y.shape == (num_tokens, size) and y.stride(1) == 1, (y.shape, y.stride())
        assert shares.mix.is_contiguous() and shares.write.is_contiguous(), shares
        new = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    if weights is not None:
        assert weights.fn.shape[1] == hc_mult * size and weights.fn.is_contiguous(), weights.fn.shape
    if num_tokens:
        dependent = gpu.dependent_launch(num_tokens)
        _mix_kernel[(triton.cdiv(num_tokens, tiles.num_tokens), num_parts)](
            new, parts, streams, y, *(shares or (None, None)), None if weights is None else weights.fn, num_tokens,
            streams.stride(0), streams.stride(1), 0 if y is None else y.stride(0), SIZE=size, HC=hc_mult,
            SHARES=0 if weights is None else len(weights.fn), BLOCK_HC=_padded(hc_mult), WIDTH=width,
            BLOCK_T=tiles.num_tokens, BLOCK_C=tiles.num_columns, STEPS=tiles.num_steps, DEPENDENT=dependent,
            num_warps=tiles.num_warps, num_stages=1, launch_pdl=dependent,
        )  # fmt: skip
    return new, parts


def _padded(hc_mult: int) -> int:
    return max(4, 1 << (hc_mult - 1).bit_length())


def _width(hc_mult: int) -> int:
    """Return the numbers of a row of parts. Shares that read are those from 0 on, then those that write, the sum of
    squares, and in the second half those that mix, [from, to]. Each kind has places for a power of two of streams."""
    return 2 * _padded(hc_mult) ** 2


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
    dependent = gpu.dependent_launch(num_tokens)
    _finish_kernel[(num_tokens, 1 if shares is None else 2)](
        x, write, mix, streams, parts, weights.base, weights.scale, weight, num_tokens, streams.stride(0),
        streams.stride(1), rules.eps, rules.norm_eps, norm_eps, SIZE=size, HC=hc_mult, BLOCK_HC=_padded(hc_mult),
        WIDTH=width, PARTS=num_parts, BLOCK_P=triton.next_power_of_2(num_parts), BLOCK=block, STEPS=rules.num_steps,
        DEPENDENT=dependent, num_warps=min(16, max(4, block // 512)), launch_pdl=dependent,
    )  # fmt: skip


@triton.jit(do_not_specialize=("num_tokens",))
def _mix_kernel(
    out_ptr,  # [num_tokens, HC, SIZE], written if there is y
    parts_ptr,  # [num_parts, num_tokens, WIDTH] float32, written if there are products
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
    BLOCK_HC: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STEPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (ceil(num_tokens / BLOCK_T), num_parts). A program has BLOCK_T tokens and STEPS * BLOCK_C columns of each
    stream."""
    tokens, places = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, WIDTH)
    is_token, share = tokens < num_tokens, share_of(places, HC, BLOCK_HC)
    rows, to = tokens.to(tl.int64)[:, None, None], tl.arange(0, BLOCK_HC)[None, :, None]
    inner = tl.arange(0, BLOCK_HC * BLOCK_C)  # column BLOCK_C * stream + i
    sums, squares = tl.zeros([BLOCK_T, WIDTH], tl.float32), tl.zeros([BLOCK_T], tl.float32)
    for step in range(STEPS):
        first = (tl.program_id(1) * STEPS + step) * BLOCK_C
        if fn_ptr is not None:
            is_column = (first + inner % BLOCK_C < SIZE) & (inner // BLOCK_C < HC)
            at = inner // BLOCK_C * SIZE + first + inner % BLOCK_C
            is_weight = is_column[:, None] & ((share >= 0) & (share < SHARES))[None, :]
            weights = tl.load(fn_ptr + share[None, :] * (HC * SIZE) + at[:, None], mask=is_weight, other=0.0)
        if DEPENDENT:
            gdc_wait()
        columns = (first + tl.arange(0, BLOCK_C))[None, None, :]
        is_in = is_token[:, None, None] & (columns < SIZE)
        is_out = is_in & (to < HC)
        if y_ptr is None:
            new = tl.load(streams_ptr + rows * token_stride + to * stream_stride + columns, mask=is_out, other=0.0)
        else:
            wide = tl.zeros([BLOCK_T, BLOCK_HC, BLOCK_C], tl.float32)
            is_share = is_token[:, None, None] & (to < HC)
            for each in tl.static_range(HC):
                from_ptrs = streams_ptr + rows * token_stride + each * stream_stride + columns
                stream = tl.load(from_ptrs, mask=is_in, other=0.0)
                mix = tl.load(mix_ptr + rows * (HC * HC) + each * HC + to, mask=is_share, other=0.0)
                wide += mix * stream.to(tl.float32)
            y = tl.load(y_ptr + rows * y_stride + columns, mask=is_in, other=0.0)
            write = tl.load(write_ptr + rows * HC + to, mask=is_share, other=0.0)
            new = (wide + write * y.to(tl.float32)).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + rows * (HC * SIZE) + to * SIZE + columns, new, mask=is_out)
        if fn_ptr is not None:
            if BLOCK_T == 1:
                flat = tl.reshape(new, [BLOCK_HC * BLOCK_C]).to(tl.float32)
                sums += tl.sum(flat[:, None] * weights, 0)[None, :]
                squares += tl.sum(flat * flat, 0)
            else:
                flat = tl.reshape(new, [BLOCK_T, BLOCK_HC * BLOCK_C])
                sums = _add_products(flat, weights, sums)
                squares += tl.sum(flat.to(tl.float32) * flat.to(tl.float32), 1)
    if DEPENDENT:
        gdc_launch_dependents()
    if fn_ptr is not None:
        sums = tl.where((places == 2 * BLOCK_HC)[None, :], squares[:, None], sums)
        parts = (tl.program_id(1) * num_tokens + tokens).to(tl.int64) * WIDTH
        tl.store(parts_ptr + parts[:, None] + places[None, :], sums, mask=is_token[:, None])


@triton.jit
def share_of(places, HC: tl.constexpr, BLOCK_HC: tl.constexpr):
    """Return the share that has each of `places` in a row of parts; -1: none."""
    mixed = tl.maximum(places - BLOCK_HC * BLOCK_HC, 0)
    source, target = mixed // BLOCK_HC, mixed % BLOCK_HC
    share = tl.where((source < HC) & (target < HC), 2 * HC + source * HC + target, -1)
    kind, each = places // BLOCK_HC, places % BLOCK_HC
    of_one = tl.where((kind < 2) & (each < HC), kind * HC + each, -1)
    return tl.where(places >= BLOCK_HC * BLOCK_HC, share, of_one)


@triton.jit
def _add_products(x, weights, sums):
    """Return `sums` + x [BLOCK_T, K] times weights [K, WIDTH] float32."""
    if x.dtype == tl.bfloat16:
        high = weights.to(tl.bfloat16)
        rest = weights - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        sums = tl.dot(x, high, tl.dot(x, middle, tl.dot(x, low, sums)))
    else:
        sums = tl.dot(x.to(tl.float32), weights, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=("num_tokens",))
def _finish_kernel(
    x_ptr,  # [num_tokens, SIZE] of the streams' dtype, written
    write_ptr,  # [num_tokens, HC] float32, written by programs (.., 1)
    mix_ptr,  # [num_tokens, HC, HC] float32, likewise
    streams_ptr,  # [num_tokens, HC, SIZE], strides token_stride and stream_stride
    parts_ptr,  # [PARTS, num_tokens, WIDTH] float32
    base_ptr,  # [num_shares] float32
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
    BLOCK_HC: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_tokens, 1 or 2). Program (token, 0) reads the next input, (token, 1) makes the shares."""
    token, places, parts = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH), tl.arange(0, BLOCK_P)[:, None]
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(parts_ptr + (parts * num_tokens + token) * WIDTH + places[None, :], mask=parts < PARTS, other=0.0)
    if tl.program_id(1) == 0:
        columns = tl.arange(0, BLOCK)
        at = streams_ptr + token * token_stride + columns
        sums = tl.sum(values, 0)
        square = tl.sum(tl.where(places == 2 * BLOCK_HC, sums, 0.0), 0)
        scale = tl.rsqrt(square / (HC * SIZE) + streams_eps) * tl.load(scale_ptr)
        x = tl.zeros([BLOCK], tl.float32)
        for each in tl.static_range(HC):
            stream = tl.load(at + each * stream_stride, mask=columns < SIZE, other=0.0).to(tl.float32)
            product = tl.sum(tl.where(places == each, sums, 0.0), 0)
            x += (tl.sigmoid(product * scale + tl.load(base_ptr + each)) + eps) * stream
        out = x.to(x_ptr.dtype.element_ty)
        if norm_ptr is not None:
            wide = out.to(tl.float32)
            weight = tl.load(norm_ptr + columns, mask=columns < SIZE, other=0.0)
            wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + norm_eps)
            out = (wide.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + token * SIZE + columns, out, mask=columns < SIZE)
    elif write_ptr is not None:
        share = share_of(places, HC, BLOCK_HC)
        is_write, is_mix = (share >= HC) & (share < 2 * HC), share >= 2 * HC
        sums = tl.sum(values, 0)
        square = tl.sum(tl.where(places == 2 * BLOCK_HC, sums, 0.0), 0)
        sums *= tl.rsqrt(square / (HC * SIZE) + streams_eps)
        sums = sums * tl.load(scale_ptr + tl.where(is_mix, 2, 1)) + tl.load(
            base_ptr + share, mask=share >= 0, other=0.0
        )
        tl.store(write_ptr + token * HC + share - HC, 2 * tl.sigmoid(sums), mask=is_write)
        halves = tl.reshape(tl.where(is_mix, sums, float("-inf")), [2, BLOCK_HC * BLOCK_HC])
        mix = tl.reshape(tl.max(halves, 0), [BLOCK_HC, BLOCK_HC])  # the first half is -inf
        mix = _doubly_stochastic(mix, eps, HC, BLOCK_HC, STEPS)
        each = tl.arange(0, BLOCK_HC)
        is_share = (each < HC)[:, None] & (each < HC)[None, :]
        tl.store(mix_ptr + token * (HC * HC) + each[:, None] * HC + each[None, :], mix, mask=is_share)


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
