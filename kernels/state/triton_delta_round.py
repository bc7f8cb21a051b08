"""Rounds of the gated delta rule by Triton: a few new rows of each sequence behind the state at its last edge.

A program has some columns of one value head of one sequence. Columns of states, values and updates are independent of
each other, so programs do not wait for each other. Each computes the keys since the edge once more, and then takes the
new rows one after another. So the bits of a row do not depend on how many rows a round has.
"""

# ruff: noqa: N803, N806
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from .delta_rule import DeltaWeights
from .paged_delta import MAX_ROUND_LEN, DeltaInputs, DeltaPlan, DeltaPools
from .triton_delta_rows import TILE, check_layer, convolved, decays, numbers, places, store_gates, store_rows, unit

_FEW_PROGRAMS = 192  # with fewer value heads of sequences, several programs share one, so that all processors have work


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
    block_v, num_warps, num_registers = tiles_of(num_seqs * num_heads * num_shared, value_dim)
    dependent = gpu.dependent_launch(num_tokens)
    _round_kernel[(num_heads * num_shared * triton.cdiv(value_dim, block_v), num_seqs)](
        out, *pools, inputs.qkv, inputs.b, inputs.a, *weights[:3], plan.seq_lens, plan.table, query_len,
        plan.table.shape[1] * page_size, inputs.qkv.stride(0), inputs.b.stride(0), plan.table.stride(0),
        QKV_HEAD=inputs.qkv.stride(1), B_HEAD=inputs.b.stride(1), A_HEAD=inputs.a.stride(1), HEADS=num_heads,
        SHARED=num_shared, KEY_DIM=key_dim, VALUE_DIM=value_dim, TAPS=weights.taps.shape[2], PAGE_SIZE=page_size,
        BLOCK=plan.block, ROWS=max(TILE, plan.block), STATE_PART=pools.states.shape[4],
        BLOCK_K=max(TILE, triton.next_power_of_2(key_dim)), BLOCK_V=block_v, NEW=MAX_ROUND_LEN, EARLY=is_alone,
        DEPENDENT=dependent, num_warps=num_warps, num_stages=1, maxnreg=num_registers, launch_pdl=dependent,
    )  # fmt: skip
    return out


def tiles_of(num_states: int, value_dim: int) -> tuple[int, int, int | None]:
    """Return the columns of a program, its warps, and the most registers of a thread, for so many value heads of
    sequences."""
    whole = max(TILE, int(triton.next_power_of_2(value_dim)))
    return (min(32, whole), 8, None) if num_states < _FEW_PROGRAMS else (min(64, whole), 8, 128)


@triton.jit(do_not_specialize=("query_len", "num_slots", "table_stride"))
def _round_kernel(
    out_ptr,  # [num_tokens, HEADS * SHARED, VALUE_DIM], written
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 2)], written
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, SHARED * VALUE_DIM] float32, written
    states_ptr,  # [num_pages, HEADS, PAGE_SIZE, STATE_PART] float32, written
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
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # of a block
    STATE_PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NEW: tl.constexpr,  # rows of a round at most
    EARLY: tl.constexpr,  # pages are read before the kernel before ends
    DEPENDENT: tl.constexpr,
):
    """Grid: (HEADS * SHARED * ceil(VALUE_DIM / BLOCK_V), num_seqs)."""
    NUM_PARTS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    CHANNELS: tl.constexpr = 2 * KEY_DIM + SHARED * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + 2 * SHARED
    part, value_head = tl.program_id(0) % NUM_PARTS, tl.program_id(0) // NUM_PARTS
    head, shared, seq = value_head // SHARED, value_head % SHARED, tl.program_id(1).to(tl.int64)
    start = tl.maximum(tl.load(seq_lens_ptr + seq).to(tl.int32) - query_len, 0)
    stop = tl.minimum(start + query_len, num_slots)
    pages_ptr = table_ptr + seq * table_stride
    taps_ptr += head * CHANNELS * TAPS
    a_log, dt_bias = tl.load(a_log_ptr + value_head), tl.load(dt_bias_ptr + value_head)
    qkv_ptr += seq * query_len * token_stride + head * QKV_HEAD
    b_ptr += seq * query_len * small_stride + head * B_HEAD + shared
    a_ptr += seq * query_len * small_stride + head * A_HEAD + shared
    out_ptr += (seq * query_len * HEADS * SHARED + value_head) * VALUE_DIM
    row, dims, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V)
    is_dim, is_column = dims < KEY_DIM, columns < VALUE_DIM
    numbers_of_state = (shared * KEY_DIM + dims)[:, None] * VALUE_DIM + columns[None, :]
    is_state = is_dim[:, None] & is_column[None, :]
    edge = start // BLOCK * BLOCK
    if DEPENDENT:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    place = places(edge - BLOCK, edge > 0, pages_ptr, head, HEADS, PAGE_SIZE)
    state = tl.load(states_ptr + place * STATE_PART + numbers_of_state, mask=is_state & (edge > 0), other=0.0)
    keys, decay, passed, updates = _since_edge(
        edge, row, start, dims, is_dim, columns, is_column, shared, a_log, dt_bias, qkv_ptr, rows_ptr, updates_ptr,
        pages_ptr, taps_ptr, token_stride, head, HEADS, SHARED, KEY_DIM, VALUE_DIM, PAGE_SIZE, WIDTH, TAPS,
    )  # fmt: skip
    if DEPENDENT and EARLY:
        gdc_wait()
    values, new = 2 * KEY_DIM + shared * VALUE_DIM + columns, tl.arange(0, NEW)
    _store_new(
        start + new, new < stop - start, part, shared, dims, is_dim, values, is_column, qkv_ptr, b_ptr, a_ptr, rows_ptr,
        pages_ptr, start, token_stride, small_stride, head, HEADS, SHARED, KEY_DIM, PAGE_SIZE, WIDTH,
    )  # fmt: skip
    for slot in range(start, stop):
        q, k, v = _new_row(slot, dims, is_dim, values, is_column, qkv_ptr, rows_ptr, pages_ptr, taps_ptr, start,
                           token_stride, head, HEADS, KEY_DIM, PAGE_SIZE, WIDTH, TAPS)  # fmt: skip
        token = slot - start
        beta = tl.sigmoid(tl.load(b_ptr + token * small_stride).to(tl.float32))
        passed += decays(tl.load(a_ptr + token * small_stride).to(tl.float32), slot < stop, a_log, dt_bias)
        here = slot - edge
        between = tl.exp(tl.where(row < here, passed - decay, float("-inf")))
        of_k, of_q = tl.sum(keys * k[None, :], 1) * between, tl.sum(keys * q[None, :], 1) * between
        known = tl.exp(passed) * tl.sum(state * k[:, None], 0) + tl.sum(of_k[:, None] * updates, 0)
        output = tl.exp(passed) * tl.sum(state * q[:, None], 0) + tl.sum(of_q[:, None] * updates, 0)
        update = beta * (v - known)
        output += tl.sum(q * k, 0) * update
        place = places(slot, slot >= 0, pages_ptr, head, HEADS, PAGE_SIZE)
        own_ptr = updates_ptr + (place * SHARED + shared) * VALUE_DIM
        tl.store(own_ptr + columns, update, mask=is_column)
        own_ptr = out_ptr + token * (HEADS * SHARED * VALUE_DIM)
        tl.store(own_ptr + columns, output.to(out_ptr.dtype.element_ty), mask=is_column)
        is_here = row == here
        keys = tl.where(is_here[:, None], k[None, :], keys)
        updates = tl.where(is_here[:, None], update[None, :], updates)
        decay = tl.where(is_here, passed, decay)
        if here == BLOCK - 1:
            faded = keys * tl.exp(tl.where(row < BLOCK, passed - decay, float("-inf")))[:, None]
            state = _advanced(state * tl.exp(passed), faded, updates)
            place = places(edge, edge >= 0, pages_ptr, head, HEADS, PAGE_SIZE)
            tl.store(states_ptr + place * STATE_PART + numbers_of_state, state, mask=is_state)
            keys, updates = tl.zeros_like(keys), tl.zeros_like(updates)
            passed = 0.0
            edge += BLOCK
    is_lost = (new >= stop - start) & (new < query_len)  # without a slot
    at = new[:, None] * (HEADS * SHARED * VALUE_DIM) + columns[None, :]
    nothing = tl.zeros([NEW, BLOCK_V], out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, nothing, mask=is_lost[:, None] & is_column[None, :])


@triton.jit
def _store_new(
    slots, is_row, part, shared, dims, is_dim, values, is_column, qkv_ptr, b_ptr, a_ptr, rows_ptr, pages_ptr, start,
    token_stride, small_stride, head, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the rows of new tokens in the pool: each program its own values, the first program of a value head its b
    and a, and the first program of a key head q and k."""
    if part == 0:
        store_gates(slots, is_row, shared, b_ptr, a_ptr, rows_ptr, pages_ptr, start, small_stride, head, HEADS, SHARED,
                    PAGE_SIZE, WIDTH)  # fmt: skip
        if shared == 0:
            for of_key in tl.static_range(2):
                store_rows(slots, is_row, of_key * KEY_DIM + dims, is_dim, 0, qkv_ptr, rows_ptr, pages_ptr, start,
                           token_stride, head, HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
    store_rows(slots, is_row, values, is_column, 0, qkv_ptr, rows_ptr, pages_ptr, start, token_stride, head, HEADS,
               PAGE_SIZE, WIDTH)  # fmt: skip


@triton.jit
def _since_edge(
    edge, row, start, dims, is_dim, columns, is_column, shared, a_log, dt_bias, qkv_ptr, rows_ptr, updates_ptr,
    pages_ptr, taps_ptr, token_stride, head, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Return what the rows from `edge` to `start` have left: keys [ROWS, BLOCK_K], decays since the edge [ROWS], the
    decay of them all, and updates [ROWS, BLOCK_V]. Rows that do not exist yet are zeros."""
    slots, is_old = edge + row, row < start - edge
    keys = unit(convolved(slots, is_old, KEY_DIM + dims, is_dim, qkv_ptr, rows_ptr, pages_ptr, taps_ptr, start,
                          token_stride, head, HEADS, PAGE_SIZE, WIDTH, TAPS, False))  # fmt: skip
    a = numbers(slots, is_old, WIDTH - SHARED + shared, qkv_ptr, rows_ptr, pages_ptr, start, token_stride, head, HEADS,
                PAGE_SIZE, WIDTH, False)  # fmt: skip
    own = decays(a, is_old, a_log, dt_bias)
    place = places(edge, start > edge, pages_ptr, head, HEADS, PAGE_SIZE)
    at = (place + row)[:, None] * (SHARED * VALUE_DIM) + shared * VALUE_DIM + columns[None, :]
    updates = tl.load(updates_ptr + at, mask=is_old[:, None] & is_column[None, :], other=0.0)
    return keys, tl.cumsum(own, 0), tl.sum(own, 0), updates


@triton.jit
def _new_row(
    slot, dims, is_dim, values, is_column, qkv_ptr, rows_ptr, pages_ptr, taps_ptr, start, token_stride, head,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Return the query and the key [BLOCK_K] and the value [BLOCK_V] of a new row."""
    one = tl.arange(0, 1)
    slots, is_row = slot + one, one == 0
    q = unit(convolved(slots, is_row, dims, is_dim, qkv_ptr, rows_ptr, pages_ptr, taps_ptr, start, token_stride, head,
                       HEADS, PAGE_SIZE, WIDTH, TAPS, True))  # fmt: skip
    k = unit(convolved(slots, is_row, KEY_DIM + dims, is_dim, qkv_ptr, rows_ptr, pages_ptr, taps_ptr, start,
                       token_stride, head, HEADS, PAGE_SIZE, WIDTH, TAPS, True))  # fmt: skip
    v = convolved(slots, is_row, values, is_column, qkv_ptr, rows_ptr, pages_ptr, taps_ptr, start, token_stride, head,
                  HEADS, PAGE_SIZE, WIDTH, TAPS, True)  # fmt: skip
    return tl.sum(q, 0) * KEY_DIM**-0.5, tl.sum(k, 0), tl.sum(v, 0)


@triton.jit
def _advanced(state, keys, updates):
    """Return `state` [BLOCK_K, BLOCK_V] with the products of `keys` [ROWS, BLOCK_K] and `updates` [ROWS, BLOCK_V], few
    rows at a time: this is rare, and should not take the registers of all rounds."""
    TILE: tl.constexpr = 16
    NUM: tl.constexpr = keys.shape[0] // TILE
    tile = tl.arange(0, NUM)[:, None, None]
    keys = tl.reshape(keys, [NUM, TILE, keys.shape[1]])
    updates = tl.reshape(updates, [NUM, TILE, updates.shape[1]])
    for i in range(NUM):
        some_keys = tl.sum(tl.where(tile == i, keys, 0.0), 0)
        some_updates = tl.sum(tl.where(tile == i, updates, 0.0), 0)
        state = tl.dot(tl.trans(some_keys), some_updates, state, input_precision="tf32x3")
    return state
