"""The running softmax of attention on a GPU (FlashAttention-2, arXiv:2307.08691), and the sum of its parts.

A program visits keys tile by tile and keeps three float32 values, its state, about those visited:

    sums     [BLOCK_M, BLOCK_D]   the values, weighted by 2^(score - highest)
    total    [BLOCK_M]            the sum of those weights
    highest  [BLOCK_M]            the highest score so far, in base 2

A layer may have a sink per query head. It is one more score, whose value is 0. The program of a row's first keys
begins with it (`sink_seen`), so it is counted once.

The result of a row is sums / total (`quotient`). If several programs share a row's keys, each stores its state
(`store_part`), in the order of items (triton_shares.py), and the parts are combined:

    parts  [num_items * num_rows, HEAD_DIM] float32      sums
    stats  [2, num_items * num_rows] float32             highest scores, then totals

The last program of a row to arrive combines the parts, or `combine` does in a launch of its own.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .triton_shares import is_last, splits_of, unpacked

# One warp combines 64 dimensions of 32 splits, so that no numbers go through shared memory.
_COMBINED_DIMS, _COMBINED_SPLITS = 64, 32
_LARGEST = tl.constexpr(3.4028234663852886e38)  # float32
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def nothing_seen(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the state before any key: sums [BLOCK_M, BLOCK_D], total and highest [BLOCK_M], float32.

    `highest` is the least float32 instead of -inf, so that a row which has seen nothing makes no NaN."""
    total = tl.zeros([BLOCK_M], tl.float32)
    return tl.zeros([BLOCK_M, BLOCK_D], tl.float32), total, tl.full([BLOCK_M], -_LARGEST, tl.float32)


@triton.jit
def sink_seen(
    sinks_ptr,  # [num_heads] float32; None: there are none
    heads,  # [BLOCK_M] int32, the query head of each row
    has_sink,  # whether the program has the first keys of its rows
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return the state before any key, as `nothing_seen`, after the sink of each row."""
    sums, total, highest = nothing_seen(BLOCK_M, BLOCK_D)
    if sinks_ptr is not None:
        total = tl.where(has_sink, total + 1.0, total)
        highest = tl.where(has_sink, tl.load(sinks_ptr + heads) * _LOG2_E, highest)
    return sums, total, highest


@triton.jit
def weigh(
    scores,  # [BLOCK_M, BLOCK_N] float32, in base 2 once multiplied by scale; -inf: the row does not see the key
    scale,
    values,  # [BLOCK_N, BLOCK_D] of any float dtype
    sums,  # [BLOCK_M, BLOCK_D] float32
    total,  # [BLOCK_M] float32
    highest,  # [BLOCK_M] float32
):
    """Return the state (sums, total, highest) with one more tile of keys. A row with a NaN score becomes NaN."""
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_highest[:, None])
    correction = tl.exp2(highest - new_highest)
    total = total * correction + tl.sum(weights, 1)
    sums = tl.dot(weights.to(values.dtype), values, sums * correction[:, None], input_precision="ieee")
    return sums, total, new_highest


@triton.jit
def weigh_seen(scores, is_seen, scale, values, sums, total, highest):
    """Do `weigh` for keys that may hold NaN or infinities. `is_seen` [BLOCK_M, BLOCK_N] bool says who sees them.

    A key has no influence on a row that does not see it. A row that sees a value which is not finite becomes NaN."""
    is_number = tl.abs(values.to(tl.float32)) <= _LARGEST
    is_bad = tl.max(tl.where(is_number, 0, 1), 1) != 0  # [BLOCK_N]
    values = tl.where(is_number, values, 0.0).to(values.dtype)
    scores = tl.where(is_seen, scores, float("-inf"))
    sums, total, highest = weigh(scores, scale, values, sums, total, highest)
    sees_bad = tl.max((is_seen & is_bad[None, :]).to(tl.int32), 1) != 0
    return sums, tl.where(sees_bad, float("nan"), total), highest


@triton.jit
def has_nan(sums):
    """Return whether any of `sums` is NaN. The caller then weighs all tiles once more, by `weigh_seen`.

    NaN comes from a row's own numbers, or from a value that it does not see: 0 times NaN or infinity is NaN."""
    return tl.max(tl.max((sums != sums).to(tl.int32), 1), 0) != 0


@triton.jit
def quotient(sums, total):
    """Return sums / total, [BLOCK_M, BLOCK_D] float32; 0 for a row that has seen nothing."""
    return sums / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _store_stats(ptr, rows, stride, highest, total, is_row):
    """Store `highest` and `total` [BLOCK_M] at `rows` [BLOCK_M] of `ptr` [2, stride] float32, if `is_row`."""
    tl.store(ptr + rows, highest, mask=is_row)
    tl.store(ptr + stride + rows, total, mask=is_row)


@triton.jit
def store_heads(ptr, rows, values, is_row, dims, HEAD_DIM: tl.constexpr):
    """Store `values` [BLOCK_M, BLOCK_D] at `rows` [BLOCK_M] of `ptr` [all rows, HEAD_DIM].

    Rows without `is_row` [BLOCK_M] bool and dimensions beyond HEAD_DIM are not stored."""
    is_stored = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    tl.store(ptr + rows[:, None] * HEAD_DIM + dims[None, :], values, mask=is_stored)


@triton.jit
def store_part(
    parts_ptr,  # [num_items * num_rows, HEAD_DIM] float32, written
    stats_ptr,  # [2, num_items * num_rows] float32, written
    arrivals_ptr,  # [num_seqs * grid[0]] int32, zeros before and after; None: `combine_kernel` combines
    item,
    seq,
    split,
    num_splits,
    out_rows,  # [BLOCK_M], rows of the output [num_seqs * num_rows, HEAD_DIM]
    num_rows,  # of the output, per sequence
    sums,  # [BLOCK_M, BLOCK_D] float32
    total,  # [BLOCK_M] float32
    highest,  # [BLOCK_M] float32
    is_row,  # [BLOCK_M] bool
    dims,  # [BLOCK_D] int32, 0 .. BLOCK_D - 1
    has_keys,
    HEAD_DIM: tl.constexpr,
):
    """Store the state of one split of a sequence's keys, and return (sums, total, is_row) of what is complete.

    Without arrivals, every split stores its state and returns it. With arrivals, there are three cases. A split that is
    the only one of its sequence stores nothing and returns its own state. The last split to arrive returns the state of
    all splits together. The other splits return an `is_row` of False.

    The caller's grid is (tiles of rows, items, 1) or (tiles of rows, splits, sequences)."""
    stats_stride = tl.num_programs(1) * tl.num_programs(2) * num_rows
    rows = out_rows + (item - seq) * num_rows
    if arrivals_ptr is None or num_splits > 1:
        _store_stats(stats_ptr, rows, stats_stride, highest, total, is_row)
        if has_keys:
            store_heads(parts_ptr, rows, sums, is_row, dims, HEAD_DIM)
    if arrivals_ptr is not None:  # noqa: SIM102
        if num_splits > 1:
            is_row &= is_last(arrivals_ptr + seq * tl.num_programs(0) + tl.program_id(0), num_splits)
            rows -= split * num_rows
            sums, total = _gathered(
                parts_ptr, stats_ptr, rows, num_rows, num_splits, stats_stride, is_row, dims, HEAD_DIM
            )
    return sums, total, is_row


@triton.jit
def _gathered(parts_ptr, stats_ptr, rows, num_rows, num_splits, stats_stride, is_row, dims, HEAD_DIM: tl.constexpr):
    """Return (sums, total) of all splits together, read from memory. The first split's state is at `rows`, the next
    ones' `num_rows` further each. The sums of a split with total 0 are not read, because it stored none."""
    sums, total, highest = nothing_seen(rows.shape[0], dims.shape[0])
    is_dim = dims[None, :] < HEAD_DIM
    for _ in range(num_splits):
        other_highest = tl.load(stats_ptr + rows, mask=is_row, other=-_LARGEST)
        other_total = tl.load(stats_ptr + stats_stride + rows, mask=is_row, other=0.0)
        is_read = (is_row & (other_total != 0.0))[:, None] & is_dim
        others = tl.load(parts_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=is_read, other=0.0)
        new_highest = tl.maximum(highest, other_highest)
        correction, weight = tl.exp2(highest - new_highest), tl.exp2(other_highest - new_highest)
        sums = sums * correction[:, None] + others * weight[:, None]
        total = total * correction + other_total * weight
        highest = new_highest
        rows += num_rows
    return sums, total


def combine(
    out: Tensor,
    parts: Tensor,
    stats: Tensor,
    firsts: Tensor | None,
    seq_lens: Tensor,
    most_splits: int,
    min_split: int,
    *,
    dependent: bool,
) -> None:
    """Combine the splits of all rows: write `out` [num_tokens, num_heads, head_dim], by a launch of its own.

    `parts` [num_items * num_rows, head_dim] and `stats` [2, num_items * num_rows] are float32, for num_rows rows of a
    sequence. A sequence has at most `most_splits`. `firsts` are those of `Shares`; None: it has `most_splits` items, of
    which it uses as many as its length in `seq_lens` [num_seqs] int64 allows."""
    head_dim, num_seqs = out.shape[2], len(seq_lens if firsts is None else firsts)
    num_rows, splits = out.shape[0] * out.shape[1] // num_seqs, triton.next_power_of_2(most_splits)
    combine_kernel[(num_rows, num_seqs, triton.cdiv(head_dim, _COMBINED_DIMS))](
        out, parts, stats, firsts, seq_lens, most_splits, stats.shape[1], HEAD_DIM=head_dim,
        SPLITS=min(splits, _COMBINED_SPLITS), HAS_MORE=splits > _COMBINED_SPLITS, MIN_SPLIT=min_split,
        BLOCK_D=_COMBINED_DIMS, DEPENDENT=dependent, num_warps=1, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit(do_not_specialize=("num_splits", "stats_stride"))
def combine_kernel(
    out_ptr,  # [num_seqs * num_rows, HEAD_DIM] of any float dtype, written
    parts_ptr,  # [num_items * num_rows, HEAD_DIM] float32
    stats_ptr,  # [2, num_items * num_rows] float32, halves stats_stride apart
    firsts_ptr,  # [num_seqs] int64 of `Shares`; None: each sequence has num_splits items, and uses `splits_of` of them
    seq_lens_ptr,  # [num_seqs] int64, read without firsts
    num_splits,
    stats_stride,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,  # that are read at once, a power of two
    HAS_MORE: tl.constexpr,  # a sequence may have more
    MIN_SPLIT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_rows, num_seqs, ceil(HEAD_DIM / BLOCK_D)). Combine the splits of one row, in BLOCK_D dimensions.

    A split with total 0 saw no key. Its sums have no influence, whatever memory holds."""
    row, num_rows, seq = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    if firsts_ptr is None:  # loads all splits at once, and does not wait for the number that it uses
        first, num_read = seq * num_splits, num_splits
        num_splits = splits_of(tl.load(seq_lens_ptr + seq).to(tl.int32), num_splits, MIN_SPLIT)
    else:
        first, _, num_splits = unpacked(tl.load(firsts_ptr + seq))
        num_read = num_splits
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    dims = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    parts_ptr += row.to(tl.int64) * HEAD_DIM + dims[None, :]
    is_dim = dims[None, :] < HEAD_DIM
    sums, total = tl.zeros((BLOCK_D,), dtype=tl.float32), tl.zeros((), dtype=tl.float32)
    highest = tl.full((), -_LARGEST, dtype=tl.float32)
    for start in range(0, num_read if HAS_MORE else 1, SPLITS):
        splits = start + tl.arange(0, SPLITS)
        rows, is_read = (first + splits) * num_rows, splits < num_read
        scores = tl.load(stats_ptr + rows + row, mask=is_read, other=-_LARGEST)
        totals = tl.load(stats_ptr + stats_stride + rows + row, mask=is_read, other=0.0)
        parts = tl.load(parts_ptr + rows.to(tl.int64)[:, None] * HEAD_DIM, mask=is_read[:, None] & is_dim, other=0.0)
        is_used = (splits < num_splits) & (totals != 0.0)
        scores = tl.where(is_used, scores, -_LARGEST)
        before, highest = highest, tl.maximum(highest, tl.max(scores, 0))
        weights = tl.where(is_used, tl.exp2(scores - highest), 0.0)
        kept = tl.exp2(before - highest)
        sums = sums * kept + tl.sum(tl.where(is_used[:, None], parts, 0.0) * weights[:, None], 0)
        total = total * kept + tl.sum(tl.where(is_used, totals, 0.0) * weights, 0)
    out = (sums / tl.where(total == 0.0, 1.0, total)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (seq * num_rows + row).to(tl.int64) * HEAD_DIM + dims, out, mask=dims < HEAD_DIM)
