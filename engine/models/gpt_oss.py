"""gpt-oss and MiMo-V2-Flash: sinks, windows in some layers, and mixtures of experts.

The experts of gpt-oss have biases and a clamped activation. Values of MiMo-V2-Flash are narrower than keys."""

from __future__ import annotations

import torch

from ..checkpoint.model_config import ModelConfig
from ..checkpoint.stacked_weights import StackedWeight
from ..checkpoint.weights import Weights
from ..layers.attention import Attention, NarrowAttention
from ..layers.decoder import DecoderBody, DecoderLayer
from ..layers.moe import ExpertRouter, MoeMlp
from ..products.base import HEADS_IN, INNER_IN, INNER_OUT, heads_out
from ..products.experts import ExpertSources, choose_experts_product
from .decoder import DecoderModel
from .llama import head_order, norm_weight, read_layer, read_mlp, read_model, read_sinks
from .mixtures import read_mixture

_MTP_NORMS = ("input", "pre_mlp")


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


def read_mimo(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Name the tensors of MiMo-V2-Flash and build its layers."""
    with_experts = () if config.experts is None else config.experts.layers
    layers = (
        read_layer(
            config,
            weights,
            prefix,
            index,
            read_mixture(config, weights, f"{prefix}.mlp") if index in with_experts else None,
            _read_attention(config, weights, f"{prefix}.self_attn", index),
        )
        for index, prefix in enumerate(f"model.layers.{index}" for index in range(config.num_layers))
    )
    return read_model(config, weights, layers)


def read_mimo_mtp_layer(config: ModelConfig, weights: Weights, prefix: str, index: int) -> DecoderLayer:
    """Read a prediction layer."""
    norms = [norm_weight(config, weights, f"{prefix}.{name}_layernorm", config.hidden_size) for name in _MTP_NORMS]
    attention = _read_attention(config, weights, f"{prefix}.self_attn", index)
    mlp = read_mlp(config, weights, f"{prefix}.mlp", config.intermediate_size)
    return DecoderLayer(norms[0], DecoderBody(attention, norms[1], mlp))


def _read_attention(config: ModelConfig, weights: Weights, prefix: str, index: int) -> NarrowAttention:
    window = config.sliding_window[index]
    kind = config if config.window is None else config.by_window()[window is not None]
    value_dim = kind.value_dim or kind.head_dim
    sizes = {f"{prefix}.q_proj": kind.q_size, f"{prefix}.k_proj": kind.kv_size}
    own, order, orders = weights.own(kind), None, {}
    if kind.has_cut_heads:
        order = head_order(kind, own.q_size + own.kv_size).to(weights.device)
    elif kind.rotary_dim:
        orders = {name: head_order(kind, size) for name, size in sizes.items()}
    sizes[f"{prefix}.v_proj"] = kind.num_kv_heads * value_dim
    split = heads_out(kind.num_heads, kind.num_kv_heads)
    attention = Attention(
        config.kv_place(index),
        weights.fused(sizes, config.hidden_size, bias=config.qkv_bias, split=split, orders=orders),
        None,
        window,
        weights.linear(
            f"{prefix}.o_proj",
            config.hidden_size,
            kind.num_heads * value_dim,
            bias=config.attention_bias,
            split=HEADS_IN,
        ),
        sinks=None
        if window is None
        else read_sinks(config, weights, f"{prefix}.attention_sink_bias", weights.ranks.shard(split)),
    )
    return NarrowAttention(attention, kind.head_dim, value_dim, own.num_kv_heads, config.value_scale, order)
