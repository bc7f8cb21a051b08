"""Attention in the absorbed form (latents.py) on a GPU, which reads latents in pages.

A pool of latents has one plane of one head, RANK + ROTARY_DIM numbers wide. Its keys are also its values, of which the
first RANK count. So all query heads share every tile of keys, which a program loads once for the scores and the sums.

A program of `latent_attention` works on a tile of BLOCK_M rows of one sequence: a row is a pair of a token and a query
head. Programs share the keys of a sequence (triton_shares.py). One kernel serves rounds, in which each sequence has the
same few tokens, as in triton_attention.py. Another one serves chunks, as in triton_extend.py.

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from .paged_plan import PagedPlan
from .triton_attention import load_pages, num_sms, padded, tile_rows
from .triton_extend import tile_at, tile_shares, tile_work
from .triton_shares import MIN_SPLIT, Shares, max_splits, work
from .triton_softmax import combine, has_nan, nothing_seen, quotient, store_heads, store_part, weigh, weigh_seen
from .triton_visibility import seen_in_tree, span

_MIN_SPLIT = 256  # keys of a chunk's tile; a split that is shorter costs more to combine than it saves
_SEQS = 32  # sequences that `tile_at` looks at in one step
_FEW_SPLITS = 4  # of a sequence, which its last program combines; if there may be more, another launch does
_MANY_SEQS = 1024  # work enough without splits, whose parts would take gigabytes
_FEW_SEQS = 4  # in a round: a program has few tiles of keys, and waits for the first one


class LatentTiles(NamedTuple):
    """The sizes of `latent_attention`'s tiles."""

    block_m: int  # rows: pairs of a token and a query head
    block_n: int  # keys
    num_slots: int  # tiles that run at once
    num_warps: int
    num_stages: int
    keys_first: bool = False  # keys are the rows of products, so that tensor cores multiply 64 of them at a time

    @classmethod
    def choose(cls, q: torch.Tensor, num_seqs: int) -> LatentTiles:
        """Choose by shapes and the device alone (measured on an H100 over 1 to 256 sequences of 1,100 keys). Shared
        memory and registers bound the keys under way. If there are more sequences than processors, two programs share a
        processor, and one loads keys while the other one multiplies."""
        num_rows, sms = triton.cdiv(q.shape[0], max(1, num_seqs)) * q.shape[1], num_sms(q.device)  # rows of a sequence
        if q.dtype == torch.float32:  # no tensor cores; for tests more than for speed
            return cls(16, 16, sms, num_warps=8, num_stages=1)
        if num_rows > 16:
            return cls(64, 32, sms, num_warps=8, num_stages=3)
        if num_seqs > sms:
            return cls(16, 32, 2 * sms, num_warps=4, num_stages=3)
        if num_seqs > _FEW_SEQS:
            return cls(16, 32, sms, num_warps=4, num_stages=5)
        return cls(16, 64, sms, num_warps=4, num_stages=2, keys_first=True)


def latent_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: PagedPlan,
    rank: int,
    scale: float,
    tiles: LatentTiles | None = None,
) -> torch.Tensor:
    """Return the first `rank` numbers of `paged_attention_ref` without a window: a new tensor [num_tokens, num_heads,
    rank].

    `q` [num_tokens, num_heads, width] may be strided by token. `kv_layer` [num_pages, 1, 1, page_size, width] is
    contiguous. The plan may be of trees. Slots beyond a sequence's length are not read. A row that
    sees no slot is 0."""
    (num_tokens, num_heads, width), num_seqs, starts = q.shape, len(plan.seq_lens), plan.starts
    assert kv_layer.shape[1:3] == (1, 1) and kv_layer.shape[4] == width and kv_layer.is_contiguous(), kv_layer.shape
    assert q.stride(1) == width and q.stride(2) == 1 and q.dtype == kv_layer.dtype and rank < width, (q.shape, rank)
    assert plan.block_table.stride(1) == 1 and plan.seq_lens.is_contiguous(), plan.block_table.stride()
    assert starts is None or starts.shape == (num_seqs + 1,), starts
    tiles = tiles or LatentTiles.choose(q, num_seqs)
    attend = _attend_few if starts is None else _attend_any
    out = torch.empty((num_tokens, num_heads, rank), dtype=q.dtype, device=q.device)
    attend(out, q, kv_layer, plan, scale * math.log2(math.e), tiles)
    return out


def _attend_few(
    out: torch.Tensor, q: torch.Tensor, kv_layer: torch.Tensor, plan: PagedPlan, scale: float, tiles: LatentTiles
) -> None:
    """Attend with the same few tokens in each sequence, as `decode_attention` does."""
    (num_tokens, num_heads, rank), width, num_seqs = out.shape, q.shape[2], len(plan.seq_lens)
    query_len, page_size, visible = plan.query_len, kv_layer.shape[3], plan.visible
    assert query_len is not None and num_tokens == num_seqs * query_len, (num_tokens, num_seqs, query_len)
    num_tiles = triton.cdiv(query_len * num_heads, tiles.block_m)
    most_splits = triton.cdiv(plan.block_table.shape[1] * page_size, MIN_SPLIT)
    most_splits = min(max_splits(num_sms(q.device), num_tiles), most_splits)
    num_slots = max(1, tiles.num_slots // num_tiles) if num_seqs < _MANY_SEQS else 1
    shares = parts = stats = items = firsts = arrivals = None
    lens, num_items, num_rows = plan.seq_lens, num_seqs, query_len * num_heads
    if min(num_slots, most_splits) > 1:
        gathers = num_seqs * num_tiles * _FEW_SPLITS > num_sms(q.device)
        shares = plan.shares(_seq_shares, num_slots, most_splits, num_tiles, MIN_SPLIT, gathers)
        items, firsts, arrivals, lens = shares.items, shares.firsts, shares.arrivals, shares.lens
        num_items = len(items)
        parts = torch.empty((num_items * num_rows, rank), dtype=torch.float32, device=q.device)
        stats = torch.empty((2, num_items * num_rows), dtype=torch.float32, device=q.device)
    dependent = gpu.dependent_launch(num_tokens)
    _decode_kernel[(num_tiles, *((1, num_seqs) if items is None else (num_items, 1)))](
        out, parts, stats, items, arrivals, q, kv_layer, plan.block_table, lens, plan.tree_starts, visible, query_len,
        q.stride(0), plan.block_table.stride(0), 0 if visible is None else visible.shape[1], scale,
        IS_TREE=visible is not None, DEPENDENT=dependent, HAS_HIDDEN=query_len > 1 or visible is not None,
        KEYS_FIRST=tiles.keys_first, GROUP=num_heads, PAGE_SIZE=page_size, RANK=rank, ROTARY_DIM=width - rank,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=padded(rank), BLOCK_R=padded(width - rank),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, launch_pdl=dependent,
    )  # fmt: skip
    if parts is not None and stats is not None and arrivals is None:
        combine(out, parts, stats, firsts, lens, min(num_slots, most_splits), MIN_SPLIT, dependent=dependent)


def _seq_shares(plan: PagedPlan, *cut: int) -> Shares:
    """Return the division of the sequences' keys among programs."""
    *sizes, gathers = cut
    return Shares.of(plan.seq_lens, *sizes, gathers=bool(gathers))


def _attend_any(
    out: torch.Tensor, q: torch.Tensor, kv_layer: torch.Tensor, plan: PagedPlan, scale: float, tiles: LatentTiles
) -> None:
    """Attend with any number of tokens in each sequence, as `extend_attention` does."""
    (num_tokens, num_heads, rank), width, num_seqs = out.shape, q.shape[2], len(plan.seq_lens)
    page_size = kv_layer.shape[3]
    assert plan.visible is None, plan
    num_tiles = num_tokens * num_heads // tiles.block_m + num_seqs
    shares = parts = stats = None
    if num_tiles < 2 * tiles.num_slots and plan.block_table.shape[1] * page_size > _MIN_SPLIT:
        cut = (num_tiles, num_heads, tiles.block_m, tiles.num_slots, 1, _MIN_SPLIT)
        shares = plan.shares(tile_shares, *cut)
        num_rows = len(shares.items) * tiles.block_m
        parts = torch.empty((num_rows, rank), dtype=torch.float32, device=q.device)
        stats = torch.empty((2, num_rows), dtype=torch.float32, device=q.device)
    items, arrivals = (None, None) if shares is None else (shares.items, shares.arrivals)
    _attend_kernel[(num_tiles, 1) if items is None else (1, len(items))](
        out, parts, stats, items, arrivals, q, kv_layer, plan.block_table, plan.seq_lens, plan.starts, num_seqs,
        q.stride(0), plan.block_table.stride(0), scale, GROUP=num_heads, PAGE_SIZE=page_size, RANK=rank,
        ROTARY_DIM=width - rank, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=padded(rank),
        BLOCK_R=padded(width - rank), KEYS_FIRST=tiles.keys_first, SEQS=_SEQS,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=("query_len", "table_stride", "num_words"))
def _decode_kernel(
    out_ptr,  # [num_tokens, GROUP, RANK] of q's dtype, written unless parts are combined later
    parts_ptr,  # [num_items * query_len * GROUP, RANK] float32, written with items
    stats_ptr,  # [2, num_items * query_len * GROUP] float32, written with items
    items_ptr,  # [num_items] int64 of `Shares`; None: each sequence has one item
    arrivals_ptr,  # [num_seqs * grid[0]] int32; None: `combine_kernel` combines parts
    q_ptr,  # [num_tokens, GROUP, RANK + ROTARY_DIM], tokens q_stride apart
    kv_ptr,  # [num_pages, PAGE_SIZE, RANK + ROTARY_DIM] of q's dtype
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    seq_lens_ptr,  # [num_items] int64 with items, [num_seqs] without
    tree_starts_ptr,  # [num_seqs] int64, read if IS_TREE
    visible_ptr,  # [num_tokens, num_words] int64, read if IS_TREE
    query_len,
    q_stride,
    table_stride,
    num_words,
    scale,
    IS_TREE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    HAS_HIDDEN: tl.constexpr,  # a row may not see all keys of its program
    KEYS_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid: (tiles of a sequence's rows, num_items, 1), or (.., 1, num_seqs) without items."""
    item, seq, split, num_splits, seq_len = work(items_ptr, seq_lens_ptr, 1, 1)
    if num_splits < 0:
        return
    table_ptr += seq.to(tl.int64) * table_stride
    tokens, heads, is_row = tile_rows(tl.program_id(0) * BLOCK_M, 0, query_len, GROUP, BLOCK_M)
    last_seen, batch_tokens = seq_len - query_len + tokens, (seq * query_len + tokens).to(tl.int64)
    begin, end, _lowest = span(None, tokens, last_seen, seq_len, 0, split, num_splits, IS_TREE, False, BLOCK_N)
    dims, turned = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    if DEPENDENT:
        gdc_wait()
    q_ptrs = q_ptr + (batch_tokens * q_stride + heads * (RANK + ROTARY_DIM))[:, None]
    q = tl.load(q_ptrs + dims[None, :], mask=is_row[:, None] & (dims < RANK)[None, :], other=0.0)
    is_turned = is_row[:, None] & (turned < ROTARY_DIM)[None, :]
    turned_q = tl.load(q_ptrs + RANK + turned[None, :], mask=is_turned, other=0.0)
    if IS_TREE:
        tree_start = tl.load(tree_starts_ptr + seq).to(tl.int32)
        visible_ptrs = visible_ptr + batch_tokens * num_words
    else:
        tree_start, visible_ptrs = 0, visible_ptr
    sums, total, highest = _weighted(
        q, turned_q, kv_ptr, table_ptr, visible_ptrs, begin, end, last_seen, tree_start, num_words, scale, False,
        KEYS_FIRST, IS_TREE, PAGE_SIZE, RANK, ROTARY_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_R,
    )  # fmt: skip
    if HAS_HIDDEN:  # noqa: SIM102
        if has_nan(sums):
            sums, total, highest = _weighted(
                q, turned_q, kv_ptr, table_ptr, visible_ptrs, begin, end, last_seen, tree_start, num_words, scale, True,
                False, IS_TREE, PAGE_SIZE, RANK, ROTARY_DIM, BLOCK_M, 16, BLOCK_D, BLOCK_R,
            )  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
    out_rows = batch_tokens * GROUP + heads
    if items_ptr is not None:
        sums, total, is_row = store_part(
            parts_ptr, stats_ptr, arrivals_ptr, item, seq, split, num_splits, out_rows, query_len * GROUP,
            sums, total, highest, is_row, dims, begin < end, RANK,
        )  # fmt: skip
    if items_ptr is None or arrivals_ptr is not None:
        store_heads(out_ptr, out_rows, quotient(sums, total).to(out_ptr.dtype.element_ty), is_row, dims, RANK)


@triton.jit(do_not_specialize=("num_seqs", "table_stride"))
def _attend_kernel(
    out_ptr,  # [num_tokens, GROUP, RANK] of q's dtype, written
    parts_ptr,  # [num_items * BLOCK_M, RANK] float32, written with items
    stats_ptr,  # [2, num_items * BLOCK_M] float32, written with items
    items_ptr,  # [num_items] int64 of `Shares` of tiles; None: a program has all keys of its tile
    arrivals_ptr,  # [num_tiles] int32, with items
    q_ptr,  # [num_tokens, GROUP, RANK + ROTARY_DIM], tokens q_stride apart
    kv_ptr,  # [num_pages, PAGE_SIZE, RANK + ROTARY_DIM] of q's dtype
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    seq_lens_ptr,  # [num_seqs] int64
    starts_ptr,  # [num_seqs + 1] int32
    num_seqs,
    q_stride,
    table_stride,
    scale,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SEQS: tl.constexpr,
):
    """Grid: (num_tiles, 1), or (1, num_items) with items. A tile may have no rows."""
    tile, kv_head, split, num_splits = tile_work(items_ptr)
    seq, start, query_len, first_row = tile_at(starts_ptr, num_seqs, tile, GROUP, BLOCK_M, SEQS)
    if (first_row < query_len * GROUP) & (num_splits > 0):
        seq_len = tl.load(seq_lens_ptr + seq).to(tl.int32)
        table_ptr += seq.to(tl.int64) * table_stride
        tokens, heads, is_row = tile_rows(first_row, kv_head, query_len, GROUP, BLOCK_M)
        last_seen, batch_tokens = seq_len - query_len + tokens, (start + tokens).to(tl.int64)
        begin, end, _lowest = span(None, tokens, last_seen, seq_len, 0, split, num_splits, False, False, BLOCK_N)
        dims, turned = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
        q_ptrs = q_ptr + (batch_tokens * q_stride + heads * (RANK + ROTARY_DIM))[:, None]
        q = tl.load(q_ptrs + dims[None, :], mask=is_row[:, None] & (dims < RANK)[None, :], other=0.0)
        is_turned = is_row[:, None] & (turned < ROTARY_DIM)[None, :]
        turned_q = tl.load(q_ptrs + RANK + turned[None, :], mask=is_turned, other=0.0)
        sums, total, highest = _weighted(
            q, turned_q, kv_ptr, table_ptr, None, begin, end, last_seen, 0, 0, scale, False,
            KEYS_FIRST, False, PAGE_SIZE, RANK, ROTARY_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_R,
        )  # fmt: skip
        if has_nan(sums):
            sums, total, highest = _weighted(
                q, turned_q, kv_ptr, table_ptr, None, begin, end, last_seen, 0, 0, scale, True,
                False, False, PAGE_SIZE, RANK, ROTARY_DIM, BLOCK_M, 16, BLOCK_D, BLOCK_R,
            )  # fmt: skip
        if items_ptr is not None:
            sums, total, is_row = store_part(
                parts_ptr, stats_ptr, arrivals_ptr, tl.program_id(1), tile, split, num_splits,
                tile * BLOCK_M + tl.arange(0, BLOCK_M), BLOCK_M, sums, total, highest, is_row, dims, begin < end, RANK,
            )  # fmt: skip
        out = quotient(sums, total).to(out_ptr.dtype.element_ty)
        store_heads(out_ptr, batch_tokens * GROUP + heads, out, is_row, dims, RANK)


@triton.jit
def _weighted(
    q,  # [BLOCK_M, BLOCK_D]
    turned_q,  # [BLOCK_M, BLOCK_R]
    kv_ptr,  # [num_pages, PAGE_SIZE, RANK + ROTARY_DIM]
    table_ptr,  # [max_pages] int64, of the sequence
    visible_ptrs,  # [BLOCK_M] pointers to each row's words, for a tree
    begin,
    end,
    last_seen,  # [BLOCK_M] int32, the last slot that each row sees by causality
    tree_start,
    num_words,
    scale,
    SELECTS: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    IS_TREE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Return the state of the running softmax (triton_softmax.py) after slots begin .. end - 1.

    With SELECTS, latents that a row does not see may be NaN. Tensor cores multiply 64 rows at a time. If a tile has
    fewer rows than keys, keys take the place of rows, and everything but the state is transposed."""
    if KEYS_FIRST and not SELECTS:
        sums, total = tl.zeros([BLOCK_D, BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
        highest = tl.full([BLOCK_M], -3.4028234663852886e38, tl.float32)
    else:
        sums, total, highest = nothing_seen(BLOCK_M, BLOCK_D)
    dims, turned = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    pages = load_pages(table_ptr, begin, end, PAGE_SIZE, BLOCK_N)
    for first in tl.range(begin, end, BLOCK_N, num_stages=1 if SELECTS else None):
        slots = first + tl.arange(0, BLOCK_N)
        is_inside = slots < end
        if PAGE_SIZE % BLOCK_N == 0:  # one page has all keys of the tile
            page_ptr = kv_ptr + (pages.to(tl.int64) * PAGE_SIZE + first % PAGE_SIZE) * (RANK + ROTARY_DIM)
            ptrs = page_ptr + (tl.arange(0, BLOCK_N) * (RANK + ROTARY_DIM))[:, None]
        else:
            ptrs = kv_ptr + ((pages.to(tl.int64) * PAGE_SIZE + slots % PAGE_SIZE) * (RANK + ROTARY_DIM))[:, None]
        pages = load_pages(table_ptr, first + BLOCK_N, end, PAGE_SIZE, BLOCK_N)
        latents = _load(ptrs, is_inside, dims, RANK, BLOCK_D)
        turned_k = _load(ptrs + RANK, is_inside, turned, ROTARY_DIM, BLOCK_R)
        if IS_TREE:
            is_seen = seen_in_tree(visible_ptrs, slots, is_inside, first, tree_start, num_words)
        else:
            is_seen = slots[None, :] <= tl.minimum(last_seen, end - 1)[:, None]
        if KEYS_FIRST and not SELECTS:
            scores = tl.dot(turned_k, tl.trans(turned_q), input_precision="ieee")
            scores = tl.dot(latents, tl.trans(q), scores, input_precision="ieee") * scale
            scores = tl.where(tl.trans(is_seen), scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 0))
            weights = tl.exp2(scores - new_highest[None, :])
            correction = tl.exp2(highest - new_highest)
            total = total * correction + tl.sum(weights, 0)
            sums = sums * correction[None, :]
            sums = tl.dot(tl.trans(latents), weights.to(latents.dtype), sums, input_precision="ieee")
            highest = new_highest
        else:
            scores = tl.dot(turned_q, tl.trans(turned_k), input_precision="ieee")
            scores = tl.dot(q, tl.trans(latents), scores, input_precision="ieee")
            if SELECTS:
                sums, total, highest = weigh_seen(scores, is_seen, scale, latents, sums, total, highest)
            else:
                seen = tl.where(is_seen, scores, float("-inf"))
                sums, total, highest = weigh(seen, scale, latents, sums, total, highest)
    if KEYS_FIRST and not SELECTS:
        sums = tl.trans(sums)
    return sums, total, highest


@triton.jit
def _load(ptrs, is_inside, dims, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return DIM numbers at each of `ptrs` [BLOCK_N, 1], and zeros: [BLOCK_N, BLOCK]. Zeros if not `is_inside`."""
    if DIM == BLOCK:
        return tl.load(ptrs + dims[None, :], mask=is_inside[:, None], other=0.0)
    return tl.load(ptrs + dims[None, :], mask=is_inside[:, None] & (dims < DIM)[None, :], other=0.0)
