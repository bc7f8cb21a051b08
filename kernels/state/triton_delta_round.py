"""Rounds of the gated delta rule by Triton: a few new rows of each sequence behind the state at its last edge.

Two kernels share the work. The first one computes what does not depend on a state: queries, keys, values and decays of
new rows, and products with all keys since the edge. The second one has some columns of one value head of a sequence.
Columns of states, values and updates are independent of each other, so programs do not wait for each other. Its states
are on the way while the first one runs. If sequences are few, each program of the second kernel does the first one's
work for itself, because a second kernel would take longer.

New rows are convolved in groups of one size. Else both take them one after another, and what they read of earlier rows
is what earlier rounds stored. So the bits of a row depend neither on the rows of a round nor on the other sequences.
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
from .triton_delta_rows import (
    TILE,
    block_rows,
    check_layer,
    decays,
    new_part,
    old_part,
    places,
    store_gates,
    store_rows,
    unit,
)

TILE_OF_STATE = 64, 8, 80  # columns and warps of a program of the second kernel, and registers of a thread
MOST_FUSED = 8  # sequences whose rounds need no first kernel


class _New(NamedTuple):
    """New rows between the kernels, float32."""

    vectors: Tensor  # [num_tokens, num_key_heads, 2, key_dim], key and query
    products: Tensor  # [num_tokens, num_key_heads, 2, block], of both with the block's keys
    values: Tensor  # [num_tokens, num_value_heads, value_dim]
    steps: Tensor  # [num_tokens, num_value_heads, 2], beta, and the decay since the edge

    @classmethod
    def allocate(cls, num_tokens: int, block: int, weights: DeltaWeights) -> _New:
        num_heads, num_shared, key_dim, value_dim = weights.state_shape
        of_key_head, of_value_head = (num_tokens, num_heads, 2), (num_tokens, num_heads * num_shared)
        shapes = (*of_key_head, key_dim), (*of_key_head, block), (*of_value_head, value_dim), (*of_value_head, 2)
        return cls(*(torch.empty(shape, dtype=torch.float32, device=weights.taps.device) for shape in shapes))


def delta_round(
    inputs: DeltaInputs, weights: DeltaWeights, pools: DeltaPools, plan: DeltaPlan, *, is_alone: bool
) -> Tensor:
    """Store the rows and updates of new tokens, and the states after the blocks that they complete. Return the outputs,
    [num_tokens, num_value_heads, value_dim] of the inputs' dtype.

    `is_alone`: no kernel of this forward has written pages of this layer, so they may be read while the kernel before
    still runs."""
    check_layer(inputs, weights, pools, plan)
    (num_tokens, num_heads, _), (_, num_shared, key_dim, value_dim) = inputs.qkv.shape, weights.state_shape
    num_seqs, query_len, page_size = len(plan.seq_lens), plan.query_len, pools.rows.shape[3]
    assert plan.is_round and query_len is not None and num_tokens == num_seqs * query_len, plan
    assert plan.seq_lens.is_contiguous() and plan.table.stride(1) == 1, (plan.seq_lens, plan.table)
    out = torch.empty((num_tokens, num_heads * num_shared, value_dim), dtype=inputs.qkv.dtype, device=inputs.qkv.device)
    new, rows = _New.allocate(num_tokens, plan.block, weights), max(TILE, plan.block)
    whole_v = max(TILE, triton.next_power_of_2(value_dim))
    block_v = min(TILE_OF_STATE[0], whole_v)
    is_fused, dependent = num_seqs <= MOST_FUSED, gpu.dependent_launch(num_tokens)
    sizes = {
        "QKV_HEAD": inputs.qkv.stride(1),
        "B_HEAD": inputs.b.stride(1),
        "A_HEAD": inputs.a.stride(1),
        "HEADS": num_heads,
        "SHARED": num_shared,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "TAPS": weights.taps.shape[2],
        "PAGE_SIZE": page_size,
        "UPDATE_WIDTH": weights.update_width,
        "BLOCK": plan.block,
        "ROWS": rows,
        "BLOCK_K": max(rows, triton.next_power_of_2(key_dim)),
        "WHOLE_V": whole_v,
        "EARLY": is_alone,
        "DEPENDENT": dependent,
        "num_warps": TILE_OF_STATE[1],
        "num_stages": 1,
        "launch_pdl": dependent,
    }
    places = plan.seq_lens, plan.table, query_len, plan.table.shape[1] * page_size, plan.table.stride(0)
    given = *pools[:2], inputs.qkv, inputs.b, inputs.a, *weights[:3], *places, inputs.qkv.stride(0), inputs.b.stride(0)
    if not is_fused:
        _rows_kernel[num_heads * (1 + num_shared), num_seqs](*new, *given, maxnreg=80, **sizes)
    _round_kernel[num_heads * num_shared * triton.cdiv(value_dim, block_v), num_seqs](
        out, pools.states, *new, *given, STATE_PART=pools.states.shape[4], BLOCK_V=block_v, NEW=MAX_ROUND_LEN,
        FUSED=is_fused, maxnreg=128 if is_fused else TILE_OF_STATE[2], **sizes,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=("query_len", "num_slots", "table_stride"))
def _rows_kernel(
    vectors_ptr,  # [num_tokens, HEADS, 2, KEY_DIM] float32, written
    products_ptr,  # [num_tokens, HEADS, 2, BLOCK] float32, written
    values_ptr,  # [num_tokens, HEADS * SHARED, VALUE_DIM] float32, written
    steps_ptr,  # [num_tokens, HEADS * SHARED, 2] float32, written
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 2)], written
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32, written
    qkv_ptr,  # [num_tokens, HEADS, 2 * KEY_DIM + SHARED * VALUE_DIM], tokens token_stride and heads QKV_HEAD apart
    b_ptr,  # [num_tokens, HEADS, SHARED], tokens small_stride and heads B_HEAD apart
    a_ptr,  # [num_tokens, HEADS, SHARED], tokens small_stride and heads A_HEAD apart
    taps_ptr,  # [HEADS, 2 * KEY_DIM + SHARED * VALUE_DIM, TAPS] float32
    a_log_ptr,  # [HEADS, SHARED] float32
    dt_bias_ptr,  # [HEADS, SHARED] float32
    seq_lens_ptr,  # [num_seqs] int64
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    query_len,
    num_slots,  # of a sequence
    table_stride,
    token_stride,
    small_stride,
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
    ROWS: tl.constexpr,  # of a block
    BLOCK_K: tl.constexpr,
    WHOLE_V: tl.constexpr,
    EARLY: tl.constexpr,  # pages are read before the kernel before ends
    DEPENDENT: tl.constexpr,
):
    """Grid: (HEADS * (1 + SHARED), num_seqs). A program has the queries and keys of a key head, or the values of one
    value head."""
    head, kind, seq = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS, tl.program_id(1).to(tl.int64)
    first_token, pages_ptr = seq * query_len, table_ptr + seq * table_stride
    start = tl.maximum(tl.load(seq_lens_ptr + seq).to(tl.int32) - query_len, 0)
    stop = tl.minimum(start + query_len, num_slots)
    if DEPENDENT:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    if kind == 0:
        _keys(vectors_ptr, products_ptr, rows_ptr, updates_ptr, qkv_ptr, taps_ptr, pages_ptr, first_token, start, stop,
              token_stride, head, QKV_HEAD, HEADS, SHARED, KEY_DIM, VALUE_DIM, TAPS, PAGE_SIZE, UPDATE_WIDTH, BLOCK,
              ROWS, BLOCK_K, DEPENDENT and EARLY)  # fmt: skip
    else:
        _values(values_ptr, steps_ptr, rows_ptr, updates_ptr, qkv_ptr, b_ptr, a_ptr, taps_ptr, a_log_ptr, dt_bias_ptr,
                pages_ptr, first_token, start, stop, token_stride, small_stride, head, kind - 1, QKV_HEAD, B_HEAD,
                A_HEAD, HEADS, SHARED, KEY_DIM, VALUE_DIM, TAPS, PAGE_SIZE, UPDATE_WIDTH, BLOCK, WHOLE_V,
                DEPENDENT and EARLY)  # fmt: skip


@triton.jit
def _keys(
    vectors_ptr, products_ptr, rows_ptr, updates_ptr, qkv_ptr, taps_ptr, pages_ptr, first_token, start, stop,
    token_stride, head, QKV_HEAD: tl.constexpr, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, TAPS: tl.constexpr, PAGE_SIZE: tl.constexpr, UPDATE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Store queries and keys of a head's new rows, and their products with the keys since the edge."""
    GROUP: tl.constexpr = 8
    CHANNELS: tl.constexpr = 2 * KEY_DIM + SHARED * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + 2 * SHARED
    edge = start // BLOCK * BLOCK
    first = start - edge
    row, group, dims = tl.arange(0, ROWS), tl.arange(0, GROUP), tl.arange(0, BLOCK_K)
    is_dim = dims < KEY_DIM
    taps_ptr += head * CHANNELS * TAPS
    qkv_ptr += first_token * token_stride + head * QKV_HEAD
    vectors_ptr += (first_token * HEADS + head) * (2 * KEY_DIM)
    products_ptr += (first_token * HEADS + head) * (2 * BLOCK)
    old = places(edge, start < stop, pages_ptr, head, HEADS, PAGE_SIZE) + row
    keys_ptr = updates_ptr + SHARED * VALUE_DIM + dims[None, :]
    keys = tl.load(keys_ptr + old[:, None] * UPDATE_WIDTH, mask=(row < first)[:, None] & is_dim[None, :], other=0.0)
    block_ptr, before_ptr = block_rows(edge, rows_ptr, pages_ptr, head, HEADS, PAGE_SIZE, BLOCK, WIDTH)
    of_k = old_part(first + group, group < stop - start, KEY_DIM + dims, is_dim, block_ptr, before_ptr, taps_ptr, edge,
                    first, WIDTH, TAPS)  # fmt: skip
    of_q = old_part(first + group, group < stop - start, dims, is_dim, block_ptr, before_ptr, taps_ptr, edge, first,
                    WIDTH, TAPS)  # fmt: skip
    if WAIT:
        gdc_wait()
    for begin in range(0, stop - start, GROUP):
        token = begin + group
        is_new = token < stop - start
        k = unit(new_part(of_k, token, is_new, KEY_DIM + dims, is_dim, qkv_ptr, taps_ptr, token_stride, TAPS))
        q = unit(new_part(of_q, token, is_new, dims, is_dim, qkv_ptr, taps_ptr, token_stride, TAPS)) * KEY_DIM**-0.5
        of_k, of_q = tl.zeros_like(of_k), tl.zeros_like(of_q)  # a group has no fewer rows than a convolution
        is_in = is_new[:, None] & is_dim[None, :]
        to_ptr = vectors_ptr + token[:, None] * (2 * HEADS * KEY_DIM) + dims[None, :]
        tl.store(to_ptr, k, mask=is_in)
        tl.store(to_ptr + KEY_DIM, q, mask=is_in)
        place = places(start + token, is_new, pages_ptr, head, HEADS, PAGE_SIZE)
        tl.store(keys_ptr + place[:, None] * UPDATE_WIDTH, k, mask=is_in)
        for of_key in tl.static_range(2):
            store_rows(start + token, is_new, of_key * KEY_DIM + dims, is_dim, 0, qkv_ptr, rows_ptr, pages_ptr, start,
                       token_stride, head, HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
    tl.debug_barrier()
    for number in range(stop - start):
        here, own_ptr = start + number - edge, vectors_ptr + number * (2 * HEADS * KEY_DIM) + dims
        own_k = tl.load(own_ptr, mask=is_dim, other=0.0)[None, :]
        own_q = tl.load(own_ptr + KEY_DIM, mask=is_dim, other=0.0)[None, :]
        keys = tl.where((row == here)[:, None], own_k, keys)
        at = products_ptr + number * (2 * HEADS * BLOCK) + row
        tl.store(at, tl.sum(keys * own_k, 1), mask=row < BLOCK)
        tl.store(at + BLOCK, tl.sum(keys * own_q, 1), mask=row < BLOCK)
        if here == BLOCK - 1:
            keys = tl.zeros_like(keys)
            edge += BLOCK


@triton.jit
def _values(
    values_ptr, steps_ptr, rows_ptr, updates_ptr, qkv_ptr, b_ptr, a_ptr, taps_ptr, a_log_ptr, dt_bias_ptr, pages_ptr,
    first_token, start, stop, token_stride, small_stride, head, shared, QKV_HEAD: tl.constexpr, B_HEAD: tl.constexpr,
    A_HEAD: tl.constexpr, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr, PAGE_SIZE: tl.constexpr, UPDATE_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE_V: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Store the values of one head's new rows, beta, and the decays since the edge."""
    GROUP: tl.constexpr = 8
    CHANNELS: tl.constexpr = 2 * KEY_DIM + SHARED * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + 2 * SHARED
    edge, group, columns = start // BLOCK * BLOCK, tl.arange(0, GROUP), tl.arange(0, WHOLE_V)
    first, channels, is_column = start - edge, 2 * KEY_DIM + shared * VALUE_DIM + columns, columns < VALUE_DIM
    taps_ptr += head * CHANNELS * TAPS
    qkv_ptr += first_token * token_stride + head * QKV_HEAD
    b_ptr += first_token * small_stride + head * B_HEAD + shared
    a_ptr += first_token * small_stride + head * A_HEAD + shared
    values_ptr += ((first_token * HEADS + head) * SHARED + shared) * VALUE_DIM
    steps_ptr += ((first_token * HEADS + head) * SHARED + shared) * 2
    decays_ptr = updates_ptr + SHARED * VALUE_DIM + KEY_DIM + shared
    a_log, dt_bias = tl.load(a_log_ptr + head * SHARED + shared), tl.load(dt_bias_ptr + head * SHARED + shared)
    before = places(start - 1, first > 0, pages_ptr, head, HEADS, PAGE_SIZE)
    passed = tl.load(decays_ptr + before * UPDATE_WIDTH, mask=first > 0, other=0.0)
    block_ptr, before_ptr = block_rows(edge, rows_ptr, pages_ptr, head, HEADS, PAGE_SIZE, BLOCK, WIDTH)
    old = old_part(first + group, group < stop - start, channels, is_column, block_ptr, before_ptr, taps_ptr, edge,
                   first, WIDTH, TAPS)  # fmt: skip
    if WAIT:
        gdc_wait()
    for begin in range(0, stop - start, GROUP):
        token = begin + group
        is_new = token < stop - start
        v = new_part(old, token, is_new, channels, is_column, qkv_ptr, taps_ptr, token_stride, TAPS)
        old = tl.zeros_like(old)  # a group has no fewer rows than a convolution
        at = token[:, None] * (HEADS * SHARED * VALUE_DIM) + columns[None, :]
        tl.store(values_ptr + at, v, mask=is_new[:, None] & is_column[None, :])
        store_rows(start + token, is_new, channels, is_column, 0, qkv_ptr, rows_ptr, pages_ptr, start, token_stride,
                   head, HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
        store_gates(start + token, is_new, shared, b_ptr, a_ptr, rows_ptr, pages_ptr, start, small_stride, head, HEADS,
                    SHARED, PAGE_SIZE, WIDTH)  # fmt: skip
    for number in range(stop - start):
        b = tl.load(b_ptr + number * small_stride).to(tl.float32)
        a = tl.load(a_ptr + number * small_stride).to(tl.float32)
        slot = start + number
        passed = tl.where(slot % BLOCK == 0, 0.0, passed) + decays(a, True, a_log, dt_bias)
        tl.store(steps_ptr + number * (2 * HEADS * SHARED), tl.sigmoid(b))
        tl.store(steps_ptr + number * (2 * HEADS * SHARED) + 1, passed)
        tl.store(decays_ptr + places(slot, True, pages_ptr, head, HEADS, PAGE_SIZE) * UPDATE_WIDTH, passed)


@triton.jit(do_not_specialize=("query_len", "num_slots", "table_stride"))
def _round_kernel(
    out_ptr,  # [num_tokens, HEADS * SHARED, VALUE_DIM], written
    states_ptr,  # [num_pages, HEADS, PAGE_SIZE, STATE_PART] float32, written
    vectors_ptr,  # [num_tokens, HEADS, 2, KEY_DIM] float32, written if FUSED
    products_ptr,  # [num_tokens, HEADS, 2, BLOCK] float32, written if FUSED
    values_ptr,  # [num_tokens, HEADS * SHARED, VALUE_DIM] float32, written if FUSED
    steps_ptr,  # [num_tokens, HEADS * SHARED, 2] float32, written if FUSED
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 2)], written
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32, written
    qkv_ptr,  # [num_tokens, HEADS, 2 * KEY_DIM + SHARED * VALUE_DIM], tokens token_stride and heads QKV_HEAD apart
    b_ptr,  # [num_tokens, HEADS, SHARED], tokens small_stride and heads B_HEAD apart
    a_ptr,  # [num_tokens, HEADS, SHARED], tokens small_stride and heads A_HEAD apart
    taps_ptr,  # [HEADS, 2 * KEY_DIM + SHARED * VALUE_DIM, TAPS] float32
    a_log_ptr,  # [HEADS, SHARED] float32
    dt_bias_ptr,  # [HEADS, SHARED] float32
    seq_lens_ptr,  # [num_seqs] int64
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    query_len,
    num_slots,  # of a sequence
    table_stride,
    token_stride,
    small_stride,
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
    ROWS: tl.constexpr,  # of a block
    BLOCK_K: tl.constexpr,
    WHOLE_V: tl.constexpr,
    EARLY: tl.constexpr,  # pages are read before the kernel before ends
    DEPENDENT: tl.constexpr,
    STATE_PART: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NEW: tl.constexpr,  # rows of a round at most
    FUSED: tl.constexpr,  # there was no first kernel
):
    """Grid: (HEADS * SHARED * ceil(VALUE_DIM / BLOCK_V), num_seqs). If FUSED, programs of a head store the same numbers
    at the same places."""
    NUM_PARTS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    part, value_head = tl.program_id(0) % NUM_PARTS, tl.program_id(0) // NUM_PARTS
    head, shared, seq = value_head // SHARED, value_head % SHARED, tl.program_id(1).to(tl.int64)
    first_token, pages_ptr = seq * query_len, table_ptr + seq * table_stride
    start = tl.maximum(tl.load(seq_lens_ptr + seq).to(tl.int32) - query_len, 0)
    stop = tl.minimum(start + query_len, num_slots)
    row, dims, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V)
    is_column, edge = columns < VALUE_DIM, start // BLOCK * BLOCK
    numbers = (shared * KEY_DIM + dims)[:, None] * VALUE_DIM + columns[None, :]
    is_state = (dims < KEY_DIM)[:, None] & is_column[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    before = places(edge - BLOCK, edge > 0, pages_ptr, head, HEADS, PAGE_SIZE)
    state = tl.load(states_ptr + before * STATE_PART + numbers, mask=is_state & (edge > 0), other=0.0)
    place = places(edge, start < stop, pages_ptr, head, HEADS, PAGE_SIZE)
    at = updates_ptr + (place + row) * UPDATE_WIDTH
    is_old = row < start - edge
    updates = tl.load(at[:, None] + (shared * VALUE_DIM + columns)[None, :], mask=is_old[:, None] & is_column[None, :],
                      other=0.0)  # fmt: skip
    decay = tl.load(at + (SHARED * VALUE_DIM + KEY_DIM) + shared, mask=is_old, other=0.0)
    if FUSED:
        _keys(vectors_ptr, products_ptr, rows_ptr, updates_ptr, qkv_ptr, taps_ptr, pages_ptr, first_token, start, stop,
              token_stride, head, QKV_HEAD, HEADS, SHARED, KEY_DIM, VALUE_DIM, TAPS, PAGE_SIZE, UPDATE_WIDTH, BLOCK,
              ROWS, BLOCK_K, DEPENDENT and EARLY)  # fmt: skip
        _values(values_ptr, steps_ptr, rows_ptr, updates_ptr, qkv_ptr, b_ptr, a_ptr, taps_ptr, a_log_ptr, dt_bias_ptr,
                pages_ptr, first_token, start, stop, token_stride, small_stride, head, shared, QKV_HEAD, B_HEAD,
                A_HEAD, HEADS, SHARED, KEY_DIM, VALUE_DIM, TAPS, PAGE_SIZE, UPDATE_WIDTH, BLOCK, WHOLE_V,
                DEPENDENT and EARLY)  # fmt: skip
        tl.debug_barrier()
    elif DEPENDENT and EARLY:
        gdc_wait()
    out_ptr += value_head * VALUE_DIM
    end = tl.minimum(stop, edge + BLOCK)
    decay = _rows_of_block(out_ptr, vectors_ptr, products_ptr, values_ptr, steps_ptr, updates_ptr, state, updates,
                           decay, first_token, start, end, edge, place, value_head, columns, is_column, HEADS, SHARED,
                           KEY_DIM, VALUE_DIM, UPDATE_WIDTH, BLOCK, ROWS, BLOCK_K, BLOCK_V)  # fmt: skip
    for _ in range(start // BLOCK, stop // BLOCK):  # blocks that the round completes
        tl.debug_barrier()  # updates are stored
        _advance(states_ptr, updates_ptr, before, place, edge > 0, decay, shared, columns, is_column, SHARED, KEY_DIM,
                 VALUE_DIM, UPDATE_WIDTH, BLOCK, STATE_PART, BLOCK_K)  # fmt: skip
        tl.debug_barrier()
        state = tl.load(states_ptr + place * STATE_PART + numbers, mask=is_state, other=0.0)
        edge += BLOCK
        end = tl.minimum(stop, edge + BLOCK)
        before, place = place, places(edge, edge < stop, pages_ptr, head, HEADS, PAGE_SIZE)
        decay = _rows_of_block(out_ptr, vectors_ptr, products_ptr, values_ptr, steps_ptr, updates_ptr, state,
                               tl.zeros_like(updates), tl.zeros_like(decay), first_token + edge - start, edge, end,
                               edge, place, value_head, columns, is_column, HEADS, SHARED, KEY_DIM, VALUE_DIM,
                               UPDATE_WIDTH, BLOCK, ROWS, BLOCK_K, BLOCK_V)  # fmt: skip
    new = tl.arange(0, NEW)
    is_lost = (new >= stop - start) & (new < query_len)  # without a slot
    lost_ptr = out_ptr + (first_token + new)[:, None] * (HEADS * SHARED * VALUE_DIM) + columns[None, :]
    nothing = tl.zeros([NEW, BLOCK_V], out_ptr.dtype.element_ty)
    tl.store(lost_ptr, nothing, mask=is_lost[:, None] & is_column[None, :])


@triton.jit
def _rows_of_block(
    out_ptr, vectors_ptr, products_ptr, values_ptr, steps_ptr, updates_ptr, state, updates, decay, first_token, start,
    stop, edge, place, value_head, columns, is_column, HEADS: tl.constexpr, SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, UPDATE_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store updates and outputs of new rows of one block, which follow the old rows that have `updates` [ROWS, BLOCK_V]
    and `decay` [ROWS]. Return the decays of all."""
    PIECES: tl.constexpr = BLOCK_K // ROWS  # of a state, each as many rows as a block
    head, shared = value_head // SHARED, value_head % SHARED
    row, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    is_dim = dims < KEY_DIM
    for number in range(stop - start):
        here, of_head = start + number - edge, (first_token + number) * HEADS + head
        of_value_head = of_head * SHARED + shared
        vector_ptr, pairs_ptr = vectors_ptr + of_head * (2 * KEY_DIM) + dims, products_ptr + of_head * (2 * BLOCK)
        beta, passed = tl.load(steps_ptr + of_value_head * 2), tl.load(steps_ptr + of_value_head * 2 + 1)
        k, q = tl.load(vector_ptr, mask=is_dim, other=0.0), tl.load(vector_ptr + KEY_DIM, mask=is_dim, other=0.0)
        of_k = tl.load(pairs_ptr + row, mask=row < here, other=0.0)
        of_q = tl.load(pairs_ptr + BLOCK + row, mask=row < here, other=0.0)
        own = tl.load(pairs_ptr + BLOCK + here)
        v = tl.load(values_ptr + of_value_head * VALUE_DIM + columns, mask=is_column, other=0.0)
        between = tl.exp(tl.where(row < here, passed - decay, float("-inf")))
        from_k = tl.reshape(state * (k * tl.exp(passed))[:, None], [PIECES, ROWS, BLOCK_V])
        from_k = tl.sum(from_k, 0) + updates * (of_k * between)[:, None]
        from_q = tl.reshape(state * (q * tl.exp(passed))[:, None], [PIECES, ROWS, BLOCK_V])
        from_q = tl.sum(from_q, 0) + updates * (of_q * between)[:, None]
        known, output = tl.split(tl.sum(tl.join(from_k, from_q), 0))
        update = beta * (v - known)
        output = (output + own * update).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (first_token + number) * (HEADS * SHARED * VALUE_DIM) + columns, output, mask=is_column)
        tl.store(updates_ptr + (place + here) * UPDATE_WIDTH + shared * VALUE_DIM + columns, update, mask=is_column)
        updates = tl.where((row == here)[:, None], update[None, :], updates)
        decay = tl.where(row == here, passed, decay)
    return decay


@triton.jit
def _advance(
    states_ptr, updates_ptr, before, place, has_state, decay, shared, columns, is_column, SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, UPDATE_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    STATE_PART: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store some columns of the state behind the block at `place`: the decayed state `before`, and the decayed products
    of keys and updates. `decay` [ROWS] is that of each row. This is rare, so all is read again, few rows at a time, and
    no round keeps it ready."""
    TILE: tl.constexpr = 16
    NUM: tl.constexpr = decay.shape[0] // TILE
    tile, row, dims = tl.arange(0, NUM)[:, None], tl.arange(0, TILE), tl.arange(0, BLOCK_K)
    all_rows = tl.arange(0, decay.shape[0])
    last = tl.sum(tl.where(all_rows == BLOCK - 1, decay, 0.0), 0)
    faded = tl.reshape(tl.exp(tl.where(all_rows < BLOCK, last - decay, float("-inf"))), [NUM, TILE])
    is_dim = dims < KEY_DIM
    is_state = is_dim[:, None] & is_column[None, :]
    numbers = (shared * KEY_DIM + dims)[:, None] * VALUE_DIM + columns[None, :]
    state = tl.load(states_ptr + before * STATE_PART + numbers, mask=is_state & has_state, other=0.0)
    state *= tl.exp(last)
    updates_ptr += place * UPDATE_WIDTH
    for i in range(NUM):
        own = i * TILE + row
        at = updates_ptr + own[None, :] * UPDATE_WIDTH + (SHARED * VALUE_DIM + dims)[:, None]
        keys = tl.load(at, mask=is_dim[:, None] & (own < BLOCK)[None, :], other=0.0)
        at = updates_ptr + own[:, None] * UPDATE_WIDTH + (shared * VALUE_DIM + columns)[None, :]
        update = tl.load(at, mask=(own < BLOCK)[:, None] & is_column[None, :], other=0.0)
        update *= tl.sum(tl.where(tile == i, faded, 0.0), 0)[:, None]
        state = tl.dot(keys, update, state, input_precision="tf32x3")
    tl.store(states_ptr + place * STATE_PART + numbers, state, mask=is_state)
