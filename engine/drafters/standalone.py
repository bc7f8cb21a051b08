"""STANDALONE: a complete small model with the target's tokenizer drafts by itself. It has no hidden state anywhere.

Unshifted: the draft's KV at position i is of token i. A round feeds the bonus token and the drafts d_1 .. d_K at
positions L .. L + K. The last of these K + 1 forwards proposes nothing: it fills the slot that a fully accepted round
would leave empty otherwise. Slots of rejected drafts are overwritten before they are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from ...metadata.errors import ConfigError
from ...metadata.handoff.schema.hidden_layout import HiddenLayout
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.read_config import read_model_config
from ..checkpoint.tokenizer_file import has_tokenizer, tokenizer_bytes
from ..device import counted
from ..models.decoder import DecoderModel
from ..models.registry import load_model
from ..pace.draft_length import DraftShape
from ..rounds.batch import ForwardBatch
from ..rounds.trees import Drafts, sample_ahead
from ..sampling.batch import SamplingBatch
from ..state.model_pools import ModelPools
from ..work import BatchRow
from .base import DraftState, PromptChunk, PromptTail, RoundRows
from .family import Family, Loading, Speculation, Wanted


class StandaloneDrafter:
    """Owns the draft model; its KV pool shares page numbers with the target's."""

    has_kv = True
    proposer = None

    def __init__(self, model: DecoderModel, pools: ModelPools, hidden: HiddenLayout, shape: DraftShape) -> None:
        """Take the draft model and its pools."""
        self.shape = shape
        self.hidden = hidden
        self.pools = pools
        self._model = model
        self._page_size = pools.kv.shape[4]

    def use_pools(self, target: ModelPools, draft: ModelPools | None) -> None:
        del target
        assert draft is not None
        self.pools = draft

    def allocate(self, num_rows: int) -> DraftState:
        return DraftState()

    def propose(self, rows: RoundRows, shape: DraftShape) -> Drafts:
        tokens = rows.last_tokens.unsqueeze(1)  # bonus and drafts
        position = rows.lengths
        for step in range(shape.num_steps + 1):
            end = position + 1
            batch = ForwardBatch.uniform(tokens[:, -1:], position.unsqueeze(1), end, rows.block_table, self._page_size)
            position = end
            hidden = self._model.forward(batch, self.pools)
            if step < shape.num_steps:
                if rows.sampling.needs.is_plain_greedy:
                    proposed = self._model.best(hidden).token_ids
                else:
                    logits = self._model.logits(hidden, rows.sampling.lens(len(hidden)))
                    proposed = sample_ahead(logits, rows.sampling, tokens[:, 1:])
                tokens = torch.cat([tokens, proposed.unsqueeze(1)], dim=1)
        return Drafts(tokens[:, 1:])

    def observe(self, rows: RoundRows, hidden: Tensor | None, targets: Tensor, num_accepted: Tensor) -> DraftState:
        """Store the draft's KV of tokens from rounds without drafts. If it drafted, its KV is there already."""
        assert hidden is None, hidden
        if not rows.was_drafted:
            tokens = torch.cat([rows.last_tokens.unsqueeze(1), targets[:, :-1]], dim=1)
            positions = rows.lengths.unsqueeze(1) + counted(tokens.shape[1], tokens.device)
            end = rows.lengths + tokens.shape[1]
            self._model.forward(
                ForwardBatch.uniform(tokens, positions, end, rows.block_table, self._page_size), self.pools
            )
        return DraftState()

    def observe_prompt(self, chunks: Sequence[PromptChunk], hidden: Tensor | None) -> None:
        """Store draft KV of the same tokens."""
        assert hidden is None, hidden
        rows = [BatchRow(chunk.token_ids[chunk.start : chunk.stop], chunk.start, chunk.pages, 0) for chunk in chunks]
        self._model.forward(ForwardBatch.build(rows, self._page_size, self.pools.kv.device), self.pools)

    def finish_prompt(
        self, tails: Sequence[PromptTail], tokens: Tensor, hidden: Tensor | None, sampling: SamplingBatch
    ) -> DraftState:
        """Return no state: the first round proposes from the bonus token."""
        return DraftState()


# --- the family ---


def _read(wanted: Wanted) -> Speculation:
    draft = read_model_config(wanted.draft_dir)
    _check_vocabulary(wanted, draft)
    return Speculation(
        algorithm=wanted.algorithm,
        shape=wanted.shape,
        hidden=wanted.layout(draft),
        make=lambda loading: _load(wanted, draft, loading),
        draft_dir=wanted.draft_dir,
        draft=draft,
        has_pool=True,
    )


def _check_vocabulary(wanted: Wanted, draft: ModelConfig) -> None:
    """Raise ConfigError if the draft's token ids are not the target's."""
    if wanted.target.vocab_size != draft.vocab_size:
        raise ConfigError(
            f"a draft model must have the target's vocabulary: {wanted.target_dir} has {wanted.target.vocab_size}"
            f" entries, {wanted.draft_dir} has {draft.vocab_size}"
        )
    digests = {
        directory: xxhash.xxh3_64_hexdigest(tokenizer_bytes(directory))
        for directory in (wanted.target_dir, wanted.draft_dir)
        if has_tokenizer(directory)
    }
    if len(set(digests.values())) > 1:
        raise ConfigError(
            f"a draft model must have the target's tokenizer: {wanted.target_dir} and {wanted.draft_dir} differ"
        )


def _load(wanted: Wanted, draft: ModelConfig, loading: Loading) -> StandaloneDrafter:
    model = load_model(
        wanted.draft_dir, draft, loading.dtype, loading.target.device, loading.on_progress, loading.ranks
    )
    return StandaloneDrafter(model, loading.pools, loading.hidden, loading.shape)


FAMILY = Family(name="standalone", read=_read)
