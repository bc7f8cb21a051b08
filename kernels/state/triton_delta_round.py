"""Rounds of the gated delta rule by Triton: a few new rows of each sequence behind the state at its last edge, in two
kernels.

The first one stores new rows, and computes queries, keys, values, and products with all keys since the edge, once for
all columns. The second one has some columns of one value head of a sequence. Columns of states, values and updates are
independent of each other, so programs do not wait for each other. Its states are on the way while the first one runs.

Both take new rows one after another. So the bits of a row do not depend on how many rows a round has.
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
    convolved,
    decays,
    places,
    store_gates,
    store_rows,
    unit,
)

# Columns and warps of a program of the second kernel, and registers of a thread. Only the end of a block needs more.
TILE_OF_STATE = 32, 4, 128


class _New(NamedTuple):
    """New rows between the kernels, float32."""

    queries: Tensor  # [num_tokens, num_key_heads, key_dim]
    keys: Tensor  # [num_seqs, num_key_heads, block + MAX_ROUND_LEN, key_dim], from the edge on
    products: Tensor  # [num_tokens, num_key_heads, 2, block], of the key and the query with the block's keys
    values: Tensor  # [num_tokens, num_value_heads, value_dim]
    steps: Tensor  # [num_tokens, num_value_heads, 2], beta and decay

    @classmethod
    def allocate(cls, num_tokens: int, num_seqs: int, block: int, weights: DeltaWeights) -> _New:
        num_heads, num_shared, key_dim, value_dim = weights.state_shape
        shapes = [(num_tokens, num_heads, key_dim), (num_seqs, num_heads, block + MAX_ROUND_LEN, key_dim)]
        shapes += [(num_tokens, num_heads, 2, block), (num_tokens, num_heads * num_shared, value_dim)]
        shapes += [(num_tokens, num_heads * num_shared, 2)]
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
    new = _New.allocate(num_tokens, num_seqs, plan.block, weights)
    whole_v = max(TILE, triton.next_power_of_2(value_dim))
    block_v, num_warps, num_registers = min(TILE_OF_STATE[0], whole_v), *TILE_OF_STATE[1:]
    dependent = gpu.dependent_launch(num_tokens)
    sizes = {
        "HEADS": num_heads,
        "SHARED": num_shared,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "PAGE_SIZE": page_size,
        "BLOCK": plan.block,
        "ROWS": max(TILE, plan.block),
        "BLOCK_K": max(TILE, triton.next_power_of_2(key_dim)),
        "NEW": MAX_ROUND_LEN,
        "EARLY": is_alone,
        "DEPENDENT": dependent,
        "num_stages": 1,
        "launch_pdl": dependent,
    }
    strides = {"QKV_HEAD": inputs.qkv.stride(1), "B_HEAD": inputs.b.stride(1), "A_HEAD": inputs.a.stride(1)}
    places = plan.seq_lens, plan.table, query_len, plan.table.shape[1] * page_size, plan.table.stride(0)
    _rows_kernel[num_heads * (1 + num_shared), num_seqs](
        *new, pools.rows, inputs.qkv, inputs.b, inputs.a, *weights[:3], *places, inputs.qkv.stride(0),
        inputs.b.stride(0), TAPS=weights.taps.shape[2], BLOCK_V=whole_v, num_warps=8, maxnreg=80, **strides, **sizes,
    )  # fmt: skip
    _round_kernel[num_heads * num_shared * triton.cdiv(value_dim, block_v), num_seqs](
        out, *pools, *new, *weights[1:3], *places, BLOCK_V=block_v, STATE_PART=pools.states.shape[4],
        num_warps=num_warps, maxnreg=num_registers, **sizes,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=("query_len", "num_slots", "table_stride"))
def _rows_kernel(
    queries_ptr,  # [num_tokens, HEADS, KEY_DIM] float32, written
    keys_ptr,  # [num_seqs, HEADS, BLOCK + NEW, KEY_DIM] float32, written
    products_ptr,  # [num_tokens, HEADS, 2, BLOCK] float32, written
    values_ptr,  # [num_tokens, HEADS * SHARED, VALUE_DIM] float32, written
    steps_ptr,  # [num_tokens, HEADS * SHARED, 2] float32, written
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 2)], written
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
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # of a block
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NEW: tl.constexpr,  # rows of a round at most
    EARLY: tl.constexpr,  # pages are read before the kernel before ends
    DEPENDENT: tl.constexpr,
):
    """Grid: (HEADS * (1 + SHARED), num_seqs). A program has the queries and keys of a key head, or the values of one
    value head."""
    CHANNELS: tl.constexpr = 2 * KEY_DIM + SHARED * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + 2 * SHARED
    head, kind, seq = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS, tl.program_id(1).to(tl.int64)
    start = tl.maximum(tl.load(seq_lens_ptr + seq).to(tl.int32) - query_len, 0)
    stop = tl.minimum(start + query_len, num_slots)
    pages_ptr = table_ptr + seq * table_stride
    taps_ptr += head * CHANNELS * TAPS
    qkv_ptr += seq * query_len * token_stride + head * QKV_HEAD
    new, dims, columns = tl.arange(0, NEW), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    slots, is_new, is_dim, is_column = start + new, new < stop - start, dims < KEY_DIM, columns < VALUE_DIM
    edge = start // BLOCK * BLOCK
    first = start - edge
    block_ptr, before_ptr = block_rows(edge, rows_ptr, pages_ptr, head, HEADS, PAGE_SIZE, BLOCK, WIDTH)
    if DEPENDENT:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    if kind == 0:
        row = tl.arange(0, ROWS)
        is_old = row < first
        keys = unit(convolved(row, is_old, KEY_DIM + dims, is_dim, qkv_ptr, block_ptr, before_ptr, taps_ptr, edge,
                              first, token_stride, WIDTH, TAPS, True, False))  # fmt: skip
        if DEPENDENT and EARLY:
            gdc_wait()
        q = unit(convolved(first + new, is_new, dims, is_dim, qkv_ptr, block_ptr, before_ptr, taps_ptr, edge, first,
                           token_stride, WIDTH, TAPS, True, True)) * KEY_DIM**-0.5  # fmt: skip
        k = unit(convolved(first + new, is_new, KEY_DIM + dims, is_dim, qkv_ptr, block_ptr, before_ptr, taps_ptr, edge,
                           first, token_stride, WIDTH, TAPS, True, True))  # fmt: skip
        queries_ptr += (seq * query_len * HEADS + head) * KEY_DIM
        keys_ptr += (seq * HEADS + head) * ((BLOCK + NEW) * KEY_DIM)
        products_ptr += (seq * query_len * HEADS + head) * (2 * BLOCK)
        is_in = is_new[:, None] & is_dim[None, :]
        tl.store(queries_ptr + new[:, None] * (HEADS * KEY_DIM) + dims[None, :], q, mask=is_in)
        tl.store(keys_ptr + (first + new)[:, None] * KEY_DIM + dims[None, :], k, mask=is_in)
        if first + stop - start >= BLOCK:
            at = row[:, None] * KEY_DIM + dims[None, :]
            tl.store(keys_ptr + at, keys, mask=is_old[:, None] & is_dim[None, :])
        keys_ptr += first * KEY_DIM
        tl.debug_barrier()
        for token in range(stop - start):
            own_k = tl.load(keys_ptr + token * KEY_DIM + dims, mask=is_dim, other=0.0)[None, :]
            own_q = tl.load(queries_ptr + token * (HEADS * KEY_DIM) + dims, mask=is_dim, other=0.0)[None, :]
            here = start + token - edge
            keys = tl.where((row == here)[:, None], own_k, keys)
            at = products_ptr + token * (HEADS * 2 * BLOCK) + row
            tl.store(at, tl.sum(keys * own_k, 1), mask=row < BLOCK)
            tl.store(at + BLOCK, tl.sum(keys * own_q, 1), mask=row < BLOCK)
            if here == BLOCK - 1:
                keys = tl.zeros_like(keys)
                edge += BLOCK
        for of_key in tl.static_range(2):
            store_rows(slots, is_new, of_key * KEY_DIM + dims, is_dim, 0, qkv_ptr, rows_ptr, pages_ptr, start,
                       token_stride, head, HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
    else:
        if DEPENDENT and EARLY:
            gdc_wait()
        shared = kind - 1
        value_head, channels = head * SHARED + shared, 2 * KEY_DIM + shared * VALUE_DIM + columns
        v = convolved(first + new, is_new, channels, is_column, qkv_ptr, block_ptr, before_ptr, taps_ptr, edge, first,
                      token_stride, WIDTH, TAPS, True, True)  # fmt: skip
        of_head = (seq * query_len + new) * (HEADS * SHARED) + value_head
        at = of_head[:, None] * VALUE_DIM + columns[None, :]
        tl.store(values_ptr + at, v, mask=is_new[:, None] & is_column[None, :])
        b_ptr += seq * query_len * small_stride + head * B_HEAD + shared
        a_ptr += seq * query_len * small_stride + head * A_HEAD + shared
        b = tl.load(b_ptr + new * small_stride, mask=is_new, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + new * small_stride, mask=is_new, other=0.0).to(tl.float32)
        tl.store(steps_ptr + of_head * 2, tl.sigmoid(b), mask=is_new)
        decay = decays(a, is_new, tl.load(a_log_ptr + value_head), tl.load(dt_bias_ptr + value_head))
        tl.store(steps_ptr + of_head * 2 + 1, decay, mask=is_new)
        store_rows(slots, is_new, channels, is_column, 0, qkv_ptr, rows_ptr, pages_ptr, start, token_stride, head,
                   HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
        store_gates(slots, is_new, shared, b_ptr, a_ptr, rows_ptr, pages_ptr, start, small_stride, head, HEADS, SHARED,
                    PAGE_SIZE, WIDTH)  # fmt: skip


@triton.jit(do_not_specialize=("query_len", "num_slots", "table_stride"))
def _round_kernel(
    out_ptr,  # [num_tokens, HEADS * SHARED, VALUE_DIM], written
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 2)]
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, SHARED * VALUE_DIM] float32, written
    states_ptr,  # [num_pages, HEADS, PAGE_SIZE, STATE_PART] float32, written
    queries_ptr,  # [num_tokens, HEADS, KEY_DIM] float32
    keys_ptr,  # [num_seqs, HEADS, BLOCK + NEW, KEY_DIM] float32
    products_ptr,  # [num_tokens, HEADS, 2, BLOCK] float32
    values_ptr,  # [num_tokens, HEADS * SHARED, VALUE_DIM] float32
    steps_ptr,  # [num_tokens, HEADS * SHARED, 2] float32
    a_log_ptr,  # [HEADS, SHARED] float32
    dt_bias_ptr,  # [HEADS, SHARED] float32
    seq_lens_ptr,  # [num_seqs] int64
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    query_len,
    num_slots,  # of a sequence
    table_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
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
    part, value_head = tl.program_id(0) % NUM_PARTS, tl.program_id(0) // NUM_PARTS
    head, shared, seq = value_head // SHARED, value_head % SHARED, tl.program_id(1).to(tl.int64)
    start = tl.maximum(tl.load(seq_lens_ptr + seq).to(tl.int32) - query_len, 0)
    stop = tl.minimum(start + query_len, num_slots)
    pages_ptr = table_ptr + seq * table_stride
    out_ptr += (seq * query_len * HEADS * SHARED + value_head) * VALUE_DIM
    keys_ptr += (seq * HEADS + head) * ((BLOCK + NEW) * KEY_DIM)
    row, dims, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V)
    is_dim, is_column, edge = dims < KEY_DIM, columns < VALUE_DIM, start // BLOCK * BLOCK
    numbers_of_state = (shared * KEY_DIM + dims)[:, None] * VALUE_DIM + columns[None, :]
    is_state = is_dim[:, None] & is_column[None, :]
    first_ptr = keys_ptr + (start - edge) * KEY_DIM
    if DEPENDENT:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    before = places(edge - BLOCK, edge > 0, pages_ptr, head, HEADS, PAGE_SIZE)
    state = tl.load(states_ptr + before * STATE_PART + numbers_of_state, mask=is_state & (edge > 0), other=0.0)
    place = places(edge, start < stop, pages_ptr, head, HEADS, PAGE_SIZE)
    updates, decay, passed = _since_edge(
        place + row, row < start - edge, columns, is_column, shared, tl.load(a_log_ptr + value_head),
        tl.load(dt_bias_ptr + value_head), rows_ptr, updates_ptr, SHARED, VALUE_DIM,
        2 * KEY_DIM + SHARED * (VALUE_DIM + 2),
    )  # fmt: skip
    if DEPENDENT and EARLY:
        gdc_wait()
    for token in range(stop - start):
        here, of_head = start + token - edge, (seq * query_len + token) * HEADS + head
        at = products_ptr + of_head * (2 * BLOCK) + row
        of_k, of_q = tl.load(at, mask=row < here, other=0.0), tl.load(at + BLOCK, mask=row < here, other=0.0)
        of_own = tl.load(products_ptr + of_head * (2 * BLOCK) + BLOCK + here)
        k = tl.load(first_ptr + token * KEY_DIM + dims, mask=is_dim, other=0.0)
        q = tl.load(queries_ptr + of_head * KEY_DIM + dims, mask=is_dim, other=0.0)
        of_head = of_head * SHARED + shared
        v = tl.load(values_ptr + of_head * VALUE_DIM + columns, mask=is_column, other=0.0)
        beta = tl.load(steps_ptr + of_head * 2)
        passed += tl.load(steps_ptr + of_head * 2 + 1)
        between = tl.exp(tl.where(row < here, passed - decay, float("-inf")))
        known = tl.exp(passed) * tl.sum(state * k[:, None], 0) + tl.sum((of_k * between)[:, None] * updates, 0)
        output = tl.exp(passed) * tl.sum(state * q[:, None], 0) + tl.sum((of_q * between)[:, None] * updates, 0)
        update = beta * (v - known)
        output += of_own * update
        own_ptr = updates_ptr + ((place + here) * SHARED + shared) * VALUE_DIM
        tl.store(own_ptr + columns, update, mask=is_column)
        output = output.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * (HEADS * SHARED * VALUE_DIM) + columns, output, mask=is_column)
        updates = tl.where((row == here)[:, None], update[None, :], updates)
        decay = tl.where(row == here, passed, decay)
        if here == BLOCK - 1:
            tl.debug_barrier()  # updates are stored
            old = tl.load(states_ptr + before * STATE_PART + numbers_of_state, mask=is_state & (edge > 0), other=0.0)
            faded = tl.exp(tl.where(row < BLOCK, passed - decay, float("-inf")))
            block_ptr = first_ptr + (token + 1 - BLOCK) * KEY_DIM
            advanced = _advanced(old * tl.exp(passed), block_ptr, faded, updates_ptr, place, dims, is_dim, columns,
                                 is_column, shared, SHARED, KEY_DIM, VALUE_DIM, BLOCK)  # fmt: skip
            to_ptr = states_ptr + place * STATE_PART + numbers_of_state
            tl.store(to_ptr, advanced, mask=is_state)
            tl.debug_barrier()
            state = tl.load(to_ptr, mask=is_state, other=0.0)
            updates, passed = tl.zeros_like(updates), 0.0
            edge += BLOCK
            before, place = place, places(edge, start + token + 1 < stop, pages_ptr, head, HEADS, PAGE_SIZE)
    new = tl.arange(0, NEW)
    is_lost = (new >= stop - start) & (new < query_len)  # without a slot
    at = new[:, None] * (HEADS * SHARED * VALUE_DIM) + columns[None, :]
    nothing = tl.zeros([NEW, BLOCK_V], out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, nothing, mask=is_lost[:, None] & is_column[None, :])


@triton.jit
def _since_edge(
    places, is_old, columns, is_column, shared, a_log, dt_bias, rows_ptr, updates_ptr, SHARED: tl.constexpr,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the updates [ROWS, BLOCK_V] of the rows at `places` of pools, zeros where `is_old` is False, their decays
    since the edge [ROWS], and the decay of them all."""
    at = places[:, None] * (SHARED * VALUE_DIM) + shared * VALUE_DIM + columns[None, :]
    updates = tl.load(updates_ptr + at, mask=is_old[:, None] & is_column[None, :], other=0.0)
    a = tl.load(rows_ptr + places * WIDTH + WIDTH - SHARED + shared, mask=is_old, other=0.0)
    own = decays(a.to(tl.float32), is_old, a_log, dt_bias)
    return updates, tl.cumsum(own, 0), tl.sum(own, 0)


@triton.jit
def _advanced(
    state, keys_ptr, faded, updates_ptr, place, dims, is_dim, columns, is_column, shared, SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return `state` [BLOCK_K, BLOCK_V] with the products of a block's keys [BLOCK, KEY_DIM] and its stored updates,
    each times `faded` [ROWS]. This is rare, so all is read again, few rows at a time, and no round keeps it ready."""
    TILE: tl.constexpr = 16
    NUM: tl.constexpr = faded.shape[0] // TILE
    tile, row = tl.arange(0, NUM)[:, None], tl.arange(0, TILE)
    faded = tl.reshape(faded, [NUM, TILE])
    for i in range(NUM):
        is_row = i * TILE + row < BLOCK
        is_in = is_dim[:, None] & is_row[None, :]
        keys = tl.load(keys_ptr + (i * TILE + row)[None, :] * KEY_DIM + dims[:, None], mask=is_in, other=0.0)
        at = (place + i * TILE + row)[:, None] * (SHARED * VALUE_DIM) + shared * VALUE_DIM + columns[None, :]
        update = tl.load(updates_ptr + at, mask=is_row[:, None] & is_column[None, :], other=0.0)
        update *= tl.sum(tl.where(tile == i, faded, 0.0), 0)[:, None]
        state = tl.dot(keys, update, state, input_precision="tf32x3")
    return state
