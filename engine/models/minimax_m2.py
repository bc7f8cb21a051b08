"""MiniMax-M2: attention with norms over all heads that rotates a part of each head, and experts in every layer."""

from __future__ import annotations

from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Weights
from .decoder import DecoderModel
from .llama import read_layer, read_model
from .mixtures import MixtureNames, read_mixture

_NAMES = MixtureNames(gate="w1", up="w3", down="w2", bias="e_score_correction_bias")


def read_minimax_m2(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Name the tensors of MiniMax-M2 and build its layers."""
    layers = (
        read_layer(config, weights, prefix, i, read_mixture(config, weights, f"{prefix}.block_sparse_moe", _NAMES))
        for i, prefix in enumerate(f"model.layers.{i}" for i in range(config.num_layers))
    )
    return read_model(config, weights, layers)
