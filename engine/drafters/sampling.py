"""A drafter's choice of a token: the same processing and the same noise as the target's at that position.

A draft token is accepted exactly when it equals the target's, so the drafter asks the same question of its own logits
(DESIGN.md section 6): noise of the *position of the proposed token* and the *target's id*.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..sampling import sample
from ..sampling_state import SamplingBatch, SamplingState


def sample_ahead(logits: torch.Tensor, states: Sequence[SamplingState], drafted: torch.Tensor) -> torch.Tensor:
    """Tokens after `drafted` [num_rows, j] int64, which follow what `states` know: [num_rows] int64.

    `logits` [num_rows, vocab_size] in the target's vocabulary; row i is processed with state i and its drafted tokens.
    """
    num_drafted = drafted.shape[1]
    ahead = [state.ahead(num_drafted, drafted[row]) for row, state in enumerate(states)]
    return sample(logits, SamplingBatch.of(ahead, logits.device), with_logprobs=False).token_ids
