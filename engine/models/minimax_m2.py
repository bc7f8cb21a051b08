"""MiniMax-M2: attention with norms over all heads that rotates a part of each head, and experts in every layer."""

from __future__ import annotations

from typing import cast

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
    kinds = raw.get("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in cast(list[object], kinds))):
        raise raw.error("attn_type_list", "is not served; 1 for every layer is")
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
    model_type="minimax_m2",
    read=read_minimax_m2,
    qkv_bias=False,
    has_wide_norms=True,
    rotary_share=1.0,
    needs=("num_key_value_heads", "head_dim", "num_experts_per_tok", "rope_parameters|rope_theta"),
    inert=("mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp"),
    fixed={
        "layernorm_full_attention_alpha": 1.0,
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_alpha": 1.0,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_alpha": 1.0,
        "layernorm_mlp_beta": 1.0,
        "norm_topk_prob": True,
        "qk_norm_type": "per_layer",
        "routed_scaling_factor": 1.0,
        "swa_rope_theta": -1.0,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    read_experts=_read_experts,
    own_mtp=("model.layers.",),
)
