"""Trees grow by kernels as by the references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, random

pytest.importorskip("triton")

from baton.engine.pace.draft_length import DraftShape
from baton.kernels.state import triton_growth
from baton.kernels.state.tree_types import Candidates, Frontier
from baton.kernels.state.trees import ancestry_ref, choose_ref, grow_ref_

NUM_SEQS, WIDTH = 3, 20
Grow = Callable[[Candidates, Frontier, Tensor, Tensor], Frontier]


def grown(grow_: Grow, shape: DraftShape, dtype: torch.dtype, seed: int) -> tuple[Candidates, list[Frontier]]:
    """Of drafters' tokens and scores that are drawn from few values, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    candidates = Candidates.allocate(NUM_SEQS, shape.max_drafts, torch.device(DEVICE))
    frontiers = [Frontier.root(random(NUM_SEQS, WIDTH, dtype=dtype, seed=seed))]
    for step in range(shape.num_steps):
        size = (NUM_SEQS * frontiers[-1].tokens.shape[1], shape.topk)
        tokens = torch.randint(0, 500, size, generator=generator).to(DEVICE)
        scores = -torch.randint(0, 4, size, generator=generator).to(DEVICE, torch.float32) / 4
        frontiers.append(grow_(candidates, frontiers[-1], tokens, scores))
        states = random(*frontiers[-1].states.shape, dtype=dtype, seed=seed + step)
        frontiers[-1] = frontiers[-1]._replace(states=states) if step % 2 else frontiers[-1]
    return candidates, frontiers


SHAPES = [DraftShape(1, 2, 2), DraftShape(3, 2, 5), DraftShape(4, 3, 21), DraftShape(3, 8, 40)]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_growth(shape: DraftShape, dtype: torch.dtype) -> None:
    (candidates, frontiers), (expected, wanted) = (
        grown(grow_, shape, dtype, seed=shape.topk) for grow_ in (triton_growth.grow_, grow_ref_)
    )
    for ours, theirs in zip([*candidates, *sum(frontiers, ())], [*expected, *sum(wanted, ())], strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    for num_drafts in {shape.num_tokens, 1, shape.max_drafts}:
        tokens, parents = triton_growth.choose(candidates, num_drafts)
        expected_tokens, expected_parents = choose_ref(expected, num_drafts)
        assert torch.equal(tokens, expected_tokens) and torch.equal(parents, expected_parents)


def test_states_wider_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_growth, "_STATE_BLOCK", 8)
    shape = DraftShape(2, 2, 4)
    (_, ours), (_, theirs) = (grown(grow_, shape, torch.float32, 5) for grow_ in (triton_growth.grow_, grow_ref_))
    assert torch.equal(ours[-1].states, theirs[-1].states)


def test_what_is_no_number_stays_a_tree() -> None:
    """Whatever a drafter says, a parent stands before its children, and they are as deep as they say."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 9, (NUM_SEQS, 3), generator=generator).to(DEVICE)
    scores = torch.tensor([[0.0, float("nan"), -float("inf")]] * NUM_SEQS).to(DEVICE)
    results = []
    for grow_, choose in ((triton_growth.grow_, triton_growth.choose), (grow_ref_, choose_ref)):
        candidates = Candidates.allocate(NUM_SEQS, 12, torch.device(DEVICE))
        frontier = grow_(candidates, Frontier.root(random(NUM_SEQS, 4)), tokens, scores)
        grow_(candidates, frontier, tokens.repeat_interleave(3, 0), scores.repeat_interleave(3, 0))
        results.append(choose(candidates, 6))
    (tokens, parents), (expected, expected_parents) = results
    assert torch.equal(tokens, expected) and torch.equal(parents, expected_parents)
    assert (parents <= torch.arange(6, device=parents.device)).all()
    assert ancestry_ref(parents, 2).depths.max() == 2
