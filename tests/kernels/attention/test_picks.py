"""The choice of tokens by index scores, against plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from baton.kernels.attention.attention import Tree
from baton.kernels.attention.picks import Sight, pick, picked

PAGE_SIZE = 4


def sight_of(query_lens: list[int], seq_lens: list[int], tree: Tree | None = None) -> Sight:
    num_pages = -(-max(seq_lens) // PAGE_SIZE)
    numbers = random.Random(0).sample(range(1, 60), num_pages * len(seq_lens))
    table = torch.tensor(numbers).view(len(seq_lens), num_pages)
    return Sight.of(table, query_lens, torch.tensor(seq_lens), tree)


@pytest.mark.parametrize("num_picks", [1, 3, 8, 40])
def test_the_best_slots_are_taken_and_of_equal_ones_the_lowest(num_picks: int) -> None:
    generator = torch.Generator().manual_seed(num_picks)
    scores = torch.randint(-3, 3, (50, 19), generator=generator).float() * 0.5  # many are equal
    scores[scores == -1.5] = float("-inf")
    scores[0], scores[1] = float("-inf"), 0.0
    scores[1, ::2] = -0.0  # equal to 0
    picks = pick(scores, num_picks)
    assert picks.shape == (50, min(num_picks, 19)) and picks.dtype == torch.int32
    for row, mask, own in zip(scores.tolist(), picked(picks, 19), picks.tolist(), strict=True):
        seen = [slot for slot, score in enumerate(row) if score > float("-inf")]
        expected = sorted(sorted(seen, key=lambda slot: (-row[slot], slot))[:num_picks])
        assert own == expected + [-1] * (len(own) - len(expected))
        assert mask.nonzero().flatten().tolist() == expected


def test_a_slot_without_a_number_is_not_taken() -> None:
    assert pick(torch.tensor([[1.0, float("nan"), 3.0, 2.0]]), 3).tolist() == [[0, 2, 3]]


def test_a_token_sees_the_slots_up_to_its_own() -> None:
    sight = sight_of([1, 3], [9, 5])
    assert sight.seqs.tolist() == [0, 1, 1, 1] and sight.slots.tolist() == [8, 2, 3, 4]
    assert sight.seen.sum(1).tolist() == [9, 3, 4, 5]
    rows = sight.rows(PAGE_SIZE).tolist()
    assert rows == [
        int(sight.block_table[seq, slot // PAGE_SIZE]) * PAGE_SIZE + slot % PAGE_SIZE
        for seq, slot in [(0, 8), (1, 2), (1, 3), (1, 4)]
    ]


def test_a_node_of_a_tree_sees_its_ancestors() -> None:
    visible = torch.tensor([[True, False, False], [True, True, False], [True, False, True]] * 2)
    sight = sight_of([3, 3], [9, 7], Tree(torch.tensor([6, 4]), visible))
    for seq, start in enumerate([6, 4]):
        own = sight.seen[3 * seq : 3 * seq + 3]
        assert own[:, :start].all() and torch.equal(own[:, start : start + 3], visible[:3])
        assert not own[:, start + 3 :].any()
