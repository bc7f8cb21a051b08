"""Heads that draft from the target's hidden states, in their published layouts: EAGLE and EAGLE-3 (MTP: mtp.py).

docs/drafter_checkpoints.md has every layout's tensors, formula and source. A head is fed the embedding of token i + 1
and a hidden state of row i, stores KV at position i, and returns a recurrent state, its next row's hidden state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ...kernels.norm import rms_norm
from ...metadata.errors import ConfigError, ModelError
from ...metadata.handoff.hidden_layout import spec_hidden_size
from ..attention import Attention, begin_attention
from ..batch import ForwardBatch
from ..checkpoint import Checkpoint
from ..layers import Linear, Residual, embed
from ..model_config import ModelConfig
from ..rope import RotaryEmbedding
from ..weights import LayerWeights
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


@dataclass(frozen=True, slots=True)
class HeadFile:
    """A head's directory, recognised and checked against its target, not read yet."""

    directory: Path
    algorithm: str  # eagle, eagle3 or mtp
    config: ModelConfig
    raw: Mapping[str, Any]
    prefix: str  # of the layer's tensor names
    mtp_prefixes: tuple[str, ...] = ()  # of each MTP layer's tensor names, first layer first; none for the others

    @property
    def num_mtp_layers(self) -> int:
        return max(1, len(self.mtp_prefixes))

    @property
    def is_chained(self) -> bool:
        """Several MTP layers: whether each takes the state of the one before it, or all take the target's."""
        return bool(self.raw.get("mtp_chained", "mtp_layers" not in self.prefix))

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """EAGLE-3: inputs of which target layers it takes; none for the others."""
        if self.algorithm != "eagle3":
            return ()
        ids = self.raw.get("eagle_aux_hidden_state_layer_ids")
        if ids is None:
            outputs = (self.raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
            ids = None if outputs is None else [index + 1 for index in outputs]
        return () if ids is None else tuple(ids)


def read_head(directory: Path, target: ModelConfig) -> HeadFile:
    """Recognise a head by its tensors' names. Raises ModelError for a directory that holds none, ConfigError for a head
    that does not fit the target, naming both values."""
    names = Checkpoint(directory).names
    algorithm, prefix = _recognise(directory, names)
    has_streams = any(name.endswith("layers.0.attn_hc.read") for name in names)
    config = ModelConfig.from_dir(directory, "HyperLlamaForCausalLM" if has_streams else "LlamaForCausalLM")
    raw = json.loads((directory / "config.json").read_text())
    mtp_prefixes = _mtp_prefixes(names) if algorithm == "mtp" else ()
    if mtp_prefixes:  # config.json repeats the target's number of layers
        config = replace(config, num_layers=len(mtp_prefixes), sliding_window=(None,) * len(mtp_prefixes))
    head = HeadFile(directory, algorithm, config, raw, prefix, mtp_prefixes)
    own = raw.get("target_hidden_size", config.hidden_size)
    if own != target.hidden_size:
        raise ConfigError(
            f"{directory} is a head for a target of hidden size {own}; the target has {target.hidden_size}"
        )
    width = spec_hidden_size(config.hidden_size, config.hc_mult)
    if algorithm != "eagle3" and width != target.handoff_hidden_size:
        raise ConfigError(
            f"{directory} takes states of {width} numbers (hc_mult {config.hc_mult}); the target hands over"
            f" {target.handoff_hidden_size} (hc_mult {target.hc_mult})"
        )
    if config.vocab_size != target.vocab_size:
        raise ConfigError(f"{directory} has a vocabulary of {config.vocab_size}; the target has {target.vocab_size}")
    wrong = [index for index in head.aux_layers if not 0 <= index <= target.num_layers]
    if wrong:
        raise ConfigError(f"{directory} takes states of layers {wrong}; the target has layers 0 to {target.num_layers}")
    return head


def _recognise(directory: Path, names: set[str]) -> tuple[str, str]:
    stripped = {name.removeprefix("model.") for name in names}
    if any(name.startswith("midlayer.") for name in stripped) or "layers.0.hidden_norm.weight" in stripped:
        return "eagle3", "midlayer" if any(name.startswith("midlayer.") for name in stripped) else "layers.0"
    mtp_prefixes = _mtp_prefixes(names)
    if mtp_prefixes:
        return "mtp", mtp_prefixes[0]
    if "fc.weight" in stripped:
        return "eagle", "layers"
    raise ModelError(f"{directory} holds no EAGLE, EAGLE-3 or MTP head (see docs/drafter_checkpoints.md)")


def _mtp_prefixes(names: set[str]) -> tuple[str, ...]:
    """`model.layers.61`, ... or `model.mtp_layers.0`, ..., by their numbers."""
    found = {name.rsplit(".", 2)[0] for name in names if name.endswith((".eh_proj.weight", ".input_proj.weight"))}
    return tuple(sorted(found, key=lambda prefix: int(prefix.rsplit(".", 1)[1])))


def load_head(file: HeadFile, target: LlamaModel) -> DraftHead:
    """Read the tensors of an EAGLE or EAGLE-3 head, in the target's dtype and on its device. Raises ModelError for
    missing ones and for those that the layout does not know; copies of what is the target's are left alone, and so is
    the input norm that EAGLE's first layer does not have."""
    assert file.algorithm in ("eagle", "eagle3"), file.algorithm
    source = HeadTensors(file.directory, target.dtype, target.device)
    config = file.config
    rotary = RotaryEmbedding(config.rope, config.head_dim, target.device)
    if file.algorithm == "eagle3":
        head, ignored = _eagle3(source, file, rotary, target), ("t2d",)
    elif config.hc_mult > 1:
        head, ignored = load_hyper_eagle(source, config, rotary, target), ("embed_tokens.weight", "lm_head.weight")
    else:
        head, ignored = _eagle(source, config, rotary, target), ("lm_head.weight", "layers.0.input_layernorm.weight")
    source.refuse_unknown(*ignored)
    return head


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
    config, raw, size = file.config, file.raw, file.config.hidden_size
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
        source.layer(file.prefix, config, qkv_in=2 * size),
        source.tensor(f"{file.prefix}.hidden_norm.weight", size),
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
