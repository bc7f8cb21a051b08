"""MTP with n layers, one per step: layer m proposes the token m + 2 places after its row, and has KV of its own.

Row i of layer m (from 0) takes token i + 1 + m at position i, and the target's state of row i or, chained, the state of
layer m - 1 at the same row. There are no forwards in a round: the extend runs the layers one after the other. Layer m
proposes d_(m+1) at the last row, where layer m + 1 takes it:

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
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.state.rows import gather_rows
from ...metadata.handoff.schema.hidden_layout import HiddenLayout
from ..device import counted, to_device
from ..models.heads import DraftHead
from ..pace.draft_length import DraftShape
from ..rounds.batch import ForwardBatch
from ..rounds.trees import Drafts, sample_ahead
from ..sampling.batch import SamplingBatch
from ..state.model_pools import ModelPools
from ..work import BatchRow
from .base import DraftState, PromptChunk, PromptTail, RoundRows


class MtpLayersDrafter:
    """Owns the layers; their KV pool shares page numbers with the target's, one pool layer for each."""

    has_kv = True
    proposer = None

    def __init__(self, layers: Sequence[DraftHead], pools: ModelPools, hidden: HiddenLayout, shape: DraftShape) -> None:
        """Take the layers and their pools, which have a layer for each of them.

        The layers are chained if `hidden` has a recurrent state: each layer takes the state of the one before it."""
        num_layers = len(layers)
        assert 1 <= shape.num_steps <= num_layers, (shape, num_layers)
        assert num_layers == len(pools.kv) == hidden.num_target_rows + 1, (num_layers, pools.kv.shape, hidden)
        self.shape = shape
        self.hidden = hidden
        self._layers = layers
        self._pools = pools
        self._is_chained = hidden.recurrent is not None

    @property
    def num_before(self) -> int:
        """Number of rows before L that every extend computes again, n - 1."""
        return len(self._layers) - 1

    def use_pools(self, target: ModelPools, draft: ModelPools | None) -> None:
        del target
        assert draft is not None
        self._pools = draft

    def allocate(self, num_rows: int) -> DraftState:
        rows = self.hidden.allocate("extend", num_rows * self.num_before, self._pools.kv.device)
        assert rows is not None
        tokens = torch.zeros(
            num_rows, len(self._layers) + self.num_before, dtype=torch.int64, device=self._pools.kv.device
        )
        proposed, recent = tokens.split([len(self._layers), self.num_before], dim=1)
        return DraftState(
            proposed.clone(), rows=rows.view(num_rows, self.num_before, rows.shape[1]), recent=recent.clone()
        )

    def propose(self, rows: RoundRows, shape: DraftShape) -> Drafts:
        assert rows.draft.tokens is not None
        return Drafts(rows.draft.tokens[:, : shape.num_steps])

    def observe(self, rows: RoundRows, hidden: Tensor | None, targets: Tensor, num_accepted: Tensor) -> DraftState:
        assert hidden is not None and hidden.shape[:2] == targets.shape, (hidden, targets)
        return self._extend(
            rows.lengths,
            (rows.block_table, rows.tail_table),
            rows.draft,
            hidden,
            targets,
            num_accepted,
            rows.after(targets, num_accepted),
        )

    def observe_prompt(self, chunks: Sequence[PromptChunk], hidden: Tensor | None) -> None:
        """Run in every layer the rows whose token is in the prompt. The last rows wait for `finish_prompt`."""
        assert hidden is not None
        self.hidden.check("extend", hidden)
        states = list(hidden.split([chunk.stop - chunk.start for chunk in chunks]))  # what this layer takes, by chunk
        for ahead, layer in enumerate(self._layers, start=1):
            tokens = [chunk.token_ids[chunk.start + ahead : chunk.stop + ahead] for chunk in chunks]
            found = [i for i in range(len(chunks)) if tokens[i]]
            if not found:
                return
            rows = [BatchRow(tokens[i], chunks[i].start, chunks[i].pages, 0, tail=chunks[i].tail) for i in found]
            inputs = self.hidden.to_draft(torch.cat([states[i][: len(tokens[i])] for i in found]))
            batch = ForwardBatch.build(rows, self._pools.kv.shape[4], self._pools.kv.device)
            outputs = layer.forward(batch, self._pools.layer(ahead - 1), inputs, is_extend=True)
            if self._is_chained:
                for i, output in zip(found, outputs.split([len(tokens[i]) for i in found]), strict=True):
                    states[i] = output

    def finish_prompt(
        self, tails: Sequence[PromptTail], tokens: Tensor, hidden: Tensor | None, sampling: SamplingBatch
    ) -> DraftState:
        assert hidden is not None and hidden.shape[0] == len(tails), hidden
        self.hidden.check("extend", hidden)
        state = self.allocate(len(tails))
        if not tails:
            return state
        assert state.rows is not None and state.recent is not None
        num, device = self.num_before, self._pools.kv.device
        recent: list[list[int]] = []
        for i, tail in enumerate(tails):
            num_known = min(num, tail.prompt_len - 1)
            assert tail.rows is not None and len(tail.rows) >= num_known, (tail.rows, tail.prompt_len)
            state.rows[i, num - num_known :] = tail.rows[len(tail.rows) - num_known :]
            known = list(tail.token_ids[-num:])  # of rows .. L: L is the prompt's last
            recent.append([0] * (num - len(known)) + known)
        batch = ForwardBatch.build(
            [BatchRow([0], tail.prompt_len - 1, tail.pages, tail=tail.tail) for tail in tails],
            self._pools.kv.shape[4],
            device,
        )
        state.recent.copy_(to_device(torch.tensor(recent), device))
        none = torch.zeros(len(tails), dtype=torch.int64, device=device)
        padded = F.pad(batch.block_table, (0, num))  # rows may run past the prompt: padding
        tables = padded, None if batch.tail_table is None else F.pad(batch.tail_table, (0, num))
        return self._extend(batch.positions, tables, state, hidden.unsqueeze(1), tokens.unsqueeze(1), none, sampling)

    def _extend(
        self,
        lengths: Tensor,
        tables: tuple[Tensor, Tensor | None],
        draft: DraftState,
        hidden: Tensor,
        targets: Tensor,
        num_accepted: Tensor,
        sampling: SamplingBatch,
    ) -> DraftState:
        """Run all layers over the rows that the target has just run and the n - 1 rows before them.

        The target ran L .. L + num_new - 1, with states `hidden` [num_seqs, num_new, width], and sampled `targets`
        [num_seqs, num_new] after them; `sampling` is of the token that follows t_a. `tables`: of pages, and of tail
        pages.

        Column c of a sequence is row L - (n - 1) + c. Layer m takes the token of column c + m there. If L < n - 1, the
        first columns are rows before position 0. All columns then move up by as many, and the last ones run past the
        end, where everything is overwritten before it is read."""
        assert draft.rows is not None and draft.recent is not None
        num_before, device = self.num_before, self._pools.kv.device
        num_seqs, num_columns = len(targets), self.num_before + targets.shape[1]
        tokens = torch.cat([draft.recent, targets, targets.new_zeros(num_seqs, num_before)], dim=1)
        states = torch.cat([draft.rows, hidden], dim=1)  # [num_seqs, num_columns, width]
        self.hidden.check("extend", states.flatten(0, 1))

        num_missing = (num_before - lengths).clamp(min=0).unsqueeze(1)  # [num_seqs, 1]
        column = counted(num_columns, device)
        used = (column + num_missing).clamp(max=num_columns - 1)  # [num_seqs, num_columns] in place of `column`
        start = (lengths - num_before).clamp(min=0).unsqueeze(1)
        last = counted(num_seqs, device, num_columns)
        last = last + num_before + num_accepted - num_missing.squeeze(1)  # rows L + a
        batch = ForwardBatch.uniform(
            used,
            start + column,
            start.squeeze(1) + num_columns,
            tables[0],
            self._pools.kv.shape[4],
            tail_table=tables[1],
        )

        inputs = states.gather(1, used.unsqueeze(2).expand(-1, -1, states.shape[2])).flatten(0, 1)
        inputs = self.hidden.to_draft(inputs)
        drafted = targets[:, :0]
        next_column = num_accepted.unsqueeze(1) + num_before + 1  # of d_1 in `tokens`
        for m, layer in enumerate(self._layers):
            fed = tokens.gather(1, used + m).flatten()
            outputs = layer.forward(replace(batch, input_ids=fed), self._pools.layer(m), inputs, is_extend=True)
            [final] = gather_rows([outputs], last)
            proposed = sample_ahead(layer.logits(final, sampling.lens(len(final))), sampling, drafted).unsqueeze(1)
            drafted = torch.cat([drafted, proposed], dim=1)
            if m < num_before:
                tokens.scatter_(1, next_column + m, proposed)
            if self._is_chained:
                inputs = outputs
        kept = num_accepted.unsqueeze(1) + 1 + counted(num_before, device)  # [num_seqs, n - 1]
        rows = states.gather(1, kept.unsqueeze(2).expand(-1, -1, states.shape[2]))
        return DraftState(drafted, rows=rows, recent=tokens.gather(1, kept))
