"""`index_scores` of picks.py for float32 on a CPU. A score is computed in one order, whatever else a forward holds."""

from __future__ import annotations

import torch

from .. import numba_kernels
from .picks import Sight


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, sight: Sight) -> torch.Tensor:
    """Return `index_scores_ref`, a new tensor [num_tokens, num_slots] float32."""
    out = torch.empty(sight.seen.shape, dtype=torch.float32)
    numba_kernels.index_scores(
        q.contiguous().numpy(), weights.contiguous().numpy(), keys.numpy(), sight.block_table.contiguous().numpy(),
        sight.seqs.numpy(), sight.seen.contiguous().numpy(), out.numpy(),
    )  # fmt: skip
    return out
