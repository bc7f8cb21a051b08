"""FROZEN_KV_MTP: a head that attends to the target's own KV. It has no KV, and its extend only chooses a row.

All K forwards of a round stand at position L - 1 and see the target's KV of rows 0 .. L - 1: only the token (the bonus,
then d_1, d_2, ...) and the recurrent state change from one to the next. The first state is the target's own at L - 1,
after its last norm; with residual streams, collapsed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.state.rows import gather_rows
from ...metadata.errors import ConfigError
from ...metadata.handoff.schema.hidden_layout import HiddenLayout
from ..device import counted
from ..models.frozen_kv import FrozenKvFile, FrozenKvHead, read_frozen_kv
from ..pace.draft_length import DraftShape
from ..rounds.batch import ForwardBatch
from ..rounds.trees import Drafts, grow_tree, sample_ahead, top_of
from ..sampling.batch import SamplingBatch
from ..state.model_pools import ModelPools
from .base import DraftState, PromptChunk, PromptTail, RoundRows
from .family import Family, Loading, Speculation, Wanted


class FrozenKvDrafter:
    """Owns the head. It only reads the target's pool of KV."""

    has_kv = False
    proposer = None

    def __init__(self, head: FrozenKvHead, target: ModelPools, hidden: HiddenLayout, shape: DraftShape) -> None:
        self.shape = shape
        self.hidden = hidden
        self._head = head
        self._kv = target.kv

    def use_pools(self, target: ModelPools, draft: ModelPools | None) -> None:
        del draft
        self._kv = target.kv

    def allocate(self, num_rows: int) -> DraftState:
        return DraftState(hidden=self.hidden.allocate("recurrent", num_rows, self._kv.device))

    def propose(self, rows: RoundRows, shape: DraftShape) -> Drafts:
        hidden = rows.draft.hidden
        assert hidden is not None, rows.draft
        drafted = rows.lengths.new_empty(len(hidden), 0)
        hidden, logits = self._forward(rows, rows.last_tokens.unsqueeze(1), hidden)
        if not shape.is_chain:

            def expand(_step: int, nodes: Tensor, states: Tensor, _visible: Tensor) -> tuple[Tensor, Tensor]:
                recurrent, scores = self._forward(rows, nodes, states.flatten(0, 1))
                return recurrent.view(*nodes.shape, recurrent.shape[-1]), scores

            return grow_tree(shape, top_of(logits, rows.sampling, shape.topk), hidden, rows.sampling, expand)
        for step in range(shape.num_steps):
            if step:
                hidden, logits = self._forward(rows, drafted[:, -1:], hidden)
            drafted = torch.cat([drafted, sample_ahead(logits, rows.sampling, drafted).unsqueeze(1)], dim=1)
        return Drafts(drafted)

    def observe(self, rows: RoundRows, hidden: Tensor | None, targets: Tensor, num_accepted: Tensor) -> DraftState:
        assert hidden is not None and hidden.shape[:2] == targets.shape, (hidden, targets)
        states = hidden.flatten(0, 1)
        self.hidden.check("extend", states)
        first = counted(len(targets), targets.device, targets.shape[1])
        return DraftState(hidden=gather_rows([states], first + num_accepted)[0])

    def observe_prompt(self, chunks: Sequence[PromptChunk], hidden: Tensor | None) -> None:
        """Do nothing: the drafter has no KV of its own."""

    def finish_prompt(
        self, tails: Sequence[PromptTail], tokens: Tensor, hidden: Tensor | None, sampling: SamplingBatch
    ) -> DraftState:
        assert hidden is not None and hidden.shape[0] == len(tails), hidden
        self.hidden.check("extend", hidden)
        return DraftState(hidden=hidden.clone())

    def _forward(self, rows: RoundRows, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return (states after, logits) of `tokens` [num_seqs, n], each with its state in `hidden` [num_seqs * n,
        width], all at position L - 1."""
        self.hidden.check("recurrent", hidden)
        num = tokens.shape[1]
        lengths = rows.lengths.repeat_interleave(num) if num > 1 else rows.lengths
        table = rows.block_table.repeat_interleave(num, 0) if num > 1 else rows.block_table
        batch = ForwardBatch.uniform(
            tokens.reshape(-1, 1), (lengths - 1).unsqueeze(1), lengths, table, self._kv.shape[4]
        )
        return self._head.forward(batch, self._kv, hidden, rows.sampling.lens(len(hidden)))


# --- the family ---


def _read(wanted: Wanted) -> Speculation:
    if wanted.draft_dtype != wanted.target_dtype:
        raise ConfigError(
            f"speculative {wanted.algorithm} attends to the target's KV, so it computes in the target's dtype"
            f" {wanted.target_dtype}, but draft_dtype is {wanted.draft_dtype}"
        )
    file = read_frozen_kv(wanted.draft_dir, wanted.target)
    return Speculation(
        algorithm=wanted.algorithm,
        shape=wanted.shape,
        hidden=wanted.layout(file.config, extend="final", recurrent="final"),
        make=lambda loading: _load(file, loading),
        draft_dir=wanted.draft_dir,
        draft=file.config,
        frozen_layers=file.target_layers,
    )


def _load(file: FrozenKvFile, loading: Loading) -> FrozenKvDrafter:
    head = FrozenKvHead(file, loading.target, loading.ranks)
    return FrozenKvDrafter(head, loading.target_pools, loading.hidden, loading.shape)


FAMILY = Family(name="frozen-kv-mtp", read=_read, drafts_trees=True)
