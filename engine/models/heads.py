"""Heads that draft from the target's hidden states, in their published layouts: EAGLE and EAGLE-3 (MTP: mtp.py).

docs/drafter_checkpoints.md has every layout's tensors, formula and source. A head takes the embedding of token i + 1
and a hidden state of row i, stores KV at position i, and returns a recurrent state, which its next row takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ...kernels.norm import rms_norm
from ...metadata.errors import ConfigError, ModelError
from ...metadata.handoff.hidden_layout import spec_hidden_size
from ..attention import AttentionContext, begin_attention
from ..batch import ForwardBatch
from ..checkpoint import Checkpoint
from ..layers.decoder import DecoderBody, DecoderLayer
from ..layers.embedding import Embedding, LmHead
from ..layers.residual import Residual
from ..model_config import ModelConfig
from ..products.linear import Linear
from ..rope import RotaryEmbedding
from .decoder import DecoderModel
from .hyper_eagle import load_hyper_eagle
from .llama import read_body, read_layer
from .tensors import HeadTensors

Embed = Callable[[Tensor], Tensor]  # [num_tokens] int64 -> [num_tokens, hidden_size]: the target's, or the head's own


class DraftHead(Protocol):
    """The model that a shifted drafter runs."""

    @property
    def config(self) -> ModelConfig:
        """Configuration of the head's own layers."""
        ...

    def forward(self, batch: ForwardBatch, kv: Tensor, hidden: Tensor, *, is_extend: bool) -> Tensor:
        """Store the rows' KV and return recurrent states [num_tokens, width].

        `batch.input_ids` are tokens i + 1 for the rows i = `batch.positions`. `hidden` [num_tokens, width] is the
        target's extend state (`is_extend`), or the head's own recurrent state."""
        ...

    def logits(self, recurrent: Tensor) -> Tensor:
        """Return logits in the target's vocabulary, -inf for an id that the head has not: [num_rows, width] ->
        [num_rows, vocab_size]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class EagleHead:
    """EAGLE and EAGLE-2: y = fc([E(t) ; h]); decoder layers, the first without an input norm; the target's lm_head."""

    config: ModelConfig
    rotary: RotaryEmbedding
    target: DecoderModel
    embed: Embed
    fc: Linear  # 2 * hidden_size -> hidden_size
    first: DecoderBody
    rest: tuple[DecoderLayer, ...]

    def forward(self, batch: ForwardBatch, kv: Tensor, hidden: Tensor, *, is_extend: bool) -> Tensor:
        eps = self.config.rms_norm_eps
        context = begin_attention(self.config, self.rotary, batch, kv)
        x = self.fc(torch.cat([self.embed(batch.input_ids), hidden], dim=1))
        x = run_body(self.first, x, x, context, eps)
        for layer in self.rest:
            x = run_body(layer.body, x, rms_norm(x, layer.norm, eps), context, eps)
        return x

    def logits(self, recurrent: Tensor) -> Tensor:
        return self.target.logits(recurrent)


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
    lm_head: Callable[[Tensor], Tensor]  # [num_rows, hidden_size] -> [num_rows, draft_vocab_size]
    target_ids: Tensor | None  # [draft_vocab_size] int64; None: the same ids
    vocab_size: int  # of the target
    is_norm_before_residual: bool

    def forward(self, batch: ForwardBatch, kv: Tensor, hidden: Tensor, *, is_extend: bool) -> Tensor:
        eps = self.config.rms_norm_eps
        context = begin_attention(self.config, self.rotary, batch, kv)
        x = self.fc(hidden) if is_extend else hidden.clone()
        normed = rms_norm(x, self.hidden_norm, eps)
        embedded = rms_norm(self.embed(batch.input_ids), self.embedding_norm, eps)
        both = torch.cat([embedded, normed], dim=1)
        return run_body(self.body, normed if self.is_norm_before_residual else x, both, context, eps)

    def logits(self, recurrent: Tensor) -> Tensor:
        own = self.lm_head(rms_norm(recurrent, self.norm, self.config.rms_norm_eps))
        if self.target_ids is None:
            return own
        return own.new_full((own.shape[0], self.vocab_size), float("-inf")).index_copy_(1, self.target_ids, own)


def run_body(body: DecoderBody, hidden: Tensor, x: Tensor, context: AttentionContext, eps: float) -> Tensor:
    """Return `hidden` [num_tokens, hidden_size] with the outputs of a layer added in place, whose attention reads `x`
    [num_tokens, in_size]."""
    stream = Residual(hidden, eps)
    body(stream, x, context)
    return stream.settled()


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
        """Return whether each of several MTP layers takes the state of the layer before it, not the target's."""
        return bool(self.raw.get("mtp_chained", "mtp_layers" not in self.prefix))

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Return the target layers whose inputs an EAGLE-3 head takes; none for other heads."""
        if self.algorithm != "eagle3":
            return ()
        ids = self.raw.get("eagle_aux_hidden_state_layer_ids")
        if ids is None:
            outputs = (self.raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
            ids = None if outputs is None else [index + 1 for index in outputs]
        return () if ids is None else tuple(ids)


def read_head(directory: Path, target: ModelConfig) -> HeadFile:
    """Recognise a head by its tensors' names.

    Raises ModelError for a directory that holds none, ConfigError for a head that does not fit the target: the message
    names both values."""
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


def _recognise(directory: Path, names: frozenset[str]) -> tuple[str, str]:
    """Return the algorithm and the prefix of the first layer's names."""
    stripped = {name.removeprefix("model.") for name in names}
    if any(name.startswith("midlayer.") for name in stripped) or "layers.0.hidden_norm.weight" in stripped:
        return "eagle3", "midlayer" if any(name.startswith("midlayer.") for name in stripped) else "layers.0"
    mtp_prefixes = _mtp_prefixes(names)
    if mtp_prefixes:
        return "mtp", mtp_prefixes[0]
    if "fc.weight" in stripped:
        return "eagle", "layers"
    raise ModelError(f"{directory} holds no EAGLE, EAGLE-3 or MTP head (see docs/drafter_checkpoints.md)")


def _mtp_prefixes(names: frozenset[str]) -> tuple[str, ...]:
    """Return `model.layers.61`, ... or `model.mtp_layers.0`, ..., ordered by their numbers."""
    found = {name.rsplit(".", 2)[0] for name in names if name.endswith((".eh_proj.weight", ".input_proj.weight"))}
    return tuple(sorted(found, key=lambda prefix: int(prefix.rsplit(".", 1)[1])))


def load_head(file: HeadFile, target: DecoderModel) -> DraftHead:
    """Read an EAGLE or EAGLE-3 head, in the target's dtype and on its device.

    Raises ModelError for tensors that are missing, and for tensors that the layout does not know. Copies of the
    target's tensors are not read, nor is an input norm of EAGLE's first layer, which has none."""
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


def _embedding(source: HeadTensors, config: ModelConfig, target: DecoderModel) -> Embed:
    """Return the head's own embedding, or the target's if it has none."""
    if source.has("embed_tokens.weight"):
        return Embedding(source.tensor("embed_tokens.weight", config.vocab_size, config.hidden_size))
    if config.hidden_size != target.config.hidden_size:
        raise ModelError(f"a head of hidden size {config.hidden_size} needs embed_tokens.weight of its own")
    return target.embed


def _eagle(source: HeadTensors, config: ModelConfig, rotary: RotaryEmbedding, target: DecoderModel) -> EagleHead:
    size, biased = config.hidden_size, source.with_biases(config, "layers.0")
    first = read_body(biased, source, "layers.0", 0)
    rest = [
        read_layer(source.with_biases(config, f"layers.{i}"), source, f"layers.{i}", i)
        for i in range(1, config.num_layers)
    ]
    embed, fc = _embedding(source, config, target), source.linear("fc", size, 2 * size)
    return EagleHead(config, rotary, target, embed, fc, first, tuple(rest))


def _eagle3(source: HeadTensors, file: HeadFile, rotary: RotaryEmbedding, target: DecoderModel) -> Eagle3Head:
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
        read_body(source.with_biases(config, file.prefix), source, file.prefix, 0, in_size=2 * size),
        source.tensor(f"{file.prefix}.input_layernorm.weight", size),
        source.tensor(f"{file.prefix}.hidden_norm.weight", size),
        source.tensor("norm.weight", size),
        LmHead(source.linear("lm_head", draft_vocab, size)) if own_head else target.logits,
        target_ids,
        config.vocab_size,
        bool(raw.get("norm_before_residual")),
    )


def _check_target_ids(directory: Path, target_ids: Tensor, draft_vocab: int, vocab_size: int) -> None:
    """Raise ModelError unless `target_ids` [draft_vocab_size] int64, made of d2t, names each target id at most once."""
    if len(target_ids) != draft_vocab:
        raise ModelError(f"{directory}: d2t maps {len(target_ids)} ids, but draft_vocab_size is {draft_vocab}")
    if not bool(((target_ids >= 0) & (target_ids < vocab_size)).all()):
        raise ModelError(f"{directory}: d2t maps {draft_vocab} ids, some outside 0 to {vocab_size - 1}")
    if len(target_ids.unique()) != draft_vocab:
        raise ModelError(f"{directory}: d2t maps {draft_vocab} ids, some of them to one target id twice")
