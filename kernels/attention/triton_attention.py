"""Attention of new tokens over paged KV on a GPU: `paged_attention_ref` (attention.py) without gathering pages first.

A program works on a tile of rows. A row is a pair of a token and a query head of one kv head, because the query heads
of a kv head share its keys. The program visits keys tile by tile with a running softmax (triton_softmax.py).

    decode_attention   few new tokens, the same number in every sequence, causal or a tree. Programs share a sequence's
                       keys by its length (triton_shares.py), and their parts are combined (Flash-Decoding)
    extend_attention   any number of new tokens (triton_extend.py)

The host reads no tensor's value, so a CUDA graph can hold all of a forward. Grids depend on shapes alone. A program
reads from `seq_lens` how much work it has, and ends at once if it has none.
"""

# ruff: noqa: N803, N806, RET505
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from ..products.fp8 import E4M3
from ..state.fp8_pages import block_size, has_close_blocks, scales_of
from .paged_plan import PagedPlan
from .triton_pairs import in_pairs, join_sums, load_scales, numbers_of, packed, scores_of, split_queries, weigh_pairs
from .triton_shares import MIN_SPLIT, Shares, max_splits, work
from .triton_softmax import combine, has_nan, quotient, sink_seen, store_heads, store_part, weigh, weigh_seen
from .triton_visibility import in_window, seen_in_tree, span

_TILE_BYTES = 16 * 1024  # per tile of keys, and of values; half of it in float32, which has no tensor cores and spills
_STAGES_BYTES = 192 * 1024  # of keys and values under way, of 227 KiB of an H100
_TWO_STAGE_SHARES = (0, *range(3, 16))  # programs for a tile of rows with which two stages are faster, on an H200
_FULL_ROWS = tl.constexpr(64)  # of a tile, from which on operands come from shared memory, not from registers
_INTERPRETED_SMS = 4
_RUN_TIME = ("query_len", "window", "num_splits", "table_stride", "num_words")


class DecodeTiles(NamedTuple):
    """Sizes by which `decode_attention` divides its work."""

    block_m: int  # rows: pairs of a token and a query head
    block_n: int  # keys
    num_slots: int  # splits of sequences that run at once; each has a program per tile of rows
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, q: torch.Tensor, kv_layer: torch.Tensor, num_seqs: int) -> DecodeTiles:
        """Choose by shapes and the device alone. There are as many splits as run at once: one program more would make
        all others wait for it (measured on an H200 over 1 to 256 sequences of 1,090 and 8,200 keys)."""
        num_kv_heads = kv_layer.shape[2]
        num_rows = q.shape[0] // num_seqs * (q.shape[1] // num_kv_heads)
        most_rows = rows_that_fit(q.shape[2], num_warps=4)
        block_m, block_n = min(64, most_rows, max(16, triton.next_power_of_2(num_rows))), tile_keys(q)
        num_tiles = num_kv_heads * triton.cdiv(num_rows, block_m)
        is_wide = block_m == 64 or 2 * block_n * padded(q.shape[2]) * q.itemsize > _TILE_BYTES
        num_at_once = num_sms(q.device) * (3 if block_m == 16 else 2) * (1 if is_wide else 2)  # by shared memory
        # two stages take less of it, so that more programs run at once; three help one that has many tiles of keys
        num_shares = num_at_once // (num_seqs * num_tiles)
        has_few = is_wide and block_m == 16 and num_shares in _TWO_STAGE_SHARES
        num_stages = stages_that_fit(q, block_n, 2 if block_m == 64 or has_few else 3)
        return cls(block_m, block_n, max(1, num_at_once // num_tiles), num_warps=4, num_stages=num_stages)


def decode_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: PagedPlan,
    window: int | None = None,
    tiles: DecodeTiles | None = None,
    out: torch.Tensor | None = None,
    *,
    sinks: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `paged_attention_ref` of a uniform plan, causal or a tree: contiguous `out` or a new tensor, of q's shape.

    `q` [num_tokens, num_heads, head_dim] may be strided by token, as a view of qkv is. `kv_layer` [num_pages, 2,
    num_kv_heads, page_size, head_dim] is contiguous. Both are float32, bfloat16 or float16, or `kv_layer` is a layer of
    a pool in e4m3 (fp8_pages.py). Products have the dtype of `q`, sums are float32. Slots beyond a sequence's length
    are not read. A row that sees no slot is 0. `sinks` are [num_heads] float32. `values`: a layer of their own pool."""
    num_tokens, num_heads, head_dim = check_shapes(q, kv_layer, plan, values)
    num_kv_heads, page_size, query_len = kv_layer.shape[2], kv_layer.shape[3], plan.query_len
    num_seqs, max_pages = plan.block_table.shape
    assert query_len is not None and num_tokens == num_seqs * query_len, (num_tokens, num_seqs, query_len)
    tiles = tiles or DecodeTiles.choose(q, kv_layer, num_seqs)
    assert plan.visible is None or tiles.block_n <= 64, tiles
    group, visible = num_heads // num_kv_heads, plan.visible
    scales = scales_of(kv_layer) if kv_layer.dtype == E4M3 else None
    num_tiles = num_kv_heads * triton.cdiv(query_len * group, tiles.block_m)
    most_splits = min(max_splits(num_sms(q.device), num_tiles), triton.cdiv(max_pages * page_size, MIN_SPLIT))
    num_splits = min(tiles.num_slots, most_splits)  # of a sequence
    shares = None
    if num_seqs > 1 and num_splits > 1:
        shares = plan.shares(_shares, tiles.num_slots, most_splits, num_tiles)
    num_items = num_seqs * num_splits if shares is None else len(shares.items)
    items, firsts, arrivals = (None, None, None) if shares is None else (shares.items, shares.firsts, shares.arrivals)
    grid = (num_splits, num_seqs) if shares is None else (num_items, 1)
    dependent = gpu.dependent_launch(num_tokens)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    assert out.is_contiguous() and (out.shape, out.dtype) == (q.shape, q.dtype), (out.shape, out.dtype)
    parts = stats = None
    if num_items > num_seqs:
        parts, stats = empty_parts(num_items * query_len * num_heads, head_dim, q.device)
    _decode_kernel[(num_tiles, *grid)](
        out, parts, stats, items, arrivals, q, in_pairs(q, kv_layer), values, scales, sinks, plan.block_table,
        plan.seq_lens if shares is None else shares.lens,
        plan.tree_starts, visible, None if window is None else plan.positions,
        query_len, window or 0, num_splits, q.stride(0), plan.block_table.stride(0),
        0 if visible is None else visible.shape[1], softmax_scale(head_dim),
        IS_TREE=visible is not None, HAS_WINDOW=window is not None, HAS_PARTS=parts is not None, DEPENDENT=dependent,
        HAS_HIDDEN=query_len > 1 or visible is not None or window is not None,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, PAGE_SIZE=page_size, HEAD_DIM=head_dim, BLOCK=block_size(kv_layer),
        VALUE_DIM=value_dim(kv_layer, values), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=padded(head_dim),
        MIN_SPLIT=MIN_SPLIT,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, launch_pdl=dependent,
    )  # fmt: skip
    if parts is not None and stats is not None and arrivals is None:
        combine(out, parts, stats, firsts, plan.seq_lens, num_splits, MIN_SPLIT, dependent=dependent)
    return out


def empty_parts(num_rows: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for sums of splits, [num_rows, head_dim] float32, and for their statistics, [2, num_rows]."""
    sums = torch.empty((num_rows, head_dim), dtype=torch.float32, device=device)
    return sums, torch.empty((2, num_rows), dtype=torch.float32, device=device)


def _shares(plan: PagedPlan, *cut: int) -> Shares:
    """Return the division of the sequences' keys among programs."""
    return Shares.of(plan.seq_lens, *cut)


def check_shapes(
    q: torch.Tensor, kv_layer: torch.Tensor, plan: PagedPlan, values: torch.Tensor | None = None
) -> tuple[int, int, int]:
    """Assert the shapes, dtypes and strides that kernels take, and return (num_tokens, num_heads, head_dim)."""
    num_tokens, num_heads, head_dim = q.shape
    num_planes = 2 if values is None else 1
    assert kv_layer.dim() == 5 and kv_layer.shape[1::3] == (num_planes, head_dim), (q.shape, kv_layer.shape)
    assert values is None or (values.is_contiguous() and values.dtype == q.dtype), values
    assert num_heads % kv_layer.shape[2] == 0 and kv_layer.dtype in (q.dtype, E4M3), (q.shape, kv_layer.shape, q.dtype)
    assert q.stride(1) == head_dim and q.stride(2) == 1 and has_close_blocks(kv_layer), q.stride()
    assert plan.block_table.stride(1) == 1 and plan.seq_lens.is_contiguous(), plan.block_table.stride()
    return num_tokens, num_heads, head_dim


def value_dim(kv_layer: torch.Tensor, values: torch.Tensor | None) -> int:
    """Return the width of values in pages."""
    if values is None:
        return kv_layer.shape[4]
    assert values.shape[:4] == kv_layer.shape[:4] and values.shape[4] <= kv_layer.shape[4], (
        values.shape,
        kv_layer.shape,
    )
    return values.shape[4]


def padded(head_dim: int) -> int:
    """Return the width of a tile of one head: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def softmax_scale(head_dim: int) -> float:
    """Return the scale of scores whose exponentials have base 2."""
    return head_dim**-0.5 * math.log2(math.e)


def tile_keys(q: torch.Tensor) -> int:
    """Return the number of keys in a tile: at most 64, the bits of a word. Keys are multiplied in the dtype of q."""
    num_bytes = _TILE_BYTES // 2 if q.dtype == torch.float32 else _TILE_BYTES
    return min(64, max(16, num_bytes // (padded(q.shape[2]) * q.itemsize)))


def rows_that_fit(head_dim: int, num_warps: int) -> int:
    """Return the most rows of a tile whose sums fit into half of the registers of a program."""
    return max(16, num_warps * 32 * 128 // padded(head_dim))


def stages_that_fit(q: torch.Tensor, block_n: int, most: int) -> int:
    """Return how many tiles of keys and values fit into the shared memory of a processor at once, 1 to `most`."""
    return max(1, min(most, _STAGES_BYTES // (2 * block_n * padded(q.shape[2]) * q.itemsize)))


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the number of processors of a GPU; a small number for the interpreter."""
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def load_pages(table_ptr, first, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the pages of slots first .. first + BLOCK_N - 1, for `first` a multiple of BLOCK_N.

    They are [BLOCK_N] int32, or one number if one page holds the whole tile. `table_ptr` is [max_pages] int64. A slot
    from `end` on has page 0. A loop loads the pages of its next tile early, so that keys never wait for a page number.
    Page numbers fit in 32 bits, so an address takes one wide multiplication."""
    if PAGE_SIZE % BLOCK_N == 0:
        pages = tl.load(table_ptr + first // PAGE_SIZE, mask=first < end, other=0)
    else:
        slots = first + tl.arange(0, BLOCK_N)
        pages = tl.load(table_ptr + slots // PAGE_SIZE, mask=slots < end, other=0)
    return pages.to(tl.int32)


@triton.jit
def tile_pointers(
    k_ptrs,  # [1, BLOCK_D / packed] pointers to the keys of the kv head in page 0
    v_ptrs,  # the same of their values, [1, BLOCK_D]; None: they lie behind the keys
    pages,  # as `load_pages` returns them
    slots,  # [BLOCK_N] int32
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_OFFSET: tl.constexpr,
):
    """Return pointers to the keys of slots, [BLOCK_N, BLOCK_D / packed]."""
    PACKED: tl.constexpr = packed(k_ptrs)
    in_page = slots % PAGE_SIZE * (HEAD_DIM // PACKED)
    if v_ptrs is None:
        return k_ptrs + (pages.to(tl.int64) * (2 * V_OFFSET // PACKED) + in_page)[:, None]
    else:
        return k_ptrs + (pages.to(tl.int64) * V_OFFSET + in_page)[:, None]


@triton.jit
def value_pointers(
    key_ptrs,  # of `tile_pointers`
    v_ptrs,
    pages,
    slots,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    V_OFFSET: tl.constexpr,
):
    """Return pointers to the values of slots, of the shape of `key_ptrs`. Other arguments as in `tile_pointers`."""
    PACKED: tl.constexpr = packed(key_ptrs)
    if v_ptrs is None:
        return key_ptrs + V_OFFSET // PACKED
    else:
        offsets = pages.to(tl.int64) * (V_OFFSET // HEAD_DIM * VALUE_DIM) + slots % PAGE_SIZE * VALUE_DIM
        return v_ptrs + offsets[:, None]


@triton.jit
def scaled(
    values,  # [BLOCK_N, BLOCK_D] or pairs [BLOCK_N, BLOCK_D / 2] uint16, keys or values of slots as they lie in pages
    scales_ptr,  # scales of the kv head's keys in page 0; None: return `values`
    plane: tl.constexpr,  # 0: keys, 1: values
    pages,  # as `load_pages` returns them
    slots,  # [BLOCK_N] int32
    is_inside,  # [BLOCK_N] bool, which slots are read
    dtype: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    V_OFFSET: tl.constexpr,  # of values behind keys, in numbers of a page
):
    """Return values times their scales in `dtype`, [BLOCK_N, BLOCK_D], as `blocks_at` (fp8_pages.py) does."""
    if scales_ptr is None:
        return values
    else:
        scales = load_scales(scales_ptr, plane, pages, slots, is_inside, PAGE_SIZE, V_OFFSET)
        if values.dtype == tl.uint16:
            return numbers_of(values, scales, dtype)
        else:
            return (values.to(tl.float32) * scales[:, None]).to(dtype)


@triton.jit
def tile_rows(first, kv_head, query_len, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return, for each row of a tile that begins with row `first`, its token in the sequence, its query head, and
    whether there is such a row: each [BLOCK_M]."""
    rows = first + tl.arange(0, BLOCK_M)
    is_row = rows < query_len * GROUP
    return tl.minimum(rows // GROUP, query_len - 1), kv_head * GROUP + rows % GROUP, is_row


@triton.jit(do_not_specialize=_RUN_TIME)
def _decode_kernel(
    out_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM] of q's dtype, written unless parts are combined later
    parts_ptr,  # [num_items * query_len * NUM_KV_HEADS * GROUP, HEAD_DIM] float32, written if HAS_PARTS
    stats_ptr,  # [2, num_items * query_len * NUM_KV_HEADS * GROUP] float32, written if HAS_PARTS
    items_ptr,  # [num_items] int64 of `Shares`; None: each sequence has num_splits items
    arrivals_ptr,  # [num_seqs * grid[0]] int32; None: `combine_kernel` combines parts
    q_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM], tokens q_stride apart
    kv_ptr,  # [num_pages, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM] of q's dtype, e4m3 or pairs of it, blocks BLOCK apart
    v_ptr,  # [num_pages, NUM_KV_HEADS, PAGE_SIZE, VALUE_DIM], if kv_ptr has keys alone; None: it has both
    scales_ptr,  # [num_pages, 2, NUM_KV_HEADS, PAGE_SIZE] float32, blocks BLOCK / 4 apart; None: no scales
    sinks_ptr,  # [NUM_KV_HEADS * GROUP] float32; None: there are none
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    seq_lens_ptr,  # [num_items] int64 with items, [num_seqs] without
    tree_starts_ptr,  # [num_seqs] int64, read if IS_TREE
    visible_ptr,  # [num_tokens, num_words] int64, read if IS_TREE
    positions_ptr,  # [num_tokens] int64, read if IS_TREE and HAS_WINDOW
    query_len,
    window,
    num_splits,
    q_stride,
    table_stride,
    num_words,
    scale,
    IS_TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    HAS_HIDDEN: tl.constexpr,  # a row may not see all keys of its program
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
):
    """Grid: (NUM_KV_HEADS * tiles of rows, num_items, 1), or (.., num_splits, num_seqs) without items."""
    kv_head, tile = tl.program_id(0) % NUM_KV_HEADS, tl.program_id(0) // NUM_KV_HEADS
    item, seq, split, num_splits, seq_len = work(items_ptr, seq_lens_ptr, num_splits, MIN_SPLIT)
    if num_splits < 0:
        return
    table_ptr += seq.to(tl.int64) * table_stride
    tokens, heads, is_row = tile_rows(tile * BLOCK_M, kv_head, query_len, GROUP, BLOCK_M)
    batch_tokens = seq * query_len + tokens  # of the forward
    first_new, dims = seq_len - query_len, tl.arange(0, BLOCK_D)
    last_seen = first_new + tokens  # by causality
    begin, end, lowest = span(
        positions_ptr, batch_tokens, last_seen, seq_len, window, split, num_splits, IS_TREE, HAS_WINDOW, BLOCK_N
    )
    is_dim = dims[None, :] < HEAD_DIM
    out_rows = batch_tokens.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
    q_rows = batch_tokens.to(tl.int64) * q_stride + heads * HEAD_DIM
    pages = load_pages(table_ptr, begin, end, PAGE_SIZE, BLOCK_N)
    if DEPENDENT:
        gdc_wait()
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=is_row[:, None] & is_dim, other=0.0)
    PACKED: tl.constexpr = packed(kv_ptr)
    k_ptrs = kv_ptr + kv_head * (BLOCK // PACKED) + tl.arange(0, BLOCK_D // PACKED)[None, :]
    v_ptrs = None if v_ptr is None else v_ptr + kv_head * (PAGE_SIZE * VALUE_DIM) + dims[None, :]
    if scales_ptr is not None:
        scales_ptr += kv_head * (BLOCK // 4)
    V_OFFSET: tl.constexpr = NUM_KV_HEADS * BLOCK
    if IS_TREE:
        tree_start = tl.load(tree_starts_ptr + seq).to(tl.int32)
        visible_ptrs = visible_ptr + batch_tokens * num_words
    else:
        tree_start, visible_ptrs = 0, visible_ptr
    has_sink = (split == 0) & (begin < end)  # without keys, no sums are stored
    sums, total, highest = sink_seen(sinks_ptr, heads, has_sink, BLOCK_M, BLOCK_D)
    if PACKED == 2 and BLOCK_M < _FULL_ROWS:
        sums, total, highest = _weighted_pairs(
            q, k_ptrs, scales_ptr, table_ptr, visible_ptrs, positions_ptr, pages, begin,
            end, last_seen, lowest, first_new, seq * query_len, tree_start, num_words, scale, total, highest,
            IS_TREE, HAS_WINDOW, PAGE_SIZE, HEAD_DIM, V_OFFSET, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    else:
        sums, total, highest = _weighted(
            q, k_ptrs, v_ptrs, scales_ptr, table_ptr, visible_ptrs, positions_ptr, pages, begin, end, last_seen, lowest,
            first_new, seq * query_len, tree_start, num_words, scale, sums, total, highest, False,
            IS_TREE, HAS_WINDOW, PAGE_SIZE, HEAD_DIM, VALUE_DIM, V_OFFSET, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    if HAS_HIDDEN:  # noqa: SIM102
        if has_nan(sums):
            FEW_KEYS: tl.constexpr = 16  # per tile, so that `weigh_seen` needs no more registers than `weigh`
            its_pages = load_pages(table_ptr, begin, end, PAGE_SIZE, FEW_KEYS)
            sums, total, highest = sink_seen(sinks_ptr, heads, has_sink, BLOCK_M, BLOCK_D)
            sums, total, highest = _weighted(
                q, k_ptrs, v_ptrs, scales_ptr, table_ptr, visible_ptrs, positions_ptr, its_pages, begin, end, last_seen,
                lowest, first_new, seq * query_len, tree_start, num_words, scale, sums, total, highest, True,
                IS_TREE, HAS_WINDOW, PAGE_SIZE, HEAD_DIM, VALUE_DIM, V_OFFSET, FEW_KEYS, BLOCK_D,
            )  # fmt: skip

    if DEPENDENT:
        gdc_launch_dependents()
    if HAS_PARTS:
        sums, total, is_row = store_part(
            parts_ptr, stats_ptr, arrivals_ptr, item, seq, split, num_splits, out_rows,
            query_len * (NUM_KV_HEADS * GROUP), sums, total, highest, is_row, dims, begin < end, HEAD_DIM,
        )  # fmt: skip
    if not HAS_PARTS or arrivals_ptr is not None:
        store_heads(out_ptr, out_rows, quotient(sums, total).to(out_ptr.dtype.element_ty), is_row, dims, HEAD_DIM)


@triton.jit
def _weighted(
    q,  # [BLOCK_M, BLOCK_D]
    k_ptrs,  # [1, BLOCK_D / PACKED] pointers to the keys of the kv head in page 0
    v_ptrs,  # [1, BLOCK_D] pointers to its values; None: they lie behind the keys
    scales_ptr,  # their scales; None: keys and values have q's dtype
    table_ptr,  # [max_pages] int64, of the sequence
    visible_ptrs,  # [BLOCK_M] pointers to each row's words, for a tree
    positions_ptr,  # [num_tokens] int64, for a tree with a window
    pages,  # int32, the pages of the first tile, from `load_pages`
    begin,
    end,
    last_seen,  # [BLOCK_M] int32, the last slot that each row sees by causality
    lowest,  # [BLOCK_M] int32, the lowest position in each row's window
    first_new,
    first_token,
    tree_start,
    num_words,
    scale,
    sums,  # [BLOCK_M, BLOCK_D] float32
    total,  # [BLOCK_M] float32
    highest,  # [BLOCK_M] float32
    SELECTS: tl.constexpr,
    IS_TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    V_OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Continue the running softmax (triton_softmax.py) over slots begin .. end - 1.

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
        is_loaded = is_inside[:, None] & is_dim
        k = tl.load(tile_ptrs, mask=is_loaded, other=0.0)
        k = scaled(k, scales_ptr, 0, tile_pages, slots, is_inside, q.dtype, PAGE_SIZE, V_OFFSET)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        is_seen = _seen(
            visible_ptrs, positions_ptr, slots, is_inside, first, end, last_seen, lowest, first_new, first_token,
            tree_start, num_words, IS_TREE, HAS_WINDOW,
        )  # fmt: skip
        its_values = value_pointers(
            tile_ptrs, v_ptrs, tile_pages, slots, PAGE_SIZE, HEAD_DIM, VALUE_DIM, V_OFFSET
        )  # fmt: skip
        v = tl.load(its_values, mask=is_inside[:, None] & is_value, other=0.0)
        v = scaled(v, scales_ptr, 1, tile_pages, slots, is_inside, q.dtype, PAGE_SIZE, V_OFFSET)
        if SELECTS:
            sums, total, highest = weigh_seen(scores, is_seen, scale, v, sums, total, highest)
        else:
            sums, total, highest = weigh(tl.where(is_seen, scores, float("-inf")), scale, v, sums, total, highest)
    return sums, total, highest


@triton.jit
def _weighted_pairs(
    q,  # [BLOCK_M, BLOCK_D]
    k_ptrs,  # [1, BLOCK_D / 2] pointers to pairs
    scales_ptr,
    table_ptr,
    visible_ptrs,
    positions_ptr,
    pages,
    begin,
    end,
    last_seen,
    lowest,
    first_new,
    first_token,
    tree_start,
    num_words,
    scale,
    total,
    highest,
    IS_TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Do `_weighted` from the first key on, with keys and values in pairs (triton_pairs.py). Other arguments as
    there."""
    is_dim = tl.arange(0, BLOCK_D // 2)[None, :] < HEAD_DIM // 2
    q_even, q_odd = split_queries(q)
    sums_even = tl.zeros([BLOCK_M, BLOCK_D // 2], tl.float32)
    sums_odd = tl.zeros([BLOCK_M, BLOCK_D // 2], tl.float32)
    for first in tl.range(begin, end, BLOCK_N):
        slots = first + tl.arange(0, BLOCK_N)
        is_inside = slots < end
        tile_ptrs = tile_pointers(k_ptrs, None, pages, slots, PAGE_SIZE, HEAD_DIM, V_OFFSET)
        k_scales = load_scales(scales_ptr, 0, pages, slots, is_inside, PAGE_SIZE, V_OFFSET)
        v_scales = load_scales(scales_ptr, 1, pages, slots, is_inside, PAGE_SIZE, V_OFFSET)
        pages = load_pages(table_ptr, first + BLOCK_N, end, PAGE_SIZE, BLOCK_N)
        is_loaded = is_inside[:, None] & is_dim
        scores = scores_of(q_even, q_odd, tl.load(tile_ptrs, mask=is_loaded, other=0), k_scales)
        is_seen = _seen(
            visible_ptrs, positions_ptr, slots, is_inside, first, end, last_seen, lowest, first_new, first_token,
            tree_start, num_words, IS_TREE, HAS_WINDOW,
        )  # fmt: skip
        sums_even, sums_odd, total, highest = weigh_pairs(
            tl.where(is_seen, scores, float("-inf")), scale,
            tl.load(tile_ptrs + V_OFFSET // 2, mask=is_loaded, other=0), v_scales,
            sums_even, sums_odd, total, highest, q.dtype,
        )  # fmt: skip
    return join_sums(sums_even, sums_odd), total, highest


@triton.jit
def _seen(
    visible_ptrs,
    positions_ptr,
    slots,  # [BLOCK_N] int32
    is_inside,  # [BLOCK_N] bool
    first,
    end,
    last_seen,
    lowest,
    first_new,
    first_token,
    tree_start,
    num_words,
    IS_TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Return which slots from `first` on each row sees, [BLOCK_M, BLOCK_N] bool. Other arguments as in `_weighted`."""
    if IS_TREE:
        is_seen = seen_in_tree(visible_ptrs, slots, is_inside, first, tree_start, num_words)
    else:
        is_seen = slots[None, :] <= tl.minimum(last_seen, end - 1)[:, None]
    if HAS_WINDOW:
        is_seen &= in_window(positions_ptr, first_token, slots, is_inside, first_new, lowest, IS_TREE)
    return is_seen
