"""Attention to latents on a GPU: `join_latents` of latents.py, and the attention that reads latents in pages.

A pool of latents has one plane of one head, RANK + ROTARY_DIM numbers wide. Its keys are also its values, of which the
first RANK count. So all query heads share every tile of keys, which a program loads once for the scores and the sums.

A program of `latent_attention` works on a tile of BLOCK_M rows of one sequence, as in triton_extend.py: a row is a pair
of a token and a query head. One kernel serves decode steps, trees and chunks. If fewer tiles exist than run at once,
programs share a tile's keys (triton_shares.py).

The host reads no tensor's value, and grids depend on shapes alone. So a CUDA graph can hold all launches.
"""

# ruff: noqa: N803, N806
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .norm import Norm
from .triton_attention import TritonPlan, load_pages, num_sms, padded, tile_rows
from .triton_extend import tile_at, tile_shares, tile_work
from .triton_softmax import has_nan, nothing_seen, quotient, store_heads, store_part, weigh, weigh_seen
from .triton_visibility import seen_in_tree, span

_MIN_SPLIT = 256  # keys; a split that is shorter costs more to combine than it saves
_HEADS = 8  # per program of `_rotate_kernel`
_SEQS = 32  # sequences that `tile_at` looks at in one step


class LatentTiles(NamedTuple):
    """The sizes of `latent_attention`'s tiles."""

    block_m: int  # rows: pairs of a token and a query head
    block_n: int  # keys
    num_slots: int  # tiles that run at once
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, q: torch.Tensor, num_seqs: int) -> LatentTiles:
        """Choose by shapes and the device alone. Tiles of keys are short, because a key is wide. Registers decide how
        many programs run at once: the sums of 16 rows are 64 registers of each thread of 4 warps."""
        num_rows = triton.cdiv(q.shape[0], max(1, num_seqs)) * q.shape[1]  # of a sequence
        block_m = min(64, max(16, triton.next_power_of_2(num_rows)))
        if q.dtype == torch.float32:  # no tensor cores; for tests more than for speed
            return cls(16, 16, num_sms(q.device), num_warps=8, num_stages=1)
        num_warps, per_sm = (4, 2) if block_m == 16 else (8, 1)
        return cls(block_m, 32, per_sm * num_sms(q.device), num_warps, num_stages=2)


def join_latents(
    absorbed: torch.Tensor, rotary: torch.Tensor, stored: torch.Tensor, norm: Norm, *, is_interleaved: bool
) -> torch.Tensor:
    """Return `join_latents_ref`, a new contiguous tensor [num_tokens, num_heads + 1, rank + rotary_dim]."""
    num_tokens, num_heads, rank = absorbed.shape
    rotary_dim = rotary.shape[2]
    assert rotary.shape[:2] == absorbed.shape[:2] and stored.shape == (num_tokens, rank + rotary_dim), stored.shape
    assert absorbed.stride(2) == rotary.stride(2) == stored.stride(1) == 1 and norm.weight.shape == (rank,), norm
    heads = torch.empty((num_tokens, num_heads + 1, rank + rotary_dim), dtype=absorbed.dtype, device=absorbed.device)
    _join_kernel[(num_tokens, num_heads + 1)](
        heads, absorbed, rotary, stored, norm.weight, *absorbed.stride()[:2], *rotary.stride()[:2], stored.stride(0),
        norm.eps, IS_INTERLEAVED=is_interleaved, RANK=rank, ROTARY_DIM=rotary_dim,
        BLOCK_D=triton.next_power_of_2(rank), HALF=triton.next_power_of_2(rotary_dim // 2), num_warps=2,
    )  # fmt: skip
    return heads


def rotate_store(
    heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv_layer: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Rotate the last numbers of all heads in place, and store the last head of each token in `kv_layer`.

    Return the queries, a view of `heads` [num_tokens, num_heads + 1, width]. `cos` and `sin` [num_tokens, 1,
    rotary_dim] are contiguous, and so is `kv_layer` [num_pages, 1, 1, page_size, width]; the first half of `sin` is
    negated already. `rows` [num_tokens] int64 comes from `token_rows` (triton_store.py)."""
    num_tokens, num_heads, width = heads.shape[0], heads.shape[1] - 1, heads.shape[2]
    rotary_dim = cos.shape[2]
    assert kv_layer.shape[1:3] == (1, 1) and kv_layer.shape[4] == width and kv_layer.is_contiguous(), kv_layer.shape
    assert cos.shape == sin.shape == (num_tokens, 1, rotary_dim) and rows.shape == (num_tokens,), (cos.shape, rows)
    assert heads.is_contiguous() and cos.is_contiguous() and sin.is_contiguous() and heads.dtype == kv_layer.dtype
    _rotate_kernel[(num_tokens, triton.cdiv(num_heads + 1, _HEADS))](
        heads, cos, sin, kv_layer, rows, NUM_HEADS=num_heads, RANK=width - rotary_dim, ROTARY_DIM=rotary_dim,
        HEADS=_HEADS, HALF=triton.next_power_of_2(rotary_dim // 2), BLOCK_D=triton.next_power_of_2(width), num_warps=2,
    )  # fmt: skip
    return heads[:, :-1]


def latent_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: TritonPlan,
    rank: int,
    scale: float,
    tiles: LatentTiles | None = None,
) -> torch.Tensor:
    """Return the first `rank` numbers of `paged_attention_ref` without a window: a new tensor [num_tokens, num_heads,
    rank].

    `q` [num_tokens, num_heads, width] may be strided by token. `kv_layer` [num_pages, 1, 1, page_size, width] is
    contiguous. The plan has `starts`, and may be of trees. Slots beyond a sequence's length are not read. A row that
    sees no slot is 0."""
    (num_tokens, num_heads, width), num_seqs, starts = q.shape, len(plan.seq_lens), plan.starts
    assert kv_layer.shape[1:3] == (1, 1) and kv_layer.shape[4] == width and kv_layer.is_contiguous(), kv_layer.shape
    assert q.stride(1) == width and q.stride(2) == 1 and q.dtype == kv_layer.dtype and rank < width, (q.shape, rank)
    assert starts is not None and starts.shape == (num_seqs + 1,), starts
    assert plan.block_table.stride(1) == 1 and plan.seq_lens.is_contiguous(), plan.block_table.stride()
    tiles, page_size, visible = tiles or LatentTiles.choose(q, num_seqs), kv_layer.shape[3], plan.visible
    num_tiles = num_tokens * num_heads // tiles.block_m + num_seqs
    out = torch.empty((num_tokens, num_heads, rank), dtype=q.dtype, device=q.device)
    shares = parts = stats = None
    if num_tiles < 2 * tiles.num_slots and plan.block_table.shape[1] * page_size > _MIN_SPLIT:
        cut = (num_tiles, num_heads, tiles.block_m, tiles.num_slots, 1, _MIN_SPLIT)
        shares = plan.shares(tile_shares, *cut)
        num_rows = len(shares.items) * tiles.block_m
        parts = torch.empty((num_rows, rank), dtype=torch.float32, device=q.device)
        stats = torch.empty((2, num_rows), dtype=torch.float32, device=q.device)
    items, arrivals = (None, None) if shares is None else (shares.items, shares.arrivals)
    _attend_kernel[(num_tiles, 1) if items is None else (1, len(items))](
        out, parts, stats, items, arrivals, q, kv_layer, plan.block_table, plan.seq_lens, starts, plan.tree_starts,
        visible, num_seqs, q.stride(0), plan.block_table.stride(0), 0 if visible is None else visible.shape[1],
        scale * math.log2(math.e), IS_TREE=visible is not None, GROUP=num_heads, PAGE_SIZE=page_size, RANK=rank,
        ROTARY_DIM=width - rank, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=padded(rank),
        BLOCK_R=padded(width - rank), SEQS=_SEQS, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


@triton.jit
def _join_kernel(
    heads_ptr,  # [num_tokens, num_heads + 1, RANK + ROTARY_DIM], written
    absorbed_ptr,  # [num_tokens, num_heads, RANK], tokens and heads so far apart
    rotary_ptr,  # [num_tokens, num_heads, ROTARY_DIM], tokens and heads so far apart
    stored_ptr,  # [num_tokens, RANK + ROTARY_DIM], tokens stored_stride apart
    norm_ptr,  # [RANK]
    absorbed_token,
    absorbed_head,
    rotary_token,
    rotary_head,
    stored_stride,
    eps,
    IS_INTERLEAVED: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
):
    """Grid: (num_tokens, num_heads + 1). A program makes one head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_heads = tl.num_programs(1) - 1
    target = heads_ptr + (token * tl.num_programs(1) + head) * (RANK + ROTARY_DIM)
    dims, half = tl.arange(0, BLOCK_D), tl.arange(0, HALF)
    is_dim, is_half = dims < RANK, half < ROTARY_DIM // 2
    if head < num_heads:
        x = tl.load(absorbed_ptr + token * absorbed_token + head * absorbed_head + dims, mask=is_dim, other=0.0)
        source = rotary_ptr + token * rotary_token + head * rotary_head
    else:
        x = tl.load(stored_ptr + token * stored_stride + dims, mask=is_dim, other=0.0)
        wide = x.to(tl.float32)
        wide = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / RANK + eps)).to(x.dtype).to(tl.float32)
        x = (wide * tl.load(norm_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)).to(x.dtype)
        source = stored_ptr + token * stored_stride + RANK
    tl.store(target + dims, x, mask=is_dim)
    if IS_INTERLEAVED:
        a = tl.load(source + 2 * half, mask=is_half, other=0.0)
        b = tl.load(source + 2 * half + 1, mask=is_half, other=0.0)
    else:
        a = tl.load(source + half, mask=is_half, other=0.0)
        b = tl.load(source + half + ROTARY_DIM // 2, mask=is_half, other=0.0)
    tl.store(target + RANK + half, a, mask=is_half)
    tl.store(target + RANK + half + ROTARY_DIM // 2, b, mask=is_half)


@triton.jit
def _rotate_kernel(
    heads_ptr,  # [num_tokens, NUM_HEADS + 1, RANK + ROTARY_DIM], written
    cos_ptr,  # [num_tokens, ROTARY_DIM]
    sin_ptr,  # [num_tokens, ROTARY_DIM], its first half negated
    kv_ptr,  # [num_pages, PAGE_SIZE, RANK + ROTARY_DIM] of heads' dtype, written
    rows_ptr,  # [num_tokens] int64
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (num_tokens, ceil((NUM_HEADS + 1) / HEADS)). The last program of a token also stores its latent."""
    WIDTH: tl.constexpr = RANK + ROTARY_DIM
    half_dim: tl.constexpr = ROTARY_DIM // 2
    token, heads = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, HALF)
    is_half = half < half_dim
    turn = token * ROTARY_DIM + half
    cos_a = tl.load(cos_ptr + turn, mask=is_half, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos_ptr + turn + half_dim, mask=is_half, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin_ptr + turn, mask=is_half, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin_ptr + turn + half_dim, mask=is_half, other=0.0).to(tl.float32)[None, :]
    at = (token * (NUM_HEADS + 1) + heads)[:, None] * WIDTH + RANK + half[None, :]
    inside = (heads <= NUM_HEADS)[:, None] & is_half[None, :]
    a = tl.load(heads_ptr + at, mask=inside, other=0.0)
    b = tl.load(heads_ptr + at + half_dim, mask=inside, other=0.0)
    x, y = a.to(tl.float32), b.to(tl.float32)
    first, second = (x * cos_a + y * sin_a).to(a.dtype), (y * cos_b + x * sin_b).to(a.dtype)
    tl.store(heads_ptr + at, first, mask=inside)
    tl.store(heads_ptr + at + half_dim, second, mask=inside)
    row = tl.load(rows_ptr + token)
    is_stored = inside & (heads == NUM_HEADS)[:, None] & (row >= 0)
    target = kv_ptr + row * WIDTH + RANK + half[None, :] + tl.zeros_like(at)
    tl.store(target, first, mask=is_stored)
    tl.store(target + half_dim, second, mask=is_stored)
    if tl.program_id(1) == tl.num_programs(1) - 1:
        dims = tl.arange(0, BLOCK_D)
        latent = tl.load(heads_ptr + (token * (NUM_HEADS + 1) + NUM_HEADS) * WIDTH + dims, mask=dims < RANK, other=0.0)
        tl.store(kv_ptr + row * WIDTH + dims, latent, mask=(dims < RANK) & (row >= 0))


@triton.jit(do_not_specialize=("num_seqs", "table_stride", "num_words"))
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
    tree_starts_ptr,  # [num_seqs] int64, read if IS_TREE
    visible_ptr,  # [num_tokens, num_words] int64, read if IS_TREE
    num_seqs,
    q_stride,
    table_stride,
    num_words,
    scale,
    IS_TREE: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
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
        begin, end, _lowest = span(None, tokens, last_seen, seq_len, 0, split, num_splits, IS_TREE, False, BLOCK_N)
        dims, turned = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
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
            IS_TREE, PAGE_SIZE, RANK, ROTARY_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_R,
        )  # fmt: skip
        if has_nan(sums):
            sums, total, highest = _weighted(
                q, turned_q, kv_ptr, table_ptr, visible_ptrs, begin, end, last_seen, tree_start, num_words, scale, True,
                IS_TREE, PAGE_SIZE, RANK, ROTARY_DIM, BLOCK_M, 16, BLOCK_D, BLOCK_R,
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

    With SELECTS, latents that a row does not see may be NaN."""
    sums, total, highest = nothing_seen(BLOCK_M, BLOCK_D)
    dims, turned = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    pages = load_pages(table_ptr, begin, end, PAGE_SIZE, BLOCK_N)
    for first in tl.range(begin, end, BLOCK_N, num_stages=1 if SELECTS else None):
        slots = first + tl.arange(0, BLOCK_N)
        is_inside = slots < end
        rows = (pages.to(tl.int64) * PAGE_SIZE + slots % PAGE_SIZE) * (RANK + ROTARY_DIM)
        pages = load_pages(table_ptr, first + BLOCK_N, end, PAGE_SIZE, BLOCK_N)
        ptrs = kv_ptr + rows[:, None]
        latents = tl.load(ptrs + dims[None, :], mask=is_inside[:, None] & (dims < RANK)[None, :], other=0.0)
        is_turned = is_inside[:, None] & (turned < ROTARY_DIM)[None, :]
        turned_k = tl.load(ptrs + RANK + turned[None, :], mask=is_turned, other=0.0)
        scores = tl.dot(turned_q, tl.trans(turned_k), input_precision="ieee")
        scores = tl.dot(q, tl.trans(latents), scores, input_precision="ieee")
        if IS_TREE:
            is_seen = seen_in_tree(visible_ptrs, slots, is_inside, first, tree_start, num_words)
        else:
            is_seen = slots[None, :] <= tl.minimum(last_seen, end - 1)[:, None]
        if SELECTS:
            sums, total, highest = weigh_seen(scores, is_seen, scale, latents, sums, total, highest)
        else:
            sums, total, highest = weigh(tl.where(is_seen, scores, float("-inf")), scale, latents, sums, total, highest)
    return sums, total, highest
