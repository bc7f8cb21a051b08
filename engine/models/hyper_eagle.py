"""The EAGLE-like head of a hyper-connection target: its states are all the streams, hc_mult times hidden_size wide.

[s_0 ; ..] = fc([E(t) ; norm(h)]);  one layer over streams;  g = [s_0 ; ..];  logits = target's lm_head(norm(sum_a s_a))

Names and source: docs/drafter_checkpoints.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.norm import add_rms_norm_, rms_norm
from ..attention import begin_attention
from ..batch import ForwardBatch
from ..layers import Linear, embed
from ..model_config import ModelConfig
from ..rope import RotaryEmbedding
from ..weights import LayerWeights
from .hyper_llama import stream_layer
from .llama import LlamaModel
from .tensors import HeadTensors


@dataclass(frozen=True, slots=True, eq=False)
class HyperEagleHead:
    """A DraftHead (models/heads.py); extend and recurrent states are both [num_tokens, hc_mult * hidden_size]."""

    config: ModelConfig
    rotary: RotaryEmbedding
    target: LlamaModel
    hidden_norm: torch.Tensor  # [hc_mult * hidden_size]
    fc: Linear  # (1 + hc_mult) * hidden_size -> hc_mult * hidden_size, the embedding's part first
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden_size]

    def forward(self, batch: ForwardBatch, kv: torch.Tensor, hidden: torch.Tensor, *, is_extend: bool) -> torch.Tensor:
        """States come back, and go in, in the same form in both phases."""
        eps = self.config.rms_norm_eps
        attend = begin_attention(self.config, self.rotary, batch, kv)
        embedded = embed(batch.input_ids, self.target.weights.embedding)
        wide = self.fc(torch.cat([embedded, rms_norm(hidden, self.hidden_norm, eps)], dim=1))
        streams = self._streams(wide)
        for index, layer in enumerate(self.layers):
            streams = stream_layer(streams, index, layer, attend, eps)
        return streams.flatten(1)

    def logits(self, recurrent: torch.Tensor) -> torch.Tensor:
        """By the head's own norm and the target's lm_head."""
        collapsed = self._streams(recurrent).sum(1)
        return self.target.logits(add_rms_norm_(collapsed, None, self.norm, self.config.rms_norm_eps))

    def _streams(self, wide: torch.Tensor) -> torch.Tensor:
        return wide.unflatten(1, (self.config.hc_mult, self.config.hidden_size))


def load_hyper_eagle(
    source: HeadTensors, config: ModelConfig, rotary: RotaryEmbedding, target: LlamaModel
) -> HyperEagleHead:
    """Raises ModelError for tensors that are missing or of a wrong shape."""
    size, wide = config.hidden_size, config.hc_mult * config.hidden_size
    layers = tuple(source.layer(f"layers.{index}", config) for index in range(config.num_layers))
    return HyperEagleHead(
        config,
        rotary,
        target,
        source.tensor("hidden_norm.weight", wide),
        source.linear("fc", wide, size + wide),
        layers,
        source.tensor("norm.weight", size),
    )
