"""The EAGLE-like head of a target with hyper-connections. A state holds all streams, hc_mult times hidden_size wide.

[s_0 ; ..] = fc([E(t) ; norm(h)]);  one layer over streams;  g = [s_0 ; ..];  logits = target's lm_head(norm(sum_a s_a))

Names and source: docs/drafter_checkpoints.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.products.norm import add_rms_norm_, rms_norm
from ..attention.attention import RotaryEmbedding, begin_attention
from ..checkpoint.model_config import ModelConfig
from ..layers.hyper_decoder import HyperDecoderLayer
from ..products.linear import Linear
from ..rounds.batch import ForwardBatch
from ..sampling.row_shares import Lens
from ..state.model_pools import ModelPools
from .hyper_llama import read_hyper_layer
from .target_ends import TargetEnds
from .tensors import HeadTensors


@dataclass(frozen=True, slots=True, eq=False)
class HyperEagleHead:
    """A DraftHead (models/heads.py); extend and recurrent states are both [num_tokens, hc_mult * hidden_size]."""

    config: ModelConfig
    rotary: RotaryEmbedding
    target: TargetEnds
    hidden_norm: torch.Tensor  # [hc_mult * hidden_size]
    fc: Linear  # (1 + hc_mult) * hidden_size -> hc_mult * hidden_size, the embedding's part first
    layers: tuple[HyperDecoderLayer, ...]
    norm: torch.Tensor  # [hidden_size]
    logit_ids: None = None  # logits are of all tokens

    def forward(self, batch: ForwardBatch, pools: ModelPools, hidden: torch.Tensor, *, is_extend: bool) -> torch.Tensor:
        """Run the layers; states have the same form in both phases."""
        context = begin_attention(self.config, self.rotary, batch, pools, hidden.dtype)
        embedded = self.target.embed(batch.input_ids)
        normed = rms_norm(hidden, self.hidden_norm, self.config.rms_norm_eps)
        streams = self._streams(self.fc(torch.cat([embedded, normed], dim=1)))
        for layer in self.layers:
            streams = layer(streams, context)
        return streams.flatten(1)

    def logits(self, recurrent: torch.Tensor, lens: Lens | None = None) -> torch.Tensor:
        """Return logits of collapsed states, by the head's own norm and the target's head."""
        collapsed = self._streams(recurrent).sum(1)
        return self.target.logits(add_rms_norm_(collapsed, None, self.norm, self.config.rms_norm_eps), lens)

    def _streams(self, wide: torch.Tensor) -> torch.Tensor:
        return wide.unflatten(1, (self.config.hc_mult, self.config.hidden_size))


def load_hyper_eagle(
    source: HeadTensors, config: ModelConfig, rotary: RotaryEmbedding, target: TargetEnds
) -> HyperEagleHead:
    """Read the head. Raises ModelError for tensors that are missing or of a wrong shape."""
    size, wide = config.hidden_size, config.hc_mult * config.hidden_size
    layers = tuple(
        read_hyper_layer(source.with_biases(config, f"layers.{i}"), source, f"layers.{i}", i)
        for i in range(config.num_layers)
    )
    return HyperEagleHead(
        source.own(config),
        rotary,
        target,
        source.tensor("hidden_norm.weight", wide),
        source.linear("fc", wide, size + wide),
        layers,
        source.tensor("norm.weight", size),
    )
