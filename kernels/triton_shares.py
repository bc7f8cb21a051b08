"""Who looks at which keys in `decode_attention` (triton_attention.py) where sequences differ in length.

A program works on an *item*: a sequence, or one of the splits of its keys. Each sequence has as many as its part of all
keys is of the programs that run at once, and at least one. So nobody waits long for one long sequence among short ones,
and equal ones are cut as they would be by their number. All of it is found on the device: a CUDA graph holds it.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MIN_SPLIT = 64  # keys; shorter ones cost more to combine than they save
MAX_SPLITS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """Of one forward. Tensors on the device."""

    items: torch.Tensor  # [num_items] int64: sequence, split << 20, number of splits << 40; -1: no work
    firsts: torch.Tensor  # [num_seqs] int64: a sequence's first item, number of splits << 40
    arrivals: torch.Tensor | None  # int32 zeros, by sequence and tile of rows: how many of its splits are done

    @classmethod
    def of(cls, seq_lens: torch.Tensor, num_slots: int, max_splits: int, num_tiles: int) -> Shares:
        """`seq_lens` [num_seqs] int64; programs of `num_slots` items run at once, each of `num_tiles` programs. Where
        few sequences will be split, the last program to finish one combines its splits: `arrivals` are for that."""
        num_seqs, device = len(seq_lens), seq_lens.device
        assert seq_lens.dtype == torch.int64 and seq_lens.is_contiguous() and num_seqs < 1 << 20, seq_lens
        num_items = min(num_seqs + num_slots, num_seqs * max_splits)
        items = torch.empty(num_items, dtype=torch.int64, device=device)
        firsts = torch.empty(num_seqs, dtype=torch.int64, device=device)
        _share_kernel[(1,)](
            items, firsts, seq_lens, num_seqs, num_items, num_slots, max_splits,
            MIN_SPLIT=MIN_SPLIT, SEQS=triton.next_power_of_2(num_seqs),
            ITEMS=triton.next_power_of_2(num_items), num_warps=4,
        )  # fmt: skip
        is_split_often = num_slots >= 2 * num_seqs
        arrivals = None if is_split_often else torch.zeros(num_seqs * num_tiles, dtype=torch.int32, device=device)
        return cls(items, firsts, arrivals)


@triton.jit(do_not_specialize=("num_seqs", "num_items", "num_slots", "max_splits"))
def _share_kernel(
    items_ptr, firsts_ptr, seq_lens_ptr, num_seqs, num_items, num_slots, max_splits,
    MIN_SPLIT: tl.constexpr, SEQS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Grid: (1,)."""
    seqs, all_items = tl.arange(0, SEQS), tl.arange(0, ITEMS)
    is_seq = seqs < num_seqs
    lens = tl.load(seq_lens_ptr + seqs, mask=is_seq, other=0)
    sizes = (tl.maximum(lens, 0) + MIN_SPLIT - 1) // MIN_SPLIT
    shares = sizes * num_slots // tl.maximum(tl.sum(sizes, 0), 1)
    shares = tl.maximum(tl.minimum(tl.minimum(shares, max_splits), sizes), 1)
    shares = tl.where(is_seq, shares, 0)
    ends = tl.cumsum(shares, 0)
    words = seqs.to(tl.int64) | (shares << 40)
    tl.store(firsts_ptr + seqs, (ends - shares) | (shares << 40), mask=is_seq)
    for split in range(tl.max(shares, 0).to(tl.int32)):
        tl.store(items_ptr + ends - shares + split, words | (split << 20), mask=split < shares)
    is_left = (all_items >= tl.sum(shares, 0)) & (all_items < num_items)
    tl.store(items_ptr + all_items, tl.full([ITEMS], -1, tl.int64), mask=is_left)


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
