"""Triton kernels for a decode round of the gated delta rule. Each sequence has a few new tokens (rows). The state that
they start from is stored at the end of the sequence's last whole block (the edge).

Two kernels share the work. The first one computes what all columns of a state need: queries, keys and decays of new
rows, and their products with all keys since the edge. A program of the second one computes some columns of the values,
outputs, updates and states of one value head. Columns do not depend on each other, so no program waits for another.
The second kernel starts to load states while the first one still runs.

Both kernels take the new rows one after another, and read of earlier rows what earlier rounds stored. One warp
convolves a row, and one multiplies it with the earlier keys, in the same order in every round. So the bits of a row
do not depend on the rows before it in the round, nor on other sequences.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from .delta_rule import DeltaWeights
from .paged_delta import MAX_ROUND_LEN, DeltaInputs, DeltaPlan, DeltaPools
from .triton_delta_columns import advance, one_row, state_columns, window
from .triton_delta_rows import (
    TILE,
    block_rows,
    check_layer,
    decays,
    new_part,
    old_part,
    places,
    store_rows,
    unit,
)

TILE_OF_KEYS = 4, 168  # warps of a program of the first kernel, and registers of a thread
TILE_OF_DECAYS = 8, 128  # likewise if states decay by channel
TILE_OF_STATE = 32, 2  # columns and warps of a program of the second kernel
REGISTERS_OF_STATE = 168, 200  # of a thread, for one new row and for several


class _New(NamedTuple):
    """New rows between the kernels, float32."""

    vectors: Tensor  # [num_tokens, num_key_heads, 2, key_dim], key and query, decayed since the edge if by channel
    products: Tensor  # [num_tokens, num_key_heads, 2, block], of both with the block's keys
    steps: Tensor  # [num_tokens, num_value_heads, 2], beta, and the decay since the edge; zero if by channel

    @classmethod
    def allocate(cls, num_tokens: int, block: int, weights: DeltaWeights) -> _New:
        num_heads, num_shared, key_dim, _ = weights.state_shape
        of_head = num_tokens, num_heads
        shapes = (*of_head, 2, key_dim), (*of_head, 2, block), (num_tokens, num_heads * num_shared, 2)
        return cls(*(torch.empty(shape, dtype=torch.float32, device=weights.taps.device) for shape in shapes))


def delta_round(
    inputs: DeltaInputs, weights: DeltaWeights, pools: DeltaPools, plan: DeltaPlan, *, is_alone: bool
) -> Tensor:
    """Store the rows and updates of new tokens, and the states after the blocks that they complete. Return the outputs,
    [num_tokens, num_value_heads, value_dim] of the inputs' dtype.

    `is_alone`: no kernel of this forward has written pages of this layer, so they may be read while the kernel before
    still runs."""
    check_layer(inputs, weights, pools, plan)
    num_tokens, (num_heads, num_shared, key_dim, value_dim) = len(inputs.q), weights.state_shape
    num_seqs, query_len, page_size = len(plan.seq_lens), plan.query_len, pools.rows.shape[3]
    assert plan.is_round and query_len is not None and num_tokens == num_seqs * query_len, plan
    assert plan.seq_lens.is_contiguous() and plan.table.stride(1) == 1, (plan.seq_lens, plan.table)
    out = torch.empty((num_tokens, num_heads * num_shared, value_dim), dtype=inputs.q.dtype, device=inputs.q.device)
    new = _New.allocate(num_tokens, plan.block, weights)
    rows = max(TILE, plan.block, triton.next_power_of_2(key_dim) // 2)
    columns, warps_of_state = TILE_OF_STATE
    block_v = min(columns, max(TILE, triton.next_power_of_2(value_dim)))
    dependent = gpu.dependent_launch(num_tokens)
    sizes = {
        "QKV_HEAD": inputs.q.stride(1),
        "HEADS": num_heads,
        "SHARED": num_shared,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "DECAY_DIM": weights.dt_bias.shape[2],
        "TAPS": weights.taps.shape[1],
        "PAGE_SIZE": page_size,
        "UPDATE_WIDTH": weights.update_width,
        "BLOCK": plan.block,
        "ROWS": rows,
        "BLOCK_K": max(TILE, triton.next_power_of_2(key_dim)),
        "EARLY": is_alone,
        "DEPENDENT": dependent,
        "num_stages": 1,
        "launch_pdl": dependent,
    }
    places = plan.seq_lens, plan.table, query_len, plan.table.shape[1] * page_size, plan.table.stride(0)
    strides = {"B_HEAD": inputs.b.stride(1), "A_HEAD": inputs.a.stride(1)}
    num_warps, registers = TILE_OF_KEYS if weights.dt_bias.shape[2] == 1 else TILE_OF_DECAYS
    _rows_kernel[num_heads, num_seqs](
        *new, *pools[:2], *inputs[:2], *inputs[4:], *weights[:3], *places, *inputs.strides, **strides, **sizes,
        BLOCK_S=triton.next_power_of_2(num_shared), GROUP=num_warps, num_warps=num_warps, maxnreg=registers,
    )  # fmt: skip
    _round_kernel[num_heads * num_shared * triton.cdiv(value_dim, block_v), num_seqs](
        out, *pools, *new, inputs.v, weights.taps, *places, inputs.strides[0], **sizes,
        STATE_PART=pools.states.shape[4], BLOCK_V=block_v, SINGLE=query_len == 1,
        NEW=1 if query_len == 1 else MAX_ROUND_LEN, num_warps=warps_of_state,
        maxnreg=REGISTERS_OF_STATE[query_len > 1],
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=("query_len", "num_slots", "table_stride"))
def _rows_kernel(
    vectors_ptr,  # [num_tokens, HEADS, 2, KEY_DIM] float32, written
    products_ptr,  # [num_tokens, HEADS, 2, BLOCK] float32, written
    steps_ptr,  # [num_tokens, HEADS * SHARED, 2] float32, written
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 1 + DECAY_DIM)], written
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32, written
    q_ptr,  # [num_tokens, HEADS, KEY_DIM], tokens token_stride and heads QKV_HEAD apart
    k_ptr,  # likewise
    b_ptr,  # [num_tokens, HEADS, SHARED], tokens b_stride and heads B_HEAD apart
    a_ptr,  # [num_tokens, HEADS, SHARED * DECAY_DIM], tokens a_stride and heads A_HEAD apart
    taps_ptr,  # [HEADS, TAPS, 2 * KEY_DIM + SHARED * VALUE_DIM] float32
    a_log_ptr,  # [HEADS, SHARED] float32
    dt_bias_ptr,  # [HEADS, SHARED, DECAY_DIM] float32
    seq_lens_ptr,  # [num_seqs] int64
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    query_len,
    num_slots,  # of a sequence
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
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # of a block, and at least half as many as BLOCK_K
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    GROUP: tl.constexpr,  # new rows that are convolved at once
    EARLY: tl.constexpr,  # pages are read before the kernel before ends
    DEPENDENT: tl.constexpr,
):
    """Grid: (HEADS, num_seqs). A program stores queries and keys of a head's new rows, their products with the keys
    since the edge, and what the head's value heads need of each row."""
    CHANNELS: tl.constexpr = 2 * KEY_DIM + SHARED * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + SHARED * (1 + DECAY_DIM)
    head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first_token, pages_ptr = seq * query_len, table_ptr + seq * table_stride
    start = tl.maximum(tl.load(seq_lens_ptr + seq).to(tl.int32) - query_len, 0)
    stop = tl.minimum(start + query_len, num_slots)
    if DEPENDENT:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    edge = start // BLOCK * BLOCK
    first = start - edge
    group, dims, is_dim = tl.arange(0, GROUP), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K) < KEY_DIM
    taps_ptr += head * CHANNELS * TAPS
    q_ptr += first_token * token_stride + head * QKV_HEAD
    k_ptr += first_token * token_stride + head * QKV_HEAD - KEY_DIM  # channels of keys stand behind those of queries
    a_ptr += first_token * a_stride + head * A_HEAD
    b_ptr += first_token * b_stride + head * B_HEAD
    vectors_ptr += (first_token * HEADS + head) * (2 * KEY_DIM)
    products_ptr += (first_token * HEADS + head) * (2 * BLOCK)
    steps_ptr += (first_token * HEADS + head) * (2 * SHARED)
    keys, decay, passed = old_keys(updates_ptr, pages_ptr, start, stop, edge, head, HEADS, SHARED, KEY_DIM, VALUE_DIM,
                                    DECAY_DIM, PAGE_SIZE, UPDATE_WIDTH, ROWS, BLOCK_K, BLOCK_S)  # fmt: skip
    block_ptr, before_ptr = block_rows(edge, rows_ptr, pages_ptr, head, HEADS, PAGE_SIZE, BLOCK, WIDTH)
    of_k = old_part(first + group, group < stop - start, KEY_DIM + dims, is_dim, block_ptr, before_ptr, taps_ptr, edge,
                    first, CHANNELS, WIDTH, TAPS)  # fmt: skip
    of_q = old_part(first + group, group < stop - start, dims, is_dim, block_ptr, before_ptr, taps_ptr, edge, first,
                    CHANNELS, WIDTH, TAPS)  # fmt: skip
    if DEPENDENT and EARLY:
        gdc_wait()
    for begin in range(0, stop - start, GROUP):
        token = begin + group
        is_new = token < stop - start
        k = new_part(of_k, token, is_new, KEY_DIM + dims, is_dim, k_ptr, taps_ptr, token_stride, CHANNELS, TAPS)
        q = new_part(of_q, token, is_new, dims, is_dim, q_ptr, taps_ptr, token_stride, CHANNELS, TAPS)
        k, q = unit(k), unit(q) * KEY_DIM**-0.5
        of_k, of_q = tl.zeros_like(of_k), tl.zeros_like(of_q)  # a group has no fewer rows than a convolution
        for number in range(begin, tl.minimum(begin + GROUP, stop - start)):
            own_k = tl.sum(tl.where((token == number)[:, None], k, 0.0), 0)
            own_q = tl.sum(tl.where((token == number)[:, None], q, 0.0), 0)
            place = places(start + number, number >= 0, pages_ptr, head, HEADS, PAGE_SIZE)
            keys, decay, passed = _next_row(
                vectors_ptr + number * (2 * HEADS * KEY_DIM), products_ptr + number * (2 * HEADS * BLOCK),
                steps_ptr + number * (2 * HEADS * SHARED), updates_ptr + place * UPDATE_WIDTH,
                a_ptr + number * a_stride, b_ptr + number * b_stride, a_log_ptr + head * SHARED,
                dt_bias_ptr + head * (SHARED * DECAY_DIM), own_k, own_q, keys, decay, passed,
                (start + number) % BLOCK, SHARED, KEY_DIM, VALUE_DIM, DECAY_DIM, BLOCK, ROWS, BLOCK_K, BLOCK_S,
            )  # fmt: skip
        place = places(start + token, is_new, pages_ptr, head, HEADS, PAGE_SIZE)
        at = updates_ptr + place[:, None] * UPDATE_WIDTH + SHARED * VALUE_DIM + dims[None, :]
        tl.store(at, k, mask=is_new[:, None] & is_dim[None, :])
        store_rows(start + token, is_new, dims, is_dim, 0, q_ptr, rows_ptr, pages_ptr, start, token_stride, head, HEADS,
                   PAGE_SIZE, WIDTH)  # fmt: skip
        store_rows(start + token, is_new, KEY_DIM + dims, is_dim, 0, k_ptr, rows_ptr, pages_ptr, start, token_stride,
                   head, HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
        shared, parts = tl.arange(0, BLOCK_S), dims if DECAY_DIM > 1 else tl.arange(0, BLOCK_S)
        store_rows(start + token, is_new, shared, shared < SHARED, CHANNELS, b_ptr, rows_ptr, pages_ptr, start,
                   b_stride, head, HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
        store_rows(start + token, is_new, parts, parts < SHARED * DECAY_DIM, CHANNELS + SHARED, a_ptr, rows_ptr,
                   pages_ptr, start, a_stride, head, HEADS, PAGE_SIZE, WIDTH)  # fmt: skip


@triton.jit
def old_keys(
    updates_ptr, pages_ptr, start, stop, edge, head, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, DECAY_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, UPDATE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Return what earlier rounds stored of the rows since the edge: keys [ROWS, BLOCK_K], their decays since the edge
    likewise, or one zero if states decay by value head, and the decays of the last row, [BLOCK_K] or [BLOCK_S]."""
    row, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    old = places(edge, start < stop, pages_ptr, head, HEADS, PAGE_SIZE) + row
    keys_ptr, is_old = (
        updates_ptr + SHARED * VALUE_DIM + dims,
        (row < start - edge)[:, None] & (dims < KEY_DIM)[None, :],
    )
    keys = tl.load(keys_ptr[None, :] + old[:, None] * UPDATE_WIDTH, mask=is_old, other=0.0)
    decay = 0.0
    if DECAY_DIM > 1:
        decay = tl.load(keys_ptr[None, :] + KEY_DIM + old[:, None] * UPDATE_WIDTH, mask=is_old, other=0.0)
    parts = dims if DECAY_DIM > 1 else tl.arange(0, BLOCK_S)
    last = places(start - 1, start > edge, pages_ptr, head, HEADS, PAGE_SIZE)
    last_ptr = updates_ptr + last * UPDATE_WIDTH + (SHARED * VALUE_DIM + KEY_DIM) + parts
    passed = tl.load(last_ptr, mask=(parts < SHARED * DECAY_DIM) & (start > edge), other=0.0)
    return keys, decay, passed


@triton.jit
def _next_row(
    vector_ptr, products_ptr, steps_ptr, update_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, own_k, own_q, keys, decay,
    passed, here, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DECAY_DIM: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Take one new row, number `here` of its block. Store its vectors, products and steps for the second kernel, and
    the sum of the decays from the edge to the row. Return `keys`, `decay` and `passed` of `old_keys` with this row
    added. All pointers are the row's own."""
    row, dims, shared = tl.arange(0, ROWS), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_S)
    is_dim, is_shared = dims < KEY_DIM, shared < SHARED
    parts = dims if DECAY_DIM > 1 else shared
    is_part = parts < SHARED * DECAY_DIM
    a = tl.load(a_ptr + parts, mask=is_part, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + shared, mask=is_shared, other=0.0).to(tl.float32)
    a_log = tl.load(a_log_ptr + shared, mask=is_shared, other=0.0) if DECAY_DIM == 1 else tl.load(a_log_ptr)
    dt_bias = tl.load(dt_bias_ptr + parts, mask=is_part, other=0.0)
    keys = tl.where((row == here)[:, None], own_k[None, :], keys)
    passed = tl.where(here == 0, 0.0, passed) + decays(a, is_part, a_log, dt_bias)
    seen = keys
    if DECAY_DIM > 1:
        decay = tl.where((row == here)[:, None], passed[None, :], decay)
        seen = keys * tl.exp(tl.where((row <= here)[:, None], passed[None, :] - decay, float("-inf")))
    tl.store(products_ptr + row, tl.sum(seen * own_k[None, :], 1), mask=row < BLOCK)
    tl.store(products_ptr + BLOCK + row, tl.sum(seen * own_q[None, :], 1), mask=row < BLOCK)
    tl.store(update_ptr + (SHARED * VALUE_DIM + KEY_DIM) + parts, passed, mask=is_part)
    tl.store(steps_ptr + 2 * shared, tl.sigmoid(b), mask=is_shared)
    if DECAY_DIM > 1:
        own_k, own_q = own_k * tl.exp(passed), own_q * tl.exp(passed)
        tl.store(steps_ptr + 2 * shared + 1, tl.zeros_like(b), mask=is_shared)
    else:
        tl.store(steps_ptr + 2 * shared + 1, passed, mask=is_shared)
    tl.store(vector_ptr + dims, own_k, mask=is_dim)
    tl.store(vector_ptr + KEY_DIM + dims, own_q, mask=is_dim)
    return tl.where(here == BLOCK - 1, 0.0, keys), decay, passed


@triton.jit(do_not_specialize=("query_len", "num_slots", "table_stride"))
def _round_kernel(
    out_ptr,  # [num_tokens, HEADS * SHARED, VALUE_DIM], written
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 1 + DECAY_DIM)], written
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32, written
    states_ptr,  # [num_pages, HEADS, PAGE_SIZE, STATE_PART] float32 or bfloat16, written
    vectors_ptr,  # [num_tokens, HEADS, 2, KEY_DIM] float32
    products_ptr,  # [num_tokens, HEADS, 2, BLOCK] float32
    steps_ptr,  # [num_tokens, HEADS * SHARED, 2] float32
    v_ptr,  # [num_tokens, HEADS, SHARED * VALUE_DIM], tokens token_stride and heads QKV_HEAD apart
    taps_ptr,  # [HEADS, TAPS, 2 * KEY_DIM + SHARED * VALUE_DIM] float32
    seq_lens_ptr,  # [num_seqs] int64
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    query_len,
    num_slots,  # of a sequence
    table_stride,
    token_stride,
    QKV_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAY_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # of a block, and at least half as many as BLOCK_K
    STATE_PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NEW: tl.constexpr,  # rows of a round at most
    SINGLE: tl.constexpr,  # a round has one row
    EARLY: tl.constexpr,  # pages are read before the kernel before ends
    DEPENDENT: tl.constexpr,
):
    """Grid: (HEADS * SHARED * ceil(VALUE_DIM / BLOCK_V), num_seqs)."""
    CHANNELS: tl.constexpr = 2 * KEY_DIM + SHARED * VALUE_DIM
    NUM_PARTS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    part, value_head = tl.program_id(0) % NUM_PARTS, tl.program_id(0) // NUM_PARTS
    head, shared, seq = value_head // SHARED, value_head % SHARED, tl.program_id(1).to(tl.int64)
    first_token, pages_ptr = seq * query_len, table_ptr + seq * table_stride
    start = tl.maximum(tl.load(seq_lens_ptr + seq).to(tl.int32) - query_len, 0)
    stop = tl.minimum(start + query_len, num_slots)
    row, columns = tl.arange(0, ROWS), part * BLOCK_V + tl.arange(0, BLOCK_V)
    is_column, edge = columns < VALUE_DIM, start // BLOCK * BLOCK
    if DEPENDENT:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    before = places(edge - BLOCK, edge > 0, pages_ptr, head, HEADS, PAGE_SIZE)
    low, high = state_columns(states_ptr + before * STATE_PART, edge > 0, shared, columns, is_column, KEY_DIM,
                              VALUE_DIM, ROWS)  # fmt: skip
    place = places(edge, start < stop, pages_ptr, head, HEADS, PAGE_SIZE)
    at = updates_ptr + (place + row) * UPDATE_WIDTH
    is_old = row < start - edge
    updates = tl.load(at[:, None] + (shared * VALUE_DIM + columns)[None, :], mask=is_old[:, None] & is_column[None, :],
                      other=0.0)  # fmt: skip
    decay = tl.zeros([ROWS], tl.float32)
    if DECAY_DIM == 1:
        decay = tl.load(at + (SHARED * VALUE_DIM + KEY_DIM) + shared, mask=is_old, other=0.0)
    taps_ptr += head * CHANNELS * TAPS
    values, taps = window(rows_ptr, taps_ptr, before, place, start - edge, edge > 0,
                          2 * KEY_DIM + shared * VALUE_DIM + columns, is_column, CHANNELS,
                          CHANNELS + SHARED * (1 + DECAY_DIM), TAPS, BLOCK)  # fmt: skip
    if DEPENDENT and EARLY:
        gdc_wait()
    v_ptr += head * QKV_HEAD
    _rows_of_block(out_ptr, vectors_ptr, products_ptr, v_ptr, steps_ptr, rows_ptr, updates_ptr, low, high, updates,
                   decay, values, taps, first_token, start, tl.minimum(stop, edge + BLOCK), edge, place, value_head,
                   columns, is_column, token_stride, HEADS, SHARED, KEY_DIM, VALUE_DIM, DECAY_DIM, TAPS, UPDATE_WIDTH,
                   BLOCK, ROWS, SINGLE)  # fmt: skip
    for _ in range(start // BLOCK, stop // BLOCK):  # blocks that the round completes
        edge += BLOCK
        after = places(edge, edge < stop, pages_ptr, head, HEADS, PAGE_SIZE)
        _next_block(out_ptr, states_ptr, vectors_ptr, products_ptr, v_ptr, steps_ptr, rows_ptr, updates_ptr, taps_ptr,
                    before, place, after, first_token + edge - start, edge, stop, value_head, part, token_stride, HEADS,
                    SHARED, KEY_DIM, VALUE_DIM, DECAY_DIM, TAPS, UPDATE_WIDTH, BLOCK, ROWS, STATE_PART, BLOCK_K,
                    BLOCK_V, SINGLE)  # fmt: skip
        before, place = place, after
    new = tl.arange(0, NEW)
    is_lost = (new >= stop - start) & (new < query_len)  # without a slot
    lost_ptr = out_ptr + ((first_token + new) * (HEADS * SHARED) + value_head)[:, None] * VALUE_DIM + columns[None, :]
    nothing = tl.zeros([NEW, BLOCK_V], out_ptr.dtype.element_ty)
    tl.store(lost_ptr, nothing, mask=is_lost[:, None] & is_column[None, :])


@triton.jit
def _rows_of_block(
    out_ptr, vectors_ptr, products_ptr, v_ptr, steps_ptr, rows_ptr, updates_ptr, low, high, updates, decay, values,
    taps, first_token, start, stop, edge, place, value_head, columns, is_column, token_stride, HEADS: tl.constexpr,
    SHARED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DECAY_DIM: tl.constexpr, TAPS: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Store values, updates and outputs of new rows of one block, which follow the old rows that have `updates` [ROWS,
    BLOCK_V] and `decay` [ROWS]. `low` and `high`: the state before the block, as `state_columns` returns it. `values`
    and `taps`: as `window` returns them for the first new row. What a row needs is loaded while the row before
    is computed."""
    WIDTH: tl.constexpr = 2 * KEY_DIM + SHARED * (VALUE_DIM + 1 + DECAY_DIM)
    vectors_ptr += (first_token * HEADS + value_head // SHARED) * (2 * KEY_DIM)
    products_ptr += (first_token * HEADS + value_head // SHARED) * (2 * BLOCK)
    steps_ptr += (first_token * (HEADS * SHARED) + value_head) * 2
    out_ptr += (first_token * (HEADS * SHARED) + value_head) * VALUE_DIM + columns
    of_values = value_head % SHARED * VALUE_DIM + columns
    v_ptr += first_token * token_stride + of_values
    rows_ptr += 2 * KEY_DIM + of_values
    updates_ptr += of_values
    num_new, here = stop - start, start - edge
    own = _row(vectors_ptr, products_ptr, v_ptr, steps_ptr, here, num_new > 0, is_column, KEY_DIM, BLOCK, ROWS)
    if SINGLE:
        one_row(out_ptr, rows_ptr + (place + here) * WIDTH, updates_ptr + (place + here) * UPDATE_WIDTH, low, high,
                 updates, decay, values, taps, own, here, is_column & (num_new > 0), KEY_DIM, TAPS, ROWS)  # fmt: skip
    else:
        for number in range(num_new):
            row, after = own, number + 1
            own = _row(vectors_ptr + after * (2 * HEADS * KEY_DIM), products_ptr + after * (2 * HEADS * BLOCK),
                       v_ptr + after * token_stride, steps_ptr + after * (2 * HEADS * SHARED), here + 1,
                       after < num_new, is_column, KEY_DIM, BLOCK, ROWS)  # fmt: skip
            updates, decay, values = one_row(
                out_ptr + number * (HEADS * SHARED * VALUE_DIM), rows_ptr + (place + here) * WIDTH,
                updates_ptr + (place + here) * UPDATE_WIDTH, low, high, updates, decay, values, taps, row, here,
                is_column, KEY_DIM, TAPS, ROWS,
            )  # fmt: skip
            here += 1


@triton.jit
def _row(
    vector_ptr, products_ptr, v_ptr, steps_ptr, here, is_row, is_column, KEY_DIM: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Load what a new row of some columns needs, if there is one: its values [BLOCK_V] before the convolution, beta,
    the decay since the edge, the product of its query and key, its key and query, [ROWS] each, their numbers from ROWS
    on likewise, and their products with the `here` rows before it in the block, [ROWS] each."""
    row = tl.arange(0, ROWS)
    is_low, is_high, is_seen = is_row & (row < KEY_DIM), is_row & (row + ROWS < KEY_DIM), is_row & (row < here)
    new = tl.load(v_ptr, mask=is_row & is_column, other=0.0)
    beta, passed = tl.load(steps_ptr, mask=is_row, other=0.0), tl.load(steps_ptr + 1, mask=is_row, other=0.0)
    of_own = tl.load(products_ptr + BLOCK + here, mask=is_row, other=0.0)
    k, q = (
        tl.load(vector_ptr + row, mask=is_low, other=0.0),
        tl.load(vector_ptr + KEY_DIM + row, mask=is_low, other=0.0),
    )
    further_k, further_q = k, q
    if KEY_DIM > ROWS:
        further_k = tl.load(vector_ptr + ROWS + row, mask=is_high, other=0.0)
        further_q = tl.load(vector_ptr + (KEY_DIM + ROWS) + row, mask=is_high, other=0.0)
    of_k = tl.load(products_ptr + row, mask=is_seen, other=0.0)
    of_q = tl.load(products_ptr + BLOCK + row, mask=is_seen, other=0.0)
    return new, beta, passed, of_own, k, q, further_k, further_q, of_k, of_q


@triton.jit(noinline=True)
def _next_block(
    out_ptr, states_ptr, vectors_ptr, products_ptr, v_ptr, steps_ptr, rows_ptr, updates_ptr, taps_ptr, before, place,
    after, first_token, edge, stop, value_head, part, token_stride, HEADS: tl.constexpr, SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DECAY_DIM: tl.constexpr, TAPS: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STATE_PART: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Store the state behind the block at `place`, whose last row is stored, and then go on with the rows from `edge`
    on, which lie at `after`. `before`: the place of the state before. This is rare. As a function of its own it takes
    no registers from the rest of the kernel."""
    CHANNELS: tl.constexpr = 2 * KEY_DIM + SHARED * VALUE_DIM
    shared, columns = value_head % SHARED, part * BLOCK_V + tl.arange(0, BLOCK_V)
    is_column = columns < VALUE_DIM
    tl.debug_barrier()  # rows and updates are stored
    advance(states_ptr, updates_ptr + place * UPDATE_WIDTH, before, place, edge > BLOCK, shared, columns, is_column,
             SHARED, KEY_DIM, VALUE_DIM, DECAY_DIM, UPDATE_WIDTH, BLOCK, STATE_PART, BLOCK_K)  # fmt: skip
    if not SINGLE:
        tl.debug_barrier()
        low, high = state_columns(states_ptr + place * STATE_PART, True, shared, columns, is_column, KEY_DIM, VALUE_DIM,
                                  ROWS)  # fmt: skip
        values, taps = window(rows_ptr, taps_ptr, place, after, 0, True, 2 * KEY_DIM + shared * VALUE_DIM + columns,
                              is_column, CHANNELS, CHANNELS + SHARED * (1 + DECAY_DIM), TAPS, BLOCK)  # fmt: skip
        _rows_of_block(out_ptr, vectors_ptr, products_ptr, v_ptr, steps_ptr, rows_ptr, updates_ptr, low, high,
                       tl.zeros_like(low), tl.zeros([ROWS], tl.float32), values, taps, first_token, edge,
                       tl.minimum(stop, edge + BLOCK), edge, after, value_head, columns, is_column, token_stride, HEADS,
                       SHARED, KEY_DIM, VALUE_DIM, DECAY_DIM, TAPS, UPDATE_WIDTH, BLOCK, ROWS, False)  # fmt: skip
