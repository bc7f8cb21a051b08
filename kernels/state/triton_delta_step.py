"""Rounds of the gated delta rule with one row of each sequence, by one kernel, if states decay by value head.

A program has several groups of columns of one key head's states, and takes them one after another. First it computes
the new query and key, and their products with the keys since the edge. Programs of one key head do so each for itself.
The bits of a row depend neither on how many groups a program has nor on the other sequences.
"""

# ruff: noqa: N803, N806
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .delta_rule import DeltaWeights
from .paged_delta import DeltaInputs, DeltaPlan, DeltaPools
from .triton_delta_columns import advance, mixed, one_row, state_columns, window
from .triton_delta_rows import decays, places

TILE = 32, 8, 128  # columns of a group, warps of a program, and registers of a thread
_PROGRAMS = 264  # at most two for each processor of an H200 are there at once


def step_round(
    out: Tensor, inputs: DeltaInputs, weights: DeltaWeights, pools: DeltaPools, plan: DeltaPlan, sizes: dict[str, Any]
) -> Tensor:
    """Do as `delta_round`, whose `out` and constants `sizes` are given. Keys have more numbers than `sizes["ROWS"]`."""
    (num_heads, num_shared, _, value_dim), num_seqs = weights.state_shape, len(plan.seq_lens)
    columns, num_warps, registers = TILE
    block_v = min(columns, max(16, triton.next_power_of_2(value_dim)))
    groups = num_shared * triton.cdiv(value_dim, block_v)
    divisors = [each for each in range(1, groups + 1) if groups % each == 0]
    most = max(1, num_heads * num_seqs * groups // _PROGRAMS)
    num_groups = max(each for each in divisors if each <= most)
    places = plan.seq_lens, plan.table, plan.table.shape[1] * pools.rows.shape[3], plan.table.stride(0)
    _step_kernel[num_heads * (groups // num_groups), num_seqs](
        out, *pools, *inputs[:3], *inputs[4:], *weights[:3], *places, *inputs.strides, B_HEAD=inputs.b.stride(1),
        A_HEAD=inputs.a.stride(1), STATE_PART=pools.states.shape[4], BLOCK_V=block_v, GROUPS=num_groups, **sizes,
        num_warps=num_warps, maxnreg=registers,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=("num_slots", "table_stride"))
def _step_kernel(
    out_ptr,  # [num_seqs, HEADS * SHARED, VALUE_DIM], written
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 2)], written
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32, written
    states_ptr,  # [num_pages, HEADS, PAGE_SIZE, STATE_PART] float32, written
    q_ptr,  # [num_seqs, HEADS, KEY_DIM], tokens token_stride and heads QKV_HEAD apart
    k_ptr,  # likewise
    v_ptr,  # [num_seqs, HEADS, SHARED * VALUE_DIM], likewise
    b_ptr,  # [num_seqs, HEADS, SHARED], tokens b_stride and heads B_HEAD apart
    a_ptr,  # [num_seqs, HEADS, SHARED], tokens a_stride and heads A_HEAD apart
    taps_ptr,  # [HEADS, TAPS, 2 * KEY_DIM + SHARED * VALUE_DIM] float32
    a_log_ptr,  # [HEADS, SHARED] float32
    dt_bias_ptr,  # [HEADS, SHARED] float32
    seq_lens_ptr,  # [num_seqs] int64
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
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
    ROWS: tl.constexpr,  # of a block, and half as many as BLOCK_K
    STATE_PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GROUPS: tl.constexpr,  # of columns that a program has
    EARLY: tl.constexpr,  # pages are read before the kernel before ends
    DEPENDENT: tl.constexpr,
):
    """Grid: (HEADS * SHARED * ceil(VALUE_DIM / BLOCK_V) / GROUPS, num_seqs)."""
    CHANNELS: tl.constexpr = 2 * KEY_DIM + SHARED * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + SHARED * (1 + DECAY_DIM)
    NUM_PARTS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    PER_HEAD: tl.constexpr = SHARED * NUM_PARTS // GROUPS
    head, first, seq = tl.program_id(0) // PER_HEAD, tl.program_id(0) % PER_HEAD * GROUPS, tl.program_id(1).to(tl.int64)
    pages_ptr = table_ptr + seq * table_stride
    start = tl.maximum(tl.load(seq_lens_ptr + seq).to(tl.int32) - 1, 0)
    row, dims, edge = tl.arange(0, ROWS), tl.arange(0, BLOCK_K), start // BLOCK * BLOCK
    is_dim, has_slot, here = dims < KEY_DIM, start < num_slots, start - edge
    if DEPENDENT:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    before = places(edge - BLOCK, edge > 0, pages_ptr, head, HEADS, PAGE_SIZE)
    place = places(edge, has_slot, pages_ptr, head, HEADS, PAGE_SIZE)
    keys_ptr = updates_ptr + place * UPDATE_WIDTH + SHARED * VALUE_DIM + dims
    keys = tl.load(keys_ptr[None, :] + row[:, None] * UPDATE_WIDTH, mask=(row < here)[:, None] & is_dim[None, :],
                   other=0.0)  # fmt: skip
    taps_ptr += head * CHANNELS * TAPS
    of_q, q_taps = window(rows_ptr, taps_ptr, before, place, here, edge > 0, dims, is_dim, CHANNELS, WIDTH, TAPS, BLOCK)
    of_k, k_taps = window(rows_ptr, taps_ptr, before, place, here, edge > 0, KEY_DIM + dims, is_dim, CHANNELS, WIDTH,
                          TAPS, BLOCK)  # fmt: skip
    if DEPENDENT and EARLY:
        gdc_wait()
    row_ptr, update_ptr = rows_ptr + (place + here) * WIDTH, updates_ptr + (place + here) * UPDATE_WIDTH
    of_head, is_stored = seq * token_stride + head * QKV_HEAD, is_dim & has_slot
    new_q = tl.load(q_ptr + of_head + dims, mask=is_dim, other=0.0)
    new_k = tl.load(k_ptr + of_head + dims, mask=is_dim, other=0.0)
    q, k = mixed(of_q, new_q, q_taps, TAPS)[0], mixed(of_k, new_k, k_taps, TAPS)[0]
    of_q, of_k = tl.split(tl.sum(tl.join(q * q, k * k), 0))
    q, k = q * (tl.rsqrt(of_q + 1e-6) * KEY_DIM**-0.5), k * tl.rsqrt(of_k + 1e-6)
    tl.store(row_ptr + dims, new_q, mask=is_stored)
    tl.store(row_ptr + KEY_DIM + dims, new_k, mask=is_stored)
    tl.store(update_ptr + SHARED * VALUE_DIM + dims, k, mask=is_stored)
    keys = tl.where((row == here)[:, None], k[None, :], keys)
    with_k, with_q = tl.sum(keys * k[None, :], 1), tl.sum(keys * q[None, :], 1)
    pair = tl.sum(tl.where(row == here, with_q, 0.0), 0)
    with_k, with_q = tl.where(row < here, with_k, 0.0), tl.where(row < here, with_q, 0.0)
    low_k, high_k = tl.split(tl.trans(tl.reshape(k, [2, ROWS])))
    low_q, high_q = tl.split(tl.trans(tl.reshape(q, [2, ROWS])))
    a_ptr += seq * a_stride + head * A_HEAD
    b_ptr += seq * b_stride + head * B_HEAD
    for group in range(first, first + GROUPS):
        shared, columns = group // NUM_PARTS, group % NUM_PARTS * BLOCK_V + tl.arange(0, BLOCK_V)
        is_column, of_values = columns < VALUE_DIM, shared * VALUE_DIM + columns
        low, high = state_columns(states_ptr + before * STATE_PART, edge > 0, shared, columns, is_column, KEY_DIM,
                                  VALUE_DIM, ROWS)  # fmt: skip
        own_ptr = updates_ptr + place * UPDATE_WIDTH + of_values
        updates = tl.load(own_ptr[None, :] + row[:, None] * UPDATE_WIDTH,
                          mask=(row < here)[:, None] & is_column[None, :], other=0.0)  # fmt: skip
        decays_ptr = updates_ptr + place * UPDATE_WIDTH + (SHARED * VALUE_DIM + KEY_DIM) + shared
        decay = tl.load(decays_ptr + row * UPDATE_WIDTH, mask=row < here, other=0.0)
        passed = tl.load(decays_ptr + (here - 1) * UPDATE_WIDTH, mask=here > 0, other=0.0)
        values, taps = window(rows_ptr, taps_ptr, before, place, here, edge > 0, 2 * KEY_DIM + of_values, is_column,
                              CHANNELS, WIDTH, TAPS, BLOCK)  # fmt: skip
        new = tl.load(v_ptr + of_head + of_values, mask=is_column, other=0.0)
        a, b = tl.load(a_ptr + shared), tl.load(b_ptr + shared)
        a_log, dt_bias = tl.load(a_log_ptr + head * SHARED + shared), tl.load(dt_bias_ptr + head * SHARED + shared)
        passed += decays(a.to(tl.float32), True, a_log, dt_bias)
        own = (new, tl.sigmoid(b.to(tl.float32)), passed, pair, low_k, low_q, high_k, high_q, with_k, with_q)
        one_row(out_ptr + (seq * HEADS + head) * (SHARED * VALUE_DIM) + of_values, row_ptr + 2 * KEY_DIM + of_values,
                update_ptr + of_values, low, high, updates, decay, values, taps, own, here, is_column & has_slot,
                KEY_DIM, TAPS, ROWS)  # fmt: skip
        tl.store(update_ptr + (SHARED * VALUE_DIM + KEY_DIM) + shared, passed, mask=has_slot)
        tl.store(row_ptr + CHANNELS + shared, b, mask=has_slot)
        tl.store(row_ptr + CHANNELS + SHARED + shared, a, mask=has_slot)
    if has_slot & (here < BLOCK - 1):
        return
    tl.debug_barrier()  # keys, decays and updates are stored
    for group in range(first, first + GROUPS):
        shared, columns = group // NUM_PARTS, group % NUM_PARTS * BLOCK_V + tl.arange(0, BLOCK_V)
        if has_slot:
            advance(states_ptr, updates_ptr + place * UPDATE_WIDTH, before, place, edge > 0, shared, columns,
                    columns < VALUE_DIM, SHARED, KEY_DIM, VALUE_DIM, DECAY_DIM, UPDATE_WIDTH, BLOCK, STATE_PART,
                    BLOCK_K)  # fmt: skip
        else:
            lost_ptr = out_ptr + (seq * HEADS + head) * (SHARED * VALUE_DIM) + shared * VALUE_DIM + columns
            tl.store(lost_ptr, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=columns < VALUE_DIM)
