"""Rounds of the gated delta rule with several rows of each sequence, which are drafts, by products of matrices.

The kernels share the work as those of triton_delta_round.py do. The first one multiplies all new queries and keys with
the keys since the edge and with each other. A program of the second one has some columns of a state, and multiplies
them with the new queries and keys. Then it takes the new rows one after another, as each depends on the updates of
those before. Products have one shape, so the bits of a row do not depend on the other sequences.
"""

# ruff: noqa: N803, N806
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .delta_rule import DeltaWeights
from .paged_delta import MAX_ROUND_LEN, DeltaInputs, DeltaPlan, DeltaPools
from .triton_delta_columns import advance
from .triton_delta_rows import block_rows, decays, new_part, old_part, places, store_rows, unit

TILE_OF_KEYS = 4, 128  # warps of a program of the first kernel, and registers of a thread
TILE_OF_STATE = 32, 4, 128  # columns and warps of a program of the second kernel, and registers of a thread


def draft_round(
    out: Tensor, inputs: DeltaInputs, weights: DeltaWeights, pools: DeltaPools, plan: DeltaPlan, sizes: dict[str, Any]
) -> Tensor:
    """Do as `delta_round`, whose `out` and constants `sizes` are given. States decay by value head."""
    num_tokens, (num_heads, num_shared, key_dim, value_dim) = len(inputs.q), weights.state_shape
    num_seqs, page_size = len(plan.seq_lens), pools.rows.shape[3]
    of_key_head = num_tokens, num_heads, 2
    vectors, products, steps = (
        torch.empty(shape, dtype=torch.float32, device=out.device)
        for shape in ((*of_key_head, key_dim), (*of_key_head, plan.block + MAX_ROUND_LEN), (*out.shape[:2], 2))
    )
    places = plan.seq_lens, plan.table, plan.query_len, plan.table.shape[1] * page_size, plan.table.stride(0)
    sizes = {**sizes, "NEW": MAX_ROUND_LEN, "CHUNK": min(32, sizes["BLOCK_K"], sizes["ROWS"])}
    num_warps, registers = TILE_OF_KEYS
    _draft_keys_kernel[num_heads, num_seqs](
        vectors, products, steps, *pools[:2], *inputs[:2], *inputs[4:], *weights[:3], *places, *inputs.strides,
        B_HEAD=inputs.b.stride(1), A_HEAD=inputs.a.stride(1), BLOCK_S=triton.next_power_of_2(num_shared), **sizes,
        num_warps=num_warps, maxnreg=registers,
    )  # fmt: skip
    del sizes["ROWS"]
    columns, num_warps, registers = TILE_OF_STATE
    block_v = min(columns, max(16, triton.next_power_of_2(value_dim)))
    _draft_columns_kernel[num_heads * num_shared * triton.cdiv(value_dim, block_v), num_seqs](
        out, *pools, vectors, products, steps, inputs.v, weights.taps, *places, inputs.strides[0], **sizes,
        STATE_PART=pools.states.shape[4], BLOCK_V=block_v, num_warps=num_warps, maxnreg=registers,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=("query_len", "num_slots", "table_stride"))
def _draft_keys_kernel(
    vectors_ptr,  # [num_tokens, HEADS, 2, KEY_DIM] float32, written: keys and queries
    products_ptr,  # [num_tokens, HEADS, 2, BLOCK + NEW] float32, written: with the block's old keys, then with new ones
    steps_ptr,  # [num_tokens, HEADS * SHARED, 2] float32, written: beta, and the decay since the edge
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 2)], written
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32, written
    q_ptr,  # [num_tokens, HEADS, KEY_DIM], tokens token_stride and heads QKV_HEAD apart
    k_ptr,  # likewise
    b_ptr,  # [num_tokens, HEADS, SHARED], tokens b_stride and heads B_HEAD apart
    a_ptr,  # [num_tokens, HEADS, SHARED], tokens a_stride and heads A_HEAD apart
    taps_ptr,  # [HEADS, TAPS, 2 * KEY_DIM + SHARED * VALUE_DIM] float32
    a_log_ptr,  # [HEADS, SHARED] float32
    dt_bias_ptr,  # [HEADS, SHARED] float32
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
    DECAY_DIM: tl.constexpr,  # 1
    TAPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NEW: tl.constexpr,  # rows of a round at most
    CHUNK: tl.constexpr,  # numbers of a key, or rows, that are multiplied at once
    EARLY: tl.constexpr,  # pages are read before the kernel before ends
    DEPENDENT: tl.constexpr,
):
    """Grid: (HEADS, num_seqs)."""
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
    token, dims, shared = tl.arange(0, NEW), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_S)
    is_new, is_dim, is_shared = token < stop - start, dims < KEY_DIM, shared < SHARED
    taps_ptr += head * CHANNELS * TAPS
    q_ptr += first_token * token_stride + head * QKV_HEAD
    k_ptr += first_token * token_stride + head * QKV_HEAD - KEY_DIM  # channels of keys stand behind those of queries
    a_ptr += first_token * a_stride + head * A_HEAD
    b_ptr += first_token * b_stride + head * B_HEAD
    last = places(start - 1, first > 0, pages_ptr, head, HEADS, PAGE_SIZE)
    decays_ptr = updates_ptr + (SHARED * VALUE_DIM + KEY_DIM) + shared
    before = tl.load(decays_ptr + last * UPDATE_WIDTH, mask=is_shared & (first > 0), other=0.0)
    a_log = tl.load(a_log_ptr + head * SHARED + shared, mask=is_shared, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + head * SHARED + shared, mask=is_shared, other=0.0)
    block_ptr, before_ptr = block_rows(edge, rows_ptr, pages_ptr, head, HEADS, PAGE_SIZE, BLOCK, WIDTH)
    k = old_part(first + token, is_new, KEY_DIM + dims, is_dim, block_ptr, before_ptr, taps_ptr, edge, first, CHANNELS,
                 WIDTH, TAPS)  # fmt: skip
    q = old_part(first + token, is_new, dims, is_dim, block_ptr, before_ptr, taps_ptr, edge, first, CHANNELS, WIDTH,
                 TAPS)  # fmt: skip
    if DEPENDENT and EARLY:
        gdc_wait()
    k = unit(new_part(k, token, is_new, KEY_DIM + dims, is_dim, k_ptr, taps_ptr, token_stride, CHANNELS, TAPS))
    q = unit(new_part(q, token, is_new, dims, is_dim, q_ptr, taps_ptr, token_stride, CHANNELS, TAPS)) * KEY_DIM**-0.5
    place = places(start + token, is_new, pages_ptr, head, HEADS, PAGE_SIZE)[:, None]
    is_in, of_head = is_new[:, None] & is_dim[None, :], ((first_token + token) * HEADS + head)[:, None]
    tl.store(updates_ptr + SHARED * VALUE_DIM + place * UPDATE_WIDTH + dims[None, :], k, mask=is_in)
    tl.store(vectors_ptr + of_head * (2 * KEY_DIM) + dims[None, :], k, mask=is_in)
    tl.store(vectors_ptr + of_head * (2 * KEY_DIM) + KEY_DIM + dims[None, :], q, mask=is_in)
    tl.debug_barrier()  # vectors are stored
    old = places(edge, start < stop, pages_ptr, head, HEADS, PAGE_SIZE)
    _products(products_ptr + head * (2 * (BLOCK + NEW)), vectors_ptr + head * (2 * KEY_DIM),
              updates_ptr + old * UPDATE_WIDTH + SHARED * VALUE_DIM, first_token, first, stop - start, HEADS, KEY_DIM,
              UPDATE_WIDTH, BLOCK, ROWS, NEW, CHUNK)  # fmt: skip
    is_in = is_new[:, None] & is_shared[None, :]
    a = tl.load(a_ptr + token[:, None] * a_stride + shared[None, :], mask=is_in, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + token[:, None] * b_stride + shared[None, :], mask=is_in, other=0.0).to(tl.float32)
    step, is_later = decays(a, is_in, a_log[None, :], dt_bias[None, :]), (first + token >= BLOCK)[:, None]
    passed = before[None, :] + tl.cumsum(tl.where(is_later, 0.0, step), 0)
    passed = tl.where(is_later, tl.cumsum(tl.where(is_later, step, 0.0), 0), passed)
    tl.store(decays_ptr[None, :] + place * UPDATE_WIDTH, passed, mask=is_in)
    at = steps_ptr + of_head * (2 * SHARED) + 2 * shared[None, :]
    tl.store(at, tl.sigmoid(b), mask=is_in)
    tl.store(at + 1, passed, mask=is_in)
    store_rows(start + token, is_new, dims, is_dim, 0, q_ptr, rows_ptr, pages_ptr, start, token_stride, head, HEADS,
               PAGE_SIZE, WIDTH)  # fmt: skip
    store_rows(start + token, is_new, KEY_DIM + dims, is_dim, 0, k_ptr, rows_ptr, pages_ptr, start, token_stride, head,
               HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
    store_rows(start + token, is_new, shared, is_shared, CHANNELS, b_ptr, rows_ptr, pages_ptr, start, b_stride, head,
               HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
    store_rows(start + token, is_new, shared, is_shared, CHANNELS + SHARED, a_ptr, rows_ptr, pages_ptr, start, a_stride,
               head, HEADS, PAGE_SIZE, WIDTH)  # fmt: skip


@triton.jit
def _products(
    products_ptr, vectors_ptr, keys_ptr, first_token, num_old, num_new, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NEW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store the products of a head's new keys and queries, side by side, with the block's old keys and the new ones."""
    both, row, token, part = tl.arange(0, 2 * NEW), tl.arange(0, ROWS), tl.arange(0, NEW), tl.arange(0, CHUNK)
    is_both, is_old = (both < 2 * num_new)[:, None], (row < num_old)[None, :]
    at = ((first_token + both // 2) * HEADS * 2 + both % 2)[:, None]
    of_new = vectors_ptr + ((first_token + token) * (HEADS * 2 * KEY_DIM))[None, :]
    with_old, with_new = tl.zeros([2 * NEW, ROWS], tl.float32), tl.zeros([2 * NEW, NEW], tl.float32)
    for first in range(0, KEY_DIM, CHUNK):
        dims, is_dim = first + part, first + part < KEY_DIM
        x = tl.load(vectors_ptr + at * KEY_DIM + dims[None, :], mask=is_both & is_dim[None, :], other=0.0)
        keys = tl.load(keys_ptr + row[None, :] * UPDATE_WIDTH + dims[:, None], mask=is_old & is_dim[:, None], other=0.0)
        with_old = tl.dot(x, keys, with_old, input_precision="tf32x3")
        keys = tl.load(of_new + dims[:, None], mask=(token < num_new)[None, :] & is_dim[:, None], other=0.0)
        with_new = tl.dot(x, keys, with_new, input_precision="tf32x3")
    tl.store(products_ptr + at * (BLOCK + NEW) + row[None, :], with_old, mask=is_both & is_old)
    tl.store(products_ptr + at * (BLOCK + NEW) + BLOCK + token[None, :], with_new, mask=is_both & (token >= 0)[None, :])


@triton.jit(do_not_specialize=("query_len", "num_slots", "table_stride"))
def _draft_columns_kernel(
    out_ptr,  # [num_tokens, HEADS * SHARED, VALUE_DIM], written
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 2)], written
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32, written
    states_ptr,  # [num_pages, HEADS, PAGE_SIZE, STATE_PART] float32, written
    vectors_ptr,  # [num_tokens, HEADS, 2, KEY_DIM] float32
    products_ptr,  # [num_tokens, HEADS, 2, BLOCK + NEW] float32
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
    DECAY_DIM: tl.constexpr,  # 1
    TAPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NEW: tl.constexpr,  # rows of a round at most
    CHUNK: tl.constexpr,  # numbers of a key, or rows, that are multiplied at once
    EARLY: tl.constexpr,  # pages are read before the kernel before ends
    DEPENDENT: tl.constexpr,
):
    """Grid: (HEADS * SHARED * ceil(VALUE_DIM / BLOCK_V), num_seqs)."""
    CHANNELS: tl.constexpr = 2 * KEY_DIM + SHARED * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + 2 * SHARED
    NUM_PARTS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    part, value_head = tl.program_id(0) % NUM_PARTS, tl.program_id(0) // NUM_PARTS
    head, shared, seq = value_head // SHARED, value_head % SHARED, tl.program_id(1).to(tl.int64)
    first_token, pages_ptr = seq * query_len, table_ptr + seq * table_stride
    start = tl.maximum(tl.load(seq_lens_ptr + seq).to(tl.int32) - query_len, 0)
    stop = tl.minimum(start + query_len, num_slots)
    both, token, columns = tl.arange(0, 2 * NEW), tl.arange(0, NEW), part * BLOCK_V + tl.arange(0, BLOCK_V)
    is_column, edge = columns < VALUE_DIM, start // BLOCK * BLOCK
    channels = 2 * KEY_DIM + shared * VALUE_DIM + columns
    if DEPENDENT:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    before = places(edge - BLOCK, edge > 0, pages_ptr, head, HEADS, PAGE_SIZE)
    place = places(edge, start < stop, pages_ptr, head, HEADS, PAGE_SIZE)
    taps_ptr += head * CHANNELS * TAPS
    if DEPENDENT and EARLY:
        gdc_wait()
    v_ptr += first_token * token_stride + head * QKV_HEAD - 2 * KEY_DIM
    values = _draft_values(rows_ptr, v_ptr, taps_ptr, before, place, start - edge, stop - start, edge, both, channels,
                           is_column, token_stride, SHARED, KEY_DIM, VALUE_DIM, DECAY_DIM, TAPS, BLOCK)  # fmt: skip
    store_rows(start + token, token < stop - start, channels, is_column, 0, v_ptr, rows_ptr, pages_ptr, start,
               token_stride, head, HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
    _drafts_of_block(out_ptr, vectors_ptr, products_ptr, steps_ptr, updates_ptr + place * UPDATE_WIDTH,
                     states_ptr + before * STATE_PART, edge > 0, values, first_token, 0,
                     tl.minimum(stop, edge + BLOCK) - start, start - edge, value_head, columns, is_column, HEADS,
                     SHARED, KEY_DIM, VALUE_DIM, UPDATE_WIDTH, BLOCK, NEW, CHUNK)  # fmt: skip
    if stop >= edge + BLOCK:
        after = places(edge + BLOCK, edge + BLOCK < stop, pages_ptr, head, HEADS, PAGE_SIZE)
        _next_block(out_ptr, vectors_ptr, products_ptr, steps_ptr, rows_ptr, updates_ptr, states_ptr, v_ptr, taps_ptr,
                    before, place, after, first_token, start, stop, edge, value_head, part, token_stride, HEADS, SHARED,
                    KEY_DIM, VALUE_DIM, DECAY_DIM, TAPS, UPDATE_WIDTH, BLOCK, STATE_PART, BLOCK_K, BLOCK_V, NEW,
                    CHUNK)  # fmt: skip
    is_lost = (token >= stop - start) & (token < query_len)  # without a slot
    lost_ptr = out_ptr + ((first_token + token) * (HEADS * SHARED) + value_head)[:, None] * VALUE_DIM + columns[None, :]
    tl.store(lost_ptr, tl.zeros([NEW, BLOCK_V], out_ptr.dtype.element_ty), mask=is_lost[:, None] & is_column[None, :])


@triton.jit(noinline=True)
def _next_block(
    out_ptr, vectors_ptr, products_ptr, steps_ptr, rows_ptr, updates_ptr, states_ptr, v_ptr, taps_ptr, before, place,
    after, first_token, start, stop, edge, value_head, part, token_stride, HEADS: tl.constexpr, SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DECAY_DIM: tl.constexpr, TAPS: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, STATE_PART: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, NEW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store the state behind the block at `place`, which begins at `edge` and whose last row is stored, and go on with
    the rows behind it, which lie at `after`. This is rare. As a function of its own it takes no registers from the rest
    of the kernel."""
    shared, columns, both = value_head % SHARED, part * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, 2 * NEW)
    is_column, channels = columns < VALUE_DIM, 2 * KEY_DIM + shared * VALUE_DIM + columns
    tl.debug_barrier()  # updates are stored
    advance(states_ptr, updates_ptr + place * UPDATE_WIDTH, before, place, edge > 0, shared, columns, is_column, SHARED,
            KEY_DIM, VALUE_DIM, DECAY_DIM, UPDATE_WIDTH, BLOCK, STATE_PART, BLOCK_K)  # fmt: skip
    tl.debug_barrier()
    values = _draft_values(rows_ptr, v_ptr, taps_ptr, before, place, start - edge, stop - start, edge, both, channels,
                           is_column, token_stride, SHARED, KEY_DIM, VALUE_DIM, DECAY_DIM, TAPS, BLOCK)  # fmt: skip
    _drafts_of_block(out_ptr, vectors_ptr, products_ptr, steps_ptr, updates_ptr + after * UPDATE_WIDTH,
                     states_ptr + place * STATE_PART, True, values, first_token, edge + BLOCK - start, stop - start,
                     start - edge - BLOCK, value_head, columns, is_column, HEADS, SHARED, KEY_DIM, VALUE_DIM,
                     UPDATE_WIDTH, BLOCK, NEW, CHUNK)  # fmt: skip


@triton.jit
def _draft_values(
    rows_ptr, v_ptr, taps_ptr, before, place, here, num_new, edge, both, channels, is_channel, token_stride,
    SHARED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DECAY_DIM: tl.constexpr, TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return some columns of the new rows' values, [2 * NEW, BLOCK_V]: every second row is zero."""
    CHANNELS: tl.constexpr = 2 * KEY_DIM + SHARED * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + SHARED * (1 + DECAY_DIM)
    is_value = (both % 2 == 0) & (both // 2 < num_new)
    values = old_part(here + both // 2, is_value, channels, is_channel, rows_ptr + place * WIDTH,
                      rows_ptr + (before + BLOCK) * WIDTH, taps_ptr, edge, here, CHANNELS, WIDTH, TAPS)  # fmt: skip
    return new_part(values, both // 2, is_value, channels, is_channel, v_ptr, taps_ptr, token_stride, CHANNELS, TAPS)


@triton.jit
def _drafts_of_block(
    out_ptr, vectors_ptr, products_ptr, steps_ptr, updates_ptr, state_ptr, has_state, values, first_token, begin, end,
    here, value_head, columns, is_column, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, UPDATE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, NEW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store updates and outputs of the new rows from `begin` to `end`, which lie in one block, the first new row at
    `here` in it. Rows of tiles are the key of a new row, then its query. `values` [2 * NEW, BLOCK_V] are zero for
    queries."""
    head, shared, both, part = value_head // SHARED, value_head % SHARED, tl.arange(0, 2 * NEW), tl.arange(0, CHUNK)
    token, is_key = both // 2, both % 2 == 0
    is_own = (token >= begin) & (token < end)
    of_value_head = (first_token + token) * (HEADS * SHARED) + value_head
    beta = tl.load(steps_ptr + of_value_head * 2, mask=is_own, other=0.0)
    passed = tl.load(steps_ptr + of_value_head * 2 + 1, mask=is_own, other=0.0)
    of_head = ((first_token + token) * HEADS + head) * 2 + both % 2
    known = tl.zeros(values.shape, tl.float32)
    for first in range(0, KEY_DIM, CHUNK):
        dims, is_dim = first + part, first + part < KEY_DIM
        at, is_in = vectors_ptr + of_head[:, None] * KEY_DIM + dims[None, :], is_own[:, None] & is_dim[None, :]
        x = tl.load(at, mask=is_in, other=0.0)
        at = state_ptr + (shared * KEY_DIM + dims)[:, None] * VALUE_DIM + columns[None, :]
        state = tl.load(at, mask=is_dim[:, None] & is_column[None, :] & has_state, other=0.0)
        known = tl.dot(x, state, known, input_precision="tf32x3")
    known *= tl.exp(passed)[:, None]
    products_ptr += of_head * (BLOCK + NEW)
    decays_ptr = updates_ptr + SHARED * VALUE_DIM + KEY_DIM + shared
    own_ptr = updates_ptr + shared * VALUE_DIM + columns
    for first in range(0, here, CHUNK):
        row, is_row = first + part, first + part < here
        x = tl.load(products_ptr[:, None] + row[None, :], mask=is_own[:, None] & is_row[None, :], other=0.0)
        decay = tl.load(decays_ptr + row * UPDATE_WIDTH, mask=is_row, other=0.0)
        since = tl.where(is_own[:, None] & is_row[None, :], passed[:, None] - decay[None, :], 0.0)
        update = tl.load(own_ptr[None, :] + row[:, None] * UPDATE_WIDTH, mask=is_row[:, None] & is_column[None, :],
                         other=0.0)  # fmt: skip
        known = tl.dot(x * tl.exp(since), update, known, input_precision="tf32x3")
    found = tl.where(is_key[:, None], beta[:, None] * (values - known), known)  # updates and outputs
    for number in range(begin, end):
        is_number = both == 2 * number
        update, own = tl.sum(tl.where(is_number[:, None], found, 0.0), 0), tl.sum(tl.where(is_number, passed, 0.0), 0)
        is_after = is_own & (both > 2 * number)
        pair = tl.load(products_ptr + (BLOCK + number), mask=is_after, other=0.0)
        pair *= tl.exp(tl.where(is_after, passed - own, 0.0))
        found += tl.where(is_key, -beta * pair, pair)[:, None] * update[None, :]
    at = out_ptr + of_value_head[:, None] * VALUE_DIM + columns[None, :]
    is_in = is_own[:, None] & is_column[None, :]
    tl.store(at, found.to(out_ptr.dtype.element_ty), mask=is_in & ~is_key[:, None])
    tl.store(own_ptr[None, :] + (here + token)[:, None] * UPDATE_WIDTH, found, mask=is_in & is_key[:, None])
