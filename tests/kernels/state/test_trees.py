"""The operations on trees by every backend, against plain loops over lists."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE

from baton.kernels.state.tree_types import Candidates, Frontier
from baton.kernels.state.trees import ancestry, choose, grow_, move_slots_, walk_chain, walk_tree

pytestmark = pytest.mark.usefixtures("each_backend")

NAN, INF = float("nan"), float("inf")


def integers(values: Sequence[object], *shape: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE).view(shape)


def best_of(scores: list[float], count: int) -> list[int]:
    """Return the indices of the highest scores, the first of equals, in the order of their ranks."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


class PlainTree:
    """A tree of one sequence that grows as `grow_` says. A node is a tuple of all fields of a frontier but tokens."""

    def __init__(self, state: list[float]) -> None:
        self.candidates: list[tuple[int, float, int]] = []  # token, score, parent
        self.frontier = [(0.0, -1, state, [], [])]  # score, id, state, path, visible

    def grow(self, topk: int, tokens: list[list[int]], scores: list[list[float]]) -> None:
        children = []
        for node, (score, parent, state, path, visible) in enumerate(self.frontier):
            for token, own in zip(tokens[node], scores[node], strict=True):
                total = score + own
                total = -INF if math.isnan(total) else total
                children.append((total, len(self.candidates), state, [*path, token], visible))
                self.candidates.append((token, total, parent))
        best = best_of([child[0] for child in children], topk)
        self.frontier = [
            (*children[i][:4], children[i][4] + [other == rank for other in range(topk)]) for rank, i in enumerate(best)
        ]


@pytest.mark.parametrize(("num_seqs", "topk", "num_steps"), [(0, 2, 2), (1, 1, 3), (3, 2, 4), (2, 5, 2), (2, 7, 3)])
@pytest.mark.parametrize("with_nan", [False, True], ids=["numbers", "nan"])
def test_growth(num_seqs: int, topk: int, num_steps: int, with_nan: bool) -> None:
    """Scores are drawn from few multiples of 1/4, so that sums are exact and many are equal."""
    generator, width = torch.Generator().manual_seed(topk), 10
    candidates = Candidates.allocate(num_seqs, topk + (num_steps - 1) * topk**2, torch.device(DEVICE))
    root = torch.randn(num_seqs, width, generator=generator).to(DEVICE)
    frontier, plain = Frontier.root(root), [PlainTree(state) for state in root.tolist()]
    for _ in range(num_steps):
        num_nodes = frontier.tokens.shape[1]
        size = (num_seqs, num_nodes, topk)
        tokens = torch.randint(0, 50, size, generator=generator)
        scores = -torch.randint(0, 5, size, generator=generator).float() / 4
        if with_nan:
            scores[torch.rand(size, generator=generator) < 0.2] = NAN
        frontier = grow_(candidates, frontier, tokens.view(-1, topk).to(DEVICE), scores.view(-1, topk).to(DEVICE))
        for seq, each in enumerate(plain):
            each.grow(topk, tokens[seq].tolist(), scores[seq].tolist())
            num_candidates = len(each.candidates)
            columns = [column[seq, :num_candidates].tolist() for column in candidates]
            assert list(zip(*columns, strict=True)) == each.candidates
            ours = [column[seq].tolist() for column in frontier[1:]]
            assert list(zip(*ours, strict=True)) == each.frontier
            assert frontier.tokens[seq].tolist() == [node[3][-1] for node in each.frontier]
    assert frontier.paths.shape == (num_seqs, topk, num_steps)
    for num_drafts in (1, len(candidates.tokens[0]) if num_seqs else 1):
        tokens, parents = choose(candidates, num_drafts)
        assert tokens.shape == parents.shape == (num_seqs, num_drafts)
        for seq, each in enumerate(plain):
            chosen = sorted(best_of([score for _, score, _ in each.candidates], num_drafts))
            nodes = {-1: 0} | {candidate: node for node, candidate in enumerate(chosen, start=1)}
            assert tokens[seq].tolist() == [each.candidates[i][0] for i in chosen]
            assert parents[seq].tolist() == [nodes[each.candidates[i][2]] for i in chosen]


def random_trees(num_seqs: int, num_drafts: int, max_depth: int, seed: int) -> list[list[int]]:
    """Return the parents of nodes 1 .. num_drafts, of each sequence."""
    rng, trees = random.Random(seed), []
    for _ in range(num_seqs):
        parents, depths = [], [0]
        for node in range(1, num_drafts + 1):
            parents.append(rng.choice([each for each in range(node) if depths[each] < max_depth]))
            depths.append(depths[parents[-1]] + 1)
        trees.append(parents)
    return trees


def path_to(parents: list[int], node: int) -> list[int]:
    """Return the nodes from `node` up to the root."""
    return [node] if node == 0 else [node, *path_to(parents, parents[node - 1])]


@pytest.mark.parametrize(("num_seqs", "num_drafts", "max_depth"), [(0, 3, 2), (1, 1, 1), (4, 7, 3), (3, 20, 9)])
def test_ancestry(num_seqs: int, num_drafts: int, max_depth: int) -> None:
    trees = random_trees(num_seqs, num_drafts, max_depth, seed=num_drafts)
    visible, depths = ancestry(integers(trees, num_seqs, num_drafts), max_depth)
    assert visible.shape == (num_seqs, num_drafts + 1, num_drafts + 1)
    for seq, parents in enumerate(trees):
        paths = [path_to(parents, node) for node in range(num_drafts + 1)]
        assert [row.nonzero().flatten().tolist() for row in visible[seq]] == [sorted(path) for path in paths]
        assert depths[seq].tolist() == [len(path) - 1 for path in paths]


def plain_walk(tokens: list[int], parents: list[int], targets: list[int], limit: int) -> list[int]:
    """Return the nodes that are walked, from the root."""
    path = [0]
    while len(path) <= limit:
        wanted = (targets[path[-1]], path[-1])
        found = [node for node, each in enumerate(zip(tokens, parents, strict=True), start=1) if each == wanted]
        if not found:
            break
        path.append(found[0])
    return path


@pytest.mark.parametrize(("num_seqs", "num_drafts", "num_steps"), [(0, 3, 2), (1, 1, 1), (8, 7, 3), (6, 3, 5)])
def test_the_walk_through_a_tree(num_seqs: int, num_drafts: int, num_steps: int) -> None:
    """Trees in which siblings may have one token. Beyond its path a row names node i in column i, or the last node."""
    rng = random.Random(num_drafts)
    trees = random_trees(num_seqs, num_drafts, min(num_drafts, num_steps), seed=num_drafts)
    tokens = [[rng.randrange(2) for _ in range(num_drafts)] for _ in trees]
    targets = [[rng.randrange(2) for _ in range(num_drafts + 1)] for _ in trees]
    limits = [num_steps if seq % 2 else rng.randint(0, num_steps) for seq in range(num_seqs)]
    tree = (integers(each, num_seqs, num_drafts) for each in (tokens, trees))
    followers = integers(targets, num_seqs, num_drafts + 1)
    nodes, counts = walk_tree(*tree, followers, integers(limits, num_seqs), num_steps)
    assert nodes.shape == (num_seqs, num_steps + 1) and counts.shape == (num_seqs,)
    paths = [plain_walk(*row) for row in zip(tokens, trees, targets, limits, strict=True)]
    assert counts.tolist() == [len(path) - 1 for path in paths]
    rest = [min(i, num_drafts) for i in range(num_steps + 1)]
    assert nodes.tolist() == [path + rest[len(path) :] for path in paths]
    assert num_seqs < 6 or len({len(path) for path in paths}) > 1


def test_the_walk_along_a_chain() -> None:
    tokens = integers([[1, 2, 3], [1, 2, 3], [1, 9, 3], [1, 2, 3], [1, 2, 3]], 5, 3)
    targets = integers([[1, 2, 3, 4], [0, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]], 5, 4)
    assert walk_chain(tokens, targets, integers([3, 3, 3, 2, 0], 5)).tolist() == [3, 0, 1, 2, 0]
    assert walk_chain(tokens[:0], targets[:0], integers([], 0)).tolist() == []


@pytest.mark.parametrize("page_size", [1, 3, 10, 48])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 10), (5, 72), (1, 576)])
def test_moved_slots(page_size: int, num_heads: int, head_dim: int) -> None:
    """Sources lie among targets, on several pages; sequences share no page, and all layers move."""
    num_seqs, num_layers, num_columns = 2, 2, -(-40 // page_size)
    generator = torch.Generator().manual_seed(page_size)
    shape = (num_layers, 1 + num_seqs * num_columns, 2, num_heads, page_size, head_dim)
    kv = torch.randn(shape, generator=generator).to(DEVICE)
    table = (torch.randperm(num_seqs * num_columns, generator=generator) + 1).view(num_seqs, num_columns).to(DEVICE)
    sources, targets = integers([[8, 9, 12], [30, 31, 39]], 2, 3), integers([[8, 10, 9], [31, 30, 0]], 2, 3)
    before, expected = kv.clone(), kv.clone()
    for seq in range(num_seqs):
        for source, target in zip(sources[seq].tolist(), targets[seq].tolist(), strict=True):
            page, new_page = table[seq, source // page_size], table[seq, target // page_size]
            expected[:, new_page, :, :, target % page_size] = before[:, page, :, :, source % page_size]
    move_slots_(kv, table, sources, targets)
    assert torch.equal(kv, expected) and not torch.equal(kv, before)
    move_slots_(kv, table[:0], sources[:0], targets[:0])
    assert torch.equal(kv, expected)
