"""The FROZEN_KV_MTP head: it attends to KV of named target layers and stores none (docs/drafter_checkpoints.md).

y = pre_projection([E(t) ; g]);  per layer: y += o(attend(rope(q(norm(y))))), y += mlp(norm(y))
u = norm(y);  logits = u @ output.T;  g = post_projection(u), of the target's width

The first g is the state that the target's output matrix takes. If the target has residual streams, it is the collapsed
state, never the streams: such a head is trained on the backbone's last hidden state, and backbone_hidden_size says its
width.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ...kernels.products.norm import rms_norm
from ...kernels.products.rotary import apply_rotary_
from ...metadata.errors import ConfigError, ModelError
from ..attention.attention import RotaryEmbedding, begin_queries
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.read_config import read_model_config
from ..layers.decoder import Mlp
from ..products.base import HEADS_IN, HEADS_OUT, INNER_IN, INNER_OUT, VOCAB
from ..products.linear import Linear
from ..ranks.ranks import ONE_RANK, Ranks
from ..rounds.batch import ForwardBatch
from ..sampling.row_shares import Lens
from .decoder import DecoderModel, LmHead
from .tensors import HeadTensors


class FrozenOutput(NamedTuple):
    """The result of a forward."""

    recurrent: torch.Tensor  # [num_tokens, target's hidden_size]
    logits: torch.Tensor  # [num_tokens, vocab_size], of the model's dtype


@dataclass(frozen=True, slots=True)
class FrozenKvFile:
    """A head's directory, checked against its target, not read yet."""

    directory: Path
    config: ModelConfig
    target_layers: tuple[int, ...]  # for each draft layer, the target layer to whose KV it attends
    tensors: Callable[..., HeadTensors] = HeadTensors


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    attention_norm: torch.Tensor  # [hidden_size]
    q: Linear  # hidden_size -> q_size
    attention_out: Linear  # q_size -> hidden_size
    mlp_norm: torch.Tensor  # [hidden_size]
    mlp: Mlp


class FrozenKvHead:
    """Owns the head's weights; reads the target's pool."""

    def __init__(self, file: FrozenKvFile, target: DecoderModel, ranks: Ranks = ONE_RANK) -> None:
        """Read the tensors, or this rank's share of them. Raises ModelError for those that are missing or of a wrong
        shape."""
        config, tensors = (
            file.config,
            file.tensors(file.directory, target.dtype, target.device, ranks, file.config.quantization),
        )
        size, width, inner = config.hidden_size, target.config.hidden_size, config.intermediate_size
        self._config, self._target_layers, self._target = tensors.own(config), file.target_layers, target
        self._rotary = RotaryEmbedding(target.config.rope, config.head_dim, target.device)
        self._pre_projection = tensors.linear("pre_projection", size, 2 * width)
        self._post_projection = tensors.linear("post_projection", width, size)
        self._norm = tensors.tensor("norm.weight", size)
        output = "lm_head" if tensors.has("lm_head.weight") else "embed_tokens"
        linear = tensors.linear(output, config.vocab_size, size, bias=False, split=VOCAB)
        self._lm_head = LmHead(linear, tensors.ranks.vocab(config.vocab_size))
        self._layers = [
            _Layer(
                tensors.tensor(f"layers.{i}.input_layernorm.weight", size),
                tensors.linear(f"layers.{i}.self_attn.q_proj", config.q_size, size, split=HEADS_OUT),
                tensors.linear(f"layers.{i}.self_attn.o_proj", size, config.q_size, split=HEADS_IN),
                tensors.tensor(f"layers.{i}.post_attention_layernorm.weight", size),
                Mlp(
                    tensors.fused(
                        {f"layers.{i}.mlp.{part}": inner for part in ("gate_proj", "up_proj")}, size, split=INNER_OUT
                    ),
                    tensors.linear(f"layers.{i}.mlp.down_proj", size, inner, split=INNER_IN),
                ),
            )
            for i in range(config.num_layers)
        ]
        tensors.refuse_unknown("embed_tokens.weight")

    def forward(
        self, batch: ForwardBatch, kv: torch.Tensor, hidden: torch.Tensor, lens: Lens | None = None
    ) -> FrozenOutput:
        """Run one token per row at the last position with target KV, and write no KV.

        `kv` is the target's pool, `hidden` [num_tokens, target's hidden_size]. If the rows are divided into `lens`, the
        logits are those of this rank's rows alone."""
        config = self._config
        eps, num_tokens = config.rms_norm_eps, batch.num_tokens
        if batch.attention is None:
            attend = begin_queries(batch, kv, self._target.dtype)
        else:
            attend = batch.attention(config, self._rotary)
        cos, sin = self._rotary(batch.positions, self._target.dtype)
        x = self._pre_projection(torch.cat([self._target.embed(batch.input_ids), hidden], 1))
        for layer, source in zip(self._layers, self._target_layers, strict=True):
            q = layer.q(rms_norm(x, layer.attention_norm, eps)).view(num_tokens, config.num_heads, config.head_dim)
            apply_rotary_(q, cos, sin)
            x = x + layer.attention_out(attend(q, source).view(num_tokens, config.q_size))
            x = x + layer.mlp(rms_norm(x, layer.mlp_norm, eps))
        final = rms_norm(x, self._norm, eps)
        return FrozenOutput(self._post_projection(final), self._lm_head(final, lens))


def read_frozen_kv(directory: Path, target: ModelConfig) -> FrozenKvFile:
    """Check a head's directory. Raises ModelError for one that is no such head, ConfigError for a head that does not
    fit the target."""
    unlike = {
        "keys and values of heads; the target's pool has latents": target.latent is not None,
        "keys and values of heads; the target's pool has entries of tokens": target.compressed is not None,
        "layers by their numbers; the target has layers without attention": target.delta is not None,
        "layers with equal heads; the target's layers have unlike heads": target.has_window_pool,
    }
    for words, is_so in unlike.items():
        if is_so:
            raise ConfigError(f"{directory} attends to {words}: choose another drafter with --speculative")
    config = read_model_config(directory, "LlamaForCausalLM")
    raw = json.loads((directory / "config.json").read_text())
    width, layers = raw.get("backbone_hidden_size"), raw.get("target_layers")
    if not isinstance(width, int) or not isinstance(layers, list) or len(layers) != config.num_layers:
        raise ModelError(
            f"{directory} is no FROZEN_KV_MTP head: config.json must have backbone_hidden_size and target_layers,"
            f" one for each of {config.num_layers} layers (see docs/drafter_checkpoints.md)"
        )
    if not all(isinstance(layer, int) and 0 <= layer < target.num_layers for layer in layers):
        raise ConfigError(f"{directory}: target_layers {layers}; the target has layers 0 to {target.num_layers - 1}")
    theirs = (width, config.num_kv_heads, config.head_dim, config.head_dim, config.vocab_size, config.rope.theta)
    value_dim = target.value_dim or target.head_dim
    ours = (target.hidden_size, target.num_kv_heads, target.head_dim, value_dim, target.vocab_size, target.rope.theta)
    names = ("backbone_hidden_size", "num_key_value_heads", "head_dim", "v_head_dim", "vocab_size", "rope_theta")
    for name, there, here in zip(names, theirs, ours, strict=True):
        if there != here:
            raise ConfigError(f"{directory}: {name} is {there}; the target's is {here}")
    return FrozenKvFile(directory, config, tuple(layers))
