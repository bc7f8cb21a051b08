"""Attention of prefill chunks over paged KV on a GPU: `extend_attention`, the other half of triton_attention.py.

A program works on a tile of BLOCK_M rows of one sequence. A row is a pair of a token and a query head of one kv head.
The program visits all slots up to the one of the tile's last token. A tile holds few tokens and all query heads of the
kv head, so few keys are seen by some of its rows only.

Sequences have unlike numbers of tokens, and their lengths are on the device. Tile t belongs to the last sequence s with

    starts[s] * group // BLOCK_M + s <= t

So each sequence gets as many tiles as it needs or one more, and shapes alone bound the number of tiles.

If fewer tiles exist than run at once, programs share a tile's keys (triton_shares.py). An example is a short prompt
behind a long prefix.
"""

# ruff: noqa: N803, N806, RET505
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..products.fp8 import E4M3
from ..state.fp8_pages import block_size, scales_of
from .paged_plan import PagedPlan
from .triton_attention import (
    check_shapes,
    empty_parts,
    load_pages,
    num_sms,
    padded,
    rows_that_fit,
    scaled,
    softmax_scale,
    stages_that_fit,
    tile_keys,
    tile_pointers,
    tile_rows,
    value_dim,
    value_pointers,
)
from .triton_pairs import in_pairs, packed
from .triton_shares import Shares, max_splits, unpacked
from .triton_softmax import has_nan, quotient, sink_seen, store_heads, store_part, weigh, weigh_seen

_SEQS = 32  # sequences that `tile_at` looks at in one step
_MIN_SPLIT = 512  # keys; shorter splits cost more to combine than they save, as a tile has many rows
_MAX_REGISTERS = 128  # per thread, so that two programs of 8 warps fit on a processor


class ExtendTiles(NamedTuple):
    """The sizes of `extend_attention`'s tiles."""

    block_m: int  # rows: pairs of a token and a query head
    block_n: int  # keys
    num_slots: int  # tiles that run at once; each has a program per kv head
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, q: torch.Tensor, kv_layer: torch.Tensor) -> ExtendTiles:
        """Choose from shapes and the device alone."""
        num_slots = max(1, _per_sm(q) * num_sms(q.device) // kv_layer.shape[2])
        if q.dtype == torch.float32:  # no tensor cores; for tests more than for speed
            block_n = min(32, tile_keys(q))
            return cls(32, block_n, num_slots, num_warps=8, num_stages=stages_that_fit(q, block_n, 2))
        block_m = min(128, rows_that_fit(q.shape[2], num_warps=8))
        return cls(block_m, tile_keys(q), num_slots, num_warps=8, num_stages=3)


def extend_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: PagedPlan,
    window: int | None = None,
    tiles: ExtendTiles | None = None,
    out: torch.Tensor | None = None,
    *,
    sinks: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `paged_attention_ref` of a causal plan with `starts`: contiguous `out` or a new tensor, of q's shape.

    `q` [num_tokens, num_heads, head_dim], `kv_layer` [num_pages, 2, num_kv_heads, page_size, head_dim], `sinks`
    [num_heads] and `values` are as in `decode_attention`. A sequence may have no new tokens. Rows of a sequence of
    length 0 are 0."""
    num_tokens, num_heads, head_dim = check_shapes(q, kv_layer, plan, values)
    num_kv_heads, page_size, starts = kv_layer.shape[2], kv_layer.shape[3], plan.starts
    num_seqs = len(plan.seq_lens)
    assert starts is not None and plan.visible is None and starts.shape == (num_seqs + 1,), plan
    tiles = tiles or ExtendTiles.choose(q, kv_layer)
    group = num_heads // num_kv_heads
    scales = scales_of(kv_layer) if kv_layer.dtype == E4M3 else None
    num_tiles = num_tokens * group // tiles.block_m + num_seqs
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    assert out.is_contiguous() and (out.shape, out.dtype) == (q.shape, q.dtype), (out.shape, out.dtype)
    shares = parts = stats = None
    if num_tiles < 2 * tiles.num_slots and plan.block_table.shape[1] * page_size > _MIN_SPLIT:
        shares = plan.shares(tile_shares, num_tiles, group, tiles.block_m, tiles.num_slots, num_kv_heads, _MIN_SPLIT)
        parts, stats = empty_parts(len(shares.items) * num_kv_heads * tiles.block_m, head_dim, q.device)
    items, arrivals = (None, None) if shares is None else (shares.items, shares.arrivals)
    _extend_kernel[(num_tiles, num_kv_heads) if items is None else (num_kv_heads, len(items))](
        out, parts, stats, items, arrivals, q, in_pairs(q, kv_layer), values, scales, sinks, plan.block_table,
        plan.seq_lens, starts, num_seqs, window or 0, q.stride(0), plan.block_table.stride(0), softmax_scale(head_dim),
        HAS_WINDOW=window is not None, NUM_KV_HEADS=num_kv_heads, GROUP=group, PAGE_SIZE=page_size, HEAD_DIM=head_dim,
        BLOCK=block_size(kv_layer), VALUE_DIM=value_dim(kv_layer, values), BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n, BLOCK_D=padded(head_dim), SEQS=_SEQS,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        maxnreg=_MAX_REGISTERS if _per_sm(q) > 1 and tiles.num_warps == 8 else None,
    )  # fmt: skip
    return out


def _per_sm(q: torch.Tensor) -> int:
    """Return how many programs fit into the shared memory of a processor."""
    return 2 if padded(q.shape[2]) * q.itemsize <= 128 else 1


def tile_shares(
    plan: PagedPlan, num_tiles: int, group: int, block_m: int, num_slots: int, num_kv_heads: int, min_split: int
) -> Shares:
    """Return the division of the keys of `num_tiles` tiles among programs, by the number of keys of each tile."""
    assert plan.starts is not None
    num_keys = torch.empty(num_tiles, dtype=torch.int64, device=plan.seq_lens.device)
    _keys_kernel[(num_tiles,)](
        num_keys, plan.seq_lens, plan.starts, len(plan.seq_lens), GROUP=group, BLOCK_M=block_m, SEQS=_SEQS, num_warps=1
    )
    most = max_splits(num_sms(plan.seq_lens.device), num_kv_heads)
    return Shares.of(num_keys, num_slots, most, num_kv_heads, min_split, gathers=True)


@triton.jit(do_not_specialize=("num_seqs", "window", "table_stride"))
def _extend_kernel(
    out_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM] of q's dtype, written
    parts_ptr,  # [num_items * NUM_KV_HEADS * BLOCK_M, HEAD_DIM] float32, written with items
    stats_ptr,  # [2, num_items * NUM_KV_HEADS * BLOCK_M] float32, written with items
    items_ptr,  # [num_items] int64 of `Shares` of tiles; None: a program has all keys of its tile
    arrivals_ptr,  # [num_tiles * NUM_KV_HEADS] int32, with items
    q_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM], tokens q_stride apart
    kv_ptr,  # [num_pages, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM] of q's dtype, e4m3 or pairs of it, blocks BLOCK apart
    v_ptr,  # [num_pages, NUM_KV_HEADS, PAGE_SIZE, VALUE_DIM], if kv_ptr has keys alone; None: it has both
    scales_ptr,  # [num_pages, 2, NUM_KV_HEADS, PAGE_SIZE] float32, blocks BLOCK / 4 apart; None: no scales
    sinks_ptr,  # [NUM_KV_HEADS * GROUP] float32; None: there are none
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    seq_lens_ptr,  # [num_seqs] int64
    starts_ptr,  # [num_seqs + 1] int32
    num_seqs,
    window,
    q_stride,
    table_stride,
    scale,
    HAS_WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SEQS: tl.constexpr,
):
    """Grid: (num_tiles, NUM_KV_HEADS), or (NUM_KV_HEADS, num_items) with items. A tile may have no rows.

    Without items the last tiles run first, because the last tiles of a sequence have most keys."""
    tile, kv_head, split, num_splits = tile_work(items_ptr)
    seq, start, query_len, first_row = tile_at(starts_ptr, num_seqs, tile, GROUP, BLOCK_M, SEQS)
    if (first_row < query_len * GROUP) & (num_splits > 0):
        seq_len = tl.load(seq_lens_ptr + seq).to(tl.int32)
        table_ptr += seq.to(tl.int64) * table_stride
        tokens, heads, is_row = tile_rows(first_row, kv_head, query_len, GROUP, BLOCK_M)
        last_seen = seq_len - query_len + tokens
        begin, full, end = _span(last_seen, window, items_ptr, split, num_splits, HAS_WINDOW, BLOCK_N)
        dims = tl.arange(0, BLOCK_D)
        is_dim = dims[None, :] < HEAD_DIM
        batch_tokens = (start + tokens).to(tl.int64)
        q_ptrs = q_ptr + (batch_tokens * q_stride + heads * HEAD_DIM)[:, None] + dims[None, :]
        q = tl.load(q_ptrs, mask=is_row[:, None] & is_dim, other=0.0)
        PACKED: tl.constexpr = packed(kv_ptr)
        columns = tl.arange(0, BLOCK_D // PACKED)[None, :]
        is_column = columns < HEAD_DIM // PACKED
        is_value = columns < VALUE_DIM // PACKED
        k_ptrs = kv_ptr + kv_head * (BLOCK // PACKED) + columns
        v_ptrs = None if v_ptr is None else v_ptr + kv_head * (PAGE_SIZE * VALUE_DIM) + dims[None, :]
        if scales_ptr is not None:
            scales_ptr += kv_head * (BLOCK // 4)
        V_OFFSET: tl.constexpr = NUM_KV_HEADS * BLOCK
        sums, total, highest = sink_seen(sinks_ptr, heads, split == 0, BLOCK_M, BLOCK_D)
        pages = load_pages(table_ptr, begin, end, PAGE_SIZE, BLOCK_N)
        for first in range(begin, full, BLOCK_N):
            slots = first + tl.arange(0, BLOCK_N)
            tile_ptrs = tile_pointers(k_ptrs, v_ptrs, pages, slots, PAGE_SIZE, HEAD_DIM, V_OFFSET)
            tile_pages = pages
            pages = load_pages(table_ptr, first + BLOCK_N, end, PAGE_SIZE, BLOCK_N)
            k = _load(tile_ptrs, is_column, HEAD_DIM == BLOCK_D)
            k = scaled(k, scales_ptr, 0, tile_pages, slots, slots < full, q.dtype, PAGE_SIZE, V_OFFSET)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            its_values = value_pointers(
                tile_ptrs, v_ptrs, tile_pages, slots, PAGE_SIZE, HEAD_DIM, VALUE_DIM, V_OFFSET
            )  # fmt: skip
            v = _load(its_values, is_value, VALUE_DIM == BLOCK_D)
            v = scaled(v, scales_ptr, 1, tile_pages, slots, slots < full, q.dtype, PAGE_SIZE, V_OFFSET)
            sums, total, highest = weigh(scores, scale, v, sums, total, highest)
        sums, total, highest = _weighted(
            q, k_ptrs, v_ptrs, scales_ptr, table_ptr, pages, full, end, last_seen, window, scale, sums, total, highest,
            False, HAS_WINDOW, PAGE_SIZE, HEAD_DIM, VALUE_DIM, V_OFFSET, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        if has_nan(sums):
            FEW_KEYS: tl.constexpr = 16  # per tile, so that `weigh_seen` needs no more registers than `weigh`
            its_pages = load_pages(table_ptr, begin, end, PAGE_SIZE, FEW_KEYS)
            sums, total, highest = sink_seen(sinks_ptr, heads, split == 0, BLOCK_M, BLOCK_D)
            sums, total, highest = _weighted(
                q, k_ptrs, v_ptrs, scales_ptr, table_ptr, its_pages, begin, end, last_seen, window, scale, sums, total,
                highest, True, HAS_WINDOW, PAGE_SIZE, HEAD_DIM, VALUE_DIM, V_OFFSET, FEW_KEYS, BLOCK_D,
            )  # fmt: skip
        if items_ptr is not None:
            sums, total, is_row = store_part(
                parts_ptr, stats_ptr, arrivals_ptr, tl.program_id(1), tile, split, num_splits,
                (tile * NUM_KV_HEADS + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M), NUM_KV_HEADS * BLOCK_M,
                sums, total, highest, is_row, dims, begin < end, HEAD_DIM,
            )  # fmt: skip
        out = quotient(sums, total).to(out_ptr.dtype.element_ty)
        out_rows = batch_tokens * (NUM_KV_HEADS * GROUP) + heads
        store_heads(out_ptr, out_rows, out, is_row, dims, HEAD_DIM)


@triton.jit
def _weighted(
    q,  # [BLOCK_M, BLOCK_D]
    k_ptrs,  # [1, BLOCK_D / PACKED] pointers to the keys of the kv head in page 0
    v_ptrs,  # [1, BLOCK_D] pointers to its values; None: they lie behind the keys
    scales_ptr,  # their scales; None: keys and values have q's dtype
    table_ptr,  # [max_pages] int64, of the sequence
    pages,  # int32, the pages of the first tile, from `load_pages`
    begin,
    end,
    last_seen,  # [BLOCK_M] int32, the last slot that each row sees
    window,
    scale,
    sums,  # [BLOCK_M, BLOCK_D] float32
    total,  # [BLOCK_M] float32
    highest,  # [BLOCK_M] float32
    SELECTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    V_OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Continue the running softmax (triton_softmax.py) over slots begin .. end - 1, which a row may see in part.

    With SELECTS, keys that a row does not see may be NaN."""
    PACKED: tl.constexpr = packed(k_ptrs)
    is_dim = tl.arange(0, BLOCK_D // PACKED)[None, :] < HEAD_DIM // PACKED
    is_value = tl.arange(0, BLOCK_D // PACKED)[None, :] < VALUE_DIM // PACKED
    for first in tl.range(begin, end, BLOCK_N, num_stages=1 if SELECTS else None):
        slots = first + tl.arange(0, BLOCK_N)
        is_inside = slots < end
        tile_ptrs = tile_pointers(k_ptrs, v_ptrs, pages, slots, PAGE_SIZE, HEAD_DIM, V_OFFSET)
        tile_pages = pages
        pages = load_pages(table_ptr, first + BLOCK_N, end, PAGE_SIZE, BLOCK_N)
        k = tl.load(tile_ptrs, mask=is_inside[:, None] & is_dim, other=0.0)
        k = scaled(k, scales_ptr, 0, tile_pages, slots, is_inside, q.dtype, PAGE_SIZE, V_OFFSET)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        is_seen = slots[None, :] <= last_seen[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (slots[None, :] > (last_seen - window)[:, None])
        its_values = value_pointers(
            tile_ptrs, v_ptrs, tile_pages, slots, PAGE_SIZE, HEAD_DIM, VALUE_DIM, V_OFFSET
        )  # fmt: skip
        v = tl.load(its_values, mask=is_inside[:, None] & is_value, other=0.0)
        v = scaled(v, scales_ptr, 1, tile_pages, slots, is_inside, q.dtype, PAGE_SIZE, V_OFFSET)
        if SELECTS:
            sums, total, highest = weigh_seen(scores, is_seen & is_inside[None, :], scale, v, sums, total, highest)
        else:
            sums, total, highest = weigh(tl.where(is_seen, scores, float("-inf")), scale, v, sums, total, highest)
    return sums, total, highest


@triton.jit
def tile_work(items_ptr):
    """Return a program's tile, kv head, split and number of splits (-1: no work). Grid and `items_ptr` as in
    `_extend_kernel`."""
    if items_ptr is None:
        return tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), 0, 1
    else:
        tile, split, num_splits = unpacked(tl.load(items_ptr + tl.program_id(1)))
        return tile, tl.program_id(0), split, num_splits


@triton.jit
def _span(last_seen, window, items_ptr, split, num_splits, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (begin, full, end): the split's keys are in slots begin .. end - 1.

    Slots begin .. full - 1 are whole tiles that all rows see, so they need no mask. `last_seen` is [BLOCK_M] int32."""
    end = tl.max(last_seen, 0) + 1
    begin, full = 0, tl.maximum(tl.min(last_seen, 0) + 1, 0) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        begin = tl.maximum(tl.min(last_seen, 0) - window + 1, 0) // BLOCK_N * BLOCK_N
        full = begin
    if items_ptr is not None:
        share = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), num_splits) * BLOCK_N
        begin += split * share
        end = tl.minimum(end, begin + share)
        full = tl.minimum(tl.maximum(full, begin), tl.maximum(end, begin))
    return begin, full, end


@triton.jit
def tile_at(starts_ptr, num_seqs, tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SEQS: tl.constexpr):
    """Return a tile's sequence, the sequence's first token and number of tokens, and the tile's first row in it.

    A tile whose first row is beyond the sequence's last row has no rows. `starts_ptr` is [num_seqs + 1] int32."""
    seq = _sequence(starts_ptr, num_seqs, tile, GROUP, BLOCK_M, SEQS)
    start = tl.load(starts_ptr + seq)
    query_len = tl.load(starts_ptr + seq + 1) - start
    return seq, start, query_len, (tile - start * GROUP // BLOCK_M - seq) * BLOCK_M


@triton.jit(do_not_specialize=("num_seqs",))
def _keys_kernel(
    num_keys_ptr,  # [num_tiles] int64, written
    seq_lens_ptr,  # [num_seqs] int64
    starts_ptr,  # [num_seqs + 1] int32
    num_seqs,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SEQS: tl.constexpr,
):
    """Grid: (num_tiles,). Store the number of keys of each tile; 0 for a tile without rows."""
    tile = tl.program_id(0)
    seq, _, query_len, first_row = tile_at(starts_ptr, num_seqs, tile, GROUP, BLOCK_M, SEQS)
    last = tl.minimum((first_row + BLOCK_M - 1) // GROUP, query_len - 1)
    end = tl.load(seq_lens_ptr + seq) - query_len + last + 1
    tl.store(num_keys_ptr + tile, tl.where(first_row < query_len * GROUP, end, 0))


@triton.jit
def _sequence(starts_ptr, num_seqs, tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SEQS: tl.constexpr):
    """Return the last sequence whose tiles begin at `tile` or before. `starts_ptr` is [num_seqs + 1] int32."""
    count = 0
    for first in range(0, num_seqs, SEQS):
        seqs = first + tl.arange(0, SEQS)
        starts = tl.load(starts_ptr + seqs, mask=seqs < num_seqs, other=0)
        begins = (seqs < num_seqs) & (starts * GROUP // BLOCK_M + seqs <= tile)
        count += tl.sum(begins.to(tl.int32), 0)
    return count - 1


@triton.jit
def _load(ptrs, is_dim, IS_WHOLE: tl.constexpr):
    """Return the numbers at `ptrs` [BLOCK_N, BLOCK_D], 0 where not `is_dim` [1, BLOCK_D]. IS_WHOLE: all are read."""
    if IS_WHOLE:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=is_dim, other=0.0)
