"""Parts of the kernels of the gated delta rule: the rows of tokens, convolved, and their decays.

A row lies in a pool, or in the output of the forward's projections if its token is new.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .delta_rule import DeltaWeights
from .paged_delta import DeltaInputs, DeltaPlan, DeltaPools

TILE = 16  # rows, the fewest of a product


def check_layer(inputs: DeltaInputs, weights: DeltaWeights, pools: DeltaPools, plan: DeltaPlan) -> None:
    """Check the shapes of a layer's arguments once."""
    num_heads, num_shared, key_dim, value_dim = weights.state_shape
    num_tokens, decay_dim = len(inputs.q), weights.dt_bias.shape[2]
    assert inputs.q.shape == inputs.k.shape == (num_tokens, num_heads, key_dim), (inputs.q.shape, inputs.k.shape)
    assert inputs.v.shape == (num_tokens, num_heads, num_shared * value_dim), inputs.v.shape
    assert inputs.b.shape == (num_tokens, num_heads, num_shared), inputs.b.shape
    assert inputs.a.shape == (num_tokens, num_heads, num_shared * decay_dim), inputs.a.shape
    assert inputs.q.stride() == inputs.k.stride() == inputs.v.stride(), [each.stride() for each in inputs]
    assert inputs.q.stride(2) == inputs.b.stride(2) == inputs.a.stride(2) == 1, [each.stride() for each in inputs]
    assert weights.taps.shape[::2] == (num_heads, 2 * key_dim + num_shared * value_dim), weights.taps.shape
    assert weights.taps.is_contiguous() and weights.a_log.is_contiguous() and weights.dt_bias.is_contiguous()
    assert decay_dim == 1 or num_shared == 1, "kernels have one value head per key head if states decay by channel"
    page_size = pools.rows.shape[3]
    widths = [weights.width, weights.update_width, pools.states.shape[4]]
    for pool, width in zip(pools, widths, strict=True):
        assert pool.is_contiguous() and pool.shape[1:] == (1, num_heads, page_size, width), (pool.shape, width)
    assert weights.num_before <= plan.block, (weights.num_before, plan.block)
    assert plan.block * widths[2] >= num_shared * key_dim * value_dim and page_size % plan.block == 0, plan.block


@triton.jit
def places(slots, is_row, pages_ptr, head, HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Return the numbers of rows of one head in a pool, int64, given their slots of any shape."""
    page = tl.load(pages_ptr + slots // PAGE_SIZE, mask=is_row, other=0)
    # What the first slot of a tile is a multiple of, Triton takes for a factor of every place. It is told that none is.
    return tl.multiple_of((page * HEADS + head) * PAGE_SIZE + slots % PAGE_SIZE, 1)


@triton.jit
def block_rows(edge, rows_ptr, pages_ptr, head, HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    """Return pointers to the row at slot `edge` in the pool, and behind the last row of the block before."""
    own = places(edge, edge >= 0, pages_ptr, head, HEADS, PAGE_SIZE)
    before = places(edge - BLOCK, edge > 0, pages_ptr, head, HEADS, PAGE_SIZE) + BLOCK
    return rows_ptr + own * WIDTH, rows_ptr + before * WIDTH


@triton.jit
def convolved(
    rows,  # [M] int32, since the edge of a block
    is_row,  # [M] bool
    channels,  # [N] int32, of a head
    is_channel,  # [N] bool
    new_ptr,  # the projections' output of this head for the first new row, tokens token_stride apart
    block_ptr,  # the row at the edge in the pool
    before_ptr,  # behind the row before
    taps_ptr,  # [TAPS, CHANNELS] float32, of this head
    edge,
    first_new,  # row
    token_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_OLD: tl.constexpr,  # rows before the first new one are read
):
    """Return rows behind the convolution and silu, [M, N] float32; zeros where `is_row` or `is_channel` is False. Rows
    before the first new one lie in its block, or just before."""
    mixed = tl.zeros([rows.shape[0], channels.shape[0]], tl.float32)
    if HAS_OLD:
        mixed = old_part(rows, is_row, channels, is_channel, block_ptr, before_ptr, taps_ptr, edge, first_new,
                         CHANNELS, WIDTH, TAPS)  # fmt: skip
    return new_part(mixed, rows - first_new, is_row, channels, is_channel, new_ptr, taps_ptr, token_stride,
                    CHANNELS, TAPS)  # fmt: skip


@triton.jit
def old_part(
    rows, is_row, channels, is_channel, block_ptr, before_ptr, taps_ptr, edge, first_new,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Return the part of the convolution of rows that rows before the first new one have, [M, N]. These are a row's
    first ones, so `new_part` goes on in the same order."""
    mixed = tl.zeros([rows.shape[0], channels.shape[0]], tl.float32)
    for tap in tl.static_range(TAPS):
        at = rows - (TAPS - 1) + tap
        old = tl.where(at >= 0, block_ptr, before_ptr) + at * WIDTH
        is_in = (is_row & (at < first_new) & (edge + at >= 0))[:, None] & is_channel[None, :]
        x = tl.load(old[:, None] + channels[None, :], mask=is_in, other=0.0).to(tl.float32)
        mixed += x * tap_weights(taps_ptr + tap * CHANNELS, rows, channels, is_channel)
    return mixed


@triton.jit
def new_part(
    mixed, tokens, is_row, channels, is_channel, new_ptr, taps_ptr, token_stride, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):  # fmt: skip
    """Return rows behind the convolution and silu, given the part of old rows. `tokens` [M] are the rows, counted from
    the first new one."""
    for tap in tl.static_range(TAPS):
        at = tokens - (TAPS - 1) + tap
        new = new_ptr + at.to(tl.int64) * token_stride
        is_in = (is_row & (at >= 0))[:, None] & is_channel[None, :]
        x = tl.load(new[:, None] + channels[None, :], mask=is_in, other=0.0).to(tl.float32)
        mixed += x * tap_weights(taps_ptr + tap * CHANNELS, tokens, channels, is_channel)
    return mixed * tl.sigmoid(mixed)


@triton.jit
def tap_weights(taps_ptr, rows, channels, is_channel):
    """Return a tap's weights of channels, [M or 1, N]. If rows are few, each thread reads its own ones: passing them on
    through shared memory would take longer."""
    if rows.shape[0] <= 8:
        at = channels[None, :] + tl.zeros_like(rows)[:, None]
        taps = tl.load(taps_ptr + at, mask=is_channel[None, :] & (at >= 0), other=0.0)
    else:
        taps = tl.load(taps_ptr + channels, mask=is_channel, other=0.0)[None, :]
    return taps


@triton.jit
def unit(x):
    """Return rows [M, N] of length one. Rows of zeros stay zeros."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def decays(a, is_row, a_log, dt_bias):
    """Return the logarithms by which states decay at rows, [M] float32, zeros where `is_row` is False: -exp(a_log)
    softplus(a + dt_bias). The logarithm of a sum with one is exact also where that sum rounds."""
    x = a + dt_bias
    e = tl.exp(tl.minimum(x, 20.0))
    one = 1.0 + e
    log = tl.where(one == 1.0, e, tl.log(one) * (e / tl.where(one == 1.0, 1.0, one - 1.0)))
    return tl.where(is_row, -tl.exp(a_log) * tl.where(x > 20.0, x, log), 0.0)


@triton.jit
def store_rows(
    slots,  # [M] int32, of new rows
    is_row,  # [M] bool
    columns,  # [N] int32
    is_column,  # [N] bool
    first_column,  # in a stored row, of the first number at `new_ptr`
    new_ptr,
    rows_ptr,
    pages_ptr,
    start,
    token_stride,
    head,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store some numbers of new rows in the pool."""
    is_in = is_row[:, None] & is_column[None, :]
    x = tl.load(new_ptr + (slots - start).to(tl.int64)[:, None] * token_stride + columns[None, :], mask=is_in)
    row = places(slots, is_row, pages_ptr, head, HEADS, PAGE_SIZE)
    at = rows_ptr + row[:, None] * WIDTH + first_column + columns[None, :]
    tl.store(at, x.to(rows_ptr.dtype.element_ty), mask=is_in)
