"""FROZEN_KV_MTP: drafts by attending to the target's own KV; it has none, and extend is the choice of a row.

All K forwards of a round stand at position L - 1 and see the target's KV of rows 0 .. L - 1: only the token (the bonus,
then d_1, d_2, ...) and the recurrent state change from one to the next. The first state is the target's own at L - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...metadata.hidden_layout import HiddenLayout
from ..batch import BatchRow, ForwardBatch
from ..models.frozen_kv import FrozenKvHead
from .base import Drafted, DraftState, PromptChunk, PromptTail
from .sampling import sample_ahead


class FrozenKvDrafter:
    """Owns the head; `target_kv` is the target's pool, which it only reads."""

    name = "frozen_kv_mtp"
    is_shifted = False

    def __init__(self, head: FrozenKvHead, target_kv: torch.Tensor, hidden: HiddenLayout, num_steps: int) -> None:
        self.num_steps = num_steps
        self.hidden = hidden
        self._head = head
        self._kv = target_kv

    def propose(self, sequences: Sequence[Drafted], num_steps: int) -> torch.Tensor:
        """[num_sequences, num_steps] int64."""
        device = self._kv.device
        states = [sequence.sampling for sequence in sequences]
        rows = [BatchRow([sequence.token_ids[-1]], sequence.num_computed - 1, sequence.pages) for sequence in sequences]
        batch = ForwardBatch.build(rows, self._kv.shape[4], device)
        recurrent = torch.stack([_state(sequence).to(device) for sequence in sequences])
        drafted = torch.empty(len(sequences), 0, dtype=torch.int64, device=device)
        for _ in range(num_steps):
            self.hidden.check("recurrent", recurrent)
            recurrent, logits = self._head.forward(batch, self._kv, recurrent)
            tokens = sample_ahead(logits, states, drafted)
            drafted = torch.cat([drafted, tokens.unsqueeze(1)], dim=1)
            batch = replace(batch, input_ids=tokens)
        return drafted

    def observe(
        self,
        sequences: Sequence[Drafted],
        hidden: torch.Tensor | None,
        targets: torch.Tensor,
        num_accepted: Sequence[int],
    ) -> None:
        assert hidden is not None and hidden.shape[:2] == targets.shape, (hidden, targets)
        self.hidden.check("extend", hidden.flatten(0, 1))
        for row, (sequence, count) in enumerate(zip(sequences, num_accepted, strict=True)):
            sequence.draft = DraftState(None, hidden[row, count].clone())

    def observe_prompt(self, chunks: Sequence[PromptChunk], hidden: torch.Tensor | None) -> None:
        """Nothing: there is no KV of its own."""

    def finish_prompt(self, tails: Sequence[PromptTail], hidden: torch.Tensor | None) -> list[DraftState]:
        assert hidden is not None and hidden.shape[0] == len(tails), hidden
        self.hidden.check("extend", hidden)
        return [DraftState(None, hidden[row].clone()) for row in range(len(tails))]


def _state(sequence: Drafted) -> torch.Tensor:
    assert sequence.draft is not None and sequence.draft.hidden is not None, sequence.draft
    return sequence.draft.hidden
