"""Llama with static hyper-connections (Zhu et al. 2024, arXiv:2409.19606): S = hc_mult residual streams instead of one.

s_0 .. s_(S-1) = embedding[input_ids], each;  the layers are those of layers/hyper_decoder.py
handoff = [s_0 ; .. ; s_(S-1)];   hidden = norm(sum_a s_a);   logits = lm_head(hidden)

The handoff state is taken before the streams collapse (docs/drafter_checkpoints.md). Streams are [num_tokens, hc_mult,
hidden_size].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...kernels.products.norm import add_rms_norm_
from ..attention.context import AttentionContext
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Weights
from ..layers.hyper_decoder import HyperDecoderLayer, StreamSite
from .decoder import DecoderModel, TargetStates
from .llama import read_ends, read_layer, read_llama, read_norm


@dataclass(frozen=True, slots=True, eq=False)
class HyperStack:
    """Layers over two or more residual streams. Auxiliary states are collapsed."""

    layers: tuple[HyperDecoderLayer, ...]
    norm: Tensor  # [hidden_size]
    hc_mult: int
    hands_over_collapsed: bool
    eps: float

    def __call__(
        self, input_ids: Tensor, embedded: Tensor, context: AttentionContext, aux_layers: Sequence[int]
    ) -> TargetStates:
        del input_ids
        streams = embedded.unsqueeze(1).expand(-1, self.hc_mult, -1)
        aux: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in aux_layers:
                aux[index] = streams.sum(1)
            streams = layer(streams, context)
        aux[len(self.layers)] = collapsed = streams.sum(1)
        final = add_rms_norm_(collapsed, None, self.norm, self.eps)
        handoff = final if self.hands_over_collapsed else streams.flatten(1)
        return TargetStates(final, handoff, [aux[index] for index in aux_layers])


def read_hyper_llama(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Name the tensors of a Llama with residual streams, and build its layers. One stream is an ordinary Llama."""
    if config.hc_mult == 1:
        return read_llama(config, weights)
    embedding, lm_head = read_ends(config, weights)
    layers = tuple(read_hyper_layer(config, weights, f"model.layers.{i}", i) for i in range(config.num_layers))
    norm = read_norm(config, weights)
    stack = HyperStack(layers, norm, config.hc_mult, config.hands_over_collapsed, config.rms_norm_eps)
    return DecoderModel(weights.own(config), embedding, stack, lm_head)


def read_hyper_layer(config: ModelConfig, weights: Weights, prefix: str, index: int) -> HyperDecoderLayer:
    """Read one decoder layer over streams, which has KV in layer `index` of the pool."""
    return HyperDecoderLayer(
        read_layer(config, weights, prefix, index),
        _read_site(config, weights, f"{prefix}.attn_hc"),
        _read_site(config, weights, f"{prefix}.ffn_hc"),
        config.rms_norm_eps,
    )


def _read_site(config: ModelConfig, weights: Weights, prefix: str) -> StreamSite:
    num = config.hc_mult
    return StreamSite(
        weights.tensor(f"{prefix}.read", num),
        weights.tensor(f"{prefix}.write", num),
        weights.tensor(f"{prefix}.mix", num, num),
    )
