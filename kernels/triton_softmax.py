"""The running softmax of attention on a GPU (FlashAttention-2, arXiv:2307.08691), and the sum of its parts.

A program that has seen some of a row's keys holds `sums` [BLOCK_M, BLOCK_D] of weighted values and, for each row, the
`total` of the weights and the `highest` score, in base 2. Parts of items (triton_shares.py) lie in memory as `parts`
[num_items * num_rows, HEAD_DIM] and `stats` [2, num_items * num_rows]: highest scores, then totals; float32.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .triton_shares import is_last, splits_of, unpacked


@triton.jit
def nothing_seen(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the start of `weigh`: sums [BLOCK_M, BLOCK_D], totals and highest scores [BLOCK_M], float32."""
    total = tl.zeros([BLOCK_M], tl.float32)
    return tl.zeros([BLOCK_M, BLOCK_D], tl.float32), total, tl.full([BLOCK_M], -3.4028234663852886e38, tl.float32)


@triton.jit
def weigh(scores, scale, values, sums, total, highest):
    """Add one tile to the running softmax in base 2. `scores` [BLOCK_M, BLOCK_N] are multiplied by `scale`; -inf:
    unseen.

    A row starts with the least float32 as `highest`, so that a row that has seen nothing makes no NaN. NaN of scores
    stays."""
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_highest[:, None])
    correction = tl.exp2(highest - new_highest)
    total = total * correction + tl.sum(weights, 1)
    sums = tl.dot(weights.to(values.dtype), values, sums * correction[:, None], input_precision="ieee")
    return sums, total, new_highest


@triton.jit
def weigh_seen(scores, is_seen, scale, values, sums, total, highest):
    """Do `weigh` so that keys of which `is_seen` [BLOCK_M, BLOCK_N] is False have no influence, even if they are NaN. A
    row that sees a value that is not finite becomes NaN."""
    is_number = tl.abs(values.to(tl.float32)) <= 3.4028234663852886e38
    is_bad = tl.max(tl.where(is_number, 0, 1), 1) != 0  # [BLOCK_N]
    values = tl.where(is_number, values, 0.0).to(values.dtype)
    scores = tl.where(is_seen, scores, float("-inf"))
    sums, total, highest = weigh(scores, scale, values, sums, total, highest)
    sees_bad = tl.max((is_seen & is_bad[None, :]).to(tl.int32), 1) != 0
    return sums, tl.where(sees_bad, float("nan"), total), highest


@triton.jit
def has_nan(sums):
    """Return whether a row may have met a NaN or an infinity, of its own or of a key that it does not see, because 0
    times either is NaN. Then the tiles are weighed once more, by `weigh_seen`."""
    return tl.max(tl.max((sums != sums).to(tl.int32), 1), 0) != 0


@triton.jit
def quotient(sums, total):
    """Return sums over totals; 0 if nothing was seen."""
    return sums / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _store_stats(ptr, rows, stride, highest, total, is_row):
    """Store the numbers of rows where `combine_kernel` reads them."""
    tl.store(ptr + rows, highest, mask=is_row)
    tl.store(ptr + stride + rows, total, mask=is_row)


@triton.jit
def store_heads(ptr, rows, values, is_row, dims, HEAD_DIM: tl.constexpr):
    """Store `values` [rows, BLOCK_D], as far as there are rows and dimensions."""
    is_stored = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    tl.store(ptr + rows[:, None] * HEAD_DIM + dims[None, :], values, mask=is_stored)


@triton.jit
def store_part(
    parts_ptr, stats_ptr, arrivals_ptr, item, seq, split, num_splits, out_rows, num_rows, sums, total, highest, is_row,
    dims, has_keys, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Store a split's part of `out_rows` where `combine_kernel` reads it, `num_rows` per item.

    With arrivals, a split that is alone stores nothing and returns its own (sums, total, rows). The last of several
    returns (sums, total) of all; the others return no rows."""
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
    """Return (sums, total) over all splits. Those of the first split are at `rows`. A split without keys has total 0
    and no sums."""
    sums, total, highest = nothing_seen(rows.shape[0], dims.shape[0])
    is_dim = dims[None, :] < HEAD_DIM
    for _ in range(num_splits):
        other_highest = tl.load(stats_ptr + rows, mask=is_row, other=-3.4028234663852886e38)
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


@triton.jit(do_not_specialize=("num_splits", "stats_stride"))
def combine_kernel(
    out_ptr, parts_ptr, stats_ptr, firsts_ptr, seq_lens_ptr, num_splits, stats_stride,
    HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: (rows of an item, sequences, blocks of dimensions). A split without keys has total 0 and no sums."""
    row, num_rows, seq = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    if firsts_ptr is None:  # all are read while it finds out how many count
        first, num_read = seq * num_splits, num_splits
        num_splits = splits_of(tl.load(seq_lens_ptr + seq).to(tl.int32), num_splits, MIN_SPLIT)
    else:
        first, _, num_splits = unpacked(tl.load(firsts_ptr + seq))
        num_read = num_splits
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    splits, dims = tl.arange(0, SPLITS), tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    rows, is_read = (first + splits) * num_rows + row, splits < num_read
    scores = tl.load(stats_ptr + rows, mask=is_read, other=-3.4028234663852886e38)
    totals = tl.load(stats_ptr + stats_stride + rows, mask=is_read, other=0.0)
    parts = parts_ptr + rows.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    parts = tl.load(parts, mask=is_read[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    is_used = (splits < num_splits) & (totals != 0.0)
    scores = tl.where(is_used, scores, -3.4028234663852886e38)
    weights = tl.where(is_used, tl.exp2(scores - tl.max(scores, 0)), 0.0)
    sums = tl.sum(tl.where(is_used[:, None], parts, 0.0) * weights[:, None], 0)
    total = tl.sum(tl.where(is_used, totals, 0.0) * weights, 0)
    out = (sums / tl.where(total == 0.0, 1.0, total)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (seq * num_rows + row).to(tl.int64) * HEAD_DIM + dims, out, mask=dims < HEAD_DIM)
