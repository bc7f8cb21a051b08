"""The specifications of sums over ranks, on cases that one can compute by hand."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.products.norm import rms_norm_ref
from baton.kernels.ranks.all_reduce import (
    BLOCK_BYTES,
    FLAGS_AT,
    MAX_RANKS,
    NUM_LANES,
    SCATTER_AT,
    SLOT_BYTES,
    SLOTS_AT,
    PeerBlocks,
    all_gather_ref,
    all_max_ref,
    all_reduce_norm_ref_,
    all_reduce_ref,
    reduce_scatter_ref,
)


def test_a_sum_is_rounded_once() -> None:
    one, tiny = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0**-9], dtype=torch.bfloat16)
    assert all_reduce_ref([one, tiny, tiny, tiny]).item() == 1.0 + 2.0**-7  # each alone would disappear
    assert all_reduce_ref([one, one]).dtype is torch.bfloat16


def test_the_largest_and_all() -> None:
    xs = [torch.tensor([[1, 5]]), torch.tensor([[2, 4]])]
    assert all_max_ref(xs).tolist() == [[2, 5]]
    assert all_gather_ref(xs).tolist() == [[[1, 5]], [[2, 4]]]


def test_a_rank_keeps_its_own_rows_of_a_sum() -> None:
    xs = [torch.tensor([[1.0, 5.0], [2.0, 0.5]]), torch.tensor([[3.0, 4.0], [7.0, 2.0]])]
    assert [reduce_scatter_ref(xs, rank).tolist() for rank in range(2)] == [[4.0, 9.0], [9.0, 2.5]]


def test_the_residual_is_added_to_and_normed() -> None:
    hidden, weight = torch.ones(2, 4), torch.rand(4)
    normed = all_reduce_norm_ref_(hidden, [torch.full((2, 4), 2.0), torch.full((3, 2, 4), 1.0)], weight, 1e-5)
    assert torch.equal(hidden, torch.full((2, 4), 6.0))
    assert torch.equal(normed, rms_norm_ref(hidden, weight, 1e-5))


def test_places_in_a_block_do_not_overlap() -> None:
    assert FLAGS_AT >= NUM_LANES * 8 and FLAGS_AT % 128 == 0
    assert SLOTS_AT >= FLAGS_AT + NUM_LANES * MAX_RANKS * 8 and SLOTS_AT % 16 == SLOT_BYTES % 16 == 0
    assert BLOCK_BYTES == 2 * SCATTER_AT == 2 * (SLOTS_AT + 2 * NUM_LANES * SLOT_BYTES) and SCATTER_AT % 128 == 0


def test_blocks_of_wrong_sizes_are_refused() -> None:
    addresses, own, control = torch.zeros(2, dtype=torch.int64), torch.zeros(BLOCK_BYTES, dtype=torch.uint8), None
    control = torch.zeros(2, dtype=torch.int64)
    assert PeerBlocks(1, addresses, own, control).size == 2
    for wrong in (
        (2, addresses, own, control),
        (0, addresses.int(), own, control),
        (0, torch.zeros(MAX_RANKS + 1, dtype=torch.int64), own, control),
        (0, addresses, own[1:], control),
        (0, addresses, own, control[1:]),
    ):
        with pytest.raises(AssertionError):
            PeerBlocks(*wrong)
