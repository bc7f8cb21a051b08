"""Heads that draft from the target's hidden states, in their published layouts: EAGLE and EAGLE-3 (MTP: mtp.py).

docs/drafter_checkpoints.md has every layout's tensors, formula and source. A head is fed the embedding of token i + 1
and a hidden state of row i, stores KV at position i, and returns a recurrent state, its next row's hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ...kernels.norm import rms_norm
from ...metadata.errors import ModelError
from ..attention import Attention, begin_attention
from ..batch import ForwardBatch
from ..layers import Linear, Residual, embed
from ..model_config import ModelConfig
from ..rope import RotaryEmbedding
from ..weights import LayerWeights
from .head_file import HeadFile
from .hyper_eagle import load_hyper_eagle
from .llama import LlamaModel
from .tensors import HeadTensors


class DraftHead(Protocol):
    """Model that a shifted drafter runs."""

    @property
    def config(self) -> ModelConfig:
        """Configuration of the head's own layers."""
        ...

    def forward(self, batch: ForwardBatch, kv: torch.Tensor, hidden: torch.Tensor, *, is_extend: bool) -> torch.Tensor:
        """`batch.input_ids` are tokens i + 1 for the rows i = `batch.positions`; `hidden` [num_tokens, width] is the
        target's extend state, or the head's own recurrent state. Returns recurrent states [num_tokens, width]."""
        ...

    def logits(self, recurrent: torch.Tensor) -> torch.Tensor:
        """[num_rows, width] -> [num_rows, vocab_size] float32 in the target's vocabulary, -inf where it has no id."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class EagleHead:
    """EAGLE and EAGLE-2: y = fc([E(t) ; h]); decoder layers, the first without an input norm; the target's lm_head."""

    config: ModelConfig
    rotary: RotaryEmbedding
    target: LlamaModel
    embedding: torch.Tensor  # [vocab_size, hidden_size]
    fc: Linear  # 2 * hidden_size -> hidden_size
    layers: tuple[LayerWeights, ...]  # the first one's attention_norm is not used

    def forward(self, batch: ForwardBatch, kv: torch.Tensor, hidden: torch.Tensor, *, is_extend: bool) -> torch.Tensor:
        attend = begin_attention(self.config, self.rotary, batch, kv)
        x = self.fc(torch.cat([embed(batch.input_ids, self.embedding), hidden], dim=1))
        for index, layer in enumerate(self.layers):
            normed = x if index == 0 else rms_norm(x, layer.attention_norm, self.config.rms_norm_eps)
            x = finish_layer(x, normed, index, layer, attend, self.config.rms_norm_eps)
        return x

    def logits(self, recurrent: torch.Tensor) -> torch.Tensor:
        return self.target.logits(recurrent)


@dataclass(frozen=True, slots=True, eq=False)
class Eagle3Head:
    """EAGLE-3: a = fc(three target states) on extend, its own state after; qkv of [norm(E(t)) ; norm(a)]; own head."""

    config: ModelConfig
    rotary: RotaryEmbedding
    embedding: torch.Tensor  # [vocab_size, hidden_size]
    fc: Linear  # 3 * target_hidden_size -> hidden_size
    layer: LayerWeights  # qkv: 2 * hidden_size -> ...; attention_norm is the embedding's
    hidden_norm: torch.Tensor  # [hidden_size]
    norm: torch.Tensor  # [hidden_size]
    lm_head: Linear  # hidden_size -> draft_vocab_size
    target_ids: torch.Tensor | None  # [draft_vocab_size] int64; None: the same ids
    vocab_size: int  # of the target
    is_norm_before_residual: bool

    def forward(self, batch: ForwardBatch, kv: torch.Tensor, hidden: torch.Tensor, *, is_extend: bool) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        attend = begin_attention(self.config, self.rotary, batch, kv)
        x = self.fc(hidden) if is_extend else hidden.clone()
        normed = rms_norm(x, self.hidden_norm, eps)
        embedded = rms_norm(embed(batch.input_ids, self.embedding), self.layer.attention_norm, eps)
        both = torch.cat([embedded, normed], dim=1)
        return finish_layer(normed if self.is_norm_before_residual else x, both, 0, self.layer, attend, eps)

    def logits(self, recurrent: torch.Tensor) -> torch.Tensor:
        own = self.lm_head(rms_norm(recurrent, self.norm, self.config.rms_norm_eps))
        if self.target_ids is None:
            return own
        return own.new_full((own.shape[0], self.vocab_size), float("-inf")).index_copy_(1, self.target_ids, own)


def finish_layer(
    x: torch.Tensor, normed: torch.Tensor, index: int, layer: LayerWeights, attend: Attention, eps: float
) -> torch.Tensor:
    """The rest of a head's decoder layer after the input norm; `x` [num_tokens, hidden_size] is added to in place."""
    stream = Residual(x, eps)
    stream.add(layer.attention_out, attend(index, layer, layer.qkv(normed)))
    stream.add(layer.down, stream.gated_product(layer.gate_up, layer.mlp_norm))
    return stream.settled()


# --- reading ------------------------------------------------------------------------------------------------------


def load_eagle(file: HeadFile, target: LlamaModel) -> DraftHead:
    """Read the tensors of an EAGLE head, in the target's dtype and on its device. Raises ModelError for missing ones
    and for those that the layout does not know. Copies of the target's tensors are ignored, and so is an input norm of
    the first layer."""
    source, config, rotary = _begin(file, target)
    if config.hc_mult > 1:
        head, ignored = load_hyper_eagle(source, config, rotary, target), ("embed_tokens.weight", "lm_head.weight")
    else:
        head, ignored = _eagle(source, config, rotary, target), ("lm_head.weight", "layers.0.input_layernorm.weight")
    source.refuse_unknown(*ignored)
    return head


def load_eagle3(file: HeadFile, target: LlamaModel) -> DraftHead:
    """Read the tensors of an EAGLE-3 head, in the target's dtype and on its device. Raises ModelError as `load_eagle`
    does."""
    source, _, rotary = _begin(file, target)
    head = _eagle3(source, file, rotary, target)
    source.refuse_unknown("t2d")
    return head


def _begin(file: HeadFile, target: LlamaModel) -> tuple[HeadTensors, ModelConfig, RotaryEmbedding]:
    source = HeadTensors(file.directory, target.dtype, target.device)
    return source, file.config, RotaryEmbedding(file.config.rope, file.config.head_dim, target.device)


def _embedding(source: HeadTensors, config: ModelConfig, target: LlamaModel) -> torch.Tensor:
    if source.has("embed_tokens.weight"):
        return source.tensor("embed_tokens.weight", config.vocab_size, config.hidden_size)
    if config.hidden_size != target.config.hidden_size:
        raise ModelError(f"a head of hidden size {config.hidden_size} needs embed_tokens.weight of its own")
    return target.weights.embedding


def _eagle(source: HeadTensors, config: ModelConfig, rotary: RotaryEmbedding, target: LlamaModel) -> EagleHead:
    size = config.hidden_size
    layers = [source.layer(f"layers.{i}", config, has_input_norm=i > 0) for i in range(config.num_layers)]
    embedding, fc = _embedding(source, config, target), source.linear("fc", size, 2 * size)
    return EagleHead(config, rotary, target, embedding, fc, tuple(layers))


def _eagle3(source: HeadTensors, file: HeadFile, rotary: RotaryEmbedding, target: LlamaModel) -> Eagle3Head:
    config, raw, size = file.config, file.settings, file.config.hidden_size
    prefix = "midlayer" if any("midlayer." in name for name in file.names) else "layers.0"
    draft_vocab = raw.get("draft_vocab_size") or config.vocab_size
    target_ids = None
    if source.has("d2t"):
        offsets = source.ids("d2t")
        target_ids = offsets + torch.arange(len(offsets), device=offsets.device)
        _check_target_ids(file.directory, target_ids, draft_vocab, config.vocab_size)
    elif draft_vocab != config.vocab_size:
        raise ModelError(f"{file.directory}: draft_vocab_size is {draft_vocab}, but there is no d2t")
    own_head = source.has("lm_head.weight")
    if not own_head and (draft_vocab, size) != (config.vocab_size, target.config.hidden_size):
        raise ModelError(
            f"{file.directory} has no lm_head.weight, and the target's does not fit: {config.vocab_size} ids of"
            f" {target.config.hidden_size}, the draft has {draft_vocab} of {size}"
        )
    return Eagle3Head(
        config,
        rotary,
        _embedding(source, config, target),
        source.linear("fc", size, 3 * target.config.hidden_size),
        source.layer(prefix, config, qkv_in=2 * size),
        source.tensor(f"{prefix}.hidden_norm.weight", size),
        source.tensor("norm.weight", size),
        source.linear("lm_head", draft_vocab, size) if own_head else target.weights.lm_head,
        target_ids,
        config.vocab_size,
        bool(raw.get("norm_before_residual")),
    )


def _check_target_ids(directory: Path, target_ids: torch.Tensor, draft_vocab: int, vocab_size: int) -> None:
    """`target_ids` [draft_vocab_size] int64, made of d2t, names each target id at most once."""
    if len(target_ids) != draft_vocab:
        raise ModelError(f"{directory}: d2t maps {len(target_ids)} ids, but draft_vocab_size is {draft_vocab}")
    if not bool(((target_ids >= 0) & (target_ids < vocab_size)).all()):
        raise ModelError(f"{directory}: d2t maps {draft_vocab} ids, some outside 0 to {vocab_size - 1}")
    if len(target_ids.unique()) != draft_vocab:
        raise ModelError(f"{directory}: d2t maps {draft_vocab} ids, some of them to one target id twice")
