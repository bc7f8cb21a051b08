"""Qwen3 with mixtures of experts: Qwen3's attention, and experts in the layers that config.json names."""

from __future__ import annotations

from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Weights
from .decoder import DecoderModel
from .llama import read_layer, read_model
from .mixtures import read_mixture_layer


def read_qwen3_moe(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Name the tensors of Qwen3-MoE and build its layers."""
    assert config.experts is not None, config
    layers = (
        read_mixture_layer(config, weights, prefix, i)
        if i in config.experts.layers
        else read_layer(config, weights, prefix, i)
        for i, prefix in enumerate(f"model.layers.{i}" for i in range(config.num_layers))
    )
    return read_model(config, weights, layers)
