"""MTP layers of a target with residual streams: their states are all the streams, hc_mult times hidden_size wide.

s_a = e_proj(enorm(E(t))) + h_proj(hnorm(h_a)) for every stream a;  one layer over streams;  g = [s_0 ; ..]
logits = target's lm_head(norm(sum_a s_a))

The form is that of DeepSeek-V4's MTP block: one projection of the embedding, added to each projected stream. Names and
source: docs/drafter_checkpoints.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.products.norm import add_rms_norm_, rms_norm
from ..attention.attention import RotaryEmbedding, begin_attention
from ..checkpoint.model_config import ModelConfig
from ..layers.hyper_decoder import HyperDecoderLayer
from ..products.linear import Linear
from ..ranks.ranks import ONE_RANK, Ranks
from ..rounds.batch import ForwardBatch
from ..sampling.row_shares import Lens
from ..state.model_pools import ModelPools
from .head_file import HeadFile
from .hyper_llama import read_hyper_layer
from .mtp import load_layers
from .target_ends import TargetEnds
from .tensors import HeadTensors


@dataclass(frozen=True, slots=True, eq=False)
class HyperMtpHead:
    """One MTP layer over streams. Extend and recurrent states are both [num_tokens, hc_mult * hidden_size]."""

    config: ModelConfig  # of one layer
    rotary: RotaryEmbedding
    target: TargetEnds
    embedding_norm: torch.Tensor  # [hidden_size]
    hidden_norm: torch.Tensor  # [hidden_size], for each stream
    embedding_projection: Linear  # hidden_size -> hidden_size
    hidden_projection: Linear  # hidden_size -> hidden_size, for each stream
    layer: HyperDecoderLayer
    final_norm: torch.Tensor  # [hidden_size]
    logit_ids: None = None  # logits are of all tokens

    def forward(
        self, batch: ForwardBatch, pools: ModelPools, hidden: torch.Tensor, *, is_extend: bool = True
    ) -> torch.Tensor:
        """States come back, and go in, in the same form in both phases."""
        eps, size = self.config.rms_norm_eps, self.config.hidden_size
        context = begin_attention(self.config, self.rotary, batch, pools, hidden.dtype)
        embedded = rms_norm(self.target.embed(batch.input_ids), self.embedding_norm, eps)
        normed = rms_norm(hidden.reshape(-1, size), self.hidden_norm, eps)  # [num_tokens * hc_mult, hidden_size]
        streams = self._streams(self.hidden_projection(normed).view(hidden.shape))
        streams = streams + self.embedding_projection(embedded).unsqueeze(1)
        return self.layer(streams, context).flatten(1)

    def logits(self, recurrent: torch.Tensor, lens: Lens | None = None) -> torch.Tensor:
        """Return the target's lm_head of the summed streams, normed by the layer's own norm."""
        collapsed = self._streams(recurrent).sum(1)
        return self.target.logits(add_rms_norm_(collapsed, None, self.final_norm, self.config.rms_norm_eps), lens)

    def _streams(self, wide: torch.Tensor) -> torch.Tensor:
        return wide.unflatten(1, (self.config.hc_mult, self.config.hidden_size))


def load_hyper_mtp(
    file: HeadFile, prefixes: tuple[str, ...], target: TargetEnds, ranks: Ranks = ONE_RANK
) -> tuple[HyperMtpHead, ...]:
    """Read the layers as `load_layers` (mtp.py) does."""
    return load_layers(file, prefixes, target, ranks, _load_layer, "emb.tok_emb.weight", "head.weight")


def _load_layer(
    source: HeadTensors, prefix: str, config: ModelConfig, rotary: RotaryEmbedding, target: TargetEnds
) -> HyperMtpHead:
    size = config.hidden_size
    return HyperMtpHead(
        source.own(config),
        rotary,
        target,
        source.tensor(f"{prefix}.enorm.weight", size),
        source.tensor(f"{prefix}.hnorm.weight", size),
        source.linear(f"{prefix}.e_proj", size, size),
        source.linear(f"{prefix}.h_proj", size, size),
        read_hyper_layer(source.with_biases(config, prefix), source, prefix, 0),
        source.tensor(f"{prefix}.norm.weight", size),
    )
