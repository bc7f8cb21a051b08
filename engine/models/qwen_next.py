"""Qwen3-Next and Qwen3.5: layers with a gated delta rule between layers with attention, whose output has a gate.

The two differ in the names of the rule's input projections, and in the order of their rows: Qwen3-Next has rows of each
key head together, Qwen3.5 the queries of all heads, then their keys, then their values.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.state.delta_rule import DeltaWeights
from ..checkpoint.model_config import DELTA_ROWS, DeltaConfig, ModelConfig
from ..checkpoint.weights import Weights
from ..layers.decoder import DecoderLayer, FeedForward
from ..layers.delta_net import DeltaNet
from ..products.base import HEADS_IN, Split
from .decoder import DecoderModel
from .llama import read_layer, read_mlp, read_model
from .mixtures import MixtureNames, read_mixture

_NAMES = MixtureNames(shared="shared_expert", shared_gate="shared_expert_gate")


def read_qwen_next(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Name the tensors of a Qwen3-Next and build its layers."""
    return _read(config, weights, has_rows_by_head=True)


def read_qwen3_5(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Name the tensors of a Qwen3.5 and build its layers."""
    return _read(config, weights, has_rows_by_head=False)


def read_next_mtp_layer(config: ModelConfig, weights: Weights, prefix: str, index: int) -> DecoderLayer:
    """Read a prediction layer, which has attention."""
    mlp = _read_mlp(config, weights, prefix, has_experts=config.experts is not None)
    return read_layer(config, weights, prefix, index, mlp)


def _read(config: ModelConfig, weights: Weights, *, has_rows_by_head: bool) -> DecoderModel:
    delta, of_attention = config.delta, config.of_attention
    assert delta is not None, config
    layers: list[DecoderLayer] = []
    for i, prefix in enumerate(f"model.layers.{i}" for i in range(config.num_layers)):
        mlp = _read_mlp(config, weights, prefix, has_experts=config.experts is not None and i in config.experts.layers)
        if (place := config.place(DELTA_ROWS, i)) is None:
            layers.append(read_layer(of_attention, weights, prefix, config.kv_place(i), mlp))
            continue
        name = f"{prefix}.linear_attn"
        net = _read_delta_net(config, delta, weights, name, place, has_rows_by_head=has_rows_by_head)
        layers.append(read_layer(of_attention, weights, prefix, place, mlp, net))
    return read_model(config, weights, layers)


def _read_mlp(config: ModelConfig, weights: Weights, prefix: str, *, has_experts: bool) -> FeedForward:
    """Read the feed-forward half of a layer. Its experts are in one tensor, or in several."""
    if not has_experts or config.experts is None:
        return read_mlp(config, weights, f"{prefix}.mlp", config.intermediate_size)
    is_stacked = weights.has(f"{prefix}.mlp.experts.gate_up_proj")
    experts = replace(config.experts, is_stacked=is_stacked)
    return read_mixture(replace(config, experts=experts), weights, f"{prefix}.mlp", _NAMES)


def _read_delta_net(
    config: ModelConfig, delta: DeltaConfig, weights: Weights, prefix: str, place: int, *, has_rows_by_head: bool
) -> DeltaNet:
    num_heads, num_values = delta.num_key_heads, delta.num_value_heads
    key_size, value_size = num_heads * delta.key_dim, num_values * delta.value_dim
    channels = _by_head(delta)
    if has_rows_by_head:
        sizes, orders = {"in_proj_qkvz": 2 * (key_size + value_size), "in_proj_ba": 2 * num_values}, {}
    else:
        sizes = {"in_proj_qkv": 2 * key_size + value_size, "in_proj_z": value_size}
        sizes |= {"in_proj_b": num_values, "in_proj_a": num_values}
        orders = {f"{prefix}.in_proj_qkv": channels}
    split = Split("heads", 0, (num_heads,) * len(sizes))
    named = [(f"{prefix}.{name}", size) for name, size in sizes.items()]
    inputs = tuple(
        weights.fused(
            dict(together),
            config.hidden_size,
            bias=False,
            split=Split("heads", 0, (num_heads,) * len(together)),
            orders={name: order for name, order in orders.items() if name in dict(together)},
        )
        for together in (list(group) for _, group in itertools.groupby(named, lambda each: weights.is_scaled(each[0])))
    )
    taps = weights.tensor(f"{prefix}.conv1d.weight", len(channels), 1, delta.num_taps, dtype=torch.float32)
    a_log, dt_bias = (
        weights.tensor(f"{prefix}.{name}", num_values, dtype=torch.float32) for name in ("A_log", "dt_bias")
    )
    own = delta_weights(delta, weights, split, taps.squeeze(1)[channels.to(weights.device)], a_log, dt_bias)
    return DeltaNet(
        place,
        inputs,
        tuple(size // num_heads * len(own.taps) for size in sizes.values()),
        (None,) * len(sizes),
        own,
        weights.tensor(f"{prefix}.norm.weight", delta.value_dim),
        config.rms_norm_eps,
        F.silu,
        weights.linear(f"{prefix}.out_proj", config.hidden_size, value_size, bias=False, split=HEADS_IN),
        delta.longest_path,
    )


def delta_weights(
    delta: DeltaConfig, weights: Weights, split: Split, taps: Tensor, a_log: Tensor, dt_bias: Tensor
) -> DeltaWeights:
    """Return this rank's share of the numbers of each head, which stand head by head."""
    heads, shard = (delta.num_key_heads, delta.num_shared), weights.ranks.shard(split)
    by_tap = taps.view(heads[0], -1, delta.num_taps).transpose(1, 2).contiguous()
    by_head = [by_tap, a_log.view(heads), dt_bias.view(*heads, -1)]
    own_taps, own_log, own_bias = by_head if shard is None else [shard.take(each, 0).clone() for each in by_head]
    return DeltaWeights(own_taps, own_log, own_bias, delta.key_dim, delta.value_dim)


def _by_head(delta: DeltaConfig) -> Tensor:
    """Return the order of channels, in which each key head has its query, its key and its values together, given the
    order of all queries, all keys and all values."""
    widths = (delta.key_dim, delta.key_dim, delta.num_shared * delta.value_dim)
    starts, parts = 0, []
    for width in widths:
        parts.append(torch.arange(starts, starts + delta.num_key_heads * width).view(delta.num_key_heads, width))
        starts += delta.num_key_heads * width
    return torch.cat(parts, 1).flatten()
