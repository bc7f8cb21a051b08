"""EAGLE, EAGLE-3 and one-layer MTP: heads that draft from hidden states, one token behind the target.

Draft row i is (hidden state of row i, token i + 1) at position i; row L - 1 takes the bonus token and yields d_1 and
the recurrent state. A round of K:

    propose   d_1 is known; rows L + j = (recurrent state, d_(j+1)) at positions L + j, j = 0 .. K - 2, yield d_2 .. d_K
    observe   rows L .. L + K = (target's states, t_0 .. t_K); row L + a (a: accepted) yields the next d_1

Rows beyond L + a are wrong and are overwritten by the next round before anybody reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...metadata.hidden_layout import HiddenLayout
from ..batch import BatchRow, ForwardBatch
from ..models.heads import DraftHead
from .base import Drafted, DraftState, PromptChunk, PromptTail
from .sampling import sample_ahead


class ShiftedDrafter:
    """Owns the head; its KV pool shares page numbers with the target's."""

    is_shifted = True

    def __init__(self, name: str, head: DraftHead, kv: torch.Tensor, hidden: HiddenLayout, num_steps: int) -> None:
        """`kv` [num_layers, num_pages, 2, num_kv_heads, page_size, head_dim], as the head has them."""
        self.name = name
        self.num_steps = num_steps
        self.hidden = hidden
        self._head = head
        self._kv = kv

    def propose(self, sequences: Sequence[Drafted], num_steps: int) -> torch.Tensor:
        """[num_sequences, num_steps] int64."""
        drafts = [_draft(sequence) for sequence in sequences]
        device = self._kv.device
        if num_steps == 0:
            return torch.empty(len(sequences), 0, dtype=torch.int64, device=device)
        states = [sequence.sampling for sequence in sequences]
        recurrent = torch.stack([hidden.to(device) for _, hidden in drafts])
        drafted = torch.stack([tokens.to(device) for tokens, _ in drafts])
        tokens = drafted[:, 0]
        for step in range(num_steps - 1):
            rows = [BatchRow([0], sequence.num_computed + step, sequence.pages) for sequence in sequences]
            recurrent = self._forward(rows, tokens, recurrent, is_extend=False)
            tokens = sample_ahead(self._head.logits(recurrent), states, drafted)
            drafted = torch.cat([drafted, tokens.unsqueeze(1)], dim=1)
        return drafted

    def observe(
        self,
        sequences: Sequence[Drafted],
        hidden: torch.Tensor | None,
        targets: torch.Tensor,
        num_accepted: Sequence[int],
    ) -> None:
        assert hidden is not None and hidden.shape[:2] == targets.shape, (hidden, targets)
        num_rows = targets.shape[1]
        rows = [BatchRow([0] * num_rows, sequence.num_computed, sequence.pages) for sequence in sequences]
        recurrent = self._forward(rows, targets.flatten(), hidden.flatten(0, 1), is_extend=True)
        selected = recurrent.view(len(sequences), num_rows, -1)[range(len(sequences)), list(num_accepted)]
        states = [
            sequence.sampling.ahead(count + 1, targets[row, : count + 1])
            for row, (sequence, count) in enumerate(zip(sequences, num_accepted, strict=True))
        ]
        tokens = sample_ahead(self._head.logits(selected), states, targets[:, :0])
        for row, sequence in enumerate(sequences):
            sequence.draft = DraftState(tokens[row : row + 1], selected[row])

    def observe_prompt(self, chunks: Sequence[PromptChunk], hidden: torch.Tensor | None) -> None:
        """Rows of all positions whose next token is in the prompt: a prompt's last one waits for `finish_prompt`."""
        assert hidden is not None
        self.hidden.check("extend", hidden)
        rows: list[BatchRow] = []
        kept: list[torch.Tensor] = []
        for chunk, states in zip(chunks, hidden.split([chunk.stop - chunk.start for chunk in chunks]), strict=True):
            tokens = chunk.token_ids[chunk.start + 1 : chunk.stop + 1]
            if tokens:
                rows.append(BatchRow(tokens, chunk.start, chunk.pages, 0))
                kept.append(states[: len(tokens)])
        if rows:
            self._forward(rows, None, torch.cat(kept), is_extend=True)

    def finish_prompt(self, tails: Sequence[PromptTail], hidden: torch.Tensor | None) -> list[DraftState]:
        assert hidden is not None and hidden.shape[0] == len(tails), hidden
        self.hidden.check("extend", hidden)
        if not tails:
            return []
        rows = [BatchRow([tail.token], tail.prompt_len - 1, tail.pages) for tail in tails]
        recurrent = self._forward(rows, None, hidden, is_extend=True)
        nothing = torch.empty(len(tails), 0, dtype=torch.int64, device=recurrent.device)
        tokens = sample_ahead(self._head.logits(recurrent), [tail.sampling for tail in tails], nothing)
        return [DraftState(tokens[row : row + 1], recurrent[row]) for row in range(len(tails))]

    def _forward(
        self, rows: Sequence[BatchRow], tokens: torch.Tensor | None, hidden: torch.Tensor, *, is_extend: bool
    ) -> torch.Tensor:
        """Recurrent states [num_tokens, width]; `tokens` [num_tokens] int64 instead of the rows' own."""
        self.hidden.check("extend" if is_extend else "recurrent", hidden)
        batch = ForwardBatch.build(rows, self._kv.shape[4], self._kv.device)
        if tokens is not None:
            batch = replace(batch, input_ids=tokens)
        recurrent = self._head.forward(batch, self._kv, hidden, is_extend=is_extend)
        self.hidden.check("recurrent", recurrent)
        return recurrent


def _draft(sequence: Drafted) -> tuple[torch.Tensor, torch.Tensor]:
    draft = sequence.draft
    assert draft is not None and draft.tokens is not None and draft.hidden is not None, draft
    return draft.tokens, draft.hidden
