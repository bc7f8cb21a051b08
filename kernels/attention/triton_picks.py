"""Triton kernels of sparse attention: the scores of an index over pages, and the choice of the best slots. picks.py has
the formulas.

`paged_index_scores` reads each tile of keys once for all tokens of a program, and multiplies it with one token's heads
after the other. So a score has one order of summation, whatever else the forward holds.

`paged_picks` takes two launches for a long row, and the second one alone for a short row:

1. Many programs divide the row. Each computes the same bound from the same sample of scores, such that somewhat more
   slots reach it than are wanted. The slots that reach it are the candidates, and are stored in their order.
2. One program per row reads all candidates into registers and searches for the least score that is chosen. It counts
   the scores above two points between a lower and an upper bound, and moves the bounds to these points. If the sample
   misled, so that there are too few or too many candidates, it reads the whole row: slower, with the same choice.

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
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
_CANDIDATES_WARPS, _CHOICE_WARPS = 8, 16
_NUM_PROGRAMS = 2  # that look for candidates, per multiprocessor
_LEAST_PART = 2048  # slots of a program that looks for candidates
_CHUNK = 4096  # slots that it holds at a time
_MOST = 4096  # candidates of a row, of a row's sample also the least number
_ALL = 2  # times as many slots are all candidates
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
    most = max(_MOST, triton.next_power_of_2(num_picks + num_picks // 2))
    assert most <= 1 << 14, f"{num_picks} picks are too many"  # engine/checkpoint refuses such models
    slots = keys = nums = None
    run, num_parts, room, device = max(16, triton.next_power_of_2(num_slots)), 1, 0, scores.device
    dependent, are_fours = False, num_slots % 4 == 0
    if num_slots > _ALL * most:
        sample = min(max(run // 16, most), 1 << 15)
        per_part = triton.cdiv(num_slots, max(1, _NUM_PROGRAMS * num_sms(device) // num))
        part = max(triton.next_power_of_2(per_part), _LEAST_PART)
        num_parts, room, run, dependent = triton.cdiv(num_slots, part), min(part, most), most, gpu.dependent_launch(num)
        slots = torch.empty((num, num_parts, room), dtype=torch.int32, device=device)
        keys, nums = torch.empty_like(slots), torch.empty((num, num_parts), dtype=torch.int32, device=device)
        _candidates_kernel[(num, num_parts)](
            slots, keys, nums, scores, ends, num_slots, num_picks, most,
            SAMPLE=sample, PART=part, CHUNK=min(part, _CHUNK), ROOM=room, ARE_FOURS=are_fours, DEPENDENT=dependent,
            num_warps=_CANDIDATES_WARPS, launch_pdl=dependent,
        )  # fmt: skip
    _choice_kernel[(num,)](
        out.rows[tokens.start :], out.counts[tokens.start :], scores, slots, keys, nums, ends, seqs, plan.block_table,
        num_slots, num_picks, num_parts, plan.block_table.stride(0),
        PAGE_SIZE=page_size, RUN=run, ROOM=room, LEVELS=int(num_parts - 1).bit_length(), ARE_FOURS=are_fours,
        DEPENDENT=dependent, num_warps=_CHOICE_WARPS, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit(do_not_specialize=("num_slots", "num_picks", "most"))
def _candidates_kernel(
    slots_ptr,  # [num_rows, num_parts, ROOM] int32, written: the candidates of a part, in ascending order
    keys_ptr,  # like slots_ptr, written: their keys, and then _LEAST up to a multiple of 4
    nums_ptr,  # [num_rows, num_parts] int32, of candidates, written; those above ROOM are not in the lists
    scores_ptr,  # [num_rows, num_slots] float32
    ends_ptr,  # [num_rows] int32
    num_slots,
    num_picks,
    most,  # candidates of a row that the choice can hold
    SAMPLE: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    ARE_FOURS: tl.constexpr,  # num_slots is a multiple of 4
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_rows, num_parts). Keep those of PART slots of a row whose keys reach its bound. All programs of a row
    find the same bound. In a row of at most `most` slots all are candidates."""
    row, part = tl.program_id(0), tl.program_id(1)
    place = row.to(tl.int64) * tl.num_programs(1) + part
    end = tl.load(ends_ptr + row)
    scores_ptr += _first(row, num_slots, ARE_FOURS)
    slots_ptr, keys_ptr = slots_ptr + place * ROOM, keys_ptr + place * ROOM
    begin = part * PART
    stop = tl.minimum(begin + PART, end)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    fours = begin // 4 + tl.arange(0, CHUNK // 4)
    keys = _keys(scores_ptr, fours, stop, ARE_FOURS)  # loaded while the bound is sought
    bound, num = _LEAST + 1, 0
    if end > most:
        bound = _bound(scores_ptr, end, num_picks, SAMPLE, ARE_FOURS)
    for first in range(0, stop - begin, CHUNK):
        slots = _fours(fours + first // 4)
        next_keys = _keys(scores_ptr, fours + (first + CHUNK) // 4, stop, ARE_FOURS)
        is_taken = keys >= bound
        ranks, num_taken = _ranks(is_taken.to(tl.int32))
        order = num + ranks - 1
        tl.store(slots_ptr + order, slots, mask=is_taken & (order < ROOM))
        tl.store(keys_ptr + order, keys, mask=is_taken & (order < ROOM))
        num += num_taken
        keys = next_keys
    behind = num + tl.arange(0, 4)
    tl.store(keys_ptr + behind, tl.full((4,), _LEAST, tl.int32), mask=behind < tl.minimum((num + 3) // 4 * 4, ROOM))
    tl.store(nums_ptr + place, num)


@triton.jit
def _bound(scores_ptr, end, num_picks, SAMPLE: tl.constexpr, ARE_FOURS: tl.constexpr):
    """Return the key that somewhat more slots of a row reach than `num_picks`, if the row is like its sample: groups of
    four slots."""
    groups, num_groups = tl.arange(0, SAMPLE // 4), end // 4
    stride = tl.maximum(num_groups // (SAMPLE // 4), 1).to(tl.uint32)  # a hash chooses one of as many groups
    group = (groups.to(tl.int64) * num_groups // (SAMPLE // 4)).to(tl.int32)
    group += ((groups.to(tl.uint32) * 2654435761 >> 9) % stride).to(tl.int32)
    wanted = num_picks * (SAMPLE / end)
    least = (wanted + 4.5 * tl.sqrt(wanted)).to(tl.int32) + 4
    keys = _keys(scores_ptr, group, end, ARE_FOURS)
    threshold, _ = _threshold(keys, _sum(keys != _LEAST), least, least + least // 16)
    return tl.maximum(threshold, _LEAST + 1)


@triton.jit(do_not_specialize=("num_slots", "num_picks", "num_parts", "table_stride"))
def _choice_kernel(
    rows_ptr,  # [num_rows, num_picks] int64, written
    counts_ptr,  # [num_rows] int64, written
    scores_ptr,  # [num_rows, num_slots] float32
    slots_ptr,  # [num_rows, num_parts, ROOM] int32, candidates; None: all slots
    keys_ptr,  # like slots_ptr, their keys
    nums_ptr,  # [num_rows, num_parts] int32, of candidates
    ends_ptr,  # [num_rows] int32
    seqs_ptr,  # [num_rows] int32
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    num_slots,
    num_picks,
    num_parts,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    RUN: tl.constexpr,
    ROOM: tl.constexpr,
    LEVELS: tl.constexpr,  # 2**LEVELS parts at most
    ARE_FOURS: tl.constexpr,  # num_slots is a multiple of 4
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_rows,). Write the rows of the best `num_picks` slots of a row, of equal ones the lowest slots."""
    row = tl.program_id(0)
    end = tl.load(ends_ptr + row)
    scores_ptr += _first(row, num_slots, ARE_FOURS)
    rows_ptr += row.to(tl.int64) * num_picks
    table_ptr += tl.load(seqs_ptr + row).to(tl.int64) * table_stride
    fours = tl.arange(0, RUN // 4)
    if DEPENDENT:
        gdc_wait()
    if slots_ptr is None:
        slots, is_enough = _fours(fours), True
        keys = _keys(scores_ptr, fours, end, ARE_FOURS)
        num = _sum(keys != _LEAST)
    else:
        first = row.to(tl.int64) * num_parts
        four, num_fours, num = _lists(nums_ptr + first, fours, num_parts, ROOM, LEVELS)
        is_enough = (num_fours * 4 <= RUN) & ((num >= num_picks) | (end <= RUN))
        is_there = ((fours < num_fours) & is_enough)[:, None]
        slots = tl.load(slots_ptr + first * ROOM + _fours(four), mask=is_there, other=0)
        keys = tl.load(keys_ptr + first * ROOM + _fours(four), mask=is_there, other=_LEAST)
    if is_enough:
        if slots_ptr is not None:  # while the threshold is sought
            pages = tl.load(table_ptr + slots // PAGE_SIZE, mask=keys != _LEAST, other=0)
        threshold, num_level = _threshold(keys, num, num_picks, num_picks)
        if slots_ptr is None:
            pages = tl.load(table_ptr + slots // PAGE_SIZE, mask=keys >= threshold, other=0)
        _write(rows_ptr, keys, slots, pages, threshold, 0, num_level, PAGE_SIZE)
        count = tl.minimum(num, num_picks)
    else:  # the row is not like its sample
        threshold, num_level = _threshold_of_row(scores_ptr, end, num_picks, RUN, ARE_FOURS)
        count = 0
        for begin in range(0, end, RUN):
            slots, keys = _fours(begin // 4 + fours), _keys(scores_ptr, begin // 4 + fours, end, ARE_FOURS)
            pages = tl.load(table_ptr + slots // PAGE_SIZE, mask=keys >= threshold, other=0)
            count, num_level = _write(rows_ptr, keys, slots, pages, threshold, count, num_level, PAGE_SIZE)
    tl.store(counts_ptr + row, count.to(tl.int64))


@triton.jit
def _fours(firsts):
    """Return the places of groups of four, [num_groups, 4], which a program reads at once."""
    return firsts[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def _first(row, num_slots, ARE_FOURS: tl.constexpr):
    """Return where the scores of a row begin."""
    return row.to(tl.int64) * (num_slots // 4 * 4 if ARE_FOURS else num_slots)


@triton.jit
def _sum(each):
    """Return the sum of [num_groups, 4]."""
    return tl.sum(tl.sum(each.to(tl.int32), 1), 0)


@triton.jit
def _lists(nums_ptr, fours, num_parts, ROOM: tl.constexpr, LEVELS: tl.constexpr):
    """Return where each four of candidates lies in the lists of its row, and how many fours and candidates there
    are."""
    parts = tl.arange(0, 2**LEVELS)
    nums = tl.load(nums_ptr + parts, mask=parts < num_parts, other=0)
    num_fours = (nums + 3) // 4
    stops = tl.cumsum(num_fours, 0)
    part, start = tl.zeros_like(fours), tl.zeros_like(fours)  # parts whose stops are not above a four
    for level in tl.static_range(LEVELS):
        step = 1 << (LEVELS - 1 - level)
        stop = tl.gather(stops, part + (step - 1), 0)
        part, start = tl.where(stop <= fours, part + step, part), tl.where(stop <= fours, stop, start)
    return part * (ROOM // 4) + fours - start, tl.sum(num_fours, 0), tl.sum(nums, 0)


@triton.jit
def _ranks(flags):
    """Return the sums of [num_groups, 4] up to each place, and of all."""
    of_fours = tl.sum(flags, 1)
    return tl.cumsum(flags, 1) + (tl.cumsum(of_fours, 0) - of_fours)[:, None], tl.sum(of_fours, 0)


@triton.jit
def _write(rows_ptr, keys, slots, pages, threshold, count, num_level, PAGE_SIZE: tl.constexpr):
    """Write the rows of keys above the threshold, and of the first `num_level` keys equal to it, behind `count` rows.
    Return how many rows there are then, and how many equal keys are left to write."""
    is_above, is_level = keys > threshold, keys == threshold
    either = is_above.to(tl.int32) | (is_level.to(tl.int32) << 16)  # at most 2^14 keys
    both, nums = _ranks(either)
    levels = both >> 16
    is_taken = is_above | (is_level & (levels <= num_level))
    order = count + (both & 65535) + tl.minimum(levels, num_level) - 1
    tl.store(rows_ptr + order, pages * PAGE_SIZE + slots % PAGE_SIZE, mask=is_taken)
    levels_taken = tl.minimum(nums >> 16, num_level)
    return count + (nums & 65535) + levels_taken, num_level - levels_taken


@triton.jit
def _threshold(keys, num, num_picks, most):
    """Return a key that at least `num_picks` of `num` keys reach, and if possible at most `most`. It is the least one
    if there are no more keys. Also return how many of the keys equal to it are among the first `num_picks`, or more
    than all if all are."""
    down = tl.where(keys != _LEAST, ~keys, _LEAST)
    lowest, highest = tl.split(tl.max(tl.max(tl.join(down, keys), 1), 0))
    low, num_low, num_high = ~lowest, num, 0  # too few keys reach low + span
    span = (highest + 1 - low).to(tl.uint32, bitcast=True)
    while (num_low > most) & (span > 1):
        first, second = _points(span, num_low, num_high, (num_picks + most) // 2)
        nums = tl.sum(tl.sum(_reached(keys, low, first, second), 1), 0)
        low, span, num_low, num_high = _narrow(
            low, span, num_low, num_high, first, second, nums & 65535, nums >> 16, num_picks
        )  # fmt: skip
    return low, tl.where(num_low > num_picks, num_picks - num_high, num_low)


@triton.jit
def _points(span, num_low, num_high, num):
    """Return two distances between 0 and `span`, uint32, in ascending order: the middle, and where `num` keys would be
    if they were evenly spread."""
    share = (num_low - num) / (num_low - num_high)
    near = tl.minimum(tl.maximum((span.to(tl.float32) * share).to(tl.uint32), 1), span - 1)
    return tl.minimum(near, span >> 1), tl.maximum(near, span >> 1)


@triton.jit
def _reached(keys, low, first, second):
    """Return 1 for each key that reaches `low` + `first`, and 2^16 more if it reaches `low` + `second` too."""
    first, second = low + first.to(tl.int32, bitcast=True), low + second.to(tl.int32, bitcast=True)
    return tl.where(keys >= second, 65537, (keys >= first).to(tl.int32))


@triton.jit
def _narrow(low, span, num_low, num_high, first, second, num_first, num_second, num_picks):
    """Return the bounds and how many keys reach them, when so many reach two points between them."""
    is_first, is_second = num_first >= num_picks, num_second >= num_picks
    low += tl.where(is_second, second, tl.where(is_first, first, 0)).to(tl.int32, bitcast=True)
    span = tl.where(is_second, span - second, tl.where(is_first, second - first, first))
    num_low = tl.where(is_second, num_second, tl.where(is_first, num_first, num_low))
    return low, span, num_low, tl.where(is_second, num_high, tl.where(is_first, num_second, num_first))


@triton.jit
def _threshold_of_row(scores_ptr, end, num_picks, RUN: tl.constexpr, ARE_FOURS: tl.constexpr):
    """Return what `_threshold` returns for the keys of all slots of a row, which has more than `num_picks`."""
    low, span = tl.full((), _LEAST + 1, tl.int32), tl.full((), 4294967294, tl.uint32)  # the key of infinity is lower
    num_low, num_high = _count(scores_ptr, end, low, tl.zeros_like(span), span, RUN, ARE_FOURS)
    while (num_low > num_picks) & (span > 1):
        first, second = _points(span, num_low, num_high, num_picks)
        num_first, num_second = _count(scores_ptr, end, low, first, second, RUN, ARE_FOURS)
        low, span, num_low, num_high = _narrow(
            low, span, num_low, num_high, first, second, num_first, num_second, num_picks
        )  # fmt: skip
    return low, tl.where(num_low > num_picks, num_picks - num_high, num_low)


@triton.jit
def _count(scores_ptr, end, low, first, second, RUN: tl.constexpr, ARE_FOURS: tl.constexpr):
    """Return how many keys of a row reach `low` + `first` and `low` + `second`."""
    num_first, num_second = 0, 0
    for begin in range(0, end, RUN):
        keys = _keys(scores_ptr, begin // 4 + tl.arange(0, RUN // 4), end, ARE_FOURS)
        nums = tl.sum(tl.sum(_reached(keys, low, first, second), 1), 0)
        num_first, num_second = num_first + (nums & 65535), num_second + (nums >> 16)
    return num_first, num_second


@triton.jit
def _keys(scores_ptr, fours, end, ARE_FOURS: tl.constexpr):
    """Return whole numbers in the order of the scores of groups of four slots, [num_groups, 4] int32: _LEAST for a slot
    from `end` on and for a score of -inf or NaN. ARE_FOURS: a group that begins below `end` may be read whole."""
    slots = _fours(fours)
    is_slot = slots < end
    scores = tl.load(scores_ptr + slots, mask=(fours * 4 < end)[:, None] if ARE_FOURS else is_slot, other=float("-inf"))
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 is 0
    return tl.where(is_slot & (scores > float("-inf")), bits ^ ((bits >> 31) & 0x7FFFFFFF), _LEAST)
