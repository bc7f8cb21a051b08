"""Kimi-Linear (arXiv:2510.26692): layers with a gated delta rule whose states decay by channel (Kimi Delta Attention),
between layers with multi-head latent attention, in which nothing is rotated. Decays and gates of the former are
products of a low rank."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checkpoint.model_config import DELTA_ROWS, DeltaConfig, ModelConfig
from ..checkpoint.weights import Weights
from ..layers.decoder import DecoderLayer, FeedForward
from ..layers.delta_net import DeltaNet
from ..products.base import HEADS_IN, HEADS_OUT, Split
from .decoder import DecoderModel
from .deepseek import read_latent_attention
from .llama import read_layer, read_mlp, read_model
from .mixtures import MixtureNames, read_mixture
from .qwen_next import delta_weights

_NAMES = MixtureNames("w1", "w3", "w2", of_shared=("gate_proj", "up_proj", "down_proj"))


def read_kimi_linear(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Name the tensors of a Kimi-Linear and build its layers."""
    delta, of_attention = config.delta, config.of_attention
    assert delta is not None, config
    with_experts = () if config.experts is None else config.experts.layers
    layers: list[DecoderLayer] = []
    for i, prefix in enumerate(f"model.layers.{i}" for i in range(config.num_layers)):
        mlp = _read_mlp(config, weights, prefix, has_experts=i in with_experts)
        place, name = config.place(DELTA_ROWS, i), f"{prefix}.self_attn"
        if place is None:
            attention = read_latent_attention(of_attention, weights, name, config.kv_place(i))
        else:
            attention = _read_delta_net(config, delta, weights, name, place)
        layers.append(read_layer(of_attention, weights, prefix, i, mlp, attention))
    return read_model(config, weights, layers)


def _read_mlp(config: ModelConfig, weights: Weights, prefix: str, *, has_experts: bool) -> FeedForward:
    mixture = f"{prefix}.block_sparse_moe"
    if has_experts:
        return read_mixture(config, weights, mixture, _NAMES)
    is_resaved = weights.has(f"{mixture}.gate_proj.weight")  # transformers saves dense layers by the name of mixtures
    return read_mlp(config, weights, mixture if is_resaved else f"{prefix}.mlp", config.intermediate_size)


def _read_delta_net(config: ModelConfig, delta: DeltaConfig, weights: Weights, prefix: str, place: int) -> DeltaNet:
    num_heads, dim = delta.num_key_heads, delta.key_dim
    size = num_heads * dim
    widths = {"q_proj": size, "k_proj": size, "v_proj": size, "g_a_proj": dim, "b_proj": num_heads, "f_a_proj": dim}
    num_parts = tuple(1 if name in ("g_a_proj", "f_a_proj") else num_heads for name in widths)
    split = Split("heads", 0, num_parts)  # low ranks are whole on every rank
    inputs = weights.fused(
        {f"{prefix}.{name}": width for name, width in widths.items()}, config.hidden_size, bias=False, split=split
    )
    ups = {
        name: weights.linear(f"{prefix}.{name.replace('_a_', '_b_')}", size, dim, bias=False, split=HEADS_OUT)
        for name in ("g_a_proj", "f_a_proj")
    }

    def taps(name: str) -> Tensor:
        of_part = weights.tensor(f"{prefix}.{name}_conv1d.weight", size, 1, delta.num_taps, dtype=torch.float32)
        return of_part.view(num_heads, dim, delta.num_taps)

    a_log = weights.tensor(f"{prefix}.A_log", 1, 1, num_heads, 1, dtype=torch.float32)
    dt_bias = weights.tensor(f"{prefix}.dt_bias", size, dtype=torch.float32)
    own = delta_weights(delta, weights, HEADS_OUT, torch.cat([taps("q"), taps("k"), taps("v")], 1), a_log, dt_bias)
    return DeltaNet(
        place,
        (inputs,),
        tuple(width if name in ups else width // num_heads * len(own.taps) for name, width in widths.items()),
        tuple(map(ups.get, widths)),
        own,
        weights.tensor(f"{prefix}.o_norm.weight", dim),
        config.rms_norm_eps,
        torch.sigmoid,
        weights.linear(f"{prefix}.o_proj", config.hidden_size, size, bias=False, split=HEADS_IN),
        delta.longest_path,
    )
