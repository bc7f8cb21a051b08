"""Heads that draft from the target's hidden states, in their published layouts: EAGLE and EAGLE-3 (MTP: mtp.py).

docs/drafter_checkpoints.md has every layout's tensors, formula and source. A head takes the embedding of token i + 1
and a hidden state of row i, stores KV at position i, and returns a recurrent state, which its next row takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.products.norm import rms_norm
from ...metadata.errors import ModelError
from ..attention.attention import RotaryEmbedding, begin_attention
from ..attention.context import AttentionContext
from ..checkpoint.model_config import ModelConfig
from ..layers.decoder import DecoderBody, DecoderLayer, Residual
from ..products.linear import Linear
from ..ranks.ranks import ONE_RANK, Ranks
from ..rounds.batch import ForwardBatch
from ..sampling.row_shares import Lens
from ..state.model_pools import ModelPools
from .decoder import Embedding, LmHead
from .head_file import HeadFile
from .llama import read_body, read_layer
from .target_ends import TargetEnds
from .tensors import HeadTensors

Embed = Callable[[Tensor], Tensor]  # [num_tokens] int64 -> [num_tokens, hidden_size]: the target's, or the head's own


class DraftHead(Protocol):
    """The model that a shifted drafter runs."""

    @property
    def config(self) -> ModelConfig:
        """Configuration of the head's own layers."""
        ...

    def forward(self, batch: ForwardBatch, pools: ModelPools, hidden: Tensor, *, is_extend: bool) -> Tensor:
        """Store the rows' KV and return recurrent states [num_tokens, width].

        `batch.input_ids` are tokens i + 1 for the rows i = `batch.positions`. `hidden` [num_tokens, width] is the
        target's extend state (`is_extend`), or the head's own recurrent state."""
        ...

    @property
    def logit_ids(self) -> Tensor | None:
        """The target's ids of the tokens that the head can propose, [num_logits] int32, ascending; None: all tokens."""
        ...

    def logits(self, recurrent: Tensor, lens: Lens | None = None) -> Tensor:
        """Return the logits of the tokens `logit_ids`: [num_rows, width] -> [num_rows, num_logits]. If the rows are
        divided into `lens`, return those of this rank's rows alone."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class EagleHead:
    """EAGLE and EAGLE-2: y = fc([E(t) ; h]); decoder layers, the first without an input norm; the target's lm_head."""

    config: ModelConfig
    rotary: RotaryEmbedding
    target: TargetEnds
    embed: Embed
    fc: Linear  # 2 * hidden_size -> hidden_size
    first: DecoderBody
    rest: tuple[DecoderLayer, ...]
    logit_ids: None = None  # logits are of all tokens

    def forward(self, batch: ForwardBatch, pools: ModelPools, hidden: Tensor, *, is_extend: bool) -> Tensor:
        eps = self.config.rms_norm_eps
        context = begin_attention(self.config, self.rotary, batch, pools, hidden.dtype)
        x = self.fc(torch.cat([self.embed(batch.input_ids), hidden], dim=1))
        x = run_body(self.first, x, x, context, eps)
        for layer in self.rest:
            x = run_body(layer.body, x, rms_norm(x, layer.norm, eps), context, eps)
        return x

    def logits(self, recurrent: Tensor, lens: Lens | None = None) -> Tensor:
        return self.target.logits(recurrent, lens)


@dataclass(frozen=True, slots=True, eq=False)
class Eagle3Head:
    """EAGLE-3: a = fc(three target states) on extend, its own state after; qkv of [norm(E(t)) ; norm(a)]; own head."""

    config: ModelConfig
    rotary: RotaryEmbedding
    embed: Embed
    fc: Linear  # 3 * target_hidden_size -> hidden_size
    body: DecoderBody  # qkv: 2 * hidden_size -> ...
    embedding_norm: Tensor  # [hidden_size]
    hidden_norm: Tensor  # [hidden_size]
    norm: Tensor  # [hidden_size]
    lm_head: Callable[[Tensor, Lens | None], Tensor]  # [num_rows, hidden_size] -> [num_rows, draft_vocab_size]
    logit_ids: Tensor | None  # [draft_vocab_size] int32, ascending; None: all
    is_norm_before_residual: bool

    def forward(self, batch: ForwardBatch, pools: ModelPools, hidden: Tensor, *, is_extend: bool) -> Tensor:
        eps = self.config.rms_norm_eps
        context = begin_attention(self.config, self.rotary, batch, pools, hidden.dtype)
        x = self.fc(hidden) if is_extend else hidden.clone()
        normed = rms_norm(x, self.hidden_norm, eps)
        embedded = rms_norm(self.embed(batch.input_ids), self.embedding_norm, eps)
        both = torch.cat([embedded, normed], dim=1)
        return run_body(self.body, normed if self.is_norm_before_residual else x, both, context, eps)

    def logits(self, recurrent: Tensor, lens: Lens | None = None) -> Tensor:
        return self.lm_head(rms_norm(recurrent, self.norm, self.config.rms_norm_eps), lens)


def run_body(body: DecoderBody, hidden: Tensor, x: Tensor, context: AttentionContext, eps: float) -> Tensor:
    """Return `hidden` [num_tokens, hidden_size] with the outputs of a layer added in place, whose attention reads `x`
    [num_tokens, in_size]."""
    stream = Residual(hidden, eps)
    body(stream, x, context)
    return stream.settled()


def load_eagle(file: HeadFile, target: TargetEnds, ranks: Ranks = ONE_RANK) -> DraftHead:
    """Read an EAGLE head, or this rank's share of it, in the dtype and on the device of `target`.

    Raises ModelError for tensors that are missing, and for tensors that the layout does not know. Copies of the
    target's tensors are not read, nor is an input norm of the first layer, which has none."""
    source, config, rotary = _begin(file, target, ranks)
    head = _eagle(source, config, rotary, target)
    source.refuse_unknown("lm_head.weight", "layers.0.input_layernorm.weight")
    return head


def load_eagle3(file: HeadFile, target: TargetEnds, ranks: Ranks = ONE_RANK) -> DraftHead:
    """Read an EAGLE-3 head as `load_eagle` does."""
    source, _, rotary = _begin(file, target, ranks)
    head = _eagle3(source, file, rotary, target)
    source.refuse_unknown("t2d")
    return head


def _begin(file: HeadFile, target: TargetEnds, ranks: Ranks) -> tuple[HeadTensors, ModelConfig, RotaryEmbedding]:
    source = file.tensors(file.directory, target.dtype, target.device, ranks, file.config.quantization)
    return source, file.config, RotaryEmbedding(file.config.rope, file.config.head_dim, target.device)


def _embedding(source: HeadTensors, config: ModelConfig, target: TargetEnds) -> Embed:
    """Return the head's own embedding, or the target's if it has none."""
    if source.has("embed_tokens.weight"):
        return Embedding(source.tensor("embed_tokens.weight", config.vocab_size, config.hidden_size))
    if config.hidden_size != target.config.hidden_size:
        raise ModelError(f"a head of hidden size {config.hidden_size} needs embed_tokens.weight of its own")
    return target.embed


def _eagle(source: HeadTensors, config: ModelConfig, rotary: RotaryEmbedding, target: TargetEnds) -> EagleHead:
    size, biased = config.hidden_size, source.with_biases(config, "layers.0")
    first = read_body(biased, source, "layers.0", 0)
    rest = [
        read_layer(source.with_biases(config, f"layers.{i}"), source, f"layers.{i}", i)
        for i in range(1, config.num_layers)
    ]
    embed, fc = _embedding(source, config, target), source.linear("fc", size, 2 * size)
    return EagleHead(source.own(config), rotary, target, embed, fc, first, tuple(rest))


def _eagle3(source: HeadTensors, file: HeadFile, rotary: RotaryEmbedding, target: TargetEnds) -> Eagle3Head:
    config, fields, size = file.config, file.fields, file.config.hidden_size
    prefix = "midlayer" if any("midlayer." in name for name in file.names) else "layers.0"
    draft_vocab = fields.integer("draft_vocab_size", config.vocab_size)
    target_ids = None
    if source.has("d2t"):
        offsets = source.ids("d2t")
        target_ids = offsets + torch.arange(len(offsets), device=offsets.device)
        _check_target_ids(file.directory, target_ids, draft_vocab, config.vocab_size)
    elif draft_vocab != config.vocab_size:
        raise ModelError(
            f"{file.directory}: draft_vocab_size is {draft_vocab}, but no tensor d2t says which of the target's "
            f"{config.vocab_size} ids these are; copy the checkpoint again"
        )
    lm_head, logit_ids = _output(source, file, draft_vocab, target_ids, target)
    return Eagle3Head(
        source.own(config),
        rotary,
        _embedding(source, config, target),
        source.linear("fc", size, 3 * target.config.hidden_size),
        read_body(source.with_biases(config, prefix), source, prefix, 0, in_size=2 * size),
        source.tensor(f"{prefix}.input_layernorm.weight", size),
        source.tensor(f"{prefix}.hidden_norm.weight", size),
        source.tensor("norm.weight", size),
        lm_head,
        logit_ids,
        fields.flag("norm_before_residual"),
    )


def _output(
    source: HeadTensors, file: HeadFile, draft_vocab: int, target_ids: Tensor | None, target: TargetEnds
) -> tuple[Callable[[Tensor, Lens | None], Tensor], Tensor | None]:
    """Return the output layer, its rows in the order of the target's ids, and the ids of its rows, [draft_vocab_size]
    int32; None: all. `target_ids` [draft_vocab_size] int64 are those of the rows in the file; None: 0, 1, .."""
    size, vocab_size, order, ids = file.config.hidden_size, file.config.vocab_size, None, None
    if target_ids is not None:
        ids, order = target_ids.sort()
        order = None if torch.equal(ids, target_ids) else order
        ids = ids.to(torch.int32) if draft_vocab < vocab_size else None
    if source.has("lm_head.weight"):
        return LmHead(source.ordered("lm_head", draft_vocab, size, order), source.ranks.vocab(draft_vocab)), ids
    if (draft_vocab, size) != (vocab_size, target.config.hidden_size):
        raise ModelError(
            f"{file.directory} has no lm_head.weight, and the target's does not fit: {vocab_size} ids of"
            f" {target.config.hidden_size}, the draft has {draft_vocab} of {size}"
        )
    if order is not None:
        raise ModelError(f"{file.directory} has no lm_head.weight, but its d2t orders the target's ids anew")
    return target.logits, ids


def _check_target_ids(directory: Path, target_ids: Tensor, draft_vocab: int, vocab_size: int) -> None:
    """Raise ModelError unless `target_ids` [draft_vocab_size] int64, made of d2t, names each target id at most once."""
    if len(target_ids) != draft_vocab:
        raise ModelError(f"{directory}: d2t maps {len(target_ids)} ids, but draft_vocab_size is {draft_vocab}")
    if not bool(((target_ids >= 0) & (target_ids < vocab_size)).all()):
        raise ModelError(f"{directory}: d2t maps {draft_vocab} ids, some outside 0 to {vocab_size - 1}")
    if len(target_ids.unique()) != draft_vocab:
        raise ModelError(f"{directory}: d2t maps {draft_vocab} ids, some of them to one target id twice")
