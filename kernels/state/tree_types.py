"""Values that the operations on draft trees (trees.py) take and return, for every backend.

A dynamic tree grows from its root, the last token of the sequence. In each step the drafter proposes `topk` children of
every node of the *frontier*. All children ever proposed are *candidates*. The `topk` best new ones are the next
frontier. At the end the best candidates become nodes of the tree, and the target verifies them.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor


class Candidates(NamedTuple):
    """All nodes that a growing tree considers, in the order of their depth. So a node comes after its parent."""

    tokens: Tensor  # [num_seqs, num_candidates] int64
    scores: Tensor  # [num_seqs, num_candidates] float32
    parents: Tensor  # [num_seqs, num_candidates] int64, the number of the parent among the candidates; -1: the root

    @classmethod
    def allocate(cls, num_seqs: int, num_candidates: int, device: torch.device) -> Self:
        """Return candidates without values; `grow_` writes them."""
        tokens = torch.empty(num_seqs, num_candidates, dtype=torch.int64, device=device)
        return cls(tokens, torch.empty_like(tokens, dtype=torch.float32), torch.empty_like(tokens))


class Frontier(NamedTuple):
    """The nodes whose children are proposed next. All are `depth` steps below the root."""

    tokens: Tensor  # [num_seqs, num_nodes] int64
    scores: Tensor  # [num_seqs, num_nodes] float32
    ids: Tensor  # [num_seqs, num_nodes] int64, the nodes' numbers among the candidates; -1: the root
    states: Tensor  # [num_seqs, num_nodes, width], the drafter's; their parents' until the drafter has run
    paths: Tensor  # [num_seqs, num_nodes, depth] int64, the tokens below the root, down to the node
    visible: Tensor  # [num_seqs, num_nodes, depth * topk] bool: sees each node of the frontiers so far, this one last

    @classmethod
    def root(cls, state: Tensor) -> Self:
        """Return the frontier of the root alone. Its `state` [num_seqs, width] proposes its children."""
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
        """Return the number of candidates before the children of these nodes."""
        depth = self.paths.shape[2]
        return topk + (depth - 1) * topk**2 if depth else 0


class Ancestry(NamedTuple):
    """The ancestors and depths of the root, node 0, and of nodes 1 .. N of a tree."""

    visible: Tensor  # [num_seqs, N + 1, N + 1] bool: [s, i, j] says that node j is node i or an ancestor of it
    depths: Tensor  # [num_seqs, N + 1] int64, steps below the root
