"""Rounds of the gated delta rule by Triton: a few new rows of each sequence behind the state at its last edge.

A program has some columns of one value head of one sequence. Columns of states, values and updates are independent of
each other, so programs do not wait for each other. They all compute the keys that they need.
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

    `is_alone`: no kernel of this forward has written states of this layer, so they may be read while the kernel before
    still runs."""
    check_layer(inputs, weights, pools, plan)
    (num_tokens, num_heads, _), (_, num_shared, key_dim, value_dim) = inputs.qkv.shape, weights.state_shape
    num_seqs, query_len, page_size = len(plan.seq_lens), plan.query_len, pools.rows.shape[3]
    assert plan.is_round and query_len is not None and num_tokens == num_seqs * query_len, plan
    assert plan.seq_lens.is_contiguous() and plan.table.stride(1) == 1, (plan.seq_lens, plan.table)
    out = torch.empty((num_tokens, num_heads * num_shared, value_dim), dtype=inputs.qkv.dtype, device=inputs.qkv.device)
    block_k = max(TILE, triton.next_power_of_2(key_dim))
    block_v, num_warps = tiles_of(num_seqs * num_heads * num_shared, value_dim)
    dependent = gpu.dependent_launch(num_tokens)
    _round_kernel[(num_heads * num_shared * triton.cdiv(value_dim, block_v), num_seqs)](
        out, *pools, inputs.qkv, inputs.b, inputs.a, *weights[:3], plan.seq_lens, plan.table, query_len,
        plan.table.shape[1] * page_size, inputs.qkv.stride(0), inputs.b.stride(0), plan.table.stride(0),
        QKV_HEAD=inputs.qkv.stride(1), B_HEAD=inputs.b.stride(1), A_HEAD=inputs.a.stride(1), HEADS=num_heads,
        SHARED=num_shared, KEY_DIM=key_dim, VALUE_DIM=value_dim, TAPS=weights.taps.shape[2], PAGE_SIZE=page_size,
        BLOCK=plan.block, STATE_PART=pools.states.shape[4], BLOCK_K=block_k, BLOCK_V=block_v, ROWS=MAX_ROUND_LEN,
        WARPS=min(num_warps, block_k // 16), EARLY=is_alone, DEPENDENT=dependent, num_warps=num_warps,
        launch_pdl=dependent,
    )  # fmt: skip
    return out


def tiles_of(num_states: int, value_dim: int) -> tuple[int, int]:
    """Return the columns of a program and its warps, for so many value heads of sequences."""
    whole = max(TILE, int(triton.next_power_of_2(value_dim)))
    return min(32 if num_states < _FEW_PROGRAMS else 64, whole), 8


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
    STATE_PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,  # that divide BLOCK_K
    EARLY: tl.constexpr,  # states are read before the kernel before ends
    DEPENDENT: tl.constexpr,
):
    """Grid: (HEADS * SHARED * ceil(VALUE_DIM / BLOCK_V), num_seqs)."""
    TILE: tl.constexpr = 16
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
    if DEPENDENT and EARLY:
        gdc_wait()
    values = 2 * KEY_DIM + shared * VALUE_DIM + columns
    _store_new(
        start + row, row < stop - start, part, shared, dims, is_dim, values, is_column, qkv_ptr, b_ptr, a_ptr, rows_ptr,
        pages_ptr, start, token_stride, small_stride, head, HEADS, SHARED, KEY_DIM, PAGE_SIZE, WIDTH,
    )  # fmt: skip
    begin = start
    while begin < stop:
        end = tl.minimum(stop, edge + BLOCK)
        slots = begin + row
        is_new = slots < end
        q = unit(convolved(slots, is_new, dims, is_dim, qkv_ptr, rows_ptr, pages_ptr, taps_ptr, start, token_stride,
                           head, HEADS, PAGE_SIZE, WIDTH, TAPS, True))  # fmt: skip
        q *= KEY_DIM**-0.5
        k = unit(convolved(slots, is_new, KEY_DIM + dims, is_dim, qkv_ptr, rows_ptr, pages_ptr, taps_ptr, start,
                           token_stride, head, HEADS, PAGE_SIZE, WIDTH, TAPS, True))  # fmt: skip
        v = convolved(slots, is_new, values, is_column, qkv_ptr, rows_ptr, pages_ptr, taps_ptr, start, token_stride,
                      head, HEADS, PAGE_SIZE, WIDTH, TAPS, True)  # fmt: skip
        new = (slots - start).to(tl.int64) * small_stride
        beta = tl.sigmoid(tl.load(b_ptr + new, mask=is_new, other=0.0).to(tl.float32))
        a = tl.load(a_ptr + new, mask=is_new, other=0.0).to(tl.float32)
        before = edge + tl.arange(0, BLOCK)
        is_before = before < begin
        a_before = numbers(before, is_before, CHANNELS + SHARED + shared, a_ptr, rows_ptr, pages_ptr, start,
                           token_stride, head, HEADS, PAGE_SIZE, WIDTH, False)  # fmt: skip
        decay = tl.sum(decays(a_before, is_before, a_log, dt_bias), 0)
        decay += tl.cumsum(decays(a, is_new, a_log, dt_bias), 0)
        known = tl.exp(decay)[:, None] * times(k, state, WARPS)
        output = tl.exp(decay)[:, None] * times(q, state, WARPS)
        known, output = _with_old(
            k, q, known, output, decay, edge, begin, dims, is_dim, columns, is_column, shared, a_log, dt_bias, qkv_ptr,
            rows_ptr, updates_ptr, pages_ptr, taps_ptr, start, token_stride, head, HEADS, SHARED, KEY_DIM, VALUE_DIM,
            PAGE_SIZE, WIDTH, TAPS, TILE, WARPS,
        )  # fmt: skip
        update, output = _solved(q, k, beta[:, None] * (v - known), output, decay, beta, is_new, end - begin, WARPS)
        is_in = is_new[:, None] & is_column[None, :]
        at = places(slots, is_new, pages_ptr, head, HEADS, PAGE_SIZE)[:, None] * (SHARED * VALUE_DIM)
        tl.store(updates_ptr + at + shared * VALUE_DIM + columns[None, :], update, mask=is_in)
        at = (slots - start)[:, None] * (HEADS * SHARED * VALUE_DIM) + columns[None, :]
        tl.store(out_ptr + at, output.to(out_ptr.dtype.element_ty), mask=is_in)
        if end == edge + BLOCK:
            last = tl.sum(tl.where(row == end - begin - 1, decay, 0.0), 0)
            state = _past_old(
                state * tl.exp(last), last, edge, begin, dims, is_dim, columns, is_column, shared, a_log, dt_bias,
                qkv_ptr, rows_ptr, updates_ptr, pages_ptr, taps_ptr, start, token_stride, head, HEADS, SHARED, KEY_DIM,
                VALUE_DIM, PAGE_SIZE, WIDTH, TAPS, TILE,
            )  # fmt: skip
            keys = k * tl.exp(tl.where(is_new, last - decay, float("-inf")))[:, None]
            state = tl.dot(tl.trans(keys), tl.where(is_in, update, 0.0), state, input_precision="tf32x3")
            place = places(edge, edge >= 0, pages_ptr, head, HEADS, PAGE_SIZE)
            tl.store(states_ptr + place * STATE_PART + numbers_of_state, state, mask=is_state)
        begin = end
        edge += BLOCK
    is_lost = (row >= stop - start) & (row < query_len)  # without a slot
    at = row[:, None] * (HEADS * SHARED * VALUE_DIM) + columns[None, :]
    nothing = tl.zeros([ROWS, BLOCK_V], out_ptr.dtype.element_ty)
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
def _solved(q, k, update, output, decay, beta, is_new, num_new, WARPS: tl.constexpr):
    """Return the updates of new rows [ROWS, BLOCK_V] and their outputs, by forward substitution. `update` and `output`
    are those that follow from the rows before alone."""
    row = tl.arange(0, is_new.shape[0])
    is_earlier = (row[:, None] >= row[None, :]) & is_new[:, None]
    between = tl.exp(tl.where(is_earlier, decay[:, None] - decay[None, :], float("-inf")))
    of_k = times(k, tl.trans(k), WARPS) * between * beta[:, None]
    of_k = tl.where(row[:, None] > row[None, :], of_k, 0.0)
    of_q = times(q, tl.trans(k), WARPS) * between
    for i in range(num_new):
        solved = tl.sum(tl.where(row[:, None] == i, update, 0.0), 0)[None, :]
        update -= tl.sum(tl.where(row[None, :] == i, of_k, 0.0), 1)[:, None] * solved
        output += tl.sum(tl.where(row[None, :] == i, of_q, 0.0), 1)[:, None] * solved
    return update, output


@triton.jit
def times(x, y, PARTS: tl.constexpr):
    """Return the product of x [M, K] and y [K, N], [M, N] float32. Each warp has a part of K, because with few rows or
    columns all warps would hold all of x or y."""
    size: tl.constexpr = x.shape[1] // PARTS
    x = tl.permute(tl.reshape(x, [x.shape[0], PARTS, size]), (1, 0, 2))
    y = tl.reshape(y, [PARTS, size, y.shape[1]])
    return tl.sum(tl.dot(x, y, input_precision="tf32x3"), 0)


@triton.jit
def _with_old(
    k, q, known, output, decay, edge, begin, dims, is_dim, columns, is_column, shared, a_log, dt_bias, qkv_ptr,
    rows_ptr, updates_ptr, pages_ptr, taps_ptr, start, token_stride, head, HEADS: tl.constexpr, SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
    TILE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Return `known` and `output` [ROWS, BLOCK_V] of the new rows, with what the rows from `edge` to `begin` add."""
    passed = 0.0
    for first in range(edge, begin, TILE):
        keys, old_decay, updates, passed, is_old = _old_rows(
            first, begin, passed, dims, is_dim, columns, is_column, shared, a_log, dt_bias, qkv_ptr, rows_ptr,
            updates_ptr, pages_ptr, taps_ptr, start, token_stride, head, HEADS, SHARED, KEY_DIM, VALUE_DIM, PAGE_SIZE,
            WIDTH, TAPS, TILE,
        )  # fmt: skip
        between = tl.exp(tl.where(is_old[None, :], decay[:, None] - old_decay[None, :], float("-inf")))
        of_k = times(k, tl.trans(keys), WARPS) * between
        of_q = times(q, tl.trans(keys), WARPS) * between
        known = tl.dot(of_k, updates, known, input_precision="tf32x3")
        output = tl.dot(of_q, updates, output, input_precision="tf32x3")
    return known, output


@triton.jit
def _past_old(
    state, last, edge, begin, dims, is_dim, columns, is_column, shared, a_log, dt_bias, qkv_ptr, rows_ptr, updates_ptr,
    pages_ptr, taps_ptr, start, token_stride, head, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return `state` [BLOCK_K, BLOCK_V] with what the rows from `edge` to `begin` add. `last`: the decay at the end."""
    passed = 0.0
    for first in range(edge, begin, TILE):
        keys, old_decay, updates, passed, is_old = _old_rows(
            first, begin, passed, dims, is_dim, columns, is_column, shared, a_log, dt_bias, qkv_ptr, rows_ptr,
            updates_ptr, pages_ptr, taps_ptr, start, token_stride, head, HEADS, SHARED, KEY_DIM, VALUE_DIM, PAGE_SIZE,
            WIDTH, TAPS, TILE,
        )  # fmt: skip
        keys *= tl.exp(tl.where(is_old, last - old_decay, float("-inf")))[:, None]
        state = tl.dot(tl.trans(keys), updates, state, input_precision="tf32x3")
    return state


@triton.jit
def _old_rows(
    first, begin, passed, dims, is_dim, columns, is_column, shared, a_log, dt_bias, qkv_ptr, rows_ptr, updates_ptr,
    pages_ptr, taps_ptr, start, token_stride, head, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the rows from slot `first` on, before `begin`: keys [TILE, BLOCK_K], decays since the edge [TILE], updates
    [TILE, BLOCK_V], the decay of all rows so far, and which rows exist [TILE]. `passed`: the decay before them."""
    slots = first + tl.arange(0, TILE)
    is_old = slots < begin
    keys = unit(convolved(slots, is_old, KEY_DIM + dims, is_dim, qkv_ptr, rows_ptr, pages_ptr, taps_ptr, start,
                          token_stride, head, HEADS, PAGE_SIZE, WIDTH, TAPS, False))  # fmt: skip
    a = numbers(slots, is_old, WIDTH - SHARED + shared, qkv_ptr, rows_ptr, pages_ptr, start, token_stride, head, HEADS,
                PAGE_SIZE, WIDTH, False)  # fmt: skip
    own = decays(a, is_old, a_log, dt_bias)
    at = places(slots, is_old, pages_ptr, head, HEADS, PAGE_SIZE)[:, None] * (SHARED * VALUE_DIM)
    is_in = is_old[:, None] & is_column[None, :]
    updates = tl.load(updates_ptr + at + shared * VALUE_DIM + columns[None, :], mask=is_in, other=0.0)
    return keys, passed + tl.cumsum(own, 0), updates, passed + tl.sum(own, 0), is_old
