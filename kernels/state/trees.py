"""Operations on draft trees, for engine/rounds/trees.py.

They grow a tree, find the ancestors of its nodes, walk the path that the target accepts, and move the KV of accepted
nodes to the slots in which the sequence continues. The root, node 0, is the last token of the sequence. Drafted tokens
are nodes 1 .. N.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operations import Operation
from .fp8_pages import parts_of
from .tree_types import Ancestry, Candidates, Frontier


def _tokens(candidates: Candidates, *_: object, **__: object) -> Tensor:
    return candidates.tokens


def grow_ref_(candidates: Candidates, frontier: Frontier, tokens: Tensor, scores: Tensor) -> Frontier:
    """Add the children of a frontier to the candidates, in place, and return the next frontier.

    `tokens` [num_seqs * num_nodes, topk] int64 are the children. `scores` of the same shape, float32 and at most 0, are
    relative to their parents. The candidates get the sums along the path; a sum that is NaN counts as -inf. The next
    frontier holds the `topk` best children, the first of equals. Their `states` are their parents'."""
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


grow_ = Operation("grow_", grow_ref_, by=_tokens)


def choose_ref(candidates: Candidates, num_drafts: int) -> tuple[Tensor, Tensor]:
    """Return the tokens and parents of the N = `num_drafts` best candidates, each [num_seqs, N] int64.

    The first of equals is taken. Those chosen become nodes 1 .. N, in the order of the candidates. No candidate scores
    more than its parent, so the parent of a chosen one is chosen too. Parent 0 is the root."""
    chosen = candidates.scores.sort(dim=1, descending=True, stable=True).indices[:, :num_drafts].sort(1).values
    parents = torch.searchsorted(chosen, candidates.parents.gather(1, chosen), right=True)
    return candidates.tokens.gather(1, chosen), parents


choose = Operation("choose", choose_ref, by=_tokens)


def ancestry_ref(parents: Tensor, num_steps: int) -> Ancestry:
    """Return the ancestors and depths of all nodes of trees that are at most `num_steps` deep.

    `parents` [num_seqs, N] int64 are those of nodes 1 .. N."""
    num_seqs, num_drafts = parents.shape
    up = torch.cat([parents.new_zeros(num_seqs, 1), parents], dim=1)  # the root is its own parent
    node = torch.arange(num_drafts + 1, device=parents.device).expand_as(up)
    visible = torch.zeros(num_seqs, num_drafts + 1, num_drafts + 1, dtype=torch.bool, device=parents.device)
    for _ in range(num_steps + 1):
        visible.scatter_(2, node.unsqueeze(2), True)
        node = up.gather(1, node)
    return Ancestry(visible, visible.sum(2) - 1)


ancestry = Operation("ancestry", ancestry_ref)


def walk_chain_ref(tokens: Tensor, targets: Tensor, limits: Tensor) -> Tensor:
    """Return the number of drafts that a target accepts in each sequence, [num_seqs] int64.

    It counts the `tokens` [num_seqs, K] before the first that differs from `targets` [num_seqs, K + 1], and is at most
    `limits` [num_seqs]. All are int64."""
    num_equal = (tokens == targets[:, :-1]).long().cumprod(1).sum(1)
    return torch.minimum(num_equal, limits)


walk_chain = Operation("walk_chain", walk_chain_ref)


def walk_tree_ref(
    tokens: Tensor, parents: Tensor, targets: Tensor, limits: Tensor, num_steps: int
) -> tuple[Tensor, Tensor]:
    """Walk down each tree, and return the nodes [num_seqs, num_steps + 1] and the number of steps [num_seqs].

    A step goes to the child whose token is the target of the node, the first if several are. The walk ends at a node
    without such a child, or after `limits` [num_seqs] steps. `num_steps` is the depth of the deepest tree.

    `tokens` and `parents` [num_seqs, N] are those of nodes 1 .. N. `targets` [num_seqs, N + 1] holds the target of each
    node. The nodes begin with the root. Beyond the path, column i holds node i, or N if i is more. All are int64."""
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


walk_tree = Operation("walk_tree", walk_tree_ref)


def move_slots_ref_(kv: Tensor, block_table: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy the KV of slots `sources` to slots `targets` of the same sequence, each [num_seqs, n] int64, in all layers.

    All sources are read before a target is written, so a slot may be both. A sequence names no target twice. `kv` is
    the pool [num_layers, num_pages, num_planes, num_kv_heads, page_size, head_dim]; `block_table` is [num_seqs,
    max_pages] int64."""
    page_size = kv.shape[4]
    pages, rows = block_table.gather(1, sources // page_size), sources % page_size
    new_pages, new_rows = block_table.gather(1, targets // page_size), targets % page_size
    for part in parts_of(kv):
        for layer in part:
            layer[new_pages, :, :, new_rows] = layer[pages, :, :, rows]


move_slots_ = Operation("move_slots_", move_slots_ref_)
