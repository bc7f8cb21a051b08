"""Qwen3 with mixtures of experts: Qwen3's attention, and experts in the layers that config.json names."""

from __future__ import annotations

from ..config_file import ConfigFile
from ..model_config import ExpertsConfig, ModelConfig
from ..weights import Weights
from .decoder import DecoderModel
from .family import ModelFamily
from .llama import read_layer, read_model
from .mixtures import num_active_of, num_experts_of, read_mixture_layer


def read_qwen3_moe(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Read a whole model."""
    assert config.experts is not None, config
    layers = (
        read_mixture_layer(config, weights, prefix, i)
        if i in config.experts.layers
        else read_layer(config, weights, prefix, i)
        for i, prefix in enumerate(f"model.layers.{i}" for i in range(config.num_layers))
    )
    return read_model(config, weights, layers)


def _read_experts_config(raw: ConfigFile) -> ExpertsConfig:
    num_layers, num_experts = raw.integer("num_hidden_layers"), num_experts_of(raw)
    num_active = num_active_of(raw, num_experts)
    step, dense = raw.integer("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise raw.error("mlp_only_layers", "must be a list of layer numbers")
    layers = tuple(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense)
    inner_size = raw.integer("moe_intermediate_size")
    return ExpertsConfig(num_experts, num_active, inner_size, raw.flag("norm_topk_prob"), layers)


QWEN3_MOE = ModelFamily(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    read=read_qwen3_moe,
    qk_norm=True,
    needs=("num_key_value_heads", "head_dim", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    fixed={"use_qk_norm": True},
    read_experts=_read_experts_config,
    own_mtp=(),
)
