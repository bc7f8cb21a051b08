"""STANDALONE: a complete small model with the target's tokenizer drafts by itself. It has no hidden state anywhere.

Unshifted: the draft's KV at position i is of token i. A round feeds the bonus token and the drafts d_1 .. d_K at
positions L .. L + K; the last of these K + 1 forwards proposes nothing, it fills the slot that a fully accepted round
would else leave empty. Slots of rejected drafts are overwritten before they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...metadata.hidden_layout import HiddenLayout
from ..batch import BatchRow, ForwardBatch
from ..models.llama import LlamaModel
from .base import Drafted, DraftState, PromptChunk, PromptTail
from .sampling import sample_ahead


class StandaloneDrafter:
    """Owns the draft model; its KV pool shares page numbers with the target's."""

    name = "standalone"
    is_shifted = False

    def __init__(self, model: LlamaModel, kv: torch.Tensor, hidden: HiddenLayout, num_steps: int) -> None:
        """`kv` [num_layers, num_pages, 2, num_kv_heads, page_size, head_dim], as the draft model has them."""
        self.num_steps = num_steps
        self.hidden = hidden
        self.kv = kv
        self._model = model
        self._page_size = kv.shape[4]

    def propose(self, sequences: Sequence[Drafted], num_steps: int) -> torch.Tensor:
        """[num_sequences, num_steps] int64."""
        states = [sequence.sampling for sequence in sequences]
        last = [sequence.token_ids[-1] for sequence in sequences]
        tokens = torch.tensor(last, dtype=torch.int64, device=self.kv.device)
        drafted = tokens.new_empty(len(sequences), 0)
        for step in range(num_steps + 1):
            rows = [BatchRow([0], sequence.num_computed + step, sequence.pages) for sequence in sequences]
            batch = replace(ForwardBatch.build(rows, self._page_size, self.kv.device), input_ids=tokens)
            hidden = self._model.forward(batch, self.kv)
            if step < num_steps:
                tokens = sample_ahead(self._model.logits(hidden), states, drafted)
                drafted = torch.cat([drafted, tokens.unsqueeze(1)], dim=1)
        return drafted

    def observe(
        self,
        sequences: Sequence[Drafted],
        hidden: torch.Tensor | None,
        targets: torch.Tensor,
        num_accepted: Sequence[int],
    ) -> None:
        """Nothing: the draft's KV of accepted tokens is there already."""
        assert hidden is None, hidden
        for sequence in sequences:
            sequence.draft = DraftState(None, None)

    def observe_prompt(self, chunks: Sequence[PromptChunk], hidden: torch.Tensor | None) -> None:
        """Draft KV of the same tokens."""
        assert hidden is None, hidden
        rows = [BatchRow(chunk.token_ids[chunk.start : chunk.stop], chunk.start, chunk.pages, 0) for chunk in chunks]
        self._model.forward(ForwardBatch.build(rows, self._page_size, self.kv.device), self.kv)

    def finish_prompt(self, tails: Sequence[PromptTail], hidden: torch.Tensor | None) -> list[DraftState]:
        """The first round proposes from the bonus token."""
        return [DraftState(None, None) for _ in tails]
