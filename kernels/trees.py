"""Trees on the device: how one grows, who descends from whom, which path the target accepts, and the accepted nodes' KV
on its way to where the sequence goes on (engine/trees.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from . import gpu
from .tree_types import Ancestry, Candidates, Frontier


def grow_ref_(candidates: Candidates, frontier: Frontier, tokens: Tensor, scores: Tensor) -> Frontier:
    """The specification. The children of a frontier, `tokens` [num_seqs * num_nodes, topk] int64 with the `scores` of
    each below its parent, float32, at most 0, go to the candidates, with those above them counted; what is no number is
    the least. Returns the `topk` best, the first of equals: the next frontier, with `frontier.states` of their parents.
    """
    num_seqs, num_nodes = frontier.scores.shape
    topk = tokens.shape[1]
    tokens = tokens.view(num_seqs, num_nodes * topk)
    scores = (frontier.scores.unsqueeze(2) + scores.view(num_seqs, num_nodes, topk)).flatten(1)
    scores = scores.where(~scores.isnan(), -torch.inf)
    start = frontier.num_before(topk)
    for column, values in zip(candidates, (tokens, scores, frontier.ids.repeat_interleave(topk, 1)), strict=True):
        column[:, start : start + num_nodes * topk] = values
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    parent = (best // topk).unsqueeze(2)
    itself = torch.eye(topk, dtype=torch.bool, device=tokens.device).expand(num_seqs, topk, topk)

    def inherited(values: Tensor) -> Tensor:
        return values.gather(1, parent.expand(-1, -1, values.shape[2]))

    tokens = tokens.gather(1, best)
    return Frontier(
        tokens,
        scores.gather(1, best),
        start + best,
        inherited(frontier.states),
        torch.cat([inherited(frontier.paths), tokens.unsqueeze(2)], dim=2),
        torch.cat([inherited(frontier.visible), itself], dim=2),
    )


def grow_(candidates: Candidates, frontier: Frontier, tokens: Tensor, scores: Tensor) -> Frontier:
    """`grow_ref_`, in one launch on CUDA."""
    if gpu.compiled(tokens):
        from . import triton_growth

        return triton_growth.grow_(candidates, frontier, tokens, scores)
    return grow_ref_(candidates, frontier, tokens, scores)


def choose_ref(candidates: Candidates, num_drafts: int) -> tuple[Tensor, Tensor]:
    """The specification. The `num_drafts` best candidates, N, the first of equals, as nodes 1 .. N in the order in
    which they stand; no candidate scores more than its parent, so a node's parent is among them. Returns tokens and
    parents, [num_seqs, N] int64, 0 for the root."""
    chosen = candidates.scores.sort(dim=1, descending=True, stable=True).indices[:, :num_drafts].sort(1).values
    parents = torch.searchsorted(chosen, candidates.parents.gather(1, chosen), right=True)
    return candidates.tokens.gather(1, chosen), parents


def choose(candidates: Candidates, num_drafts: int) -> tuple[Tensor, Tensor]:
    """`choose_ref`, in one launch on CUDA."""
    if gpu.compiled(candidates.tokens):
        from . import triton_growth

        return triton_growth.choose(candidates, num_drafts)
    return choose_ref(candidates, num_drafts)


def ancestry_ref(parents: Tensor, num_steps: int) -> Ancestry:
    """The specification. Of a tree at most `num_steps` deep, `parents` [num_seqs, N] int64 of nodes 1 .. N."""
    num_seqs, num_drafts = parents.shape
    up = torch.cat([parents.new_zeros(num_seqs, 1), parents], dim=1)  # the root is its own parent
    node = torch.arange(num_drafts + 1, device=parents.device).expand_as(up)
    visible = torch.zeros(num_seqs, num_drafts + 1, num_drafts + 1, dtype=torch.bool, device=parents.device)
    for _ in range(num_steps + 1):
        visible.scatter_(2, node.unsqueeze(2), True)
        node = up.gather(1, node)
    return Ancestry(visible, visible.sum(2) - 1)


def ancestry(parents: Tensor, num_steps: int) -> Ancestry:
    """`ancestry_ref`, in one launch on CUDA."""
    if gpu.compiled(parents):
        from . import triton_trees

        return triton_trees.ancestry(parents, num_steps)
    return ancestry_ref(parents, num_steps)


def walk_chain_ref(tokens: Tensor, targets: Tensor, limits: Tensor) -> Tensor:
    """The specification. How many of `tokens` [num_seqs, K] equal `targets` [num_seqs, K + 1] from the start, at most
    `limits` [num_seqs]: [num_seqs]. All int64."""
    num_equal = (tokens == targets[:, :-1]).long().cumprod(1).sum(1)
    return torch.minimum(num_equal, limits)


def walk_chain(tokens: Tensor, targets: Tensor, limits: Tensor) -> Tensor:
    """`walk_chain_ref`, in one launch on CUDA."""
    if gpu.compiled(tokens):
        from . import triton_trees

        return triton_trees.walk_chain(tokens, targets, limits)
    return walk_chain_ref(tokens, targets, limits)


def walk_tree_ref(
    tokens: Tensor, parents: Tensor, targets: Tensor, limits: Tensor, num_steps: int
) -> tuple[Tensor, Tensor]:
    """The specification. From the root to the child that the target samples, the first of several, while there is one
    and no more than `limits` [num_seqs]: `tokens`, `parents` [num_seqs, N] of nodes 1 .. N, `targets` [num_seqs, N + 1]
    -> nodes [num_seqs, num_steps + 1], the root first and, beyond the path, the one of its number (at most N); and how
    many are below the root, [num_seqs]. All int64."""
    node = torch.zeros_like(limits).unsqueeze(1)
    count, nodes = torch.zeros_like(limits), [node]
    is_on = limits > 0
    for depth in range(1, num_steps + 1):
        matches = (tokens == targets.gather(1, node)) & (parents == node)
        is_on = is_on & matches.any(1) & (limits >= depth)
        node = torch.where(is_on.unsqueeze(1), matches.long().argmax(1, keepdim=True) + 1, node)
        count = count + is_on
        nodes.append(torch.where(is_on.unsqueeze(1), node, min(depth, tokens.shape[1])))
    return torch.cat(nodes, dim=1), count


def walk_tree(
    tokens: Tensor, parents: Tensor, targets: Tensor, limits: Tensor, num_steps: int
) -> tuple[Tensor, Tensor]:
    """`walk_tree_ref`, in one launch on CUDA."""
    if gpu.compiled(tokens):
        from . import triton_trees

        return triton_trees.walk_tree(tokens, parents, targets, limits, num_steps)
    return walk_tree_ref(tokens, parents, targets, limits, num_steps)


def move_slots_ref_(kv: Tensor, block_table: Tensor, sources: Tensor, targets: Tensor) -> None:
    """The specification. In every layer, KV of slots `sources` into slots `targets`, each [num_seqs, n] int64, by
    sequence; all sources are read before any target is written, so the two may overlap, and targets are different.

    `kv` [num_layers, num_pages, 2, num_kv_heads, page_size, head_dim], `block_table` [num_seqs, num_columns] int64."""
    page_size = kv.shape[4]
    pages, rows = block_table.gather(1, sources // page_size), sources % page_size
    new_pages, new_rows = block_table.gather(1, targets // page_size), targets % page_size
    for layer in kv:
        layer[new_pages, :, :, new_rows] = layer[pages, :, :, rows]


def move_slots_(kv: Tensor, block_table: Tensor, sources: Tensor, targets: Tensor) -> None:
    """`move_slots_ref_`, in one launch on CUDA."""
    if gpu.compiled(kv):
        from . import triton_trees

        triton_trees.move_slots_(kv, block_table, sources, targets)
    else:
        move_slots_ref_(kv, block_table, sources, targets)
