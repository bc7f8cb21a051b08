"""The walk through a tree and the move of its KV, against their references."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from large_pool import IN_A_FILE, SMALL_TABLE, TABLE, WRAPS, make_large_pool, small_pool
from triton_device import DEVICE, random

pytest.importorskip("triton")

from baton.engine.rounds.trees import top_of
from baton.engine.sampling.batch import SamplingBatch
from baton.engine.sampling.state import SamplingState
from baton.kernels.operations import preferring
from baton.kernels.state import triton_trees
from baton.kernels.state.trees import ancestry_ref, move_slots_ref_, walk_chain_ref, walk_tree_ref
from baton.metadata.wire.request import SamplingParams


@pytest.mark.parametrize(("num_drafts", "num_steps"), [(1, 1), (5, 3), (18, 5)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_walk(num_drafts: int, num_steps: int, seed: int) -> None:
    """Trees in which several children have one token, and rows limited to none and to less than they could have."""
    generator = torch.Generator().manual_seed(seed)
    num_seqs = 6
    parents = torch.stack(
        [torch.randint(0, node, (num_seqs,), generator=generator) for node in range(1, num_drafts + 1)], 1
    )
    tokens = torch.randint(0, 2, (num_seqs, num_drafts), generator=generator)
    targets = torch.randint(0, 2, (num_seqs, num_drafts + 1), generator=generator)
    limits = torch.randint(0, num_steps + 1, (num_seqs, 2), generator=generator)
    limits[:3] = num_steps
    targets[0, 0] = tokens[0, 0]
    args = (tokens.to(DEVICE), parents.to(DEVICE), targets.to(DEVICE), limits.to(DEVICE)[:, 0], num_steps)
    nodes, num_accepted = triton_trees.walk_tree(*args)
    expected_nodes, expected = walk_tree_ref(*args)
    assert torch.equal(nodes, expected_nodes) and torch.equal(num_accepted, expected)
    assert num_accepted.max() > 0 and (num_drafts == 1 or num_accepted.unique().numel() > 1)


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
def test_a_chain(num_drafts: int) -> None:
    """Columns of something wider, some all equal, some never, some equal again after a difference."""
    generator, num_seqs = torch.Generator().manual_seed(num_drafts), 12
    tokens = torch.randint(0, 2, (num_seqs, num_drafts + 2), generator=generator)
    targets = torch.randint(0, 2, (num_seqs, num_drafts + 1), generator=generator)
    targets[:4, :-1] = tokens[:4, 1:-1]
    limits = torch.randint(0, num_drafts + 1, (num_seqs, 2), generator=generator)
    limits[::2] = num_drafts
    args = (tokens.to(DEVICE)[:, 1:-1], targets.to(DEVICE), limits.to(DEVICE)[:, 0])
    num_accepted = triton_trees.walk_chain(*args)
    assert torch.equal(num_accepted, walk_chain_ref(*args))
    assert num_accepted.min() == 0 and num_accepted.max() == num_drafts


@pytest.mark.parametrize(("num_drafts", "num_steps"), [(1, 1), (7, 3), (31, 6)])
def test_who_descends_from_whom(num_drafts: int, num_steps: int) -> None:
    generator, num_seqs = torch.Generator().manual_seed(num_drafts), 4
    parents, depths = torch.zeros(num_seqs, num_drafts, dtype=torch.int64), torch.zeros(num_seqs, num_drafts + 1)
    for seq in range(num_seqs):
        for node in range(1, num_drafts + 1):
            above = (depths[seq, :node] < num_steps).nonzero().flatten()
            parents[seq, node - 1] = above[torch.randint(len(above), (1,), generator=generator)]
            depths[seq, node] = depths[seq, parents[seq, node - 1]] + 1
    assert depths.max() == min(num_steps, num_drafts)
    tree, expected = triton_trees.ancestry(parents.to(DEVICE), num_steps), ancestry_ref(parents.to(DEVICE), num_steps)
    assert torch.equal(tree.visible, expected.visible) and torch.equal(tree.depths, expected.depths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("planes", "page_size", "head_dim", "num_moves"), [((2, 3), 4, 16, 3), ((2, 3), 1, 8, 1), ((1, 1), 16, 20, 5)]
)
def test_the_move(planes: tuple[int, int], page_size: int, head_dim: int, num_moves: int, dtype: torch.dtype) -> None:
    """Sources lie among targets, over the borders of pages; one sequence stays as it is."""
    generator = torch.Generator().manual_seed(page_size)
    num_seqs, num_columns = 3, -(-40 // page_size)
    shape = (2, 1 + num_seqs * num_columns, *planes, page_size, head_dim)
    kv = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    table = (torch.randperm(num_seqs * num_columns, generator=generator) + 1).view(num_seqs, num_columns).to(DEVICE)
    starts = torch.tensor([[7], [20], [11]])
    targets = starts + torch.arange(1, num_moves + 1)
    sources = targets + torch.arange(num_moves)  # the first stays, and others go where their elders were
    sources[2] = targets[2]
    sources, targets = sources.to(DEVICE), targets.to(DEVICE)
    expected = kv.clone()
    move_slots_ref_(expected, table, sources, targets)
    before = kv.clone()
    triton_trees.move_slots_(kv, table, sources, targets)
    assert torch.equal(kv, expected) and (num_moves == 1) == torch.equal(kv, before)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_k": 3}, {"repetition_penalty": 1.4}], ids=str)
def test_drafts_are_ranked_alike(params: dict[str, float]) -> None:
    """By a kernel where nothing but noise is asked for, with the noise of each row's own place; else by torch."""
    states = [
        SamplingState(SamplingParams(max_tokens=9, seed=seed, **params), [seed, 5], vocab_size=300)  # type: ignore[arg-type]
        for seed in range(4)
    ]
    batch, logits = SamplingBatch.of(states, DEVICE), random(4, 300, scale=2.0)
    answers = []
    for has_kernels in (False, True):
        with preferring("triton" if has_kernels else "reference"):
            answers.append(top_of(logits, batch, 3))
    (tokens, scores), (ours, our_scores) = answers
    assert torch.equal(tokens, ours)
    torch.testing.assert_close(scores, our_scores, rtol=1e-5, atol=1e-5)


@IN_A_FILE
@WRAPS
def test_a_move_in_a_pool_of_more_than_2_31_elements(tmp_path: Path) -> None:
    pool, sources, targets = make_large_pool(tmp_path), torch.tensor([[39, 17, 2]]), torch.tensor([[1, 33, 16]])
    before, expected = small_pool(pool), small_pool(pool)
    move_slots_ref_(expected, SMALL_TABLE, sources, targets)
    triton_trees.move_slots_(pool, TABLE, sources, targets)
    assert torch.equal(small_pool(pool), expected) and not torch.equal(expected, before)
