"""Prompts under the gated delta rule by Triton: whole blocks behind the state at an edge, in five kernels.

The first one convolves rows. The next three solve the system of each block, for all blocks at once. With T the inverse
of the system's matrix:

    W = T (beta exp(G) k),  U0 = T (beta v);  then U = U0 - W S, with the state S before the block

T comes from forward substitution in squares of 16 on the diagonal, which neighbours then join. The last kernel goes
from block to block with a few columns of a state, which are independent of the other columns. It stores updates,
states and outputs. A block that has begun is computed from its edge once more, so bits do not depend on the division of
a text into chunks.

For bfloat16 and float16 inputs, factors of products are float16: queries, keys, T and W are at most one, and values,
updates and states are divided by 16 first. So numbers up to a million fit, and keep 11 bits above 1e-3. Sums are
float32.
"""

# ruff: noqa: N803, N806
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .delta_rule import DeltaWeights
from .paged_delta import DeltaInputs, DeltaPlan, DeltaPools
from .triton_delta_rows import (
    TILE,
    block_rows,
    check_layer,
    convolved,
    decays,
    places,
    store_gates,
    store_rows,
    unit,
)

_COLUMNS = 32  # of a state that a program of the last kernel has


class _Solved(NamedTuple):
    """Blocks between the kernels, float16 or float32, except decays. Values and U0 are scaled as states are."""

    q: Tensor  # [num_blocks, block, num_key_heads, key_dim]
    k: Tensor  # likewise
    values: Tensor  # [num_blocks, block, num_value_heads, value_dim], then U0
    w: Tensor  # [num_blocks, block, num_value_heads, key_dim]
    pairs: Tensor  # [num_blocks, num_value_heads, block, block], products of queries and keys that they see, decayed
    system: Tensor  # likewise of keys; squares on the diagonal become those of the inverse
    decays: Tensor  # [num_blocks, num_value_heads, block] float32, since the edge

    @classmethod
    def allocate(cls, num_blocks: int, block: int, weights: DeltaWeights, dtype: torch.dtype) -> _Solved:
        num_heads, num_shared, key_dim, value_dim = weights.state_shape
        values, of_keys = num_heads * num_shared, (num_blocks, block, num_heads, key_dim)
        shapes = [of_keys, of_keys, (num_blocks, block, values, value_dim), (num_blocks, block, values, key_dim)]
        shapes += [(num_blocks, values, block, block)] * 2 + [(num_blocks, values, block)]
        dtypes = (*[dtype] * 6, torch.float32)
        device = weights.taps.device
        return cls(*(torch.empty(shape, dtype=each, device=device) for shape, each in zip(shapes, dtypes, strict=True)))


def delta_prompt(inputs: DeltaInputs, weights: DeltaWeights, pools: DeltaPools, plan: DeltaPlan) -> Tensor:
    """Store the rows and updates of new tokens, and the states after the blocks that they complete. Return the outputs,
    [num_tokens, num_value_heads, value_dim] of the inputs' dtype; zeros for tokens without a slot."""
    check_layer(inputs, weights, pools, plan)
    (num_tokens, num_heads, _), (_, num_shared, key_dim, value_dim) = inputs.qkv.shape, weights.state_shape
    blocks = plan.blocks
    assert blocks is not None and plan.table.stride(1) == 1, plan
    num_blocks, num_values = len(blocks.seqs), num_heads * num_shared
    out = torch.zeros((num_tokens, num_values, value_dim), dtype=inputs.qkv.dtype, device=inputs.qkv.device)
    is_half = inputs.qkv.dtype != torch.float32
    solved = _Solved.allocate(num_blocks, plan.block, weights, torch.float16 if is_half else torch.float32)
    scale = 1 / 16 if is_half else 1.0
    rows, block_v = max(TILE, plan.block), max(TILE, triton.next_power_of_2(value_dim))
    sizes = {
        "HEADS": num_heads,
        "SHARED": num_shared,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK": plan.block,
        "BLOCK_K": max(TILE, triton.next_power_of_2(key_dim)),
    }
    of_pages = sizes | {"PAGE_SIZE": pools.rows.shape[3]}
    of_updates = of_pages | {"UPDATE_WIDTH": weights.update_width}
    strides = {"QKV_HEAD": inputs.qkv.stride(1), "B_HEAD": inputs.b.stride(1), "A_HEAD": inputs.a.stride(1)}
    _convolve_kernel[num_blocks * (rows // TILE), num_heads, 2 + num_shared](
        *solved[:3], *pools[:2], *inputs[:1], *inputs[2:], weights.taps, *blocks[:3], *blocks[4:], plan.table,
        inputs.qkv.stride(0), inputs.b.stride(0), plan.table.stride(0), TAPS=weights.taps.shape[2], BLOCK_V=block_v,
        SCALE=scale, **strides, **of_updates, num_warps=4, maxnreg=80,
    )  # fmt: skip
    _pairs_kernel[num_blocks, num_values](
        *solved[:2], *solved[4:], *pools[:2], weights.a_log, weights.dt_bias, blocks.stops, *blocks[4:], plan.table,
        plan.table.stride(0), ROWS=rows, **of_updates, num_warps=4,
    )  # fmt: skip
    _invert_kernel[num_blocks * (rows // TILE), num_values](
        solved.system, blocks.seqs, HEADS=num_values, BLOCK=plan.block, num_warps=1
    )
    _solve_kernel[num_blocks, num_values](
        *solved[1:4], *solved[5:], pools.rows, blocks.stops, *blocks[4:], plan.table, plan.table.stride(0), ROWS=rows,
        BLOCK_V=block_v, **of_pages, num_warps=4,
    )  # fmt: skip
    block_v = min(_COLUMNS, block_v)
    _pass_kernel[num_values * triton.cdiv(value_dim, block_v), len(blocks.starts)](
        out, *pools[1:], *solved[:5], solved.decays, *blocks[:4], plan.table, plan.table.stride(0), ROWS=rows,
        STATE_PART=pools.states.shape[4], BLOCK_V=block_v, SCALE=scale, **of_updates, num_warps=4,
        num_stages=3 if is_half else 1,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=("table_stride",))
def _convolve_kernel(
    q_ptr,  # [num_blocks, BLOCK, HEADS, KEY_DIM], written
    k_ptr,  # [num_blocks, BLOCK, HEADS, KEY_DIM], written
    values_ptr,  # [num_blocks, BLOCK, HEADS * SHARED, VALUE_DIM], written
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 2)], written
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32, written
    qkv_ptr,  # [num_tokens, HEADS, 2 * KEY_DIM + SHARED * VALUE_DIM], tokens token_stride and heads QKV_HEAD apart
    b_ptr,  # [num_tokens, HEADS, SHARED], tokens small_stride and heads B_HEAD apart
    a_ptr,  # [num_tokens, HEADS, SHARED], tokens small_stride and heads A_HEAD apart
    taps_ptr,  # [HEADS, 2 * KEY_DIM + SHARED * VALUE_DIM, TAPS] float32
    tokens_ptr,  # [num_seqs] int32
    starts_ptr,  # [num_seqs] int32
    stops_ptr,  # [num_seqs] int32
    block_seqs_ptr,  # [num_blocks] int32
    block_edges_ptr,  # [num_blocks] int32
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    token_stride,
    small_stride,
    table_stride,
    QKV_HEAD: tl.constexpr,
    B_HEAD: tl.constexpr,
    A_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,  # of values
):
    """Grid: (num_blocks * ceil(BLOCK / 16), HEADS, 2 + SHARED). A program has 16 rows: the queries, the keys, or the
    values of one value head. It also stores the rows of new tokens, and keys."""
    TILE: tl.constexpr = 16
    PARTS: tl.constexpr = (BLOCK + TILE - 1) // TILE
    CHANNELS: tl.constexpr = 2 * KEY_DIM + SHARED * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + 2 * SHARED
    block, part = tl.program_id(0).to(tl.int64) // PARTS, tl.program_id(0) % PARTS
    head, kind = tl.program_id(1), tl.program_id(2)
    seq = tl.load(block_seqs_ptr + block).to(tl.int64)
    if seq >= 0:
        edge, start, stop = tl.load(block_edges_ptr + block), tl.load(starts_ptr + seq), tl.load(stops_ptr + seq)
        token = tl.load(tokens_ptr + seq).to(tl.int64)
        pages_ptr = table_ptr + seq * table_stride
        taps_ptr += head * CHANNELS * TAPS
        qkv_ptr += token * token_stride + head * QKV_HEAD
        row = part * TILE + tl.arange(0, TILE)
        slots = edge + row
        is_row = (row < BLOCK) & (slots < stop)
        is_new = is_row & (slots >= start)
        if kind < 2:
            dims = tl.arange(0, BLOCK_K)
            is_dim, channels = dims < KEY_DIM, kind * KEY_DIM + dims
            store_rows(slots, is_new, channels, is_dim, 0, qkv_ptr, rows_ptr, pages_ptr, start, token_stride, head,
                       HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
            x = unit(_rows(row, part * TILE, is_row, channels, is_dim, qkv_ptr, rows_ptr, pages_ptr, taps_ptr, edge,
                           start, token_stride, head, HEADS, PAGE_SIZE, BLOCK, WIDTH, TAPS))  # fmt: skip
            x *= tl.where(kind == 0, KEY_DIM**-0.5, 1.0)
            at = ((block * BLOCK + row) * HEADS + head)[:, None] * KEY_DIM + dims[None, :]
            is_in = (row < BLOCK)[:, None] & is_dim[None, :]
            to_ptr = q_ptr if kind == 0 else k_ptr
            tl.store(to_ptr + at, x.to(q_ptr.dtype.element_ty), mask=is_in)
            if kind == 1:
                place = places(edge, edge >= 0, pages_ptr, head, HEADS, PAGE_SIZE) + row
                at = place[:, None] * UPDATE_WIDTH + SHARED * VALUE_DIM + dims[None, :]
                tl.store(updates_ptr + at, x, mask=is_row[:, None] & is_dim[None, :])
        else:
            shared, columns = kind - 2, tl.arange(0, BLOCK_V)
            is_column, channels = columns < VALUE_DIM, 2 * KEY_DIM + shared * VALUE_DIM + columns
            store_rows(slots, is_new, channels, is_column, 0, qkv_ptr, rows_ptr, pages_ptr, start, token_stride, head,
                       HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
            b_ptr += token * small_stride + head * B_HEAD + shared
            a_ptr += token * small_stride + head * A_HEAD + shared
            store_gates(slots, is_new, shared, b_ptr, a_ptr, rows_ptr, pages_ptr, start, small_stride, head, HEADS,
                        SHARED, PAGE_SIZE, WIDTH)  # fmt: skip
            v = _rows(row, part * TILE, is_row, channels, is_column, qkv_ptr, rows_ptr, pages_ptr, taps_ptr, edge,
                      start, token_stride, head, HEADS, PAGE_SIZE, BLOCK, WIDTH, TAPS)  # fmt: skip
            at = ((block * BLOCK + row) * HEADS + head) * SHARED + shared
            at = at[:, None] * VALUE_DIM + columns[None, :]
            is_in = (row < BLOCK)[:, None] & is_column[None, :]
            tl.store(values_ptr + at, (v * SCALE).to(values_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def _rows(
    rows, first_row, is_row, channels, is_channel, qkv_ptr, rows_ptr, pages_ptr, taps_ptr, edge, start, token_stride,
    head, HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Return rows behind the convolution. Most of them, and those before, are new, and need no pool."""
    if edge + first_row - (TAPS - 1) >= start:
        x = convolved(rows, is_row, channels, is_channel, qkv_ptr, rows_ptr, rows_ptr, taps_ptr, edge, start - edge,
                      token_stride, WIDTH, TAPS, False)  # fmt: skip
    else:
        own_ptr, before_ptr = block_rows(edge, rows_ptr, pages_ptr, head, HEADS, PAGE_SIZE, BLOCK, WIDTH)
        x = convolved(rows, is_row, channels, is_channel, qkv_ptr, own_ptr, before_ptr, taps_ptr, edge, start - edge,
                      token_stride, WIDTH, TAPS, True)  # fmt: skip
    return x


@triton.jit(do_not_specialize=("table_stride",))
def _pairs_kernel(
    q_ptr,  # [num_blocks, BLOCK, HEADS, KEY_DIM]
    k_ptr,  # [num_blocks, BLOCK, HEADS, KEY_DIM]
    pairs_ptr,  # [num_blocks, HEADS * SHARED, BLOCK, BLOCK], written
    system_ptr,  # [num_blocks, HEADS * SHARED, BLOCK, BLOCK], written, without the ones on the diagonal
    decays_ptr,  # [num_blocks, HEADS * SHARED, BLOCK] float32, written
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 2)]
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32, written
    a_log_ptr,  # [HEADS, SHARED] float32
    dt_bias_ptr,  # [HEADS, SHARED] float32
    stops_ptr,  # [num_seqs] int32
    block_seqs_ptr,  # [num_blocks] int32
    block_edges_ptr,  # [num_blocks] int32
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    table_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: (num_blocks, HEADS * SHARED). A program has a block of one value head."""
    WIDTH: tl.constexpr = 2 * KEY_DIM + SHARED * (VALUE_DIM + 2)
    block, value_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, shared = value_head // SHARED, value_head % SHARED
    seq = tl.load(block_seqs_ptr + block).to(tl.int64)
    if seq >= 0:
        edge, stop = tl.load(block_edges_ptr + block), tl.load(stops_ptr + seq)
        row, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
        is_row = (row < BLOCK) & (edge + row < stop)
        is_in = (row < BLOCK)[:, None] & (dims < KEY_DIM)[None, :]
        at = ((block * BLOCK + row) * HEADS + head)[:, None] * KEY_DIM + dims[None, :]
        q, k = tl.load(q_ptr + at, mask=is_in, other=0.0), tl.load(k_ptr + at, mask=is_in, other=0.0)
        place = places(edge, edge >= 0, table_ptr + seq * table_stride, head, HEADS, PAGE_SIZE)
        of_row = rows_ptr + (place + row) * WIDTH + WIDTH - 2 * SHARED + shared
        beta = tl.sigmoid(tl.load(of_row, mask=is_row, other=0.0).to(tl.float32))
        a = tl.load(of_row + SHARED, mask=is_row, other=0.0).to(tl.float32)
        steps = decays(a, is_row, tl.load(a_log_ptr + value_head), tl.load(dt_bias_ptr + value_head))
        decay = tl.cumsum(steps, 0)
        of_head = block * (HEADS * SHARED) + value_head
        tl.store(decays_ptr + of_head * BLOCK + row, decay, mask=row < BLOCK)
        of_row = updates_ptr + (place + row) * UPDATE_WIDTH + SHARED * VALUE_DIM + KEY_DIM + shared
        tl.store(of_row, decay, mask=is_row)
        is_seen = row[:, None] >= row[None, :]
        between = tl.exp(tl.where(is_seen, decay[:, None] - decay[None, :], float("-inf")))
        pairs = tl.dot(q, tl.trans(k), input_precision="tf32x3") * between
        at = of_head * (BLOCK * BLOCK) + row[:, None] * BLOCK + row[None, :]
        is_square = (row < BLOCK)[:, None] & (row < BLOCK)[None, :]
        tl.store(pairs_ptr + at, pairs.to(pairs_ptr.dtype.element_ty), mask=is_square)
        below = tl.dot(k, tl.trans(k), input_precision="tf32x3") * between * tl.where(is_row, beta, 0.0)[:, None]
        below = tl.where(row[:, None] > row[None, :], below, 0.0)
        tl.store(system_ptr + at, below.to(system_ptr.dtype.element_ty), mask=is_square)


@triton.jit
def _invert_kernel(
    system_ptr,  # [num_blocks, HEADS, BLOCK, BLOCK], squares of 16 on the diagonal are replaced by their inverse
    block_seqs_ptr,  # [num_blocks] int32
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num_blocks * ceil(BLOCK / 16), HEADS). A program inverts a square of the system, which is strictly lower
    triangular, with ones on its diagonal. A row of the inverse follows from the rows before."""
    TILE: tl.constexpr = 16
    PARTS: tl.constexpr = (BLOCK + TILE - 1) // TILE
    block, part, head = tl.program_id(0).to(tl.int64) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    if tl.load(block_seqs_ptr + block) >= 0:
        row = tl.arange(0, TILE)
        system_ptr += (block * HEADS + head) * (BLOCK * BLOCK) + part * TILE * (BLOCK + 1)
        inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
        for i in range(1, min(TILE, BLOCK)):
            factors = tl.load(system_ptr + i * BLOCK + row, mask=row < i, other=0.0).to(tl.float32)
            solved = tl.sum(factors[:, None] * inverse, 0)
            inverse -= tl.where(row[:, None] == i, solved[None, :], 0.0)
        is_in = (row < BLOCK)[:, None] & (row < BLOCK)[None, :]
        at = row[:, None] * BLOCK + row[None, :]
        tl.store(system_ptr + at, inverse.to(system_ptr.dtype.element_ty), mask=is_in)


@triton.jit(do_not_specialize=("table_stride",))
def _solve_kernel(
    k_ptr,  # [num_blocks, BLOCK, HEADS, KEY_DIM]
    values_ptr,  # [num_blocks, BLOCK, HEADS * SHARED, VALUE_DIM], replaced by U0
    w_ptr,  # [num_blocks, BLOCK, HEADS * SHARED, KEY_DIM], written
    system_ptr,  # [num_blocks, HEADS * SHARED, BLOCK, BLOCK], squares on the diagonal are inverted
    decays_ptr,  # [num_blocks, HEADS * SHARED, BLOCK] float32
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 2)]
    stops_ptr,  # [num_seqs] int32
    block_seqs_ptr,  # [num_blocks] int32
    block_edges_ptr,  # [num_blocks] int32
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    table_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid: (num_blocks, HEADS * SHARED). A program has a block of one value head."""
    WIDTH: tl.constexpr = 2 * KEY_DIM + SHARED * (VALUE_DIM + 2)
    DTYPE: tl.constexpr = w_ptr.dtype.element_ty
    block, value_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, shared = value_head // SHARED, value_head % SHARED
    seq = tl.load(block_seqs_ptr + block).to(tl.int64)
    if seq >= 0:
        edge, stop = tl.load(block_edges_ptr + block), tl.load(stops_ptr + seq)
        row, dims, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
        of_head = block * (HEADS * SHARED) + value_head
        at = of_head * (BLOCK * BLOCK) + row[:, None] * BLOCK + row[None, :]
        is_square = (row < BLOCK)[:, None] & (row < BLOCK)[None, :]
        inverse = _joined(tl.load(system_ptr + at, mask=is_square, other=0.0)).to(DTYPE)
        is_row = (row < BLOCK) & (edge + row < stop)
        place = places(edge, edge >= 0, table_ptr + seq * table_stride, head, HEADS, PAGE_SIZE)
        b = tl.load(rows_ptr + (place + row) * WIDTH + WIDTH - 2 * SHARED + shared, mask=is_row, other=0.0)
        beta = tl.where(is_row, tl.sigmoid(b.to(tl.float32)), 0.0)
        decay = tl.load(decays_ptr + of_head * BLOCK + row, mask=row < BLOCK, other=0.0)
        is_in = (row < BLOCK)[:, None] & (dims < KEY_DIM)[None, :]
        at = ((block * BLOCK + row) * HEADS + head)[:, None] * KEY_DIM + dims[None, :]
        k = tl.load(k_ptr + at, mask=is_in, other=0.0).to(tl.float32) * (beta * tl.exp(decay))[:, None]
        w = tl.dot(inverse, k.to(DTYPE), input_precision="tf32x3")
        of_value = ((block * BLOCK + row) * (HEADS * SHARED) + value_head)[:, None]
        tl.store(w_ptr + of_value * KEY_DIM + dims[None, :], w.to(DTYPE), mask=is_in)
        own = values_ptr + of_value * VALUE_DIM + columns[None, :]
        is_in = (row < BLOCK)[:, None] & (columns < VALUE_DIM)[None, :]
        v = tl.load(own, mask=is_in, other=0.0).to(tl.float32) * beta[:, None]
        tl.store(own, tl.dot(inverse, v.to(DTYPE), input_precision="tf32x3").to(DTYPE), mask=is_in)


@triton.jit
def _joined(system):
    """Return the inverse of a system [SIZE, SIZE], float32, whose squares of 16 on the diagonal are inverted already.

    Two neighbours become one square: [[P, 0], [L, Q]] has the inverse [[P', 0], [-Q' L P', Q']]."""
    TILE: tl.constexpr = 16
    SIZE: tl.constexpr = system.shape[0]
    rows = tl.arange(0, SIZE)
    is_own = rows[:, None] // TILE == rows[None, :] // TILE
    whole = tl.where(is_own, system, 0.0).to(tl.float32)
    for level in tl.static_range(4):
        if (TILE << level) < SIZE:
            two, other = rows[:, None] // (TILE << level), rows[None, :] // (TILE << level)
            is_left = (two // 2 == other // 2) & (two > other)
            own = whole.to(system.dtype)
            left = tl.dot(tl.where(is_left, system, 0.0).to(system.dtype), own, input_precision="tf32x3")
            whole -= tl.dot(own, left.to(system.dtype), input_precision="tf32x3")
    return whole


@triton.jit(do_not_specialize=("table_stride",))
def _pass_kernel(
    out_ptr,  # [num_tokens, HEADS * SHARED, VALUE_DIM], written
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32, written
    states_ptr,  # [num_pages, HEADS, PAGE_SIZE, STATE_PART] float32, written
    q_ptr,  # [num_blocks, BLOCK, HEADS, KEY_DIM]
    k_ptr,  # [num_blocks, BLOCK, HEADS, KEY_DIM]
    values_ptr,  # [num_blocks, BLOCK, HEADS * SHARED, VALUE_DIM], U0
    w_ptr,  # [num_blocks, BLOCK, HEADS * SHARED, KEY_DIM]
    pairs_ptr,  # [num_blocks, HEADS * SHARED, BLOCK, BLOCK]
    decays_ptr,  # [num_blocks, HEADS * SHARED, BLOCK] float32
    tokens_ptr,  # [num_seqs] int32
    starts_ptr,  # [num_seqs] int32
    stops_ptr,  # [num_seqs] int32
    first_blocks_ptr,  # [num_seqs] int32
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    table_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_PART: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,  # of states and updates in this kernel
):
    """Grid: (HEADS * SHARED * ceil(VALUE_DIM / BLOCK_V), num_seqs)."""
    DTYPE: tl.constexpr = w_ptr.dtype.element_ty
    NUM_PARTS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    part, value_head = tl.program_id(0) % NUM_PARTS, tl.program_id(0) // NUM_PARTS
    head, shared, seq = value_head // SHARED, value_head % SHARED, tl.program_id(1).to(tl.int64)
    start, stop = tl.load(starts_ptr + seq), tl.load(stops_ptr + seq)
    block = tl.load(first_blocks_ptr + seq).to(tl.int64)
    pages_ptr = table_ptr + seq * table_stride
    row, dims, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V)
    is_dim, is_column = dims < KEY_DIM, columns < VALUE_DIM
    is_in = (row < BLOCK)[:, None] & is_dim[None, :]
    is_square = (row < BLOCK)[:, None] & (row < BLOCK)[None, :]
    is_state = is_dim[:, None] & is_column[None, :]
    numbers_of_state = (shared * KEY_DIM + dims)[:, None] * VALUE_DIM + columns[None, :]
    out_ptr += (tl.load(tokens_ptr + seq).to(tl.int64) * (HEADS * SHARED) + value_head) * VALUE_DIM
    begin = start // BLOCK * BLOCK
    has_state = (begin > 0) & (start < stop)
    place = places(begin - BLOCK, has_state, pages_ptr, head, HEADS, PAGE_SIZE)
    is_kept = is_state & has_state
    state = tl.load(states_ptr + place * STATE_PART + numbers_of_state, mask=is_kept, other=0.0) * SCALE
    for edge in range(begin, tl.where(start < stop, stop, begin), BLOCK):
        slots = edge + row
        is_value = ((row < BLOCK) & (slots < stop))[:, None] & is_column[None, :]
        of_head, own = block * (HEADS * SHARED) + value_head, (block * BLOCK + row)[:, None]
        decay = tl.load(decays_ptr + of_head * BLOCK + row, mask=row < BLOCK, other=0.0)
        last = tl.load(decays_ptr + of_head * BLOCK + BLOCK - 1)
        w = tl.load(w_ptr + (own * (HEADS * SHARED) + value_head) * KEY_DIM + dims[None, :], mask=is_in, other=0.0)
        q = tl.load(q_ptr + (own * HEADS + head) * KEY_DIM + dims[None, :], mask=is_in, other=0.0)
        k = tl.load(k_ptr + (own * HEADS + head) * KEY_DIM + dims[None, :], mask=is_in, other=0.0)
        pair = of_head * (BLOCK * BLOCK) + row[:, None] * BLOCK + row[None, :]
        pairs = tl.load(pairs_ptr + pair, mask=is_square, other=0.0)
        at = (own * (HEADS * SHARED) + value_head) * VALUE_DIM + columns[None, :]
        u = tl.load(values_ptr + at, mask=is_value, other=0.0).to(tl.float32)
        before = state.to(DTYPE)
        u -= tl.dot(w, before, input_precision="tf32x3")
        output = tl.exp(decay)[:, None] * tl.dot(q, before, input_precision="tf32x3")
        output = tl.dot(pairs, u.to(DTYPE), output, input_precision="tf32x3") * (1 / SCALE)
        faded = (u * tl.exp(last - decay)[:, None]).to(DTYPE)
        state = tl.dot(tl.trans(k), faded, state * tl.exp(last), input_precision="tf32x3")
        place = places(edge, edge >= 0, pages_ptr, head, HEADS, PAGE_SIZE)
        at = (place + row)[:, None] * UPDATE_WIDTH + shared * VALUE_DIM + columns[None, :]
        tl.store(updates_ptr + at, u * (1 / SCALE), mask=is_value)
        at = (slots - start).to(tl.int64)[:, None] * (HEADS * SHARED * VALUE_DIM) + columns[None, :]
        is_new = is_value & (slots >= start)[:, None]
        tl.store(out_ptr + at, output.to(out_ptr.dtype.element_ty), mask=is_new)
        is_kept = is_state & (edge + BLOCK <= stop)
        tl.store(states_ptr + place * STATE_PART + numbers_of_state, state * (1 / SCALE), mask=is_kept)
        block += 1
