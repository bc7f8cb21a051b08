"""Triton kernels of sparse attention: the scores of an index over pages, and the choice of the best slots. picks.py has
the formulas.

`paged_index_scores` reads each tile of keys once for all tokens of a program, and multiplies it with one token's heads
after the other. So a score has one order of summation, whatever else the forward holds.

`paged_picks` is a tournament: each program keeps the best of a run of slots, some more than are wanted, and further
launches keep the best of those, until one program per row is left. A program holds its run in registers. It searches
for the score from which on it keeps slots: it counts the scores above a point between two bounds, and the point becomes
one of the bounds. Only the last program of a row needs the exact number. What is kept stays in the order of slots.
There are no atomic operations.

The host reads no tensor's value, and grids depend on shapes alone. So a CUDA graph can hold all launches.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .paged_plan import PagedPlan
from .picks import PagedSight, PickedRows
from .triton_attention import load_pages, num_sms, padded
from .triton_extend import tile_at


class _Tiles(NamedTuple):
    """Division of the scores of a forward among programs. A score has the same bits with every division."""

    num_tokens: int  # of a program
    num_keys: int  # of a tile
    num_stages: int
    num_programs: int  # per multiprocessor


_FEW = 8  # tokens per sequence: programs have one each, and keys that they share come from the L2 cache
_ROUND = _Tiles(1, 64, 5, 3)
_PROMPT = _Tiles(16, 128, 3, 2)
_SEQS = 32  # sequences that `tile_at` looks at in one step
_WARPS = 8  # of a program of `paged_picks`
_RUN = 16384  # slots that a program of `paged_picks` takes the best of
_LEAST: tl.constexpr = tl.constexpr(-(2**31))  # the key of a slot that is not to be taken


def paged_index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    plan: PagedPlan,
    sight: PagedSight,
    tokens: range,
) -> torch.Tensor:
    """Return the scores of `tokens` of a forward, [len(tokens), num_slots] float32, -inf where a token does not see a
    slot. Slots from a token's end on may have any number. `num_slots` is what the block table has room for.

    `q` [num_tokens, num_heads, head_dim] is rotated, `weights` [num_tokens, num_heads] float32, `keys` [num_pages, 1,
    1, page_size, head_dim]. All are contiguous."""
    (num_tokens, num_heads, head_dim), page_size, num_seqs = q.shape, keys.shape[3], len(plan.seq_lens)
    assert keys.shape[1:3] == (1, 1) and keys.shape[4] == head_dim and keys.is_contiguous(), keys.shape
    assert q.is_contiguous() and q.dtype == keys.dtype and len(sight.ends) == num_tokens, (q.shape, q.dtype)
    assert weights.shape == (num_tokens, num_heads) and weights.dtype == torch.float32 and weights.is_contiguous()
    assert plan.block_table.stride(1) == 1 and plan.seq_lens.is_contiguous(), plan.block_table.stride()
    num_slots = plan.block_table.shape[1] * page_size
    out = torch.empty((len(tokens), num_slots), dtype=torch.float32, device=q.device)
    tiles = _ROUND if plan.query_len is not None and plan.query_len <= _FEW else _PROMPT
    of_tile, block_n = tiles.num_tokens, 32 if q.dtype == torch.float32 else tiles.num_keys
    if plan.starts is None:
        assert plan.query_len is not None, plan
        tiles_per_seq = triton.cdiv(plan.query_len, of_tile)
        num_tiles = num_seqs * tiles_per_seq
    else:
        tiles_per_seq, num_tiles = 0, num_tokens // of_tile + num_seqs
    most_parts = triton.cdiv(num_slots, block_n)
    num_parts = max(1, min(most_parts, tiles.num_programs * num_sms(q.device) // num_tiles))
    visible = plan.visible
    _scores_kernel[(num_tiles, num_parts)](
        out, q, weights, keys, plan.block_table, sight.ends, plan.starts, plan.tree_starts, visible,
        num_seqs, plan.query_len or 0, tiles_per_seq, tokens.start, tokens.stop, num_slots, plan.block_table.stride(0),
        0 if visible is None else visible.shape[1],
        IS_TREE=visible is not None, HEADS=num_heads, BLOCK_H=max(16, triton.next_power_of_2(num_heads)),
        HEAD_DIM=head_dim, BLOCK_D=padded(head_dim), PAGE_SIZE=page_size, TOKENS=of_tile, BLOCK_N=block_n, SEQS=_SEQS,
        num_warps=4, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=(
        "num_seqs", "query_len", "tiles_per_seq", "first_token", "stop_token", "num_slots", "table_stride", "num_words",
    )
)  # fmt: skip
def _scores_kernel(
    out_ptr,  # [stop_token - first_token, num_slots] float32, written
    q_ptr,  # [num_tokens, HEADS, HEAD_DIM]
    weights_ptr,  # [num_tokens, HEADS] float32
    keys_ptr,  # [num_pages, PAGE_SIZE, HEAD_DIM] of q's dtype
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    ends_ptr,  # [num_tokens] int32
    starts_ptr,  # [num_seqs + 1] int32; None: query_len tokens in each sequence
    tree_starts_ptr,  # [num_seqs] int64, read if IS_TREE
    visible_ptr,  # [num_tokens, num_words] int64, read if IS_TREE
    num_seqs,
    query_len,
    tiles_per_seq,
    first_token,
    stop_token,
    num_slots,
    table_stride,
    num_words,
    IS_TREE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEQS: tl.constexpr,
):
    """Grid: (num_tiles, num_parts). A program has every num_parts-th tile of keys, and TOKENS tokens of a sequence."""
    tile = tl.program_id(0)
    if starts_ptr is None:
        seq, first = tile // tiles_per_seq, tile % tiles_per_seq * TOKENS
        start = seq * query_len
    else:
        seq, start, query_len, first = tile_at(starts_ptr, num_seqs, tile, 1, TOKENS, SEQS)
    begin = tl.maximum(start + first, first_token)
    stop = tl.minimum(start + tl.minimum(first + TOKENS, query_len), stop_token)
    if begin < stop:
        end = tl.load(ends_ptr + stop - 1)  # the last token sees most
        table_ptr += seq.to(tl.int64) * table_stride
        tree_start = 0
        if IS_TREE:
            tree_start = tl.load(tree_starts_ptr + seq).to(tl.int32)
        dims, columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        if TOKENS == 1:
            q, weights = _queries(q_ptr, weights_ptr, begin, HEADS, BLOCK_H, HEAD_DIM, BLOCK_D)
        for low in range(tl.program_id(1) * BLOCK_N, end, tl.num_programs(1) * BLOCK_N):
            slots = low + columns
            pages = load_pages(table_ptr, low, end, PAGE_SIZE, BLOCK_N)
            k_rows = pages.to(tl.int64) * PAGE_SIZE + slots % PAGE_SIZE
            is_key = (slots < end)[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(keys_ptr + k_rows[:, None] * HEAD_DIM + dims[None, :], mask=is_key, other=0.0)
            if TOKENS == 1:  # no loop inside: the keys of the next tiles are loaded early
                is_seen = _is_seen(begin, slots, ends_ptr, tree_start, visible_ptr, num_words, IS_TREE)
                scores = tl.where(is_seen, _scores(k, q, weights), float("-inf"))
                tl.store(out_ptr + (begin - first_token) * num_slots + slots, scores, mask=slots < num_slots)
            else:
                for token in range(begin, stop):
                    q, weights = _queries(q_ptr, weights_ptr, token, HEADS, BLOCK_H, HEAD_DIM, BLOCK_D)
                    is_seen = _is_seen(token, slots, ends_ptr, tree_start, visible_ptr, num_words, IS_TREE)
                    scores = tl.where(is_seen, _scores(k, q, weights), float("-inf"))
                    tl.store(out_ptr + (token - first_token) * num_slots + slots, scores, mask=slots < num_slots)


@triton.jit
def _queries(
    q_ptr, weights_ptr, token, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Return the queries of a token, [BLOCK_D, BLOCK_H], and the weights of its heads, [BLOCK_H]."""
    heads, dims = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    is_q = (heads < HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    q_ptrs = q_ptr + token * (HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptrs, mask=is_q, other=0.0)
    return tl.trans(q), tl.load(weights_ptr + token * HEADS + heads, mask=heads < HEADS, other=0.0)


@triton.jit
def _scores(k, q, weights):
    """Return the scores of keys `k` [BLOCK_N, BLOCK_D], [BLOCK_N] float32."""
    products = tl.dot(k, q, input_precision="ieee")  # [BLOCK_N, BLOCK_H]
    return tl.sum(tl.maximum(products, 0.0) * weights[None, :], 1)


@triton.jit
def _is_seen(token, slots, ends_ptr, tree_start, visible_ptr, num_words, IS_TREE: tl.constexpr):
    """Return whether a token sees each of `slots`."""
    is_seen = slots < tl.load(ends_ptr + token)
    if IS_TREE:
        ahead = tl.maximum(slots - tree_start, 0)
        is_word = (slots >= tree_start) & (ahead < 64 * num_words)
        words = tl.load(visible_ptr + token * num_words + ahead // 64, mask=is_word, other=0)
        is_visible = ((words >> (ahead % 64).to(tl.int64)) & 1) != 0
        is_seen &= (slots < tree_start) | is_visible
    return is_seen


def paged_picks(
    scores: torch.Tensor,
    plan: PagedPlan,
    sight: PagedSight,
    tokens: range,
    page_size: int,
    num_picks: int,
    out: PickedRows,
) -> None:
    """Write the rows of `pick` of `tokens`, whose scores [len(tokens), num_slots] float32 `paged_index_scores`
    returned, to their places in `out`."""
    num, num_slots = scores.shape
    num_picks = out.rows.shape[1]
    assert num == len(tokens), (scores.shape, out.rows.shape)
    assert scores.is_contiguous() and out.rows.is_contiguous() and out.rows.dtype == out.counts.dtype == torch.int64
    ends, seqs = sight.ends[tokens.start : tokens.stop], sight.seqs[tokens.start : tokens.stop]
    most = 2 * num_picks  # that a program keeps which is not the last
    run = max(_RUN, 2 * triton.next_power_of_2(most))
    assert run <= 1 << 15, f"{num_picks} picks are too many"  # engine/checkpoint refuses such models
    left, length, slots = scores, num_slots, None
    while length > run:
        num_runs = triton.cdiv(length, run)
        best = torch.empty((2, num, num_runs * most), dtype=torch.int32, device=scores.device)
        _best_kernel[(num, num_runs)](
            best[0], best[1], None, None, left, slots, ends, seqs, plan.block_table, length, num_picks, most,
            plan.block_table.stride(0), PAGE_SIZE=page_size, RUN=run, num_warps=_WARPS,
        )  # fmt: skip
        (left, slots), length = best, num_runs * most
    _best_kernel[(num, 1)](
        None, None, out.rows[tokens.start :], out.counts[tokens.start :], left, slots, ends, seqs, plan.block_table,
        length, num_picks, num_picks, plan.block_table.stride(0), PAGE_SIZE=page_size,
        RUN=triton.next_power_of_2(length), num_warps=_WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=("length", "num_picks", "most", "table_stride"))
def _best_kernel(
    keys_ptr,  # [num_rows, num_programs(1), most] int32, written; None: rows are
    places_ptr,  # [num_rows, num_programs(1), most] int32, the slots of the keys, written
    rows_ptr,  # [num_rows, num_picks] int64, written; one program per row
    counts_ptr,  # [num_rows] int64, written
    from_ptr,  # [num_rows, length] float32, scores; or int32, keys of `slots_ptr`
    slots_ptr,  # [num_rows, length] int32, in ascending order; None: all slots
    ends_ptr,  # [num_rows] int32
    seqs_ptr,  # [num_rows] int32
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    length,
    num_picks,
    most,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    RUN: tl.constexpr,
):
    """Grid: (num_rows, num_runs). Keep the best of RUN slots of a row, at least `num_picks` and at most `most` of them,
    of equal ones the lowest slots."""
    row, run = tl.program_id(0), tl.program_id(1)
    places = run * RUN + tl.arange(0, RUN)
    from_ptr += row.to(tl.int64) * length
    if slots_ptr is None:
        slots = places
        keys = _keys(from_ptr, places, tl.load(ends_ptr + row))
    else:
        slots = tl.load(slots_ptr + row.to(tl.int64) * length + places, mask=places < length, other=0)
        keys = tl.load(from_ptr + places, mask=places < length, other=_LEAST)
    threshold = _threshold(keys, num_picks, most)
    is_above, is_level = keys > threshold, (keys == threshold) & (keys != _LEAST)
    needed = most - tl.sum(is_above.to(tl.int32), 0)
    both = tl.cumsum(is_above.to(tl.int32) | (is_level.to(tl.int32) << 16), 0)  # RUN is at most 2^15
    num_above, num_level = both & 65535, (both >> 16) & 65535
    is_taken = is_above | (is_level & (num_level <= needed))
    order = num_above + tl.minimum(num_level, needed) - 1
    num_taken = tl.sum(is_taken.to(tl.int32), 0)
    if keys_ptr is None:
        tl.store(counts_ptr + row, num_taken.to(tl.int64))
        table_ptr += tl.load(seqs_ptr + row).to(tl.int64) * table_stride
        pages = tl.load(table_ptr + slots // PAGE_SIZE, mask=is_taken, other=0)
        rows_ptr += row.to(tl.int64) * num_picks
        tl.store(rows_ptr + order, pages * PAGE_SIZE + slots % PAGE_SIZE, mask=is_taken)
    else:
        first = (row.to(tl.int64) * tl.num_programs(1) + run) * most
        tl.store(keys_ptr + first + order, keys, mask=is_taken)
        tl.store(places_ptr + first + order, slots, mask=is_taken)
        behind = tl.arange(0, RUN)
        tl.store(keys_ptr + first + behind, _LEAST, mask=(behind >= num_taken) & (behind < most))


@triton.jit
def _threshold(keys, num_picks, most):
    """Return a key that at least `num_picks` keys reach, and if possible at most `most`. It is the least one if there
    are no more keys."""
    is_key = keys != _LEAST
    num_low, num_high = tl.sum(is_key.to(tl.int32), 0), 0
    low = tl.min(tl.where(is_key, keys, 2147483647), 0).to(tl.int64)  # `num_low` keys reach it
    high = tl.max(keys, 0).to(tl.int64) + 1  # `num_high` keys reach it, too few
    step = 0
    while (num_low > most) & (high - low > 1):
        share = tl.where(step % 2 == 0, (num_low - (num_picks + most) // 2) / (num_low - num_high), 0.5)
        middle = tl.minimum(tl.maximum(low + ((high - low).to(tl.float32) * share).to(tl.int64), low + 1), high - 1)
        num = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0)
        is_low = num >= num_picks
        low, num_low = tl.where(is_low, middle, low), tl.where(is_low, num, num_low)
        high, num_high = tl.where(is_low, high, middle), tl.where(is_low, num_high, num)
        step += 1
    return low.to(tl.int32)


@triton.jit
def _keys(scores_ptr, slots, end):
    """Return whole numbers in the order of the scores of `slots`, int32: _LEAST for a slot from `end` on and for a
    score of -inf or NaN."""
    scores = tl.load(scores_ptr + slots, mask=slots < end, other=float("-inf"))
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 is 0
    return tl.where(scores > float("-inf"), bits ^ ((bits >> 31) & 0x7FFFFFFF), _LEAST)
