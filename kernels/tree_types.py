"""Values that the operations on trees (trees.py) take and return, for every backend."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor


class Candidates(NamedTuple):
    """All nodes that a growing tree considers, ordered by depth: a node comes after its parent."""

    tokens: Tensor  # [num_seqs, num_candidates] int64
    scores: Tensor  # [num_seqs, num_candidates] float32
    parents: Tensor  # [num_seqs, num_candidates] int64, the candidate above; -1: the root

    @classmethod
    def allocate(cls, num_seqs: int, num_candidates: int, device: torch.device) -> Self:
        """Return candidates whose values are not set."""
        tokens = torch.empty(num_seqs, num_candidates, dtype=torch.int64, device=device)
        return cls(tokens, torch.empty_like(tokens, dtype=torch.float32), torch.empty_like(tokens))


class Frontier(NamedTuple):
    """The nodes that are expanded next, all `depth` below the root."""

    tokens: Tensor  # [num_seqs, num_nodes] int64
    scores: Tensor  # [num_seqs, num_nodes] float32
    ids: Tensor  # [num_seqs, num_nodes] int64, their places among the candidates; -1: the root
    states: Tensor  # [num_seqs, num_nodes, width], the drafter's; until nodes are expanded, their parents'
    paths: Tensor  # [num_seqs, num_nodes, depth] int64, tokens from below the root to the node
    visible: Tensor  # [num_seqs, num_nodes, depth * topk] bool: nodes of the frontiers up to this one that a node sees

    @classmethod
    def root(cls, state: Tensor) -> Self:
        """Return the root alone, with the state [num_seqs, width] that proposes its children."""
        ids = torch.full((len(state), 1), -1, dtype=torch.int64, device=state.device)
        return cls(
            ids,
            torch.zeros_like(ids, dtype=torch.float32),
            ids,
            state.unsqueeze(1),
            ids.new_empty(len(state), 1, 0),
            torch.empty(len(state), 1, 0, dtype=torch.bool, device=state.device),
        )

    def num_before(self, topk: int) -> int:
        """Return the number of candidates up to these nodes. The children of these nodes come next."""
        depth = self.paths.shape[2]
        return topk + (depth - 1) * topk**2 if depth else 0


class Ancestry(NamedTuple):
    """Ancestors and depths, which follow from the parents."""

    visible: Tensor  # [num_seqs, N + 1, N + 1] bool: node j is node i or an ancestor of it
    depths: Tensor  # [num_seqs, N + 1] int64
