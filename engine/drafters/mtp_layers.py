"""MTP with n layers, one a step: layer m proposes the token m + 2 places after its row, and has KV of its own.

Row i of layer m (from 0) takes token i + 1 + m at position i, and the target's state of row i or, chained, the state of
layer m - 1 at the same row. There are no forwards in a round: the extend runs the layers one after the other, and layer
m at the last row proposes d_(m+1), which is what layer m + 1 needs there:

    row         L - 2      L - 1      L = bonus's position; known are tokens 0 .. L
    layer 0     t_(L-1)    t_L        -> d_1
    layer 1     t_L        d_1        -> d_2
    layer 2     d_1        d_2        -> d_3

So the last m rows of layer m were computed from proposals. Every extend computes them again, from the target's states
of the last n - 1 rows, which `DraftState.rows` keeps: it runs rows L - n + 1 .. L + K of all layers. Of these L + a (a:
accepted) proposes; those beyond are wrong and are overwritten before anybody reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...metadata.hidden_layout import HiddenLayout
from ..batch import BatchRow, ForwardBatch
from ..models.mtp import MtpHead
from ..sampling_state import SamplingState
from .base import Drafted, DraftState, PromptChunk, PromptTail
from .sampling import sample_ahead


class MtpLayersDrafter:
    """Owns the layers; their KV pool shares page numbers with the target's, one pool layer for each."""

    name = "mtp"
    is_shifted = True

    def __init__(self, layers: Sequence[MtpHead], kv: torch.Tensor, hidden: HiddenLayout, num_steps: int) -> None:
        """`kv` [num_mtp_layers, num_pages, 2, num_kv_heads, page_size, head_dim]; `hidden.is_chained` decides what the
        layers after the first take."""
        assert 1 <= num_steps <= len(layers) == kv.shape[0] == hidden.num_mtp_layers, (num_steps, len(layers), kv.shape)
        self.num_steps = num_steps
        self.hidden = hidden
        self._layers = layers
        self._kv = kv

    def propose(self, sequences: Sequence[Drafted], num_steps: int) -> torch.Tensor:
        """[num_sequences, num_steps] int64."""
        return torch.stack([_state(sequence)[0][:num_steps].to(self._kv.device) for sequence in sequences])

    def observe(
        self,
        sequences: Sequence[Drafted],
        hidden: torch.Tensor | None,
        targets: torch.Tensor,
        num_accepted: Sequence[int],
    ) -> None:
        assert hidden is not None and hidden.shape[:2] == targets.shape, (hidden, targets)
        heads = [
            _Head(
                sequence.num_computed,
                sequence.token_ids,
                _state(sequence)[1],
                sequence.pages,
                sequence.sampling.ahead(count + 1, targets[row, : count + 1]),
            )
            for row, (sequence, count) in enumerate(zip(sequences, num_accepted, strict=True))
        ]
        for sequence, draft in zip(sequences, self._extend(heads, hidden, targets, num_accepted), strict=True):
            sequence.draft = draft

    def observe_prompt(self, chunks: Sequence[PromptChunk], hidden: torch.Tensor | None) -> None:
        """In every layer the rows whose token is in the prompt: the last ones wait for `finish_prompt`."""
        assert hidden is not None
        self.hidden.check("extend", hidden)
        states = list(hidden.split([chunk.stop - chunk.start for chunk in chunks]))  # what this layer takes, by chunk
        for ahead, layer in enumerate(self._layers, start=1):
            tokens = [chunk.token_ids[chunk.start + ahead : chunk.stop + ahead] for chunk in chunks]
            found = [i for i in range(len(chunks)) if tokens[i]]
            if not found:
                return
            rows = [BatchRow(tokens[i], chunks[i].start, chunks[i].pages, 0) for i in found]
            inputs = torch.cat([states[i][: len(tokens[i])] for i in found])
            batch = ForwardBatch.build(rows, self._kv.shape[4], self._kv.device)
            outputs = layer.forward(batch, self._kv[ahead - 1 : ahead], inputs)
            if self.hidden.is_chained:
                for i, output in zip(found, outputs.split([len(tokens[i]) for i in found]), strict=True):
                    states[i] = output

    def finish_prompt(self, tails: Sequence[PromptTail], hidden: torch.Tensor | None) -> list[DraftState]:
        assert hidden is not None and hidden.shape[0] == len(tails), hidden
        self.hidden.check("extend", hidden)
        if not tails:
            return []
        heads = []
        for tail in tails:
            assert tail.rows is not None
            heads.append(_Head(tail.prompt_len - 1, tail.token_ids, tail.rows, tail.pages, tail.sampling))
        targets = torch.tensor([[tail.token] for tail in tails], dtype=torch.int64, device=self._kv.device)
        return self._extend(heads, hidden.unsqueeze(1), targets, [0] * len(tails))

    def _extend(
        self, heads: Sequence[_Head], hidden: torch.Tensor, targets: torch.Tensor, num_accepted: Sequence[int]
    ) -> list[DraftState]:
        """The target ran L .. L + num_new - 1, `hidden` [num_seqs, num_new, width], and has `targets` [num_seqs,
        num_new] after them: run all layers over those rows and the n - 1 before them.

        Column r of a sequence is row L - (n - 1) + r; it is fed token column r + m by layer m."""
        num_before, num_new, device = len(self._layers) - 1, targets.shape[1], self._kv.device
        num_columns = num_before + num_new
        known = torch.tensor([head.last_tokens(num_before) for head in heads], dtype=torch.int64, device=device)
        tokens = torch.cat([known, targets, targets.new_zeros(len(heads), num_before)], dim=1)
        states = torch.cat([torch.stack([head.last_rows(num_before, device) for head in heads]), hidden], dim=1)
        self.hidden.check("extend", states.flatten(0, 1))

        firsts = [max(0, num_before - head.position) for head in heads]  # columns before are rows before position 0
        used = torch.cat(
            [torch.arange(seq * num_columns + first, (seq + 1) * num_columns) for seq, first in enumerate(firsts)]
        )
        used = used.to(device)
        lens = torch.tensor([num_columns - first for first in firsts])
        last = (lens.cumsum(0) - num_new + torch.tensor(num_accepted)).to(device)  # of `used`: rows L + a
        rows = [
            BatchRow([0] * (num_columns - first), head.position - num_before + first, head.pages)
            for head, first in zip(heads, firsts, strict=True)
        ]
        batch = ForwardBatch.build(rows, self._kv.shape[4], device)

        inputs = states.flatten(0, 1)[used]
        drafted = targets[:, :0]
        next_column = torch.tensor(num_accepted, device=device).unsqueeze(1) + num_before + 1  # of d_1 in `tokens`
        for m, layer in enumerate(self._layers):
            fed = tokens[:, m : m + num_columns].flatten()[used]
            outputs = layer.forward(replace(batch, input_ids=fed), self._kv[m : m + 1], inputs)
            proposed = sample_ahead(layer.logits(outputs[last]), [head.sampling for head in heads], drafted).unsqueeze(
                1
            )
            drafted = torch.cat([drafted, proposed], dim=1)
            if m < num_before:
                tokens.scatter_(1, next_column + m, proposed)
            if self.hidden.is_chained:
                inputs = outputs
        return [
            DraftState(drafted[seq], None, states[seq, count + 1 : count + 1 + num_before].clone())
            for seq, count in enumerate(num_accepted)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """What an extend begins from in one sequence."""

    position: int  # L before it: of the first new row
    token_ids: Sequence[int]  # 0 .. L
    rows: torch.Tensor  # [>= min(n - 1, L), width] of the target, the last of them of row L - 1
    pages: Sequence[int]
    sampling: SamplingState  # after the extend's last committed token

    def last_tokens(self, num: int) -> list[int]:
        """The `num` last, zeros before position 0."""
        assert len(self.token_ids) == self.position + 1, (len(self.token_ids), self.position)
        last = list(self.token_ids[-num:])
        return [0] * (num - len(last)) + last

    def last_rows(self, num: int, device: torch.device) -> torch.Tensor:
        """[num, width], zeros before position 0."""
        num_kept = min(num, self.position)
        assert self.rows.shape[0] >= num_kept, (self.rows.shape, self.position)
        last = self.rows.new_zeros(num, self.rows.shape[1], device=device)
        last[num - num_kept :] = self.rows[self.rows.shape[0] - num_kept :]
        return last


def _state(sequence: Drafted) -> tuple[torch.Tensor, torch.Tensor]:
    draft = sequence.draft
    assert draft is not None and draft.tokens is not None and draft.rows is not None, draft
    return draft.tokens, draft.rows
