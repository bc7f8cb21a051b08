"""The keys that each row of an attention tile sees, on a GPU (triton_attention.py).

The mask of a tree is packed into bits, 64 columns per word (`pack`). A kernel reads the bits of a tile of keys with
`seen_in_tree`, compares positions with a window in `in_window`, and finds the keys of its split with `span`.
"""

# ruff: noqa: N803, SIM108
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PACKED_ROWS = 16


def pack(visible: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the mask `visible` [num_tokens, num_columns] bool as bits, [num_tokens, num_words] int64.

    Bit i of word w is column 64 w + i. Bits beyond the last column are 0."""
    num_columns = visible.shape[1]
    assert visible.shape[0] == num_tokens and visible.dtype == torch.bool and visible.is_contiguous(), visible.shape
    words = torch.empty((num_tokens, triton.cdiv(num_columns, 64)), dtype=torch.int64, device=visible.device)
    _pack_kernel[(triton.cdiv(num_tokens, _PACKED_ROWS), words.shape[1])](
        words, visible, num_tokens, num_columns, ROWS=_PACKED_ROWS, num_warps=4
    )
    return words


@triton.jit(do_not_specialize=("num_tokens", "num_columns"))
def _pack_kernel(
    words_ptr,  # [num_tokens, num_words] int64, written
    visible_ptr,  # [num_tokens, num_columns] bool
    num_tokens,
    num_columns,
    ROWS: tl.constexpr,
):
    """Grid: (ceil(num_tokens / ROWS), num_words). A program packs one word of each of ROWS tokens."""
    rows, bits = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, 64)
    columns, is_row = tl.program_id(1) * 64 + bits, rows < num_tokens
    inside = is_row[:, None] & (columns < num_columns)[None, :]
    visible = tl.load(visible_ptr + (rows * num_columns)[:, None] + columns[None, :], mask=inside, other=0)
    words = tl.sum((visible != 0).to(tl.int64) << bits.to(tl.int64)[None, :], 1)
    tl.store(words_ptr + rows * tl.num_programs(1) + tl.program_id(1), words, mask=is_row)


@triton.jit
def span(
    positions_ptr,  # [num_tokens] int64, read for a tree with a window
    tokens,  # [rows] int32, the token of each row, counted through the forward
    last_seen,  # [rows] int32, the last slot that each row sees by causality
    seq_len,
    window,
    split,
    num_splits,
    IS_TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return (begin, end, lowest): the split looks at slots begin .. end - 1; each row sees no position below `lowest`
    [rows] int32. `begin` is a multiple of BLOCK_N."""
    begin, end = 0, seq_len
    if not IS_TREE:
        end = tl.maximum(tl.max(last_seen, 0) + 1, 0)
    lowest = tl.zeros_like(last_seen)
    if HAS_WINDOW:
        if IS_TREE:
            lowest = tl.load(positions_ptr + tokens).to(tl.int32) - window + 1
        else:
            lowest = last_seen - window + 1
        begin = tl.maximum(tl.min(lowest, 0), 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), num_splits) * BLOCK_N
    begin += split * share
    return begin, tl.minimum(end, begin + share), lowest


@triton.jit
def seen_in_tree(
    visible_ptrs,  # [rows] pointers to the first word of each row's mask
    slots,  # [BLOCK_N] int32, first .. first + BLOCK_N - 1; BLOCK_N is at most 64
    is_inside,  # [BLOCK_N] bool: the slot is one of the split's
    first,
    tree_start,
    num_words,
):
    """Return whether each row sees each slot of a tile: [rows, BLOCK_N] bool. Slots before `tree_start` are seen."""
    bits = _visible_bits(visible_ptrs, first - tree_start, num_words)
    return is_inside[None, :] & ((bits[:, None] >> (slots - first)[None, :].to(tl.int64) & 1) != 0)


@triton.jit
def in_window(
    positions_ptr,  # [num_tokens] int64, read for a tree
    first_token,  # the sequence's first new token, counted through the forward
    slots,  # [BLOCK_N] int32
    is_inside,  # [BLOCK_N] bool
    first_new,  # the slot of the sequence's first new token
    lowest,  # [rows] int32
    IS_TREE: tl.constexpr,
):
    """Return whether the position of each slot is `lowest` or higher: [rows, BLOCK_N] bool.

    A slot's position is its number. If IS_TREE, the positions of new tokens are read from `positions_ptr` instead."""
    if IS_TREE:
        is_new = is_inside & (slots >= first_new)
        new = tl.load(positions_ptr + first_token + slots - first_new, mask=is_new, other=0).to(tl.int32)
        slots = tl.where(is_new, new, slots)
    return slots[None, :] >= lowest[:, None]


@triton.jit
def _visible_bits(visible_ptrs, column, num_words):
    """Return columns `column` .. column + 63 of the masks at `visible_ptrs` [rows] as bits, [rows] int64.

    `column` may be negative. Bits of columns below 0 are 1."""
    word, shift = (column + 0x40000000) // 64 - 0x40000000 // 64, (column + 0x40000000) % 64  # rounded down
    low = _visible_word(visible_ptrs, word, num_words).to(tl.uint64, bitcast=True)
    high = _visible_word(visible_ptrs, word + 1, num_words).to(tl.uint64, bitcast=True)
    shift = shift.to(tl.uint64)
    return ((low >> shift) | ((high << 1) << (63 - shift))).to(tl.int64, bitcast=True)


@triton.jit
def _visible_word(visible_ptrs, word, num_words):
    """Return one word of each mask, [rows] int64: all ones for a word below 0, zeros beyond the last word."""
    bits = tl.load(visible_ptrs + word, mask=(word >= 0) & (word < num_words), other=0)
    return tl.where(word < 0, -1, bits)
