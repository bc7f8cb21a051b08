"""Index scores over pages, and the choice of the best slots, on a GPU (picks.py).

`paged_index_scores` reads each tile of keys once for all tokens of a program, and multiplies it with one token's heads
after the other. So a score has one order of summation, whatever else the forward holds.

`paged_picks` finds the least key that is taken, eight bits at a time, and then writes the slots in order. A key is a
score's bits in an order of whole numbers; 0: the slot is not to be taken. Programs share a row's slots, a run of them
each, and pass their counts on from launch to launch. There are no atomic operations:

    1. count the first digits of all keys: [num_splits, 256] per row
    2. three times: find the digit at which enough keys are counted; count the next digits of the keys that share it
    3. find the last digit, and with it the threshold; each program knows how many slots the ones before it take

The host reads no tensor's value, and grids depend on shapes alone. So a CUDA graph can hold all launches.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .paged_plan import PagedPlan
from .picks import PagedSight, PickedRows
from .triton_attention import load_pages, num_sms, padded
from .triton_extend import tile_at

_TOKENS = 16  # of a program that has a part of a prompt; in a round it has those of a sequence
_SEQS = 32  # sequences that `tile_at` looks at in one step
_BLOCK = 1024  # slots that a program of `paged_picks` looks at in one step
_MAX_SPLITS = 64
_LEVELS = 4  # digits of a key


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
    of_tile = _TOKENS if plan.query_len is None else min(_TOKENS, triton.next_power_of_2(plan.query_len))
    if plan.starts is None:
        assert plan.query_len is not None, plan
        tiles_per_seq = triton.cdiv(plan.query_len, of_tile)
        num_tiles = num_seqs * tiles_per_seq
    else:
        tiles_per_seq, num_tiles = 0, num_tokens // of_tile + num_seqs
    block_n = 32 if q.dtype == torch.float32 else 128
    most_parts = triton.cdiv(num_slots, block_n)
    num_parts = max(1, min(most_parts, triton.cdiv(4 * num_sms(q.device), num_tiles)))
    visible = plan.visible
    _scores_kernel[(num_tiles, num_parts)](
        out, q, weights, keys, plan.block_table, sight.ends, plan.starts, plan.tree_starts, visible,
        num_seqs, plan.query_len or 0, tiles_per_seq, tokens.start, tokens.stop, num_slots, plan.block_table.stride(0),
        0 if visible is None else visible.shape[1],
        IS_TREE=visible is not None, HEADS=num_heads, BLOCK_H=max(16, triton.next_power_of_2(num_heads)),
        HEAD_DIM=head_dim, BLOCK_D=padded(head_dim), PAGE_SIZE=page_size, TOKENS=of_tile, BLOCK_N=block_n, SEQS=_SEQS,
        num_warps=4, num_stages=3,
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
        heads, dims, columns = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        for low in range(tl.program_id(1) * BLOCK_N, end, tl.num_programs(1) * BLOCK_N):
            slots = low + columns
            pages = load_pages(table_ptr, low, end, PAGE_SIZE, BLOCK_N)
            k_rows = pages.to(tl.int64) * PAGE_SIZE + slots % PAGE_SIZE
            is_key = (slots < end)[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(keys_ptr + k_rows[:, None] * HEAD_DIM + dims[None, :], mask=is_key, other=0.0)
            for token in range(begin, stop):
                is_q = (heads < HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
                q_ptrs = q_ptr + token * (HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + dims[None, :]
                q = tl.load(q_ptrs, mask=is_q, other=0.0)
                weights = tl.load(weights_ptr + token * HEADS + heads, mask=heads < HEADS, other=0.0)
                products = tl.dot(k, tl.trans(q), input_precision="ieee")  # [BLOCK_N, BLOCK_H]
                scores = tl.sum(tl.maximum(products, 0.0) * weights[None, :], 1)
                is_seen = slots < tl.load(ends_ptr + token)
                if IS_TREE:
                    ahead = tl.maximum(slots - tree_start, 0)
                    is_word = (slots >= tree_start) & (ahead < 64 * num_words)
                    words = tl.load(visible_ptr + token * num_words + ahead // 64, mask=is_word, other=0)
                    is_visible = ((words >> (ahead % 64).to(tl.int64)) & 1) != 0
                    is_seen &= (slots < tree_start) | is_visible
                scores = tl.where(is_seen, scores, float("-inf"))
                out_ptrs = out_ptr + (token - first_token) * num_slots + slots
                tl.store(out_ptrs, scores, mask=slots < num_slots)


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
    assert num == len(tokens) and out.rows.shape[1] == min(num_picks, num_slots), (scores.shape, out.rows.shape)
    assert scores.is_contiguous() and out.rows.is_contiguous() and out.rows.dtype == out.counts.dtype == torch.int64
    wanted = max(1, 2 * num_sms(scores.device) // num)
    num_splits = min(
        _MAX_SPLITS, triton.next_power_of_2(wanted), triton.next_power_of_2(triton.cdiv(num_slots, _BLOCK))
    )
    digits = torch.empty((_LEVELS, num, num_splits, 256), dtype=torch.int32, device=scores.device)
    above = torch.empty((_LEVELS, num, num_splits), dtype=torch.int32, device=scores.device)
    state = torch.empty((_LEVELS, 2, num), dtype=torch.int64, device=scores.device)
    ends, seqs = sight.ends[tokens.start : tokens.stop], sight.seqs[tokens.start : tokens.stop]
    for level in range(_LEVELS):
        _digits_kernel[(num, num_splits)](
            digits, above, state, scores, ends, num, num_slots, min(num_picks, num_slots), LEVEL=level,
            SPLITS=num_splits, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    _rows_kernel[(num, num_splits)](
        out.rows[tokens.start :], out.counts[tokens.start :], digits, above, state, scores, ends, seqs,
        plan.block_table, num, num_slots, out.rows.shape[1], plan.block_table.stride(0),
        PAGE_SIZE=page_size, LEVEL=_LEVELS, SPLITS=num_splits, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=("num_rows", "num_slots", "num_picks"))
def _digits_kernel(
    digits_ptr,  # [4, num_rows, SPLITS, 256] int32, those of LEVEL are written
    above_ptr,  # [4, num_rows, SPLITS] int32, as of `_descend`
    state_ptr,  # [4, 2, num_rows] int64, as of `_descend`
    scores_ptr,  # [num_rows, num_slots] float32
    ends_ptr,  # [num_rows] int32
    num_rows,
    num_slots,
    num_picks,
    LEVEL: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num_rows, SPLITS). Count the digits LEVEL of the keys in a program's run of slots, of those keys whose
    digits before are those of the threshold."""
    row, split = tl.program_id(0), tl.program_id(1)
    prefix, _, _, _ = _descend(digits_ptr, above_ptr, state_ptr, row, split, num_rows, num_picks, LEVEL, SPLITS)
    first, stop = _run(ends_ptr, row, split, SPLITS, BLOCK)
    counts = tl.zeros([256], tl.int32)
    scores_ptr += row.to(tl.int64) * num_slots
    for low in range(first, stop, BLOCK):
        keys = _keys(scores_ptr, low + tl.arange(0, BLOCK), stop)
        is_counted = keys != 0
        if LEVEL > 0:
            is_counted &= (keys >> (32 - 8 * LEVEL)).to(tl.int64) == prefix
        digits = ((keys >> (24 - 8 * LEVEL)) & 255).to(tl.int32)
        counts += tl.histogram(digits, 256, mask=is_counted)
    place = ((LEVEL * num_rows + row) * SPLITS + split).to(tl.int64) * 256
    tl.store(digits_ptr + place + tl.arange(0, 256), counts)


@triton.jit(do_not_specialize=("num_rows", "num_slots", "num_picks", "table_stride"))
def _rows_kernel(
    rows_ptr,  # [num_rows, num_picks] int64, written
    counts_ptr,  # [num_rows] int64, written
    digits_ptr,  # [4, num_rows, SPLITS, 256] int32
    above_ptr,  # [4, num_rows, SPLITS] int32
    state_ptr,  # [4, 2, num_rows] int64
    scores_ptr,  # [num_rows, num_slots] float32
    ends_ptr,  # [num_rows] int32
    seqs_ptr,  # [num_rows] int32
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    num_rows,
    num_slots,
    num_picks,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    LEVEL: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num_rows, SPLITS). Write the rows of the slots that are taken of a program's run, in order, behind those
    of the runs before it."""
    row, split = tl.program_id(0), tl.program_id(1)
    threshold, needed, above, level = _descend(
        digits_ptr, above_ptr, state_ptr, row, split, num_rows, num_picks, LEVEL, SPLITS
    )
    is_before = tl.arange(0, SPLITS) < split
    num_level = tl.sum(tl.where(is_before, level, 0), 0)  # of keys at the threshold that lie before
    num_taken = tl.sum(tl.where(is_before, above, 0), 0) + tl.minimum(num_level, needed)
    if split == 0:
        tl.store(counts_ptr + row, (tl.sum(above, 0) + tl.minimum(tl.sum(level, 0), needed)).to(tl.int64))
    first, stop = _run(ends_ptr, row, split, SPLITS, BLOCK)
    table_ptr += tl.load(seqs_ptr + row).to(tl.int64) * table_stride
    scores_ptr += row.to(tl.int64) * num_slots
    rows_ptr += row.to(tl.int64) * num_picks
    for low in range(first, stop, BLOCK):
        slots = low + tl.arange(0, BLOCK)
        keys = _keys(scores_ptr, slots, stop).to(tl.int64)
        is_level = (keys == threshold) & (keys != 0)
        rank = num_level + tl.cumsum(is_level.to(tl.int32), 0)
        is_taken = (keys > threshold) | (is_level & (rank <= needed))
        places = num_taken + tl.cumsum(is_taken.to(tl.int32), 0) - 1
        pages = tl.load(table_ptr + slots // PAGE_SIZE, mask=is_taken, other=0)
        tl.store(rows_ptr + places, pages * PAGE_SIZE + slots % PAGE_SIZE, mask=is_taken)
        num_level += tl.sum(is_level.to(tl.int32), 0)
        num_taken += tl.sum(is_taken.to(tl.int32), 0)


@triton.jit
def _descend(
    digits_ptr, above_ptr, state_ptr, row, split, num_rows, num_picks, LEVEL: tl.constexpr, SPLITS: tl.constexpr
):
    """Return the first LEVEL digits of the threshold, int64; how many keys that begin with them are still needed; and
    for LEVEL 4 how many keys of each run lie above the threshold and at it, [SPLITS] int32 each.

    All programs of a row find the same. They keep what later levels need: `above_ptr` how many keys of a run lie above
    the digits so far, `state_ptr` the digits, and the keys that are still needed."""
    splits, bins = tl.arange(0, SPLITS), tl.arange(0, 256)
    prefix, needed = num_picks.to(tl.int64) * 0, num_picks.to(tl.int32)
    of_run, level = tl.zeros([SPLITS], tl.int32), tl.zeros([SPLITS], tl.int32)
    if LEVEL > 0:
        if LEVEL > 1:
            state = state_ptr + (LEVEL - 2) * 2 * num_rows + row
            prefix, needed = tl.load(state), tl.load(state + num_rows).to(tl.int32)
            of_run = tl.load(above_ptr + ((LEVEL - 2) * num_rows + row) * SPLITS + splits)
        place = ((LEVEL - 1) * num_rows + row).to(tl.int64) * SPLITS * 256
        counts = tl.load(digits_ptr + place + splits[:, None] * 256 + bins[None, :])
        totals = tl.sum(counts, 0)
        higher = tl.sum(totals, 0) - tl.cumsum(totals, 0)  # keys of a higher digit
        digit = tl.minimum(tl.sum((higher >= needed).to(tl.int32), 0), 255)
        prefix = prefix * 256 + digit
        needed -= tl.sum(tl.where(bins == digit, higher, 0), 0)
        of_run += tl.sum(tl.where((bins > digit)[None, :], counts, 0), 1)
        level = tl.sum(tl.where((bins == digit)[None, :], counts, 0), 1)
        if LEVEL < 4:  # noqa: SIM102
            if split == 0:
                state = state_ptr + (LEVEL - 1) * 2 * num_rows + row
                tl.store(state, prefix)
                tl.store(state + num_rows, needed.to(tl.int64))
                tl.store(above_ptr + ((LEVEL - 1) * num_rows + row) * SPLITS + splits, of_run)
    return prefix, needed, of_run, level


@triton.jit
def _run(ends_ptr, row, split, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first slot of a program's run of a row, and the one behind its last."""
    end = tl.load(ends_ptr + row)
    length = tl.cdiv(tl.cdiv(end, BLOCK), SPLITS) * BLOCK
    return split * length, tl.minimum(end, (split + 1) * length)


@triton.jit
def _keys(scores_ptr, slots, stop):
    """Return the keys of the scores of `slots`, uint32: 0 for a slot from `stop` on and for a score of -inf or NaN."""
    scores = tl.load(scores_ptr + slots, mask=slots < stop, other=float("-inf"))
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 is 0
    ordered = (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)
    return tl.where(scores > float("-inf"), ordered, 0).to(tl.uint32)
