"""Who looks at which keys, and what becomes of the parts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from triton_device import DEVICE

from baton.kernels.attention.triton_shares import MIN_SPLIT, Shares, max_splits

NUMBER = 0xFFFFF


def shares_of(seq_lens: Sequence[int], num_slots: int, max_splits: int = 32) -> tuple[list[int], Shares]:
    """Splits of each sequence, after a look at what is said of them."""
    shares = Shares.of(torch.tensor(seq_lens, device=DEVICE), num_slots, max_splits, 3)
    firsts = [(word & NUMBER, word >> 40) for word in shares.firsts.tolist()]
    items = shares.items.tolist()
    in_order = sorted(range(len(seq_lens)), key=lambda seq: (firsts[seq][1] == 1, seq))  # those that are split first
    expected = [seq | split << 20 | firsts[seq][1] << 40 for seq in in_order for split in range(firsts[seq][1])]
    idle = len(items) - len(expected)
    assert items == [-1] * idle + expected
    lens = [seq_lens[seq] for seq in in_order for _ in range(firsts[seq][1])]
    assert shares.lens.tolist() == [0] * idle + lens
    for seq, (first, number) in enumerate(firsts):
        assert items[first] == seq | number << 40
    assert len(items) <= num_slots or num_slots < min(2 * len(seq_lens), len(seq_lens) + 8)
    return [number for _, number in firsts], shares


@pytest.mark.parametrize(
    ("seq_lens", "num_slots", "expected"),
    [
        ([1000] * 8, 49, [6] * 8),  # 49 // 8
        ([1000] * 64, 49, [1] * 64),
        ([1000, 1000, 0, 0, 0], 20, [8, 8, 1, 1, 1]),  # padding takes no more
        ([32_768] + [1000] * 63, 49, [16] + [1] * 63),  # an equal part of 1,520 tiles for each of 49 is 32 tiles
        ([1000] * 63 + [32_768], 49, [1] * 63 + [16]),
        ([32_768] + [1000] * 7, 49, [32] + [1] * 7),  # at most 32, and none shorter than those
        ([100, 6400], 12, [1, 10]),
        ([MIN_SPLIT, MIN_SPLIT + 1], 30, [1, 2]),  # no shorter ones
        ([0, 0, 0], 30, [1, 1, 1]),
        ([640] * 3, 1, [1, 1, 1]),
    ],
)
def test_splits_by_length(seq_lens: list[int], num_slots: int, expected: list[int]) -> None:
    assert shares_of(seq_lens, num_slots)[0] == expected


def test_any_lengths() -> None:
    """Splits are as short as all items together allow, but no shorter than an equal part for each slot."""
    generator = torch.Generator().manual_seed(0)
    for num_seqs in (1, 2, 5, 33, 90):
        for num_slots in (1, 7, 40, 99):
            lens = (torch.rand(num_seqs, generator=generator) ** 4 * 9000).int().tolist()
            numbers, shares = shares_of(lens, num_slots)
            sizes = [-(-length // MIN_SPLIT) for length in lens]
            longest = max(-(-sum(sizes) // num_slots), -(-max(sizes) // 32), 1)
            while sum(max(1, -(-size // longest)) for size in sizes) > len(shares.items):
                longest += 1
            assert numbers == [max(1, -(-size // longest)) for size in sizes]


def test_few_splits_are_combined_by_the_last_to_arrive() -> None:
    assert shares_of([500] * 4, 8)[1].arrivals is None
    arrivals = shares_of([500] * 4, 7)[1].arrivals
    assert arrivals is not None and arrivals.tolist() == [0] * 12


@pytest.mark.parametrize(
    ("num_sms", "num_tiles", "expected"),
    [(132, 8, 32), (132, 32, 32), (132, 4, 32), (132, 2, 64), (132, 1, 128), (148, 1, 128), (16, 1, 32), (4, 1, 32)],
)
def test_few_tiles_have_more_splits(num_sms: int, num_tiles: int, expected: int) -> None:
    """Eight KV heads or more have as many as ever; with one KV head nearly all processors have work."""
    assert max_splits(num_sms, num_tiles) == expected
    assert num_tiles * expected <= num_sms or expected == 32
    assert 2 * num_tiles * expected > num_sms or expected == 128
