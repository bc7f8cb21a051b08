"""Triton kernels for a decode round of the gated delta rule that verifies trees of drafts. Each new row is a
node of a tree.

A node sees the rows before the tree since the last edge, its ancestors and itself. So its path from the root is a text
of its own: it is convolved along the path, and decays are summed along it. As in a round of chains
(triton_delta_round.py), the first kernel computes what all columns of a state need, and a program of the second one
computes some columns of one value head. In the first one each node has a program, which computes the keys of its path
once more. In the second one a program takes the nodes in their order, parents before children, and reads the updates
of a node's ancestors, which it has stored itself.

A tree completes no block. When its accepted path has been moved behind the root, `pass_edges` stores the states after
the blocks that end there. It does so even if some rows of such a block are no token's: the round that completes the
block for its text stores the state again, before anybody reads it.
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
from .paged_delta import MAX_ROUND_LEN, DeltaInputs, DeltaPlan, DeltaPools, DeltaSizes
from .triton_delta_columns import advance, state_columns
from .triton_delta_round import old_keys
from .triton_delta_rows import TILE, block_rows, check_layer, decays, old_part, places, store_rows, tap_weights, unit

WARPS_OF_NODES = 4, 8  # of a program of the first kernel, if states decay by value head and by channel
TILE_OF_STATE = 32, 2  # columns and warps of a program of the second kernel


class _Nodes(NamedTuple):
    """New rows between the kernels, float32."""

    vectors: Tensor  # [num_tokens, num_key_heads, 2, key_dim], key and query, decayed since the edge if by channel
    products: Tensor  # [num_tokens, num_key_heads, 2, block + MAX_ROUND_LEN], of both with the keys before and its path
    steps: Tensor  # [num_tokens, num_value_heads, 2], beta, and the decay since the edge; zero if by channel


def delta_tree(inputs: DeltaInputs, weights: DeltaWeights, pools: DeltaPools, plan: DeltaPlan) -> Tensor:
    """Store the rows and updates of nodes of trees. Return the outputs, [num_tokens, num_value_heads, value_dim] of the
    inputs' dtype; zeros for nodes without a slot."""
    check_layer(inputs, weights, pools, plan)
    num_tokens, (num_heads, num_shared, key_dim, value_dim) = len(inputs.q), weights.state_shape
    num_seqs, query_len, page_size = len(plan.seq_lens), plan.query_len, pools.rows.shape[3]
    assert plan.paths is not None and query_len is not None and num_tokens == num_seqs * query_len, plan
    assert plan.paths.shape == (num_tokens, MAX_ROUND_LEN) and plan.paths.is_contiguous(), plan.paths
    assert plan.seq_lens.is_contiguous() and plan.table.stride(1) == 1, (plan.seq_lens, plan.table)
    out = torch.empty((num_tokens, num_heads * num_shared, value_dim), dtype=inputs.q.dtype, device=inputs.q.device)
    shapes = (2, key_dim), (2, plan.block + MAX_ROUND_LEN), (num_shared, 2)
    nodes = _Nodes(
        *(torch.empty((num_tokens, num_heads, *each), dtype=torch.float32, device=out.device) for each in shapes)
    )
    rows = max(TILE, plan.block, triton.next_power_of_2(key_dim) // 2)
    sizes = {
        "QKV_HEAD": inputs.q.stride(1),
        "HEADS": num_heads,
        "SHARED": num_shared,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "DECAY_DIM": weights.decay_dim,
        "TAPS": weights.taps.shape[1],
        "PAGE_SIZE": page_size,
        "UPDATE_WIDTH": weights.update_width,
        "BLOCK": plan.block,
        "ROWS": rows,
        "LONGEST": MAX_ROUND_LEN,
    }
    of_plan = plan.paths, plan.seq_lens, plan.table, query_len, plan.table.shape[1] * page_size, plan.table.stride(0)
    _nodes_kernel[num_heads, num_tokens](
        *nodes, *pools[:2], *inputs[:2], *inputs[4:], *weights[:3], *of_plan, *inputs.strides,
        B_HEAD=inputs.b.stride(1), A_HEAD=inputs.a.stride(1), **sizes,
        BLOCK_K=max(TILE, triton.next_power_of_2(key_dim)), BLOCK_S=triton.next_power_of_2(num_shared),
        num_warps=WARPS_OF_NODES[weights.decay_dim > 1], num_stages=1,
    )  # fmt: skip
    columns, num_warps = TILE_OF_STATE
    block_v = min(columns, max(TILE, triton.next_power_of_2(value_dim)))
    _tree_kernel[num_heads * num_shared * triton.cdiv(value_dim, block_v), num_seqs](
        out, *pools, *nodes, inputs.v, weights.taps, *of_plan, inputs.strides[0], **sizes,
        STATE_PART=pools.states.shape[4], BLOCK_V=block_v, NODES=triton.next_power_of_2(query_len),
        num_warps=num_warps, num_stages=1,
    )  # fmt: skip
    return out


def pass_edges(updates: Tensor, states: Tensor, sizes: DeltaSizes, table: Tensor, starts: Tensor, num_new: int) -> None:
    """Store the states after the blocks that end in the `num_new` slots from `starts` [num_seqs] int64 on, in all
    layers. `updates` and `states` are pools of all layers, [num_layers, ...] as in `DeltaPools`. `table` [num_seqs,
    max_pages] int64 has the sequences' tail pages."""
    num_layers, _, _, num_heads, page_size, update_width = updates.shape
    num_shared, key_dim, value_dim, decay_dim, block = sizes
    assert states.shape[:5] == updates.shape[:5] and table.stride(1) == 1, (states.shape, updates.shape)
    columns, num_warps = TILE_OF_STATE
    block_v = min(columns, max(TILE, triton.next_power_of_2(value_dim)))
    parts = num_heads * num_shared * triton.cdiv(value_dim, block_v)
    _edges_kernel[parts, len(starts), num_layers](
        updates, states, starts, table, num_new, table.shape[1] * page_size, table.stride(0), updates.stride(0),
        states.stride(0), HEADS=num_heads, SHARED=num_shared, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        DECAY_DIM=decay_dim, PAGE_SIZE=page_size, UPDATE_WIDTH=update_width, BLOCK=block, STATE_PART=states.shape[5],
        BLOCK_K=max(TILE, triton.next_power_of_2(key_dim)), BLOCK_V=block_v, num_warps=num_warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=("query_len", "num_slots", "table_stride"))
def _nodes_kernel(
    vectors_ptr,  # [num_tokens, HEADS, 2, KEY_DIM] float32, written
    products_ptr,  # [num_tokens, HEADS, 2, BLOCK + LONGEST] float32, written
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
    paths_ptr,  # [num_tokens, LONGEST] int32
    seq_lens_ptr,  # [num_seqs] int64
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    query_len,
    num_slots,  # of a sequence
    table_stride,
    token_stride,
    b_stride,
    a_stride,
    B_HEAD: tl.constexpr,
    A_HEAD: tl.constexpr,
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
    LONGEST: tl.constexpr,  # nodes of a path
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Grid: (HEADS, num_tokens). A program stores what a head's value heads need of one node."""
    CHANNELS: tl.constexpr = 2 * KEY_DIM + SHARED * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + SHARED * (1 + DECAY_DIM)
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    seq = token // query_len
    node, first_token, pages_ptr = (token % query_len).to(tl.int32), seq * query_len, table_ptr + seq * table_stride
    start = tl.maximum(tl.load(seq_lens_ptr + seq).to(tl.int32) - query_len, 0)
    if start + node < num_slots:
        edge = start // BLOCK * BLOCK
        first = start - edge
        row, step, shared = tl.arange(0, ROWS), tl.arange(0, LONGEST), tl.arange(0, BLOCK_S)
        dims = tl.arange(0, BLOCK_K)
        is_dim, parts = dims < KEY_DIM, dims if DECAY_DIM > 1 else shared
        is_part = parts < SHARED * DECAY_DIM
        path_ptr = paths_ptr + token * LONGEST
        path = tl.load(path_ptr + step)
        is_on = path >= 0
        depth = tl.sum(is_on.to(tl.int32)) - 1
        is_own = (step == depth)[:, None]
        taps_ptr += head * CHANNELS * TAPS
        q_ptr += first_token * token_stride + head * QKV_HEAD
        k_ptr += first_token * token_stride + head * QKV_HEAD - KEY_DIM  # channels of keys stand behind those of q
        a_ptr += first_token * a_stride + head * A_HEAD
        b_ptr += first_token * b_stride + head * B_HEAD
        block_ptr, before_ptr = block_rows(edge, rows_ptr, pages_ptr, head, HEADS, PAGE_SIZE, BLOCK, WIDTH)
        keys = unit(_path_rows(path_ptr, is_on, KEY_DIM + dims, is_dim, k_ptr, block_ptr, before_ptr, taps_ptr, edge,
                               first, token_stride, CHANNELS, WIDTH, TAPS, LONGEST))  # fmt: skip
        q = unit(_path_rows(path_ptr, is_on, dims, is_dim, q_ptr, block_ptr, before_ptr, taps_ptr, edge, first,
                            token_stride, CHANNELS, WIDTH, TAPS, LONGEST)) * KEY_DIM**-0.5  # fmt: skip
        own_k, own_q = tl.sum(tl.where(is_own, keys, 0.0), 0), tl.sum(tl.where(is_own, q, 0.0), 0)
        is_in = is_on[:, None] & is_part[None, :]
        a = tl.load(a_ptr + path.to(tl.int64)[:, None] * a_stride + parts[None, :], mask=is_in, other=0.0)
        a_log = tl.load(a_log_ptr + head * SHARED + parts % SHARED, mask=is_part, other=0.0)[None, :]
        dt_bias = tl.load(dt_bias_ptr + head * (SHARED * DECAY_DIM) + parts, mask=is_part, other=0.0)[None, :]
        added = decays(a.to(tl.float32), is_in, a_log, dt_bias)
        old, decay, before = old_keys(updates_ptr, pages_ptr, start, num_slots, edge, head, HEADS, SHARED, KEY_DIM,
                                      VALUE_DIM, DECAY_DIM, PAGE_SIZE, UPDATE_WIDTH, ROWS, BLOCK_K,
                                      BLOCK_S)  # fmt: skip
        along = tl.cumsum(added, 0) + before[None, :]
        passed = tl.sum(tl.where(is_own, along, 0.0), 0)
        vectors_ptr += (token * HEADS + head) * (2 * KEY_DIM)
        to_steps = steps_ptr + (token * HEADS + head) * (2 * SHARED) + 2 * shared
        b = tl.load(b_ptr + node.to(tl.int64) * b_stride + shared, mask=shared < SHARED, other=0.0).to(tl.float32)
        tl.store(to_steps, tl.sigmoid(b), mask=shared < SHARED)
        if DECAY_DIM > 1:
            old *= tl.exp(tl.where((row < first)[:, None], passed[None, :] - decay, float("-inf")))
            seen = keys * tl.exp(tl.where(is_on[:, None], passed[None, :] - along, float("-inf")))
            tl.store(to_steps + 1, tl.zeros_like(b), mask=shared < SHARED)
            tl.store(vectors_ptr + dims, own_k * tl.exp(passed), mask=is_dim)
            tl.store(vectors_ptr + KEY_DIM + dims, own_q * tl.exp(passed), mask=is_dim)
        else:
            seen = keys
            tl.store(to_steps + 1, passed, mask=shared < SHARED)
            tl.store(vectors_ptr + dims, own_k, mask=is_dim)
            tl.store(vectors_ptr + KEY_DIM + dims, own_q, mask=is_dim)
        products_ptr += (token * HEADS + head) * (2 * (BLOCK + LONGEST))
        tl.store(products_ptr + row, tl.sum(old * own_k[None, :], 1), mask=row < BLOCK)
        tl.store(products_ptr + BLOCK + step, tl.sum(seen * own_k[None, :], 1))
        products_ptr += BLOCK + LONGEST
        tl.store(products_ptr + row, tl.sum(old * own_q[None, :], 1), mask=row < BLOCK)
        tl.store(products_ptr + BLOCK + step, tl.sum(seen * own_q[None, :], 1))
        block = (first + depth) // BLOCK  # of the node's place in its text
        since_edge = tl.sum(tl.where(((first + step) // BLOCK == block)[:, None], added, 0.0), 0)
        since_edge += tl.where(block == 0, before, 0.0)
        to_ptr = updates_ptr + places(start + node, node >= 0, pages_ptr, head, HEADS, PAGE_SIZE) * UPDATE_WIDTH
        tl.store(to_ptr + SHARED * VALUE_DIM + dims, own_k, mask=is_dim)
        tl.store(to_ptr + (SHARED * VALUE_DIM + KEY_DIM) + parts, since_edge, mask=is_part)
        slot = start + node + tl.arange(0, 1)
        store_rows(slot, slot >= 0, dims, is_dim, 0, q_ptr, rows_ptr, pages_ptr, start, token_stride, head, HEADS,
                   PAGE_SIZE, WIDTH)  # fmt: skip
        store_rows(slot, slot >= 0, KEY_DIM + dims, is_dim, 0, k_ptr, rows_ptr, pages_ptr, start, token_stride, head,
                   HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
        store_rows(slot, slot >= 0, shared, shared < SHARED, CHANNELS, b_ptr, rows_ptr, pages_ptr, start, b_stride,
                   head, HEADS, PAGE_SIZE, WIDTH)  # fmt: skip
        store_rows(slot, slot >= 0, parts, is_part, CHANNELS + SHARED, a_ptr, rows_ptr, pages_ptr, start, a_stride,
                   head, HEADS, PAGE_SIZE, WIDTH)  # fmt: skip


@triton.jit
def _path_rows(
    path_ptr, is_on, channels, is_channel, new_ptr, block_ptr, before_ptr, taps_ptr, edge, first, token_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, LONGEST: tl.constexpr,
):  # fmt: skip
    """Return the rows of a path behind the convolution and silu, [LONGEST, N] float32. `first`: how many rows of the
    block stand before the root. `new_ptr` is the root's."""
    step = tl.arange(0, LONGEST)
    mixed = old_part(first + step, is_on, channels, is_channel, block_ptr, before_ptr, taps_ptr, edge, first, CHANNELS,
                     WIDTH, TAPS)  # fmt: skip
    for tap in tl.static_range(TAPS):
        at = step - (TAPS - 1) + tap
        is_new = is_on & (at >= 0)
        node = tl.load(path_ptr + at, mask=is_new, other=0).to(tl.int64)
        is_in = is_new[:, None] & is_channel[None, :]
        x = tl.load(new_ptr + node[:, None] * token_stride + channels[None, :], mask=is_in, other=0.0).to(tl.float32)
        mixed += x * tap_weights(taps_ptr + tap * CHANNELS, step, channels, is_channel)
    return mixed * tl.sigmoid(mixed)


@triton.jit(do_not_specialize=("query_len", "num_slots", "table_stride"))
def _tree_kernel(
    out_ptr,  # [num_tokens, HEADS * SHARED, VALUE_DIM], written
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 1 + DECAY_DIM)], written
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32, written
    states_ptr,  # [num_pages, HEADS, PAGE_SIZE, STATE_PART] float32 or bfloat16
    vectors_ptr,  # [num_tokens, HEADS, 2, KEY_DIM] float32
    products_ptr,  # [num_tokens, HEADS, 2, BLOCK + LONGEST] float32
    steps_ptr,  # [num_tokens, HEADS * SHARED, 2] float32
    v_ptr,  # [num_tokens, HEADS, SHARED * VALUE_DIM], tokens token_stride and heads QKV_HEAD apart
    taps_ptr,  # [HEADS, TAPS, 2 * KEY_DIM + SHARED * VALUE_DIM] float32
    paths_ptr,  # [num_tokens, LONGEST] int32
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
    ROWS: tl.constexpr,  # of a block, and at least half as many as numbers of a key
    LONGEST: tl.constexpr,  # nodes of a path
    STATE_PART: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NODES: tl.constexpr,  # of a tree at most
):
    """Grid: (HEADS * SHARED * ceil(VALUE_DIM / BLOCK_V), num_seqs)."""
    CHANNELS: tl.constexpr = 2 * KEY_DIM + SHARED * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + SHARED * (1 + DECAY_DIM)
    NUM_PARTS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    part, value_head = tl.program_id(0) % NUM_PARTS, tl.program_id(0) // NUM_PARTS
    head, shared, seq = value_head // SHARED, value_head % SHARED, tl.program_id(1).to(tl.int64)
    first_token, pages_ptr = seq * query_len, table_ptr + seq * table_stride
    start = tl.maximum(tl.load(seq_lens_ptr + seq).to(tl.int32) - query_len, 0)
    stop = tl.minimum(start + query_len, num_slots)
    row, columns = tl.arange(0, ROWS), part * BLOCK_V + tl.arange(0, BLOCK_V)
    is_column, edge = columns < VALUE_DIM, start // BLOCK * BLOCK
    first, of_values = start - edge, shared * VALUE_DIM + columns
    before = places(edge - BLOCK, edge > 0, pages_ptr, head, HEADS, PAGE_SIZE)
    place = places(edge, start < stop, pages_ptr, head, HEADS, PAGE_SIZE)
    low, high = state_columns(states_ptr + before * STATE_PART, edge > 0, shared, columns, is_column, KEY_DIM,
                              VALUE_DIM, ROWS)  # fmt: skip
    at = updates_ptr + (place + row) * UPDATE_WIDTH
    is_old = row < first
    updates = tl.load(at[:, None] + of_values[None, :], mask=is_old[:, None] & is_column[None, :], other=0.0)
    decay = tl.zeros([ROWS], tl.float32)
    if DECAY_DIM == 1:
        decay = tl.load(at + (SHARED * VALUE_DIM + KEY_DIM) + shared, mask=is_old, other=0.0)
    v_ptr += first_token * token_stride + head * QKV_HEAD + of_values
    taps_ptr += head * CHANNELS * TAPS + 2 * KEY_DIM + of_values
    steps_ptr += (first_token * (HEADS * SHARED) + value_head) * 2
    for number in range(stop - start):
        token = first_token + number
        own_ptr = places(start + number, number >= 0, pages_ptr, head, HEADS, PAGE_SIZE)
        known, output, of_own, depth = _seen(
            vectors_ptr + (token * HEADS + head) * (2 * KEY_DIM),
            products_ptr + (token * HEADS + head) * (2 * (BLOCK + LONGEST)), steps_ptr, paths_ptr + token * LONGEST,
            updates_ptr, pages_ptr, low, high, updates, decay, start, first, number, head, of_values, is_column, HEADS,
            SHARED, KEY_DIM, PAGE_SIZE, UPDATE_WIDTH, BLOCK, ROWS, LONGEST,
        )  # fmt: skip
        value = tl.zeros([BLOCK_V], tl.float32)
        for tap in tl.static_range(TAPS):
            back = depth - (TAPS - 1) + tap
            node = tl.load(paths_ptr + token * LONGEST + back, mask=back >= 0, other=0).to(tl.int64)
            new = tl.load(v_ptr + node * token_stride, mask=is_column & (back >= 0), other=0.0)
            there = tl.where(first + back >= 0, place, before + BLOCK) + first + back
            is_kept = is_column & (back < 0) & (start + back >= 0)
            old = tl.load(rows_ptr + there * WIDTH + 2 * KEY_DIM + of_values, mask=is_kept, other=0.0)
            weight = tl.load(taps_ptr + tap * CHANNELS, mask=is_column, other=0.0)
            value += tl.where(back >= 0, new.to(tl.float32), old.to(tl.float32)) * weight
        beta = tl.load(steps_ptr + number * (2 * HEADS * SHARED))
        update = beta * (value * tl.sigmoid(value) - known)
        new = tl.load(v_ptr + number * token_stride, mask=is_column, other=0.0)
        tl.store(rows_ptr + own_ptr * WIDTH + 2 * KEY_DIM + of_values, new, mask=is_column)
        tl.store(updates_ptr + own_ptr * UPDATE_WIDTH + of_values, update, mask=is_column)
        to_ptr = out_ptr + (token * (HEADS * SHARED) + value_head) * VALUE_DIM + columns
        tl.store(to_ptr, (output + of_own * update).to(out_ptr.dtype.element_ty), mask=is_column)
        tl.debug_barrier()  # the update is stored before a child reads it
    node = tl.arange(0, NODES)
    is_lost = (node >= stop - start) & (node < query_len)  # without a slot
    lost_ptr = out_ptr + ((first_token + node) * (HEADS * SHARED) + value_head)[:, None] * VALUE_DIM + columns[None, :]
    nothing = tl.zeros([NODES, BLOCK_V], out_ptr.dtype.element_ty)
    tl.store(lost_ptr, nothing, mask=is_lost[:, None] & is_column[None, :])


@triton.jit
def _seen(
    vector_ptr, products_ptr, steps_ptr, path_ptr, updates_ptr, pages_ptr, low, high, updates, decay, start, first,
    number, head, of_values, is_column, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, UPDATE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    LONGEST: tl.constexpr,
):  # fmt: skip
    """Return what the state before a node gives for its key and its query, [BLOCK_V] each, the product of the two, and
    the node's depth: the sum over the state at the edge, the old rows, and the node's ancestors. `vector_ptr`,
    `products_ptr` and `path_ptr` are the node's, `steps_ptr` is the root's."""
    row, step = tl.arange(0, ROWS), tl.arange(0, LONGEST)
    path = tl.load(path_ptr + step)
    depth = tl.sum((path >= 0).to(tl.int32)) - 1
    is_before, is_old = step < depth, row < first
    passed = tl.load(steps_ptr + number * (2 * HEADS * SHARED) + 1)
    faded = tl.exp(passed)
    k = tl.load(vector_ptr + row, mask=row < KEY_DIM, other=0.0) * faded
    q = tl.load(vector_ptr + KEY_DIM + row, mask=row < KEY_DIM, other=0.0) * faded
    from_k, from_q = low * k[:, None], low * q[:, None]
    if KEY_DIM > ROWS:
        is_high = row + ROWS < KEY_DIM
        k = tl.load(vector_ptr + ROWS + row, mask=is_high, other=0.0) * faded
        q = tl.load(vector_ptr + (KEY_DIM + ROWS) + row, mask=is_high, other=0.0) * faded
        from_k += high * k[:, None]
        from_q += high * q[:, None]
    between = tl.exp(tl.where(is_old, passed - decay, float("-inf")))
    of_q_ptr = products_ptr + (BLOCK + LONGEST)
    from_k += updates * (tl.load(products_ptr + row, mask=is_old, other=0.0) * between)[:, None]
    from_q += updates * (tl.load(of_q_ptr + row, mask=is_old, other=0.0) * between)[:, None]
    there = places(start + path, is_before, pages_ptr, head, HEADS, PAGE_SIZE)
    is_in = is_before[:, None] & is_column[None, :]
    above = tl.load(updates_ptr + there[:, None] * UPDATE_WIDTH + of_values[None, :], mask=is_in, other=0.0)
    of_above = tl.load(steps_ptr + path * (2 * HEADS * SHARED) + 1, mask=is_before, other=0.0)
    between = tl.exp(tl.where(is_before, passed - of_above, float("-inf")))
    above_k = tl.load(products_ptr + BLOCK + step, mask=is_before, other=0.0) * between
    above_q = tl.load(of_q_ptr + BLOCK + step, mask=is_before, other=0.0) * between
    known = tl.sum(from_k, 0) + tl.sum(above * above_k[:, None], 0)
    output = tl.sum(from_q, 0) + tl.sum(above * above_q[:, None], 0)
    return known, output, tl.load(of_q_ptr + BLOCK + depth), depth


@triton.jit(do_not_specialize=("num_new", "num_slots", "table_stride", "updates_stride", "states_stride"))
def _edges_kernel(
    updates_ptr,  # [num_layers, num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32, layers updates_stride apart
    states_ptr,  # [num_layers, num_pages, HEADS, PAGE_SIZE, STATE_PART] float32 or bfloat16, likewise, written
    starts_ptr,  # [num_seqs] int64
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    num_new,
    num_slots,  # of a sequence
    table_stride,
    updates_stride,
    states_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid: (HEADS * SHARED * ceil(VALUE_DIM / BLOCK_V), num_seqs, num_layers)."""
    NUM_PARTS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    part, value_head = tl.program_id(0) % NUM_PARTS, tl.program_id(0) // NUM_PARTS
    head, shared, seq = value_head // SHARED, value_head % SHARED, tl.program_id(1).to(tl.int64)
    columns, pages_ptr = part * BLOCK_V + tl.arange(0, BLOCK_V), table_ptr + seq * table_stride
    updates_ptr += tl.program_id(2).to(tl.int64) * updates_stride
    states_ptr += tl.program_id(2).to(tl.int64) * states_stride
    start = tl.load(starts_ptr + seq).to(tl.int32)
    for edge in range(start // BLOCK * BLOCK, tl.minimum(start + num_new, num_slots) - BLOCK + 1, BLOCK):
        before = places(edge - BLOCK, edge > 0, pages_ptr, head, HEADS, PAGE_SIZE)
        place = places(edge, edge >= 0, pages_ptr, head, HEADS, PAGE_SIZE)
        advance(states_ptr, updates_ptr + place * UPDATE_WIDTH, before, place, edge > 0, shared, columns,
                columns < VALUE_DIM, SHARED, KEY_DIM, VALUE_DIM, DECAY_DIM, UPDATE_WIDTH, BLOCK, STATE_PART,
                BLOCK_K)  # fmt: skip
        tl.debug_barrier()  # the state is stored before the next block reads it
