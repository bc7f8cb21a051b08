"""MiMo-V2-Flash: values narrower than keys, a window and sinks in most layers, and mixtures of experts."""

from __future__ import annotations

from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Weights
from ..layers.attention import Attention
from ..layers.narrow_attention import NarrowAttention
from ..products.base import HEADS_IN, heads_out
from .decoder import DecoderModel
from .llama import head_order, read_layer, read_model, read_sinks
from .mixtures import read_mixture


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


def _read_attention(config: ModelConfig, weights: Weights, prefix: str, index: int) -> NarrowAttention:
    window = config.sliding_window[index]
    kind = config.by_window()[window is not None]
    value_dim = kind.value_dim or kind.head_dim
    sizes = {f"{prefix}.q_proj": kind.q_size, f"{prefix}.k_proj": kind.kv_size}
    orders = {name: head_order(kind, size) for name, size in sizes.items()} if kind.rotary_dim else {}
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
    return NarrowAttention(attention, kind.head_dim, value_dim, weights.own(kind).num_kv_heads, config.value_scale)
