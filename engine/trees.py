"""Draft trees: what a round proposes, how a dynamic tree grows, and which path through it the target accepts.

Node 0 is the bonus token, nodes 1 .. N the drafts, parents before children. A chain of K is the tree in which node i
hangs on node i - 1; its parents are not written down. A dynamic tree is EAGLE-2's (Li et al. 2024, arXiv:2406.16858):
each step expands the `topk` best nodes into `topk` children each, and of all candidates the N best are verified. A
branch's score is the sum of log-softmax of the drafter's *perturbed* logits (DESIGN.md section 6): given the noise that
the target will draw with, not on average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import gpu
from ..kernels.trees import walk_tree
from .sampling import perturbed_scores, sample
from .sampling_batch import SamplingBatch


class DraftShape(NamedTuple):
    """How much a round drafts."""

    num_steps: int  # K, depth
    topk: int = 1
    num_tokens: int = 0  # N of a tree, drafts verified a round; a chain has as many as steps

    @property
    def is_chain(self) -> bool:
        return self.topk == 1

    @property
    def num_drafts(self) -> int:
        """N."""
        return self.num_steps if self.is_chain else self.num_tokens

    @property
    def max_drafts(self) -> int:
        """Candidates that a tree of this depth and width has."""
        return self.topk + (self.num_steps - 1) * self.topk**2 if self.num_steps else 0

    @property
    def num_slots(self) -> int:
        """Slots beyond the last one with KV that a round writes, in any pool (DESIGN.md section 5)."""
        return 1 + max(self.num_drafts, self.num_steps, self.topk * self.num_steps)

    @property
    def choices(self) -> Sequence[int]:
        """Steps that a round may have: a tree is drafted whole or not at all."""
        return range(self.num_steps + 1) if self.is_chain else (0, self.num_steps)

    def with_steps(self, num_steps: int) -> DraftShape:
        """The same with one of `choices`."""
        assert num_steps in self.choices, (num_steps, self)
        if self.is_chain or num_steps == self.num_steps:
            return self._replace(num_steps=num_steps)
        return DraftShape(0)


class Drafts(NamedTuple):
    """What a drafter proposes."""

    tokens: Tensor  # [num_seqs, N] int64, nodes 1 .. N
    parents: Tensor | None = None  # [num_seqs, N] int64, nodes 0 .. N; None: a chain


class Ancestry(NamedTuple):
    """What follows from the parents."""

    visible: Tensor  # [num_seqs, N + 1, N + 1] bool: node j is node i or an ancestor of it
    depths: Tensor  # [num_seqs, N + 1] int64


def ancestry(parents: Tensor, num_steps: int) -> Ancestry:
    """Of a tree `num_steps` deep, root included."""
    num_seqs, num_drafts = parents.shape
    up = torch.cat([parents.new_zeros(num_seqs, 1), parents], dim=1)  # the root is its own parent
    node = torch.arange(num_drafts + 1, device=parents.device).expand_as(up)
    visible = torch.zeros(num_seqs, num_drafts + 1, num_drafts + 1, dtype=torch.bool, device=parents.device)
    for _ in range(num_steps + 1):
        visible.scatter_(2, node.unsqueeze(2), True)
        node = up.gather(1, node)
    return Ancestry(visible, visible.sum(2) - 1)


class Path(NamedTuple):
    """What the target accepted."""

    nodes: Tensor | None  # [num_seqs, K + 1] int64, the root first; beyond the accepted ones any; None: 0 .. K
    num_accepted: Tensor  # [num_seqs] int64, without the root


def accept_chain(drafts: Tensor, targets: Tensor, limits: Tensor) -> Path:
    """`drafts` [num_seqs, K], `targets` [num_seqs, K + 1] what the target samples after each node; at most `limits`
    [num_seqs] are accepted."""
    if drafts.shape[1] == 0:
        return Path(None, torch.zeros_like(limits))
    num_equal = (drafts == targets[:, :-1]).long().cumprod(1).sum(1)
    return Path(None, torch.minimum(num_equal, limits))


def accept_tree(drafts: Drafts, targets: Tensor, limits: Tensor, num_steps: int) -> Path:
    """Walk from the root to the child that the target samples, while there is one; `targets` [num_seqs, N + 1]."""
    assert drafts.parents is not None
    return Path(*walk_tree(drafts.tokens, drafts.parents, targets, limits, num_steps))


def sample_ahead(logits: Tensor, base: SamplingBatch, drafted: Tensor) -> Tensor:
    """A drafter's choice after `drafted` [num_rows, j] int64, which follow what `base` knows: [num_rows] int64.

    A draft token is accepted exactly when it equals the target's, so the drafter asks the same question of its own
    `logits` [num_rows, vocab_size] in the target's vocabulary: same processing, noise of the position proposed for."""
    num_ahead = torch.full((1, 1), drafted.shape[1], dtype=torch.int64, device=logits.device)
    return sample(logits, base.ahead(num_ahead, drafted), with_logprobs=False).token_ids


def top_of(logits: Tensor, batch: SamplingBatch, topk: int) -> tuple[Tensor, Tensor]:
    """The `topk` best tokens of each row and log-softmax of their perturbed logits, [num_rows, topk] int64, float32."""
    needs = batch.needs
    if gpu.compiled(logits) and not (needs.processes or needs.ranks or needs.cuts):
        from ..kernels.triton_sample import MAX_TOPK, perturbed_topk

        if topk <= MAX_TOPK:
            noise = (batch.seeds, batch.positions, batch.temperature.squeeze(1)) if needs.is_random else ()
            return perturbed_topk(logits, topk, *noise)
    scores = logits.float() if needs.is_plain_greedy else perturbed_scores(logits, batch)
    best, tokens = scores.topk(topk)
    return tokens, best - scores.logsumexp(1, keepdim=True)


# Runs the drafter over a step's frontier: (step, tokens [num_seqs, topk], states [num_seqs, topk, width], visible
# [num_seqs, topk, step * topk] among the nodes of all steps so far) -> (states after, logits [num_seqs * topk, vocab]).
Expand = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def grow_tree(
    shape: DraftShape, first: tuple[Tensor, Tensor], state: Tensor, base: SamplingBatch, expand: Expand
) -> Drafts:
    """A dynamic tree from the `first` tokens and scores, each [num_seqs, topk], and the state [num_seqs, width] that
    proposed them; `base` samples the token at depth 1."""
    topk, (tokens, scores), device = shape.topk, first, state.device
    num_seqs = tokens.shape[0]
    eye = torch.eye(topk, dtype=torch.bool, device=device).expand(num_seqs, topk, topk)
    ids = torch.arange(topk, device=device).expand(num_seqs, topk)  # of the frontier among the candidates
    candidates = [(tokens, scores, torch.full_like(tokens, -1))]
    states, paths, visible = state.unsqueeze(1).expand(-1, topk, -1), tokens.unsqueeze(2), eye
    for step in range(1, shape.num_steps):
        states, logits = expand(step, tokens, states, visible)
        ahead = base.ahead(torch.full((1, topk), step, device=device), paths.flatten(1), _own_path(topk, step, device))
        child_tokens, child_scores = top_of(logits, ahead, topk)
        child_scores = (scores.reshape(-1, 1) + child_scores).view(num_seqs, -1)
        child_tokens = child_tokens.view(num_seqs, -1)
        candidates.append((child_tokens, child_scores, ids.repeat_interleave(topk, 1)))
        best = child_scores.topk(topk, dim=1).indices
        parent = (best // topk).unsqueeze(2)
        ids = topk + (step - 1) * topk**2 + best
        tokens, scores = child_tokens.gather(1, best), child_scores.gather(1, best)
        states = states.gather(1, parent.expand(-1, -1, states.shape[2]))
        paths = torch.cat([paths.gather(1, parent.expand(-1, -1, step)), tokens.unsqueeze(2)], dim=2)
        visible = torch.cat([visible.gather(1, parent.expand(-1, -1, visible.shape[2])), eye], dim=2)
    return _best(shape.num_tokens, *(torch.cat(column, dim=1) for column in zip(*candidates, strict=True)))


def _own_path(topk: int, step: int, device: torch.device) -> Tensor:
    """[1, topk, topk * step] bool: of the paths of all frontier nodes end to end, each node's own."""
    return torch.eye(topk, dtype=torch.bool, device=device).repeat_interleave(step, 1).unsqueeze(0)


def _best(num_tokens: int, tokens: Tensor, scores: Tensor, parents: Tensor) -> Drafts:
    """The `num_tokens` best candidates. A parent scores no less than its child and stands before it, so a stable sort
    takes it first; `parents` are candidates, -1 the root."""
    chosen = scores.sort(stable=True, dim=1, descending=True).indices[:, :num_tokens].sort(1).values
    parents = parents.gather(1, chosen)
    nodes = torch.searchsorted(chosen, parents.clamp(min=0)) + 1
    return Drafts(tokens.gather(1, chosen), torch.where(parents < 0, 0, nodes))
