"""The Triton kernel of places against kernels/experts/experts.py's specification."""

from __future__ import annotations

import pytest
import torch
from thinned import every, thinned
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED

pytest.importorskip("triton")

from baton.kernels.experts import triton_places
from baton.kernels.experts.experts import place_experts_ref

SIZES = [(1, 7, 2), (1, 128, 8), (33, 7, 3), (64, 60, 4), (500, 6, 2), (3, 1, 1), (2500, 40, 2), (9000, 9, 2)]
LARGE_SIZES = [(64, 128, 8), (256, 128, 8), (512, 64, 6), (8192, 128, 8), (8192, 256, 8), (65536, 128, 8)]


def choose(num_rows: int, num_experts: int, num_active: int) -> Tensor:
    """Return different experts for each row, the first ones more often."""
    scores = torch.rand(num_rows, num_experts, generator=torch.Generator().manual_seed(0))
    return (scores - torch.arange(num_experts) / num_experts / 2).topk(num_active).indices.to(DEVICE)


def check(chosen: Tensor, num_experts: int) -> None:
    assert triton_places.serves(chosen, num_experts)
    for is_packed in (False, True):
        ours = triton_places.place_experts(chosen, num_experts, is_packed=is_packed)
        theirs = place_experts_ref(chosen, num_experts, is_packed=is_packed)
        assert torch.equal(ours.pairs, theirs.pairs) and torch.equal(ours.experts, theirs.experts)


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_active"), every(SIZES, 2, first=1) if IS_INTERPRETED else SIZES + LARGE_SIZES
)
def test_places_are_those_of_the_reference(num_rows: int, num_experts: int, num_active: int) -> None:
    check(choose(num_rows, num_experts, num_active), num_experts)


@pytest.mark.parametrize("num_rows", thinned([1, 300, 5000], lambda i, _: i < 2 or not IS_INTERPRETED))
def test_all_rows_may_choose_the_same_experts(num_rows: int) -> None:
    check(torch.tensor([[5, 2]], device=DEVICE).repeat(num_rows, 1), 6)


def test_no_pairs_and_strided_ones_are_left_to_the_reference() -> None:
    chosen = choose(4, 7, 2)
    assert not triton_places.serves(chosen[:0], 7)
    assert not triton_places.serves(chosen[:, :1], 7)
