"""Gemma 3: four norms per layer, scaled embeddings, and a window in most layers, whose rotary embeddings are others."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Weights
from ..layers.decoder import DecoderLayer
from ..layers.sandwich_decoder import GeluMlp, SandwichBody
from ..products.base import INNER_IN, INNER_OUT
from .decoder import DecoderModel, DecoderStack
from .llama import norm_weight, read_attention, read_ends, read_norm


def read_gemma3(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Name the tensors of Gemma 3 and build its layers."""
    layers = tuple(_read_layer(config, weights, f"model.layers.{i}", i) for i in range(config.num_layers))
    embedding, lm_head = read_ends(config, weights)
    scale = torch.tensor(config.hidden_size**0.5).to(weights.dtype).item()  # rounded as transformers does
    stack = DecoderStack(layers, read_norm(config, weights), config.rms_norm_eps)
    return DecoderModel(weights.own(config), replace(embedding, scale=scale), stack, lm_head)


def _read_layer(config: ModelConfig, weights: Weights, prefix: str, index: int) -> DecoderLayer:
    size = config.hidden_size
    names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    norms = [norm_weight(config, weights, f"{prefix}.{name}_layernorm", size) for name in names]
    attention = read_attention(config, weights, f"{prefix}.self_attn", index, size)
    mlp = _read_mlp(config, weights, f"{prefix}.mlp")
    return DecoderLayer(norms[0], SandwichBody(attention, norms[2], mlp, norms[1], norms[3]))


def _read_mlp(config: ModelConfig, weights: Weights, prefix: str) -> GeluMlp:
    size, inner_size = config.hidden_size, config.intermediate_size
    sizes = {f"{prefix}.gate_proj": inner_size, f"{prefix}.up_proj": inner_size}
    return GeluMlp(
        weights.fused(sizes, size, bias=False, split=INNER_OUT),
        weights.linear(f"{prefix}.down_proj", size, inner_size, bias=False, split=INNER_IN),
    )
