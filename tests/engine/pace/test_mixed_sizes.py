"""The sizes of forwards that a round and a chunk share: which there are, and which of them serves."""

from __future__ import annotations

import pytest

from baton.engine.pace.draft_length import DraftShape
from baton.engine.pace.mixed_sizes import (
    CHUNK_SIZES,
    EVERY_SIZE,
    MAX_PROMPTS,
    MixedSize,
    MixedSizes,
    fitting,
    mixed_sizes,
)

CHAIN, TREE = DraftShape(5), DraftShape(3, 2, 9)
TREES = {"draft_topk": 2, "draft_steps": 3}


@pytest.mark.parametrize(
    ("batches", "chosen"),
    [
        ([1], [1]),
        ([1, 2, 4, 5], [5]),
        ([1, 2, 4, 8, 16], [8, 16]),
        ([1, 2, 4, 8, 16, 32, 64], [8, 16, 32, 64]),
        ([1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 256], [8, 16, 32, 64, 128, 256]),
        ([], []),
    ],
)
def test_few_buckets_have_mixed_graphs(batches: list[int], chosen: list[int]) -> None:
    sizes = mixed_sizes(batches, DraftShape(0))
    assert sorted(sizes) == [MixedSize(num, DraftShape(0), tokens) for num in chosen for tokens in CHUNK_SIZES]
    assert [each.num_rows for each in sizes] == sorted(each.num_rows for each in sizes)
    both = mixed_sizes(batches, CHAIN)
    assert {each.shape for each in both} == ({DraftShape(0), CHAIN} if chosen else set())
    assert max((each.num_round_rows for each in both if each.shape == CHAIN), default=0) <= 512
    assert len(both) <= 50, "each costs 0.03 to 0.1 s at the start"


def test_the_size_with_least_padding_serves() -> None:
    sizes = mixed_sizes([1, 2, 4, 8, 16, 32, 64], CHAIN)

    def of(num_seqs: int, num_steps: int, num_tokens: int) -> tuple[int, int, int] | None:
        found = fitting(sizes, num_seqs, DraftShape(num_steps), num_tokens)
        return None if found is None else (found.num_seqs, found.shape.num_steps, found.num_tokens)

    assert of(8, 0, 64) == (8, 0, 64) and of(9, 0, 65) == (16, 0, 128) and of(33, 0, 129) == (64, 0, 256)
    assert of(64, 5, 256) == (64, 5, 256) and of(8, 5, 1) == (8, 5, 64)
    assert of(65, 0, 64) is None and of(1, 0, 257) is None, "no size holds them"
    assert of(8, 1, 64) == (8, 5, 64), "the largest drafts serve smaller ones"
    assert of(33, 5, 64) == (64, 5, 64), "186 rows of padding"
    assert of(32, 5, 256) == (32, 5, 256) and of(33, 4, 256) is None, "219 rows of padding"
    assert of(20, 0, 129) == (32, 0, 256) and of(1, 5, 129) == (8, 5, 256)
    assert fitting(mixed_sizes([8], TREE), 3, TREE, 9) == MixedSize(8, TREE, 64)


def test_a_chunk_shares_a_forward_by_batch_drafts_length_and_number_of_prompts() -> None:
    sizes = MixedSizes(mixed_sizes([1, 2, 4, 8, 16, 32, 64], CHAIN), CHAIN)
    assert sizes.lengths(8, 0) == sizes.lengths(64, 0) == list(CHUNK_SIZES) and sizes.lengths(65, 0) == []
    assert sizes.lengths(33, 5) == list(CHUNK_SIZES) and sizes.lengths(33, 4) == [], "more than 192 rows of padding"
    assert sizes.holds(8, 0, 250, MAX_PROMPTS) and not sizes.holds(8, 0, 250, MAX_PROMPTS + 1)
    assert not sizes.holds(8, 0, 257), "255 tokens of padding"
    assert sizes.holds(8, 0, 320) and not sizes.holds(8, 0, 1025)
    assert EVERY_SIZE.holds(999, 0, 9999, 99) and EVERY_SIZE.lengths(1, 0) == [] and EVERY_SIZE.max_prompts is None
    assert not MixedSizes(()).holds(1, 0, 1), "without graphs a GPU computes each apart"
