"""The keys that each row sees, on a GPU: masks of trees as bits, windows, and the range of a split."""

# ruff: noqa: N803, SIM108
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PACKED_ROWS = 16


def pack(visible: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """`visible` [num_tokens, num_columns] bool -> [num_tokens, num_words] int64."""
    num_columns = visible.shape[1]
    assert visible.shape[0] == num_tokens and visible.dtype == torch.bool and visible.is_contiguous(), visible.shape
    words = torch.empty((num_tokens, triton.cdiv(num_columns, 64)), dtype=torch.int64, device=visible.device)
    _pack_kernel[(triton.cdiv(num_tokens, _PACKED_ROWS), words.shape[1])](
        words, visible, num_tokens, num_columns, ROWS=_PACKED_ROWS, num_warps=4
    )
    return words


@triton.jit(do_not_specialize=("num_tokens", "num_columns"))
def _pack_kernel(words_ptr, visible_ptr, num_tokens, num_columns, ROWS: tl.constexpr):
    """Grid: (tokens / ROWS, words)."""
    rows, bits = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, 64)
    columns, is_row = tl.program_id(1) * 64 + bits, rows < num_tokens
    inside = is_row[:, None] & (columns < num_columns)[None, :]
    visible = tl.load(visible_ptr + (rows * num_columns)[:, None] + columns[None, :], mask=inside, other=0)
    words = tl.sum((visible != 0).to(tl.int64) << bits.to(tl.int64)[None, :], 1)
    tl.store(words_ptr + rows * tl.num_programs(1) + tl.program_id(1), words, mask=is_row)


@triton.jit
def span(
    positions_ptr, tokens, last_seen, seq_len, window, split, num_splits,
    IS_TREE: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Slots begin .. end - 1 that a split of these rows looks at, and the lowest position that each row sees; `tokens`
    of the forward."""
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
def seen_in_tree(visible_ptrs, slots, is_inside, first, tree_start, num_words):
    """Return what the rows see of the slots of a tile, which begin with `first`: [rows, BLOCK_N]."""
    bits = _visible_bits(visible_ptrs, first - tree_start, num_words)
    return is_inside[None, :] & ((bits[:, None] >> (slots - first)[None, :].to(tl.int64) & 1) != 0)


@triton.jit
def in_window(positions_ptr, first_token, slots, is_inside, first_new, lowest, IS_TREE: tl.constexpr):
    """Whether keys are at no lower position than each row's `lowest`: [rows, BLOCK_N]. A sequence's new tokens are in
    slots from `first_new` on, the first one `first_token` of the forward; a tree's stand at no slot's number, but at
    `positions_ptr`."""
    if IS_TREE:
        is_new = is_inside & (slots >= first_new)
        new = tl.load(positions_ptr + first_token + slots - first_new, mask=is_new, other=0).to(tl.int32)
        slots = tl.where(is_new, new, slots)
    return slots[None, :] >= lowest[:, None]


@triton.jit
def _visible_bits(visible_ptrs, column, num_words):
    """Columns `column` .. column + 63 of rows that begin at `visible_ptrs`, as bits; columns below 0 are seen."""
    word, shift = (column + 0x40000000) // 64 - 0x40000000 // 64, (column + 0x40000000) % 64  # rounded down
    low = _visible_word(visible_ptrs, word, num_words).to(tl.uint64, bitcast=True)
    high = _visible_word(visible_ptrs, word + 1, num_words).to(tl.uint64, bitcast=True)
    shift = shift.to(tl.uint64)
    return ((low >> shift) | ((high << 1) << (63 - shift))).to(tl.int64, bitcast=True)


@triton.jit
def _visible_word(visible_ptrs, word, num_words):
    bits = tl.load(visible_ptrs + word, mask=(word >= 0) & (word < num_words), other=0)
    return tl.where(word < 0, -1, bits)
