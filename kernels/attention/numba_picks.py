"""`index_scores` of picks.py for float32 on a CPU. A score is computed in one order, whatever else a forward holds."""

from __future__ import annotations

import numpy as np
import torch

from ..numba_kernels import _SUMS, compiled
from .picks import Sight

_ZERO = np.float32(0.0)


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, sight: Sight) -> torch.Tensor:
    """Return `index_scores_ref`, a new tensor [num_tokens, num_slots] float32."""
    out = torch.empty(sight.seen.shape, dtype=torch.float32)
    _index_scores(
        q.contiguous().numpy(), weights.contiguous().numpy(), keys.numpy(), sight.block_table.contiguous().numpy(),
        sight.seqs.numpy(), sight.seen.contiguous().numpy(), out.numpy(),
    )  # fmt: skip
    return out


@compiled(_SUMS)
def _index_scores(
    q,  # [num_tokens, num_heads, head_dim] float32
    weights,  # [num_tokens, num_heads] float32
    keys,  # [num_pages, 1, 1, page_size, head_dim] float32
    block_table,  # [num_seqs, max_pages] int64
    seqs,  # [num_tokens] int64
    seen,  # [num_tokens, num_slots] bool
    out,  # [num_tokens, num_slots] float32, written
):
    """Write the scores of all slots that tokens see, and -inf for the others."""
    page_size = keys.shape[3]
    for token in range(q.shape[0]):
        table = block_table[seqs[token]]
        for slot in range(out.shape[1]):
            if not seen[token, slot]:
                out[token, slot] = -np.inf
                continue
            k, score = keys[table[slot // page_size], 0, 0, slot % page_size], _ZERO
            for head in range(q.shape[1]):
                total, x = _ZERO, q[token, head]
                for d in range(x.shape[0]):
                    total += x[d] * k[d]
                score += weights[token, head] * max(total, _ZERO)
            out[token, slot] = score
