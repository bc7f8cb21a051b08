"""EAGLE, EAGLE-3 and one-layer MTP: heads that draft from hidden states, one token behind the target.

Draft row i is (hidden state of row i, token i + 1) at position i; row L - 1 takes the bonus token and yields d_1 and
the recurrent state. A round of K:

    propose   d_1 is known; rows L + j = (recurrent state, d_(j+1)) at positions L + j, j = 0 .. K - 2, yield d_2 .. d_K
    observe   rows L .. L + K = (target's states, t_0 .. t_K); row L + a (a: accepted) yields the next d_1

Rows beyond L + a are wrong. The next round overwrites them before anything reads them. In a tree of `topk` the nodes of
step j + 1 are at position L + j, in slots L + topk * j .. ; `observe` overwrites them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.attention.attention import Tree
from ...kernels.state.rows import gather_rows
from ...metadata.handoff.schema.hidden_layout import HiddenLayout
from ..device import counted
from ..models.head_file import HeadFile
from ..models.heads import DraftHead
from ..models.target_ends import TargetEnds
from ..pace.draft_length import DraftShape
from ..ranks.ranks import Ranks
from ..rounds.batch import ForwardBatch
from ..rounds.trees import Drafts, grow_tree, sample_ahead, top_of
from ..sampling.batch import SamplingBatch
from ..state.model_pools import ModelPools
from ..work import BatchRow
from .base import DraftState, PromptChunk, PromptTail, RoundRows
from .family import Loading, Speculation, Wanted


class ShiftedDrafter:
    """Owns the head; its KV pool shares page numbers with the target's."""

    has_kv = True
    proposer = None

    def __init__(self, head: DraftHead, pools: ModelPools, hidden: HiddenLayout, shape: DraftShape) -> None:
        """Take the head and its pools."""
        self.shape = shape
        self.hidden = hidden
        self._head = head
        self._pools = pools

    def use_pools(self, target: ModelPools, draft: ModelPools | None) -> None:
        del target
        assert draft is not None
        self._pools = draft

    def allocate(self, num_rows: int) -> DraftState:
        topk, device = self.shape.topk, self._pools.kv.device
        return DraftState(
            torch.zeros(num_rows, topk, dtype=torch.int64, device=device),
            None if topk == 1 else torch.zeros(num_rows, topk, device=device),
            self.hidden.allocate("recurrent", num_rows, device),
        )

    def propose(self, rows: RoundRows, shape: DraftShape) -> Drafts:
        tokens, scores, hidden = rows.draft.tokens, rows.draft.scores, rows.draft.hidden
        assert tokens is not None and hidden is not None, rows.draft
        sampling = rows.sampling.over(self._head.logit_ids)
        if not shape.is_chain:
            assert scores is not None

            def expand(step: int, nodes: Tensor, states: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
                return self._expand(rows, step, nodes, states, visible)

            return grow_tree(shape, (tokens, scores), hidden, sampling, expand)
        drafted, position = tokens, rows.lengths
        for _ in range(shape.num_steps - 1):
            end = position + 1
            hidden = self._forward(rows, drafted[:, -1:], position.unsqueeze(1), end, hidden)
            position = end
            proposed = sample_ahead(self._head.logits(hidden, sampling.lens(len(hidden))), sampling, drafted)
            drafted = torch.cat([drafted, proposed.unsqueeze(1)], dim=1)
        return Drafts(drafted)

    def observe(self, rows: RoundRows, hidden: Tensor | None, targets: Tensor, num_accepted: Tensor) -> DraftState:
        assert hidden is not None and hidden.shape[:2] == targets.shape, (hidden, targets)
        num_seqs, num_rows = targets.shape
        positions = rows.lengths.unsqueeze(1) + counted(num_rows, targets.device)
        end = rows.lengths + num_rows
        recurrent = self._forward(rows, targets, positions, end, hidden.flatten(0, 1), is_extend=True)
        last = counted(num_seqs, targets.device, num_rows) + num_accepted
        return self._state(gather_rows([recurrent], last)[0], rows.after(targets, num_accepted))

    def observe_prompt(self, chunks: Sequence[PromptChunk], hidden: Tensor | None) -> None:
        """Run the rows whose next token is in the prompt. The prompt's last row waits for `finish_prompt`."""
        assert hidden is not None
        self.hidden.check("extend", hidden)
        rows: list[BatchRow] = []
        kept: list[Tensor] = []
        for chunk, states in zip(chunks, hidden.split([chunk.stop - chunk.start for chunk in chunks]), strict=True):
            tokens = chunk.token_ids[chunk.start + 1 : chunk.stop + 1]
            if tokens:
                rows.append(BatchRow(tokens, chunk.start, chunk.pages, 0, tail=chunk.tail))
                kept.append(states[: len(tokens)])
        if rows:
            self._run(self._batch(rows), torch.cat(kept), is_extend=True)

    def finish_prompt(
        self, tails: Sequence[PromptTail], tokens: Tensor, hidden: Tensor | None, sampling: SamplingBatch
    ) -> DraftState:
        assert hidden is not None and hidden.shape[0] == len(tails), hidden
        self.hidden.check("extend", hidden)
        if not tails:
            return self.allocate(0)
        batch = self._batch([BatchRow([0], tail.prompt_len - 1, tail.pages, tail=tail.tail) for tail in tails])
        recurrent = self._run(replace(batch, input_ids=tokens), hidden, is_extend=True)
        return self._state(recurrent, sampling)

    def _expand(
        self, rows: RoundRows, step: int, tokens: Tensor, states: Tensor, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run one step of a tree (trees.py `Expand`)."""
        topk = tokens.shape[1]
        positions = (rows.lengths + (step - 1)).unsqueeze(1).expand(-1, topk)
        tree = Tree(rows.lengths, visible.flatten(0, 1))
        recurrent = self._forward(rows, tokens, positions, rows.lengths + step * topk, states.flatten(0, 1), tree)
        logits = self._head.logits(recurrent, rows.sampling.lens(len(recurrent)))
        return recurrent.view(*tokens.shape, recurrent.shape[-1]), logits

    def _state(self, recurrent: Tensor, sampling: SamplingBatch) -> DraftState:
        """Return the state of rows L - 1: `recurrent` [num_rows, width], `sampling` of the tokens at L + 1."""
        topk, num_rows = self.shape.topk, len(recurrent)
        logits = self._head.logits(recurrent, sampling.lens(num_rows))
        sampling = sampling.over(self._head.logit_ids)
        if topk > 1:
            return DraftState(*top_of(logits, sampling, topk), recurrent)
        return DraftState(
            sample_ahead(logits, sampling, sampling.ints.new_empty(num_rows, 0))[:, None], None, recurrent
        )

    def _forward(
        self,
        rows: RoundRows,
        tokens: Tensor,
        positions: Tensor,
        seq_lens: Tensor,
        hidden: Tensor,
        tree: Tree | None = None,
        *,
        is_extend: bool = False,
    ) -> Tensor:
        page_size = self._pools.kv.shape[4]
        batch = ForwardBatch.uniform(tokens, positions, seq_lens, rows.block_table, page_size, tree, rows.tail_table)
        return self._run(batch, hidden, is_extend=is_extend)

    def _batch(self, rows: Sequence[BatchRow]) -> ForwardBatch:
        return ForwardBatch.build(rows, self._pools.kv.shape[4], self._pools.kv.device)

    def _run(self, batch: ForwardBatch, hidden: Tensor, *, is_extend: bool) -> Tensor:
        """Return recurrent states [num_tokens, width], in the draft's dtype. `hidden` of an extend has the target's."""
        self.hidden.check("extend" if is_extend else "recurrent", hidden)
        if is_extend:
            hidden = self.hidden.to_draft(hidden)
        recurrent = self._head.forward(batch, self._pools, hidden, is_extend=is_extend)
        self.hidden.check("recurrent", recurrent)
        return recurrent


def shifted_speculation(
    wanted: Wanted,
    head: HeadFile,
    hidden: HiddenLayout,
    load: Callable[[HeadFile, TargetEnds, Ranks], DraftHead],
    aux_layers: tuple[int, ...] = (),
) -> Speculation:
    """Return the configuration with a head that proposes one token, which `load` reads."""

    def make(loading: Loading) -> ShiftedDrafter:
        return ShiftedDrafter(load(head, loading.ends, loading.ranks), loading.pools, loading.hidden, loading.shape)

    return Speculation(
        algorithm=wanted.algorithm,
        shape=wanted.shape,
        hidden=hidden,
        make=make,
        draft_dir=head.directory,
        draft=head.config,
        settings=head.settings,
        has_pool=True,
        key_lookahead=1,
        num_proposing=1,
        aux_layers=aux_layers,
    )
