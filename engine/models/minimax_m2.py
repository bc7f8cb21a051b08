"""MiniMax-M2: attention with norms over all heads that rotates a part of each head, and experts in every layer."""

from __future__ import annotations

from ..config_file import ConfigFile
from ..model_config import ExpertsConfig, ModelConfig
from ..weights import Weights
from .decoder import DecoderModel
from .family import ModelFamily
from .llama import read_layer, read_model
from .mixtures import MixtureNames, check_scoring, num_active_of, num_experts_of, read_mixture

_NAMES = MixtureNames(gate="w1", up="w3", down="w2", bias="e_score_correction_bias")


def read_minimax_m2(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Read a whole model."""
    layers = (
        read_layer(config, weights, prefix, i, read_mixture(config, weights, f"{prefix}.block_sparse_moe", _NAMES))
        for i, prefix in enumerate(f"model.layers.{i}" for i in range(config.num_layers))
    )
    return read_model(config, weights, layers)


def _read_experts(raw: ConfigFile) -> ExpertsConfig:
    check_scoring(raw, "sigmoid")
    num_experts = num_experts_of(raw)
    return ExpertsConfig(
        num_experts,
        num_active_of(raw, num_experts),
        raw.integer("intermediate_size"),
        True,
        tuple(range(raw.integer("num_hidden_layers"))),
        "sigmoid",
        has_bias=True,
    )


MINIMAX_M2 = ModelFamily(
    architecture="MiniMaxM2ForCausalLM",
    read=read_minimax_m2,
    qkv_bias=False,
    has_wide_norms=True,
    rotary_share=1.0,
    needs=("num_key_value_heads", "head_dim", "num_experts_per_tok", "rope_parameters|rope_theta"),
    read_experts=_read_experts,
)
