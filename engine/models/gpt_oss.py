"""gpt-oss: attention with sinks, a window in every other layer, and experts with biases and a clamped activation."""

from __future__ import annotations

import torch

from ..checkpoint.model_config import ModelConfig
from ..checkpoint.stacked_weights import StackedWeight
from ..checkpoint.weights import Weights
from ..layers.moe import ExpertRouter, MoeMlp
from ..products.base import INNER_IN, INNER_OUT
from ..products.experts import ExpertSources, choose_experts_product
from .decoder import DecoderModel
from .llama import read_layer, read_model


def read_gpt_oss(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Name the tensors of gpt-oss and build its layers."""
    layers = (
        read_layer(config, weights, prefix, i, _read_mixture(config, weights, f"{prefix}.mlp"))
        for i, prefix in enumerate(f"model.layers.{i}" for i in range(config.num_layers))
    )
    return read_model(config, weights, layers)


def _read_mixture(config: ModelConfig, weights: Weights, prefix: str) -> MoeMlp:
    experts, size = config.experts, config.hidden_size
    assert experts is not None, config
    num, inner_size = experts.num_experts, experts.inner_size
    router = ExpertRouter(
        weights.tensor(f"{prefix}.router.weight", num, size, dtype=torch.float32),
        None,
        experts,
        weights.tensor(f"{prefix}.router.bias", num, dtype=torch.float32),
    )
    products = choose_experts_product(
        ExpertSources(
            StackedWeight(weights, f"{prefix}.experts.gate_up_proj", num, 2, inner_size, size, INNER_OUT),
            StackedWeight(weights, f"{prefix}.experts.down_proj", num, 1, size, inner_size, INNER_IN),
            num,
            experts.clamp,
        )
    )
    return MoeMlp(router, products, None, weights.ranks.sum_of(INNER_IN))
