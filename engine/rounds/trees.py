"""Draft trees: a round's proposals, the growth of a dynamic tree, and the path that the target accepts.

Node 0 is the bonus token, nodes 1 .. N are the drafts, parents before children. A chain of K is the tree in which node
i is the child of node i - 1; its parents are not stored. A dynamic tree is EAGLE-2's (Li et al. 2024,
arXiv:2406.16858): each step expands the `topk` best nodes into `topk` children each, and the N best of all candidates
are verified. A branch's score is the sum of log-softmax of the drafter's *perturbed* logits
(kernels/sampling/noise.py). So the score uses the noise that the target will draw with, and is no average over noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels.sampling.sample import perturbed_topk
from ...kernels.state.tree_types import Candidates, Frontier
from ...kernels.state.trees import choose, grow_, walk_chain, walk_tree
from ..device import counted, to_host
from ..pace.draft_length import DraftShape
from ..sampling.batch import SamplingBatch
from ..sampling.sampling import over_rows, processed, sample


class Drafts(NamedTuple):
    """Proposals of a drafter."""

    tokens: Tensor  # [num_seqs, N] int64, nodes 1 .. N
    parents: Tensor | None = None  # [num_seqs, N] int64, nodes 0 .. N; None: a chain

    def to_host(self) -> Drafts:
        """Return them on the host, once the next `recorded_event` has happened."""
        return Drafts(to_host(self.tokens), None if self.parents is None else to_host(self.parents))


class Path(NamedTuple):
    """Nodes that the target accepted."""

    nodes: Tensor | None  # [num_seqs, K + 1] int64, the root first, any nodes after the accepted ones; None: 0 .. K
    num_accepted: Tensor  # [num_seqs] int64, without the root


def accept_chain(drafts: Tensor, targets: Tensor, limits: Tensor) -> Path:
    """Return how many of `drafts` [num_seqs, K] equal `targets` [num_seqs, K + 1], which the target samples after each
    node; at most `limits` [num_seqs]."""
    return Path(None, walk_chain(drafts, targets, limits) if drafts.shape[1] else torch.zeros_like(limits))


def accept_tree(drafts: Drafts, targets: Tensor, limits: Tensor, num_steps: int) -> Path:
    """Walk from the root to the child that the target samples, while there is one; `targets` [num_seqs, N + 1]."""
    assert drafts.parents is not None
    return Path(*walk_tree(drafts.tokens, drafts.parents, targets, limits, num_steps))


def sample_ahead(logits: Tensor, base: SamplingBatch, drafted: Tensor) -> Tensor:
    """Return a drafter's choice [num_rows] int64 after `drafted` [num_rows, j] int64, which follow `base`'s tokens.

    A draft token is accepted exactly when it equals the target's, so the drafter asks the same question of its own
    `logits` [num_rows, num_logits], which are of the tokens `base.logit_ids`: the same processing, and the noise of the
    proposed token and its position."""
    num_ahead = counted(drafted.shape[1] + 1, logits.device)[-1:].unsqueeze(0)
    return sample(logits, base.ahead(num_ahead, drafted), with_logprobs=False).token_ids


def top_of(logits: Tensor, batch: SamplingBatch, topk: int) -> tuple[Tensor, Tensor]:
    """Return the `topk` best tokens of each row and log-softmax of their perturbed logits, [num_rows, topk] int64 and
    float32. If there are fewer logits, the other tokens are any, with -inf. `logits` are as for `sample`."""
    if len(logits) < batch.num_rows:
        packed = over_rows(logits, batch, lambda own: _packed(*top_of(logits, own, topk)))
        ids, scores = packed.split(topk, 1)
        return ids.contiguous(), scores.to(torch.int32).view(torch.float32)
    num_missing = max(0, topk - logits.shape[1])
    best = perturbed_topk(processed(logits, batch), topk - num_missing, batch.draws, batch.logit_ids)
    if num_missing:
        return pad(best[0], (0, num_missing)), pad(best[1], (0, num_missing), value=-torch.inf)
    return best


def _packed(ids: Tensor, scores: Tensor) -> Tensor:
    """Return the ids and the bits of the scores side by side, [num_rows, 2 * topk] int64."""
    return torch.cat([ids, scores.contiguous().view(torch.int32).to(torch.int64)], 1)


# Runs the drafter over a step's frontier: (step, tokens [num_seqs, topk], states [num_seqs, topk, width], visible
# [num_seqs, topk, step * topk] among the nodes of all steps so far) -> (states after, logits [num_seqs * topk,
# num_logits]).
Expand = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def grow_tree(
    shape: DraftShape, first: tuple[Tensor, Tensor], state: Tensor, base: SamplingBatch, expand: Expand
) -> Drafts:
    """Grow a dynamic tree from the `first` tokens and scores, each [num_seqs, topk], and the state [num_seqs, width]
    that proposed them; `base` samples the token at depth 1."""
    candidates = Candidates.allocate(len(state), shape.max_drafts, state.device)
    frontier = grow_(candidates, Frontier.root(state), *first)
    for step in range(1, shape.num_steps):
        states, logits = expand(step, frontier.tokens, frontier.states, frontier.visible)
        children = top_of(logits, _ahead(base, frontier), shape.topk)
        frontier = grow_(candidates, frontier._replace(states=states), *children)
    return Drafts(*choose(candidates, shape.num_tokens))


def _ahead(base: SamplingBatch, frontier: Frontier) -> SamplingBatch:
    """Return the batch of the tokens that follow a frontier's nodes; each has its own path in its history."""
    (_, topk, depth), device = frontier.paths.shape, frontier.paths.device
    own_path = None
    if base.needs.penalizes:
        own_path = torch.eye(topk, dtype=torch.bool, device=device).repeat_interleave(depth, 1).unsqueeze(0)
    return base.ahead(counted(depth + 1, device)[-1:].expand(1, topk), frontier.paths.flatten(1), own_path)
