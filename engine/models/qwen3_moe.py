"""Qwen3 with mixtures of experts: Qwen3's attention, and experts in the layers that config.json names."""

from __future__ import annotations

from ..layers.moe import MoeMlp
from ..model_config import ExpertsConfig, ModelConfig
from ..weights import Weights
from .decoder import DecoderModel
from .llama import read_layer, read_mlp, read_model


def read_qwen3_moe(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Read a whole model."""
    assert config.experts is not None, config
    layers = (
        read_layer(config, weights, prefix, i, _read_experts(config, config.experts, weights, f"{prefix}.mlp"))
        if i in config.experts.layers
        else read_layer(config, weights, prefix, i)
        for i, prefix in enumerate(f"model.layers.{i}" for i in range(config.num_layers))
    )
    return read_model(config, weights, layers)


def _read_experts(config: ModelConfig, experts: ExpertsConfig, weights: Weights, prefix: str) -> MoeMlp:
    return MoeMlp(
        weights.linear(f"{prefix}.gate", experts.num_experts, config.hidden_size, bias=False),
        tuple(
            read_mlp(config, weights, f"{prefix}.experts.{expert}", experts.inner_size)
            for expert in range(experts.num_experts)
        ),
        experts.num_active,
        experts.norm_topk_prob,
    )
