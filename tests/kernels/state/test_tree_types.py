"""The shapes and dtypes of the values that operations on trees take and return, and where a tree starts."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.state.tree_types import Candidates, Frontier
from baton.kernels.state.trees import ancestry, grow_

DEVICE = torch.device("cpu")


@pytest.mark.parametrize("num_seqs", [0, 1, 5])
def test_candidates(num_seqs: int) -> None:
    candidates = Candidates.allocate(num_seqs, 7, DEVICE)
    assert [each.shape for each in candidates] == [(num_seqs, 7)] * 3
    assert [each.dtype for each in candidates] == [torch.int64, torch.float32, torch.int64]
    assert len({each.data_ptr() for each in candidates}) == (3 if num_seqs else 1)  # each has memory of its own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_seqs", [0, 1, 5])
def test_the_root(num_seqs: int, dtype: torch.dtype) -> None:
    """One node per sequence, which is no candidate, scores 0, has the state given and no path."""
    state = torch.randn(num_seqs, 10).to(dtype)
    root = Frontier.root(state)
    assert torch.equal(root.states, state.view(num_seqs, 1, 10)) and root.states.dtype == dtype
    assert root.tokens.shape == root.ids.shape == root.scores.shape == (num_seqs, 1)
    assert (root.ids == -1).all() and (root.scores == 0).all()
    assert root.paths.shape == root.visible.shape == (num_seqs, 1, 0)
    kinds = [each.dtype for each in root]
    assert kinds == [torch.int64, torch.float32, torch.int64, dtype, torch.int64, torch.bool]


@pytest.mark.parametrize("topk", [1, 2, 5])
def test_the_number_of_candidates_before_a_frontier(topk: int) -> None:
    """Counted one by one: the root has topk children, and each of topk nodes of a later frontier has as many."""
    depths = 4
    candidates = Candidates.allocate(2, topk + (depths - 1) * topk**2, DEVICE)
    frontier, num_before = Frontier.root(torch.zeros(2, 3)), 0
    for depth in range(depths):
        assert frontier.num_before(topk) == num_before and frontier.paths.shape[2] == depth
        num_nodes = frontier.tokens.shape[1]
        tokens = torch.arange(num_before, num_before + num_nodes * topk).repeat(2).view(-1, topk)
        frontier = grow_(candidates, frontier, tokens, torch.zeros(2 * num_nodes, topk))
        num_before += num_nodes * topk
        assert frontier.visible.shape == (2, topk, (depth + 1) * topk)
    assert candidates.tokens[1].tolist() == list(range(num_before))  # no gap, nothing written twice


def test_an_ancestry() -> None:
    visible, depths = ancestry(torch.tensor([[0, 0, 2]]), 2)
    assert visible.shape == (1, 4, 4) and visible.dtype == torch.bool
    assert depths.shape == (1, 4) and depths.dtype == torch.int64
