"""Mixtures of experts: reading of their weights, by the names of a family, and the families that are a dense model with
such layers: Qwen3-MoE and MiniMax-M2."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.model_config import ModelConfig
from ..checkpoint.stacked_weights import StackedWeight
from ..checkpoint.weights import Weights
from ..layers.decoder import DecoderLayer, Mlp
from ..layers.moe import ExpertRouter, MoeMlp
from ..products.base import INNER_IN, INNER_OUT
from ..products.experts import ExpertSources, choose_experts_product
from .decoder import DecoderModel
from .llama import read_layer, read_mlp, read_model


class MixtureNames(NamedTuple):
    """The names of a mixture's tensors, without the prefix of its layer."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"
    shared_gate: str | None = None  # None: the shared experts have no gate
    of_shared: tuple[str, str, str] | None = None  # gate, up and down of the shared experts; None: as of the others


NAMES = MixtureNames()


def read_mixture(
    config: ModelConfig, weights: Weights, prefix: str, names: MixtureNames = NAMES, table: Tensor | None = None
) -> MoeMlp:
    """Read the mixture at `prefix`. `table`: the experts of each token id, for `ExpertRouter`."""
    experts, size = config.experts, config.hidden_size
    assert experts is not None, config
    router = ExpertRouter(
        weights.tensor(f"{prefix}.gate.weight", experts.num_experts, size, dtype=torch.float32),
        weights.tensor(f"{prefix}.{names.bias}", experts.num_experts, dtype=torch.float32)
        if experts.has_bias and table is None
        else None,
        experts,
        table=table,
    )
    products = choose_experts_product(_sources(config, weights, f"{prefix}.experts", names))
    shared: Mlp | None = None
    if experts.shared_size:
        of_shared = names.of_shared or (names.gate, names.up, names.down)
        shared = read_mlp(config, weights, f"{prefix}.{names.shared}", experts.shared_size, of_shared)
    gate = None if names.shared_gate is None else weights.tensor(f"{prefix}.{names.shared_gate}.weight", 1, size)
    return MoeMlp(router, products, shared, weights.ranks.sum_of(INNER_IN), gate)


def _sources(config: ModelConfig, weights: Weights, prefix: str, names: MixtureNames) -> ExpertSources:
    """Return the weights of all experts."""
    experts, size = config.experts, config.hidden_size
    assert experts is not None, config
    num, inner_size = experts.num_experts, experts.inner_size
    if experts.is_stacked:
        return stacked_sources(config, weights, prefix)
    each = [f"{prefix}.{expert}" for expert in range(num)]
    gate_up = {f"{expert}.{name}": inner_size for expert in each for name in (names.gate, names.up)}
    down = {f"{expert}.{names.down}": size for expert in each}
    return ExpertSources(
        weights.source(gate_up, size, bias=False, split=INNER_OUT, are_experts=True),
        weights.source(down, inner_size, bias=False, split=INNER_IN, are_experts=True),
        num,
        experts.clamp,
    )


def stacked_sources(config: ModelConfig, weights: Weights, prefix: str) -> ExpertSources:
    """Return the weights of all experts, which are in two tensors."""
    experts, size = config.experts, config.hidden_size
    assert experts is not None, config
    num, inner_size, gate_up, down = experts.num_experts, experts.inner_size, "gate_up_proj", "down_proj"
    return ExpertSources(
        StackedWeight(weights, f"{prefix}.{gate_up}", num, 2, inner_size, size, INNER_OUT, has_rows_first=True),
        StackedWeight(weights, f"{prefix}.{down}", num, 1, size, inner_size, INNER_IN, has_rows_first=True),
        num,
    )


def read_mixture_layer(config: ModelConfig, weights: Weights, prefix: str, index: int) -> DecoderLayer:
    """Read a decoder layer with experts, whose attention and names are as Llama's."""
    return read_layer(config, weights, prefix, index, read_mixture(config, weights, f"{prefix}.mlp"))


_MINIMAX_NAMES = MixtureNames(gate="w1", up="w3", down="w2", bias="e_score_correction_bias")


def read_qwen3_moe(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Name the tensors of Qwen3-MoE, which has experts in the layers that config.json names, and build its layers."""
    assert config.experts is not None, config
    layers = (
        read_mixture_layer(config, weights, prefix, i)
        if i in config.experts.layers
        else read_layer(config, weights, prefix, i)
        for i, prefix in enumerate(f"model.layers.{i}" for i in range(config.num_layers))
    )
    return read_model(config, weights, layers)


def read_minimax_m2(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Name the tensors of MiniMax-M2, which has experts in every layer, and build its layers."""
    layers = (
        read_layer(
            config, weights, prefix, i, read_mixture(config, weights, f"{prefix}.block_sparse_moe", _MINIMAX_NAMES)
        )
        for i, prefix in enumerate(f"model.layers.{i}" for i in range(config.num_layers))
    )
    return read_model(config, weights, layers)
