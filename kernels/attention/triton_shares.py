"""The division of keys among programs in the attention of a forward whose sequences differ in length
(triton_attention.py, triton_extend.py).

A program works on an *item*: a whole sequence, or one split of a sequence's keys. For prompts, read "tile of rows" for
"sequence". Splits are as short as the number of items allows. But they are no shorter than an equal part of all keys
for each program that runs at once. So a long sequence among short ones makes nobody wait, and equal sequences are cut
equally. The device computes the division, so a CUDA graph can hold it.

The number of items is at most the number of programs that run at once, because one program too many makes all wait,
even if it has no work. An exception is a batch in which nearly all items are whole sequences.

Items without work come first and pass while the kernel before ends. The splits of the longest sequences come next, and
whole sequences last.
"""

# ruff: noqa: N803, RET505
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MIN_SPLIT = 64  # keys; shorter ones cost more to combine than they save
_MAX_SPLITS, _MOST_SPLITS = 32, 128  # splits that one program combines: usually, and if few tiles exist
_LEFT_FOR_LONG = 8  # items that run at once beyond one per sequence; if fewer are left, more items are launched
_SEQS = 64  # one compiled kernel serves all batches of up to so many sequences
_RUN_TIME = ("num_seqs", "num_items", "num_slots", "max_splits", "num_arrivals")


def max_splits(num_sms: int, num_tiles: int) -> int:
    """Return the most splits of a sequence that has `num_tiles` programs per split, on so many processors.

    It is 32. If 32 would leave processors without work, it is the largest power of two, up to 128, that gives each
    processor no more than one program. Each power of two compiles one kernel that combines splits."""
    per_tile = max(1, num_sms // num_tiles)
    return min(_MOST_SPLITS, max(_MAX_SPLITS, 1 << (per_tile.bit_length() - 1)))


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """The division of one forward's keys. Tensors are on the device."""

    items: torch.Tensor  # [num_items] int64: sequence | split << 20 | number of splits << 40; -1: no work
    lens: torch.Tensor  # [num_items] int64: the length of the item's sequence
    firsts: torch.Tensor  # [num_seqs] int64: a sequence's first item | number of splits << 40
    arrivals: torch.Tensor | None  # [num_seqs * num_tiles] int32, splits of a tile of rows that are done; zeros at rest

    @classmethod
    def of(
        cls,
        seq_lens: torch.Tensor,
        num_slots: int,
        max_splits: int,
        num_tiles: int,
        min_split: int = MIN_SPLIT,
        *,
        gathers: bool = False,
    ) -> Shares:
        """Divide sequences of `seq_lens` [num_seqs] int64 into splits of at least `min_split` keys.

        `num_slots` items run at once. An item has `num_tiles` programs. If few sequences will be split, or if `gathers`
        is set, the last program of a sequence combines its splits. `arrivals` tells it that it is the last."""
        num_seqs, device = len(seq_lens), seq_lens.device
        assert seq_lens.dtype == torch.int64 and seq_lens.is_contiguous() and num_seqs < 1 << 20, seq_lens
        are_few = num_slots >= 2 * num_seqs
        num_items = num_slots if are_few or num_slots - num_seqs >= _LEFT_FOR_LONG else num_slots + num_seqs
        num_items = min(num_items, num_seqs * max_splits)
        items, lens, firsts = (
            torch.empty(size, dtype=torch.int64, device=device) for size in (num_items, num_items, num_seqs)
        )
        arrivals = None
        if not are_few or gathers:
            arrivals = torch.empty(num_seqs * num_tiles, dtype=torch.int32, device=device)
        _share_kernel[(1,)](
            items, lens, firsts, arrivals, seq_lens, num_seqs, num_items, num_slots, max_splits, num_seqs * num_tiles,
            MIN_SPLIT=min_split, SEQS=max(_SEQS, triton.next_power_of_2(num_seqs)), num_warps=4,
        )  # fmt: skip
        return cls(items, lens, firsts, arrivals)


@triton.jit(do_not_specialize=_RUN_TIME)
def _share_kernel(
    items_ptr,  # [num_items] int64, written
    lens_ptr,  # [num_items] int64, written
    firsts_ptr,  # [num_seqs] int64, written
    arrivals_ptr,  # [num_arrivals] int32, set to 0; None: there are none
    seq_lens_ptr,  # [num_seqs] int64
    num_seqs,
    num_items,
    num_slots,
    max_splits,
    num_arrivals,
    MIN_SPLIT: tl.constexpr,
    SEQS: tl.constexpr,
):
    """Grid: (1,). One program divides all sequences."""
    seqs = tl.arange(0, SEQS)
    is_seq = seqs < num_seqs
    lens = tl.load(seq_lens_ptr + seqs, mask=is_seq, other=0)
    sizes = tl.cdiv(tl.maximum(lens, 0).to(tl.int32), MIN_SPLIT)
    shares = _fewest(sizes, is_seq, num_items, num_slots, max_splits)
    cut, whole = tl.where(shares > 1, shares, 0), (shares == 1).to(tl.int32)
    num_idle = num_items - tl.sum(shares, 0)
    first = num_idle + tl.where(cut > 0, tl.cumsum(cut, 0) - cut, tl.sum(cut, 0) + tl.cumsum(whole, 0) - 1)
    number = shares.to(tl.int64) << 40
    tl.store(firsts_ptr + seqs, number | first, mask=is_seq)
    for begin in range(0, num_idle, SEQS):
        tl.store(items_ptr + begin + seqs, tl.full([SEQS], -1, tl.int64), mask=begin + seqs < num_idle)
        tl.store(lens_ptr + begin + seqs, tl.zeros([SEQS], tl.int64), mask=begin + seqs < num_idle)
    for split in range(tl.max(shares, 0)):
        tl.store(items_ptr + first + split, number | (split << 20) | seqs, mask=split < shares)
        tl.store(lens_ptr + first + split, lens, mask=split < shares)
    if arrivals_ptr is not None:
        for begin in range(0, num_arrivals, SEQS):
            tl.store(arrivals_ptr + begin + seqs, 0, mask=begin + seqs < num_arrivals)


@triton.jit
def _fewest(sizes, is_seq, num_items, num_slots, max_splits):
    """Return each sequence's number of splits, [SEQS] int32; 0 where `is_seq` [SEQS] bool is False.

    `sizes` [SEQS] int32 are the lengths in units of MIN_SPLIT keys. Splits have the least length for which `num_items`
    suffice, but no less than an equal part for each of `num_slots`."""
    longest = tl.max(sizes, 0)
    low = tl.maximum(tl.cdiv(tl.sum(sizes, 0), num_slots), tl.maximum(tl.cdiv(longest, max_splits), 1))
    high = tl.maximum(low, longest)
    while low < high:
        middle = (low + high) // 2
        has_room = tl.sum(tl.where(is_seq, tl.maximum(tl.cdiv(sizes, middle), 1), 0), 0) <= num_items
        low, high = tl.where(has_room, low, middle + 1), tl.where(has_room, middle, high)
    return tl.where(is_seq, tl.maximum(tl.cdiv(sizes, low), 1), 0)


@triton.jit
def work(items_ptr, seq_lens_ptr, num_splits, MIN_SPLIT: tl.constexpr):
    """Return a program's item, sequence, split, number of splits (-1: no work) and length of the sequence.

    Grid: (tiles, num_items, 1), with lengths [num_items] int64 at `seq_lens_ptr`. Without items the grid is (tiles,
    num_splits, num_seqs), with lengths [num_seqs]."""
    item = tl.program_id(1)
    if items_ptr is None:
        seq = tl.program_id(2)
        seq_len = tl.load(seq_lens_ptr + seq).to(tl.int32)
        number = splits_of(seq_len, num_splits, MIN_SPLIT)
        return item + seq * num_splits, seq, item, tl.where(item < number, number, -1), seq_len
    else:
        seq, split, num_splits = unpacked(tl.load(items_ptr + item))
        return item, seq, split, num_splits, tl.load(seq_lens_ptr + item).to(tl.int32)


@triton.jit
def splits_of(seq_len, most, MIN_SPLIT: tl.constexpr):
    """Return the number of splits of a sequence for a grid without items, at most `most`."""
    return tl.maximum(tl.minimum(tl.cdiv(seq_len, MIN_SPLIT), most), 1)


@triton.jit
def unpacked(word):
    """Return bits 0-19, bits 20-39 and the rest of a word of `Shares.items` or `Shares.firsts`, int32 each."""
    return (word & 0xFFFFF).to(tl.int32), ((word >> 20) & 0xFFFFF).to(tl.int32), (word >> 40).to(tl.int32)


@triton.jit
def is_last(arrivals_ptr, number):
    """Return whether this program is the last of `number` programs to call. It then sees the stores of the others.

    `arrivals_ptr` is one int32, 0 before the first program calls. The last program sets it to 0 again."""
    tl.debug_barrier()  # all of this program has stored
    is_end = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == number - 1
    tl.store(arrivals_ptr, 0, mask=is_end)
    return is_end
