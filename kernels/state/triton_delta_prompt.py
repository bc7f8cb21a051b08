"""Prompts under the gated delta rule by Triton: whole blocks behind the state at an edge, in six kernels or seven.

The first one convolves rows. The next ones (triton_delta_pairs.py, and two here) solve the system of each block, for
all blocks at once. With T the inverse of the system's matrix:

    W = T (beta exp(G) k),  U0 = T (beta v);  then U = U0 - W S, with the state S before the block

T comes from forward substitution in squares of 16 on the diagonal, which neighbours then join. The next kernel
goes from block to block with a few columns of a state, which are independent of the other columns, and stores updates
and states. The last one computes outputs, for all blocks at once. A block that has begun is computed from its edge once
more, so bits do not depend on the division of a text into chunks.

Rounds read keys, decays and updates of a block that is not complete. So a prompt stores them for its last block alone.
If the tokens may be drafts, all blocks keep them, because a round may begin in a block that rejected drafts completed.

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
from .triton_delta_pairs import pairs_by_channel, pairs_by_head
from .triton_delta_rows import (
    TILE,
    block_rows,
    check_layer,
    convolved,
    places,
    store_rows,
    unit,
)

_COLUMNS = 32  # of a state that a program of the last kernel has
# ptxas of CUDA 12.8 loses the address of a right factor of 16 or 32 columns if other products of the kernel have 64
_FEWEST = 64  # columns of the products in `_solve_kernel`


class _Solved(NamedTuple):
    """Blocks between the kernels, float16 or float32, except decays. Values and U0 are scaled as states are."""

    q: Tensor  # [num_blocks, block, num_key_heads, key_dim]
    k: Tensor  # likewise
    values: Tensor  # [num_blocks, block, num_value_heads, value_dim], then U0, then U
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
    num_tokens, (num_heads, num_shared, key_dim, value_dim) = len(inputs.q), weights.state_shape
    blocks = plan.blocks
    assert blocks is not None and plan.table.stride(1) == 1, plan
    num_blocks, num_values = len(blocks.seqs), num_heads * num_shared
    out = torch.zeros((num_tokens, num_values, value_dim), dtype=inputs.q.dtype, device=inputs.q.device)
    is_half = inputs.q.dtype != torch.float32
    solved = _Solved.allocate(num_blocks, plan.block, weights, torch.float16 if is_half else torch.float32)
    scale = 1 / 16 if is_half else 1.0
    rows, block_v = max(TILE, plan.block), max(TILE, triton.next_power_of_2(value_dim))
    sizes = {
        "HEADS": num_heads,
        "SHARED": num_shared,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "DECAY_DIM": weights.dt_bias.shape[2],
        "BLOCK": plan.block,
        "BLOCK_K": max(TILE, triton.next_power_of_2(key_dim)),
    }
    sizes |= {"PAGE_SIZE": pools.rows.shape[3]}
    of_updates, keep = sizes | {"UPDATE_WIDTH": weights.update_width}, plan.query_len is not None
    strides = {"QKV_HEAD": inputs.q.stride(1), "B_HEAD": inputs.b.stride(1), "A_HEAD": inputs.a.stride(1)}
    given = *blocks[4:], plan.table, plan.table.stride(0)
    _convolve_kernel[num_blocks * (rows // TILE), num_heads, 2 + num_shared](
        *solved[:3], *pools[:2], *inputs[:3], *inputs[4:], weights.taps, *blocks[:3], *given, *inputs.strides,
        TAPS=weights.taps.shape[1], BLOCK_V=block_v, SCALE=scale, KEEP=keep, **strides, **of_updates, num_warps=4,
        maxnreg=80,
    )  # fmt: skip
    of_pairs = *solved[:2], *solved[4:], *pools[:2], weights.a_log, weights.dt_bias, blocks.stops, *given
    if weights.dt_bias.shape[2] == 1:
        pairs_by_head(*of_pairs, ROWS=rows, KEEP=keep, **of_updates)
    else:
        pairs_by_channel(*of_pairs, ROWS=rows, **of_updates)
    _invert_kernel[num_blocks * (rows // TILE), num_values](
        solved.system, blocks.seqs, HEADS=num_values, BLOCK=plan.block, num_warps=1
    )
    of_products = of_updates | {"BLOCK_K": max(_FEWEST, sizes["BLOCK_K"]), "BLOCK_V": max(_FEWEST, block_v)}
    _solve_kernel[num_blocks, num_values](
        *solved[:4], *solved[5:], *pools[:2], blocks.stops, *given, ROWS=rows, **of_products, num_warps=4,
    )  # fmt: skip
    of_states = {"ROWS": rows, "STATE_PART": pools.states.shape[4], "SCALE": scale, "num_warps": 4}
    part_v = min(_COLUMNS, block_v)
    _pass_kernel[num_values * triton.cdiv(value_dim, part_v), len(blocks.starts)](
        *pools[1:], *solved[1:4], solved.decays, *blocks[1:4], *given[2:], BLOCK_V=part_v, KEEP=keep, **of_states,
        **of_updates, num_stages=3 if is_half else 1,
    )  # fmt: skip
    part_v = min(64, block_v)
    _outputs_kernel[num_values * triton.cdiv(value_dim, part_v), num_blocks](
        out, pools.states, solved.q, solved.values, solved.pairs, solved.decays, *blocks[:3], *given, BLOCK_V=part_v,
        **of_states, **sizes,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=("table_stride",))
def _convolve_kernel(
    q_ptr,  # [num_blocks, BLOCK, HEADS, KEY_DIM], written
    k_ptr,  # [num_blocks, BLOCK, HEADS, KEY_DIM], written
    values_ptr,  # [num_blocks, BLOCK, HEADS * SHARED, VALUE_DIM], written
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 1 + DECAY_DIM)], written
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32, written
    new_q_ptr,  # [num_tokens, HEADS, KEY_DIM], tokens token_stride and heads QKV_HEAD apart
    new_k_ptr,  # likewise
    new_v_ptr,  # [num_tokens, HEADS, SHARED * VALUE_DIM], likewise
    b_ptr,  # [num_tokens, HEADS, SHARED], tokens b_stride and heads B_HEAD apart
    a_ptr,  # [num_tokens, HEADS, SHARED * DECAY_DIM], tokens a_stride and heads A_HEAD apart
    taps_ptr,  # [HEADS, TAPS, 2 * KEY_DIM + SHARED * VALUE_DIM] float32
    tokens_ptr,  # [num_seqs] int32
    starts_ptr,  # [num_seqs] int32
    stops_ptr,  # [num_seqs] int32
    block_seqs_ptr,  # [num_blocks] int32
    block_edges_ptr,  # [num_blocks] int32
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    table_stride,
    token_stride,
    b_stride,
    a_stride,
    QKV_HEAD: tl.constexpr,
    B_HEAD: tl.constexpr,
    A_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAY_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr,
    KEEP: tl.constexpr,  # tokens may be drafts
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
    WIDTH: tl.constexpr = CHANNELS + SHARED * (1 + DECAY_DIM)
    block, part = tl.program_id(0).to(tl.int64) // PARTS, tl.program_id(0) % PARTS
    head, kind = tl.program_id(1), tl.program_id(2)
    seq = tl.load(block_seqs_ptr + block).to(tl.int64)
    if seq >= 0:
        edge, start, stop = tl.load(block_edges_ptr + block), tl.load(starts_ptr + seq), tl.load(stops_ptr + seq)
        token = tl.load(tokens_ptr + seq).to(tl.int64)
        pages_ptr = table_ptr + seq * table_stride
        taps_ptr += head * CHANNELS * TAPS
        row = part * TILE + tl.arange(0, TILE)
        slots = edge + row
        is_row = (row < BLOCK) & (slots < stop)
        is_new = is_row & (slots >= start)
        if kind < 2:
            dims = tl.arange(0, BLOCK_K)
            is_dim, channels = dims < KEY_DIM, kind * KEY_DIM + dims
            own_ptr = tl.where(kind == 0, new_q_ptr, new_k_ptr - KEY_DIM) + (token * token_stride + head * QKV_HEAD)
            store_rows(slots, is_new, channels, is_dim, 0, own_ptr, rows_ptr, pages_ptr, start, token_stride, head,
                       HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
            x = unit(_rows(row, part * TILE, is_row, channels, is_dim, own_ptr, rows_ptr, pages_ptr, taps_ptr, edge,
                           start, token_stride, head, HEADS, PAGE_SIZE, BLOCK, CHANNELS, WIDTH, TAPS))  # fmt: skip
            x *= tl.where(kind == 0, KEY_DIM**-0.5, 1.0)
            at = ((block * BLOCK + row) * HEADS + head)[:, None] * KEY_DIM + dims[None, :]
            is_in = (row < BLOCK)[:, None] & is_dim[None, :]
            tl.store(tl.where(kind == 0, q_ptr, k_ptr) + at, x.to(q_ptr.dtype.element_ty), mask=is_in)
            if kind == 1:
                place = places(edge, edge >= 0, pages_ptr, head, HEADS, PAGE_SIZE) + row
                at = place[:, None] * UPDATE_WIDTH + SHARED * VALUE_DIM + dims[None, :]
                is_kept = is_row & (KEEP or edge + BLOCK > stop)
                tl.store(updates_ptr + at, x, mask=is_kept[:, None] & is_dim[None, :])
                if DECAY_DIM > 1:
                    a_ptr += token * a_stride + head * A_HEAD
                    store_rows(slots, is_new, dims, is_dim, CHANNELS + SHARED, a_ptr, rows_ptr, pages_ptr, start,
                               a_stride, head, HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
        else:
            shared, columns, one = kind - 2, tl.arange(0, BLOCK_V), tl.arange(0, 1)
            is_column, channels = columns < VALUE_DIM, 2 * KEY_DIM + shared * VALUE_DIM + columns
            own_ptr = new_v_ptr - 2 * KEY_DIM + (token * token_stride + head * QKV_HEAD)
            store_rows(slots, is_new, channels, is_column, 0, own_ptr, rows_ptr, pages_ptr, start, token_stride, head,
                       HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
            b_ptr += token * b_stride + head * B_HEAD + shared
            store_rows(slots, is_new, one, one == 0, CHANNELS + shared, b_ptr, rows_ptr, pages_ptr, start, b_stride,
                       head, HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
            if DECAY_DIM == 1:
                a_ptr += token * a_stride + head * A_HEAD + shared
                store_rows(slots, is_new, one, one == 0, CHANNELS + SHARED + shared, a_ptr, rows_ptr, pages_ptr, start,
                           a_stride, head, HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
            v = _rows(row, part * TILE, is_row, channels, is_column, own_ptr, rows_ptr, pages_ptr, taps_ptr, edge,
                      start, token_stride, head, HEADS, PAGE_SIZE, BLOCK, CHANNELS, WIDTH, TAPS)  # fmt: skip
            at = ((block * BLOCK + row) * HEADS + head) * SHARED + shared
            at = at[:, None] * VALUE_DIM + columns[None, :]
            is_in = (row < BLOCK)[:, None] & is_column[None, :]
            tl.store(values_ptr + at, (v * SCALE).to(values_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def _rows(
    rows, first_row, is_row, channels, is_channel, new_ptr, rows_ptr, pages_ptr, taps_ptr, edge, start, token_stride,
    head, HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Return rows behind the convolution. Most of them, and those before, are new, and need no pool."""
    if edge + first_row - (TAPS - 1) >= start:
        x = convolved(rows, is_row, channels, is_channel, new_ptr, rows_ptr, rows_ptr, taps_ptr, edge, start - edge,
                      token_stride, CHANNELS, WIDTH, TAPS, False)  # fmt: skip
    else:
        own_ptr, before_ptr = block_rows(edge, rows_ptr, pages_ptr, head, HEADS, PAGE_SIZE, BLOCK, WIDTH)
        x = convolved(rows, is_row, channels, is_channel, new_ptr, own_ptr, before_ptr, taps_ptr, edge, start - edge,
                      token_stride, CHANNELS, WIDTH, TAPS, True)  # fmt: skip
    return x


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
    q_ptr,  # [num_blocks, BLOCK, HEADS, KEY_DIM], decayed since the edge if decays are by channel
    k_ptr,  # [num_blocks, BLOCK, HEADS, KEY_DIM], decayed to the end of the block if decays are by channel
    values_ptr,  # [num_blocks, BLOCK, HEADS * SHARED, VALUE_DIM], replaced by U0
    w_ptr,  # [num_blocks, BLOCK, HEADS * SHARED, KEY_DIM], written
    system_ptr,  # [num_blocks, HEADS * SHARED, BLOCK, BLOCK], squares on the diagonal are inverted
    decays_ptr,  # [num_blocks, HEADS * SHARED, BLOCK] float32
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 1 + DECAY_DIM)]
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32
    stops_ptr,  # [num_seqs] int32
    block_seqs_ptr,  # [num_blocks] int32
    block_edges_ptr,  # [num_blocks] int32
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    table_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid: (num_blocks, HEADS * SHARED). A program has a block of one value head."""
    GATES: tl.constexpr = 2 * KEY_DIM + SHARED * VALUE_DIM
    WIDTH: tl.constexpr = GATES + SHARED * (1 + DECAY_DIM)
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
        b = tl.load(rows_ptr + (place + row) * WIDTH + GATES + shared, mask=is_row, other=0.0)
        beta = tl.where(is_row, tl.sigmoid(b.to(tl.float32)), 0.0)
        is_in = (row < BLOCK)[:, None] & (dims < KEY_DIM)[None, :]
        at = ((block * BLOCK + row) * HEADS + head)[:, None] * KEY_DIM + dims[None, :]
        k = tl.load(k_ptr + at, mask=is_in, other=0.0).to(tl.float32)
        if DECAY_DIM == 1:
            decay = tl.load(decays_ptr + of_head * BLOCK + row, mask=row < BLOCK, other=0.0)
            decayed = k * (beta * tl.exp(decay))[:, None]
        else:
            decay_ptr = updates_ptr + (SHARED * VALUE_DIM + KEY_DIM) + dims
            is_stored = is_row[:, None] & (dims < KEY_DIM)[None, :]
            decay = tl.load(decay_ptr[None, :] + (place + row)[:, None] * UPDATE_WIDTH, mask=is_stored, other=0.0)
            end = (place + tl.minimum(stop - edge, BLOCK) - 1) * UPDATE_WIDTH
            last = tl.load(decay_ptr + end, mask=dims < KEY_DIM, other=0.0)[None, :]
            decayed = k * beta[:, None] * tl.exp(decay)
            q = tl.load(q_ptr + at, mask=is_in, other=0.0).to(tl.float32) * tl.exp(decay)
            tl.debug_barrier()  # all have read what is written
            tl.store(q_ptr + at, q.to(DTYPE), mask=is_in)
            tl.store(k_ptr + at, (k * tl.exp(tl.where(is_stored, last - decay, 0.0))).to(DTYPE), mask=is_in)
        w = tl.dot(inverse, decayed.to(DTYPE), input_precision="tf32x3")
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
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32, written
    states_ptr,  # [num_pages, HEADS, PAGE_SIZE, STATE_PART] float32 or bfloat16, written
    k_ptr,  # [num_blocks, BLOCK, HEADS, KEY_DIM]
    values_ptr,  # [num_blocks, BLOCK, HEADS * SHARED, VALUE_DIM], U0 is replaced by U
    w_ptr,  # [num_blocks, BLOCK, HEADS * SHARED, KEY_DIM]
    decays_ptr,  # [num_blocks, HEADS * SHARED, BLOCK] float32
    starts_ptr,  # [num_seqs] int32
    stops_ptr,  # [num_seqs] int32
    first_blocks_ptr,  # [num_seqs] int32
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    table_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr,
    KEEP: tl.constexpr,  # tokens may be drafts
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
    is_state = is_dim[:, None] & is_column[None, :]
    numbers_of_state = (shared * KEY_DIM + dims)[:, None] * VALUE_DIM + columns[None, :]
    begin = start // BLOCK * BLOCK
    has_state = (begin > 0) & (start < stop)
    place = places(begin - BLOCK, has_state, pages_ptr, head, HEADS, PAGE_SIZE)
    is_kept = is_state & has_state
    old_ptr = states_ptr + place * STATE_PART + numbers_of_state
    state = tl.load(old_ptr, mask=is_kept, other=0.0).to(tl.float32) * SCALE
    for edge in range(begin, tl.where(start < stop, stop, begin), BLOCK):
        is_value = ((row < BLOCK) & (edge + row < stop))[:, None] & is_column[None, :]
        of_head, own = block * (HEADS * SHARED) + value_head, (block * BLOCK + row)[:, None]
        place = places(edge, edge >= 0, pages_ptr, head, HEADS, PAGE_SIZE)
        if DECAY_DIM == 1:
            decay = tl.load(decays_ptr + of_head * BLOCK + row, mask=row < BLOCK, other=0.0)
            last = tl.load(decays_ptr + of_head * BLOCK + BLOCK - 1)
            faded = state * tl.exp(last)
        else:  # keys are decayed
            decay, last = tl.zeros([ROWS], tl.float32), 0.0
            end = (place + tl.minimum(stop - edge, BLOCK) - 1) * UPDATE_WIDTH + (SHARED * VALUE_DIM + KEY_DIM)
            faded = state * tl.exp(tl.load(updates_ptr + end + dims, mask=is_dim, other=0.0))[:, None]
        w = tl.load(w_ptr + (own * (HEADS * SHARED) + value_head) * KEY_DIM + dims[None, :], mask=is_in, other=0.0)
        k = tl.load(k_ptr + (own * HEADS + head) * KEY_DIM + dims[None, :], mask=is_in, other=0.0)
        own_ptr = values_ptr + (own * (HEADS * SHARED) + value_head) * VALUE_DIM + columns[None, :]
        u = tl.load(own_ptr, mask=is_value, other=0.0).to(tl.float32)
        u -= tl.dot(w, state.to(DTYPE), input_precision="tf32x3")
        tl.store(own_ptr, u.to(DTYPE), mask=is_value)
        added = (u * tl.exp(last - decay)[:, None]).to(DTYPE)
        state = tl.dot(tl.trans(k), added, faded, input_precision="tf32x3")
        at = (place + row)[:, None] * UPDATE_WIDTH + shared * VALUE_DIM + columns[None, :]
        tl.store(updates_ptr + at, u * (1 / SCALE), mask=is_value & (KEEP or edge + BLOCK > stop))
        is_kept = is_state & (edge + BLOCK <= stop)
        kept = (state * (1 / SCALE)).to(states_ptr.dtype.element_ty)
        tl.store(states_ptr + place * STATE_PART + numbers_of_state, kept, mask=is_kept)
        if states_ptr.dtype.element_ty != tl.float32:  # go on as a chunk that begins here does
            state = kept.to(tl.float32) * SCALE
        block += 1


@triton.jit(do_not_specialize=("table_stride",))
def _outputs_kernel(
    out_ptr,  # [num_tokens, HEADS * SHARED, VALUE_DIM], written
    states_ptr,  # [num_pages, HEADS, PAGE_SIZE, STATE_PART] float32 or bfloat16
    q_ptr,  # [num_blocks, BLOCK, HEADS, KEY_DIM]
    values_ptr,  # [num_blocks, BLOCK, HEADS * SHARED, VALUE_DIM], U
    pairs_ptr,  # [num_blocks, HEADS * SHARED, BLOCK, BLOCK]
    decays_ptr,  # [num_blocks, HEADS * SHARED, BLOCK] float32
    tokens_ptr,  # [num_seqs] int32
    starts_ptr,  # [num_seqs] int32
    stops_ptr,  # [num_seqs] int32
    block_seqs_ptr,  # [num_blocks] int32
    block_edges_ptr,  # [num_blocks] int32
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    table_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_PART: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,  # of states and updates in this kernel
):
    """Grid: (HEADS * SHARED * ceil(VALUE_DIM / BLOCK_V), num_blocks). A program has some columns of a block."""
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    NUM_PARTS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    part, value_head, block = tl.program_id(0) % NUM_PARTS, tl.program_id(0) // NUM_PARTS, tl.program_id(1).to(tl.int64)
    head, shared = value_head // SHARED, value_head % SHARED
    seq = tl.load(block_seqs_ptr + block).to(tl.int64)
    if seq >= 0:
        edge, start, stop = tl.load(block_edges_ptr + block), tl.load(starts_ptr + seq), tl.load(stops_ptr + seq)
        row, dims, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V)
        is_column, is_row = (columns < VALUE_DIM)[None, :], (row < BLOCK)[:, None]
        is_dim, slots, of_head = dims < KEY_DIM, edge + row, block * (HEADS * SHARED) + value_head
        place = places(edge - BLOCK, edge > 0, table_ptr + seq * table_stride, head, HEADS, PAGE_SIZE)
        at = place * STATE_PART + (shared * KEY_DIM + dims)[:, None] * VALUE_DIM + columns[None, :]
        is_state = is_dim[:, None] & is_column & (edge > 0)
        state = tl.load(states_ptr + at, mask=is_state, other=0.0).to(tl.float32) * SCALE
        at = ((block * BLOCK + row) * HEADS + head)[:, None] * KEY_DIM + dims[None, :]
        q = tl.load(q_ptr + at, mask=is_row & is_dim[None, :], other=0.0)
        at = of_head * (BLOCK * BLOCK) + row[:, None] * BLOCK + row[None, :]
        pairs = tl.load(pairs_ptr + at, mask=is_row & (row < BLOCK)[None, :], other=0.0)
        at = ((block * BLOCK + row) * (HEADS * SHARED) + value_head)[:, None] * VALUE_DIM + columns[None, :]
        u = tl.load(values_ptr + at, mask=is_row & (slots < stop)[:, None] & is_column, other=0.0)
        output = tl.dot(q, state.to(DTYPE), input_precision="tf32x3")
        if DECAY_DIM == 1:
            output *= tl.exp(tl.load(decays_ptr + of_head * BLOCK + row, mask=row < BLOCK, other=0.0))[:, None]
        output = tl.dot(pairs, u, output, input_precision="tf32x3") * (1 / SCALE)
        token = tl.load(tokens_ptr + seq) + slots - start
        at = (token.to(tl.int64) * (HEADS * SHARED) + value_head)[:, None] * VALUE_DIM + columns[None, :]
        is_new = is_row & ((slots >= start) & (slots < stop))[:, None] & is_column
        tl.store(out_ptr + at, output.to(out_ptr.dtype.element_ty), mask=is_new)
