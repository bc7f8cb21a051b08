"""Who looks at which keys in the attention of a forward (triton_attention.py, triton_extend.py) whose sequences differ
in length.

A program works on an *item*: a sequence (of prompts, a tile of rows), or one of the splits of its keys. Sequences have
as many as their part of all keys is of the programs that run at once, and at least one. So nobody waits long for one
long sequence among short ones, and equal ones are cut as they would be by their number. All of it is found on the
device: a CUDA graph holds it.

Where at least two items a sequence run at once, there are never more items than do: programs too many, even those
without work, make all wait. Else split sequences come first, and what they have beyond one item runs when others end.
(63 sequences of 1,090 keys and one of 15,360: 104 us a layer of Llama-3.1-8B on an H200, and 538 us without splits.)
"""

# ruff: noqa: N803, RET505
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MIN_SPLIT = 64  # keys; shorter ones cost more to combine than they save
MAX_SPLITS = 128
_MOST_GATHERED = 32  # splits that one program combines, one after the other
_SEQS = 64  # one kernel for all batches of up to so many
_RUN_TIME = ("num_seqs", "num_items", "least", "num_shared", "max_splits", "num_arrivals")


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """Of one forward. Tensors on the device."""

    items: torch.Tensor  # [num_items] int64: sequence, split << 20, number of splits << 40; -1: no work
    lens: torch.Tensor  # [num_items] int64: of the sequence
    firsts: torch.Tensor  # [num_seqs] int64: a sequence's first item, number of splits << 40
    arrivals: torch.Tensor | None  # int32 zeros, by sequence and tile of rows: how many of its splits are done

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
        """`seq_lens` [num_seqs] int64; `num_slots` items run at once, of `num_tiles` programs each. Where few sequences
        will be split, or it `gathers`, the last program to finish one combines its splits: `arrivals` are for that."""
        num_seqs, device = len(seq_lens), seq_lens.device
        assert seq_lens.dtype == torch.int64 and seq_lens.is_contiguous() and num_seqs < 1 << 20, seq_lens
        if num_slots >= 2 * num_seqs and not gathers:
            least, num_shared, num_most, arrivals = 1, num_slots - num_seqs, num_slots, None
        else:
            least, num_shared, num_most = 0, num_slots, num_slots + num_seqs
            max_splits = min(max_splits, _MOST_GATHERED)
            arrivals = torch.empty(num_seqs * num_tiles, dtype=torch.int32, device=device)
        num_items = min(num_most, num_seqs * max_splits)
        items, lens, firsts = (
            torch.empty(size, dtype=torch.int64, device=device) for size in (num_items, num_items, num_seqs)
        )
        _share_kernel[(1,)](
            items, lens, firsts, arrivals, seq_lens, num_seqs, num_items, least, num_shared, max_splits,
            num_seqs * num_tiles, MIN_SPLIT=min_split, SEQS=max(_SEQS, triton.next_power_of_2(num_seqs)), num_warps=4,
        )  # fmt: skip
        return cls(items, lens, firsts, arrivals)


@triton.jit(do_not_specialize=_RUN_TIME)
def _share_kernel(
    items_ptr, lens_ptr, firsts_ptr, arrivals_ptr, seq_lens_ptr, num_seqs, num_items, least, num_shared, max_splits,
    num_arrivals, MIN_SPLIT: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """Grid: (1,)."""
    seqs = tl.arange(0, SEQS)
    is_seq = seqs < num_seqs
    lens = tl.load(seq_lens_ptr + seqs, mask=is_seq, other=0)
    sizes = (tl.maximum(lens, 0) + MIN_SPLIT - 1) // MIN_SPLIT
    shares = least + sizes * num_shared // tl.maximum(tl.sum(sizes, 0), 1)
    shares = tl.maximum(tl.minimum(tl.minimum(shares, max_splits), sizes), 1)
    cut = tl.where(is_seq & (shares > 1), shares, 0)
    whole = (is_seq & (shares == 1)).to(tl.int64)
    num_cut = tl.sum(cut, 0)
    first = tl.where(cut > 0, tl.cumsum(cut, 0) - cut, num_cut + tl.cumsum(whole, 0) - 1)
    shares = cut + whole
    words = seqs.to(tl.int64) | (shares << 40)
    tl.store(firsts_ptr + seqs, first | (shares << 40), mask=is_seq)
    for split in range(tl.max(shares, 0).to(tl.int32)):
        tl.store(items_ptr + first + split, words | (split << 20), mask=split < shares)
        tl.store(lens_ptr + first + split, lens, mask=split < shares)
    for begin in range(num_cut + tl.sum(whole, 0), num_items, SEQS):
        tl.store(items_ptr + begin + seqs, tl.full([SEQS], -1, tl.int64), mask=begin + seqs < num_items)
        tl.store(lens_ptr + begin + seqs, tl.zeros([SEQS], tl.int64), mask=begin + seqs < num_items)
    if arrivals_ptr is not None:
        for begin in range(0, num_arrivals, SEQS):
            tl.store(arrivals_ptr + begin + seqs, 0, mask=begin + seqs < num_arrivals)


@triton.jit
def work(items_ptr, seq_lens_ptr, num_splits, MIN_SPLIT: tl.constexpr):
    """Of a program: its item, sequence, split, number of splits (-1: no work) and length of the sequence. Grid: (..,
    items, 1), lengths by item; without items (.., splits, sequences), lengths by sequence."""
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
    """How many a sequence has where nothing is shared."""
    return tl.maximum(tl.minimum(tl.cdiv(seq_len, MIN_SPLIT), most), 1)


@triton.jit
def unpacked(word):
    """The low two numbers of `Shares.items` or `firsts`, and the number of splits; int32."""
    return (word & 0xFFFFF).to(tl.int32), ((word >> 20) & 0xFFFFF).to(tl.int32), (word >> 40).to(tl.int32)


@triton.jit
def is_last(arrivals_ptr, number):
    """Whether the others of `number` programs were here before, whose stores this one sees then. Leaves 0 behind."""
    tl.debug_barrier()  # all of this program has stored
    is_end = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == number - 1
    tl.store(arrivals_ptr, 0, mask=is_end)
    return is_end
