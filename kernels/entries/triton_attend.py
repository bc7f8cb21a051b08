"""Attention to a window and entries by Triton. entries.py has the formula, paged_entries.py the places.

A program works on some heads of one token: all share one key per slot, which is also the value. So even one token fills
the rows of tensor cores, and each token has keys of its own. The program visits the tiles of the token's window and
then those of its entries. If few programs exist, several share a token's tiles, and another launch combines what they
found (triton_softmax.py). Outputs are rotated back at the end.

The host reads no tensor's value, and grids depend on shapes alone. So a CUDA graph can hold all launches.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from ..attention.triton_attention import num_sms, padded
from ..attention.triton_softmax import quotient, sink_seen, weigh
from .paged_entries import EntryRows, TokenPlan
from .triton_heads import turned, turns_of

_MAX_SPLITS = 64  # of a token; as many are combined at once
_PAIRS = 64  # of numbers that a program combines


class AttendTiles(NamedTuple):
    """The sizes of tiles, and the division of a token's keys."""

    block_m: int  # heads
    block_n: int  # keys
    num_splits: int
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, q: Tensor, most_keys: int) -> AttendTiles:
        """Choose by shapes and the device alone. `most_keys`: that a token may see."""
        num_tokens, num_heads, _ = q.shape
        sms = num_sms(q.device)
        if q.dtype == torch.float32:  # no tensor cores; for tests more than for speed
            block_m, block_n, num_warps, num_stages = 16, 16, 4, 1
        elif num_heads >= 64 and num_tokens * num_heads >= 64 * sms:
            block_m, block_n, num_warps, num_stages = 64, 32, 8, 3
        else:
            block_m, block_n, num_warps, num_stages = 16, 32, 4, 3
        num_tiles = num_tokens * triton.cdiv(num_heads, block_m)
        num_splits = max(1, min(triton.cdiv(most_keys, block_n), 2 * sms // num_tiles, _MAX_SPLITS))
        return cls(block_m, block_n, num_splits, num_warps, num_stages)


def attend_entries(
    q: Tensor,
    keys_layer: Tensor,
    entries: EntryRows | None,
    sinks: Tensor,
    frequencies: Tensor,
    window: int,
    plan: TokenPlan,
    tiles: AttendTiles | None = None,
) -> Tensor:
    """Return the attention of `q` [num_tokens, num_heads, width], rotated back, a new tensor of its shape.

    `keys_layer` [num_pages, 1, 1, page_size, width] has the keys of tail pages. `sinks` [num_heads] float32. Rows that
    a token does not see are not read. The result of a token without a place is 0."""
    (num_tokens, num_heads, width), page_size = q.shape, keys_layer.shape[3]
    assert q.is_contiguous() and keys_layer.is_contiguous() and keys_layer.shape[4] == width, (q.shape, keys_layer)
    assert q.dtype == keys_layer.dtype and sinks.shape == (num_heads,) and sinks.dtype == torch.float32, sinks.shape
    out = torch.empty_like(q)
    if not num_tokens:
        return out
    layer, rate, picked = entries or EntryRows(keys_layer, 1)
    rows, counts = picked or (None, None)
    num_picks, most = 0, 0
    if entries is not None:
        assert layer.is_contiguous() and layer.dtype == q.dtype and layer.shape[3] == page_size, layer.shape
        most = plan.table.shape[1] * page_size // rate
        if rows is not None:
            num_picks = most = rows.shape[1]
    tiles = tiles or AttendTiles.choose(q, window + most)
    block_m, block_n, num_splits = tiles[:3]
    parts = stats = None
    if num_splits > 1:
        parts = torch.empty((num_tokens, num_splits, num_heads, width), dtype=torch.float32, device=q.device)
        stats = torch.empty((2, num_tokens, num_splits, num_heads), dtype=torch.float32, device=q.device)
    dependent = gpu.dependent_launch(num_tokens)
    sizes = {"HEADS": num_heads, "WIDTH": width, "PAIRS": len(frequencies), "DEPENDENT": dependent}
    _attend_kernel[(num_tokens, triton.cdiv(num_heads, block_m), num_splits)](
        out, parts, stats, q, keys_layer, layer, plan.tail_table, plan.table, rows, counts, plan.seqs, plan.slots,
        sinks, frequencies, plan.tail_table.stride(0), plan.table.stride(0), num_picks, num_tokens,
        width**-0.5 * math.log2(math.e), WINDOW=window, HAS_ENTRIES=entries is not None, RATE=rate,
        STRIDE=rate * layer.shape[4], PAGE_SIZE=page_size, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=padded(width),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, launch_pdl=dependent, **sizes,
    )  # fmt: skip
    if parts is not None and stats is not None:
        _combine_kernel[(num_tokens, num_heads, triton.cdiv(width, 2 * _PAIRS))](
            out, parts, stats, plan.slots, frequencies, num_tokens, num_splits,
            SPLITS=triton.next_power_of_2(num_splits), BLOCK_P=_PAIRS, num_warps=2, launch_pdl=dependent,
            **sizes,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=("tail_stride", "table_stride", "num_tokens"))
def _attend_kernel(
    out_ptr,  # [num_tokens, HEADS, WIDTH] of q's dtype, written without parts
    parts_ptr,  # [num_tokens, num_splits, HEADS, WIDTH] float32, written; None: a program has all keys of its heads
    stats_ptr,  # [2, num_tokens, num_splits, HEADS] float32, written likewise
    q_ptr,  # [num_tokens, HEADS, WIDTH]
    keys_ptr,  # [num_tail_pages, PAGE_SIZE, WIDTH] of q's dtype
    entries_ptr,  # [num_pages, PAGE_SIZE / RATE, STRIDE] of q's dtype, if HAS_ENTRIES
    tails_ptr,  # [num_seqs, max_pages] int64, rows tail_stride apart
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    rows_ptr,  # [num_tokens, num_picks] int64, rows of entries; None: all that the token sees
    counts_ptr,  # [num_tokens] int64, of rows
    seqs_ptr,  # [num_tokens] int32
    slots_ptr,  # [num_tokens] int32
    sinks_ptr,  # [HEADS] float32
    frequencies_ptr,  # [PAIRS] float32
    tail_stride,
    table_stride,
    num_picks,
    num_tokens,
    scale,
    WINDOW: tl.constexpr,
    HAS_ENTRIES: tl.constexpr,
    RATE: tl.constexpr,
    STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_tokens, blocks of heads, num_splits)."""
    token, split, num_splits = tl.program_id(0).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    slot, seq = tl.load(slots_ptr + token), tl.load(seqs_ptr + token).to(tl.int64)
    heads, dims, columns = (
        tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M),
        tl.arange(0, BLOCK_D),
        tl.arange(0, BLOCK_N),
    )
    is_head = heads < HEADS
    is_number = is_head[:, None] & (dims < WIDTH)[None, :]
    at = (token * HEADS + heads)[:, None] * WIDTH + dims[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    q = tl.load(q_ptr + at, mask=is_number, other=0.0)
    begin = tl.maximum(slot - WINDOW + 1, 0)
    first = begin // BLOCK_N  # tile of the window
    num_window = slot // BLOCK_N - first + 1
    num_entries = 0
    if HAS_ENTRIES:
        num_entries = (slot + 1) // RATE if rows_ptr is None else tl.load(counts_ptr + token).to(tl.int32)
    if slot < 0:
        num_window, num_entries = 0, 0
    num_tiles = num_window + tl.cdiv(num_entries, BLOCK_N)
    of_split = tl.cdiv(num_tiles, num_splits)
    low = split * of_split
    high = tl.minimum(low + of_split, num_tiles)
    has_sink = (split == 0) & (slot >= 0)
    sums, total, highest = sink_seen(sinks_ptr, tl.minimum(heads, HEADS - 1), has_sink, BLOCK_M, BLOCK_D)
    tails_ptr += seq * tail_stride
    for tile in tl.range(low, tl.minimum(high, num_window)):
        slots = (first + tile) * BLOCK_N + columns
        is_seen = (slots >= begin) & (slots <= slot)
        pages = tl.load(tails_ptr + slots // PAGE_SIZE, mask=is_seen, other=0)
        key_rows = pages * PAGE_SIZE + slots % PAGE_SIZE
        is_key = is_seen[:, None] & (dims < WIDTH)[None, :]
        keys = tl.load(keys_ptr + key_rows[:, None] * WIDTH + dims[None, :], mask=is_key, other=0.0)
        sums, total, highest = _weighed(q, keys, is_seen, scale, sums, total, highest)
    if HAS_ENTRIES:
        table_ptr += seq * table_stride
        for tile in tl.range(tl.maximum(low, num_window), high):
            places = (tile - num_window) * BLOCK_N + columns
            is_seen = places < num_entries
            if rows_ptr is None:
                pages = tl.load(table_ptr + places // (PAGE_SIZE // RATE), mask=is_seen, other=0)
                entry_rows = pages * (PAGE_SIZE // RATE) + places % (PAGE_SIZE // RATE)
            else:
                entry_rows = tl.load(rows_ptr + token * num_picks + places, mask=is_seen, other=0)
            is_key = is_seen[:, None] & (dims < WIDTH)[None, :]
            keys = tl.load(entries_ptr + entry_rows[:, None] * STRIDE + dims[None, :], mask=is_key, other=0.0)
            sums, total, highest = _weighed(q, keys, is_seen, scale, sums, total, highest)
    if parts_ptr is None:
        out = _turned_back(quotient(sums, total), tl.maximum(slot, 0), frequencies_ptr, WIDTH, PAIRS, BLOCK_M, BLOCK_D)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=is_number)
    else:
        rows = (token * num_splits + split) * HEADS + heads
        tl.store(stats_ptr + rows, highest, mask=is_head)
        tl.store(stats_ptr + num_tokens.to(tl.int64) * num_splits * HEADS + rows, total, mask=is_head)
        tl.store(parts_ptr + rows[:, None] * WIDTH + dims[None, :], sums, mask=is_number & (low < high))


@triton.jit
def _weighed(q, keys, is_seen, scale, sums, total, highest):
    """Return the state of the softmax with one more tile of keys [BLOCK_N, BLOCK_D], which are also values."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    return weigh(tl.where(is_seen[None, :], scores, float("-inf")), scale, keys, sums, total, highest)


@triton.jit
def _turned_back(
    x, slot, frequencies_ptr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Return heads `x` [BLOCK_M, BLOCK_D] rotated by the opposite of a position."""
    cos, sin = turns_of(slot, tl.arange(0, BLOCK_D // 2), frequencies_ptr, WIDTH, PAIRS)
    even, odd = tl.split(tl.reshape(x, [BLOCK_M, BLOCK_D // 2, 2]))
    even, odd = turned(even, odd, cos[None, :], -sin[None, :])
    return tl.reshape(tl.join(even, odd), [BLOCK_M, BLOCK_D])


@triton.jit(do_not_specialize=("num_tokens", "num_splits"))
def _combine_kernel(
    out_ptr,  # [num_tokens, HEADS, WIDTH], written
    parts_ptr,  # [num_tokens, num_splits, HEADS, WIDTH] float32
    stats_ptr,  # [2, num_tokens, num_splits, HEADS] float32
    slots_ptr,  # [num_tokens] int32
    frequencies_ptr,  # [PAIRS] float32
    num_tokens,
    num_splits,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_tokens, HEADS, ceil(WIDTH / 2 / BLOCK_P)). Sums of a split whose total is 0 may be anything."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    splits, pairs = tl.arange(0, SPLITS), tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    rows = (token * num_splits + splits) * HEADS + head
    is_split = splits < num_splits
    cos, sin = turns_of(tl.maximum(slot, 0), pairs, frequencies_ptr, WIDTH, PAIRS)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    highest = tl.load(stats_ptr + rows, mask=is_split, other=-3.4028234663852886e38)
    totals = tl.load(stats_ptr + num_tokens.to(tl.int64) * num_splits * HEADS + rows, mask=is_split, other=0.0)
    weights = tl.where(totals != 0.0, tl.exp2(highest - tl.max(highest, 0)), 0.0)
    total = tl.sum(totals * weights, 0)
    is_read = (is_split & (totals != 0.0))[:, None] & (2 * pairs < WIDTH)[None, :]
    ptrs = parts_ptr + rows[:, None] * WIDTH + 2 * pairs[None, :]
    share = weights / tl.where(total == 0.0, 1.0, total)
    even = tl.sum(tl.load(ptrs, mask=is_read, other=0.0) * share[:, None], 0)
    odd = tl.sum(tl.load(ptrs + 1, mask=is_read, other=0.0) * share[:, None], 0)
    even, odd = turned(even, odd, cos, -sin)
    out_ptr += (token * HEADS + head) * WIDTH + 2 * pairs
    tl.store(out_ptr, even.to(out_ptr.dtype.element_ty), mask=2 * pairs < WIDTH)
    tl.store(out_ptr + 1, odd.to(out_ptr.dtype.element_ty), mask=2 * pairs < WIDTH)
