"""Reading of mixtures of experts: their settings in config.json, and their weights. Families differ in names."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..config_file import ConfigFile
from ..layers.decoder import DecoderLayer
from ..layers.mlp import Mlp
from ..layers.moe import ExpertRouter, MoeMlp
from ..model_config import ExpertsConfig, ModelConfig, Scoring
from ..products.base import INNER_IN, INNER_OUT
from ..products.experts import ExpertSources, choose_experts_product
from ..weights import Weights
from .family import NUM_EXPERTS
from .llama import read_layer, read_mlp


class MixtureNames(NamedTuple):
    """The names of a mixture's tensors, without the prefix of its layer."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"


NAMES = MixtureNames()
# how experts are chosen by scores of each kind: topk_method of config.json, first what it means if it is missing
_METHODS: dict[Scoring, tuple[str, ...]] = {"softmax": ("greedy", "group_limited_greedy"), "sigmoid": ("noaux_tc",)}


def read_mixture(config: ModelConfig, weights: Weights, prefix: str, names: MixtureNames = NAMES) -> MoeMlp:
    """Read the mixture at `prefix`."""
    experts, size = config.experts, config.hidden_size
    assert experts is not None, config
    router = ExpertRouter(
        weights.tensor(f"{prefix}.gate.weight", experts.num_experts, size, dtype=torch.float32),
        weights.tensor(f"{prefix}.{names.bias}", experts.num_experts, dtype=torch.float32)
        if experts.has_bias
        else None,
        experts,
    )
    each = [f"{prefix}.experts.{expert}" for expert in range(experts.num_experts)]
    gate_up = {f"{expert}.{name}": experts.inner_size for expert in each for name in (names.gate, names.up)}
    down = {f"{expert}.{names.down}": size for expert in each}
    products = choose_experts_product(
        ExpertSources(
            weights.source(gate_up, size, bias=False, split=INNER_OUT),
            weights.source(down, experts.inner_size, bias=False, split=INNER_IN),
            experts.num_experts,
        )
    )
    shared: Mlp | None = None
    if experts.shared_size:
        shared = read_mlp(config, weights, f"{prefix}.{names.shared}", experts.shared_size)
    return MoeMlp(router, products, shared, weights.ranks.sum_of(INNER_IN))


def read_mixture_layer(config: ModelConfig, weights: Weights, prefix: str, index: int) -> DecoderLayer:
    """Read a decoder layer with experts, whose attention and names are as Llama's."""
    return read_layer(config, weights, prefix, index, read_mixture(config, weights, f"{prefix}.mlp"))


def num_experts_of(raw: ConfigFile) -> int:
    """Return the number of experts of a layer, in whatever spelling the file has."""
    return raw.integer(next((key for key in NUM_EXPERTS if raw.has(key)), NUM_EXPERTS[0]))


def num_active_of(raw: ConfigFile, num_experts: int) -> int:
    """Return the number of experts of a token."""
    num_active = raw.integer("num_experts_per_tok")
    if num_active > num_experts:
        raise raw.error("num_experts_per_tok", f"is more than there are experts ({num_experts})")
    if raw.get("experts_per_token") not in (None, num_active):
        raise raw.error("experts_per_token", f"differs from num_experts_per_tok ({num_active}); correct the wrong one")
    return num_active


def check_scoring(raw: ConfigFile, scoring: str) -> None:
    """Raise ModelError if the file says another score of experts than its family has."""
    if raw.get("scoring_func") not in (None, scoring):
        raise raw.error("scoring_func", f"is not served for this architecture; {scoring} is")


def read_deepseek_experts(raw: ConfigFile, scoring: Scoring) -> ExpertsConfig:
    """Read the settings that DeepSeek's models and GLM-4.5 share. `scoring` is the family's."""
    num_experts = raw.integer("n_routed_experts")
    num_active = num_active_of(raw, num_experts)
    check_scoring(raw, scoring)
    methods = _METHODS[scoring]
    method = raw.get("topk_method") or methods[0]
    if method not in methods:
        served = f"{' and '.join(methods)} {'is' if len(methods) == 1 else 'are'}"
        raise raw.error("topk_method", f"is not served for this architecture; {served}")
    has_groups = method != "greedy"
    num_groups = raw.integer("n_group", 1) if has_groups else 1
    num_active_groups = raw.integer("topk_group", 1) if has_groups else 1
    if num_experts % num_groups:
        raise raw.error("n_group", f"does not divide n_routed_experts ({num_experts})")
    if num_active_groups > num_groups:
        raise raw.error("topk_group", f"is more than there are groups ({num_groups})")
    num_ranking = 2 if scoring == "sigmoid" else 1
    num_per_group = num_experts // num_groups
    if num_groups > 1 and (num_active > num_active_groups * num_per_group or num_ranking > num_per_group):
        raise raw.error("n_group", f"leaves a token fewer than {num_active} experts to choose from")
    step = raw.integer("moe_layer_freq", 1)
    first, num_layers = raw.integer("first_k_dense_replace", 0, minimum=0), raw.integer("num_hidden_layers")
    inner_size = raw.integer("moe_intermediate_size")
    return ExpertsConfig(
        num_experts,
        num_active,
        inner_size,
        raw.flag("norm_topk_prob"),
        tuple(layer for layer in range(first, num_layers) if layer % step == 0),
        scoring,
        has_bias=method == "noaux_tc",
        num_groups=num_groups,
        num_active_groups=num_active_groups,
        num_ranking=num_ranking if num_groups > 1 else 1,
        scaling=raw.number("routed_scaling_factor", 1.0),
        shared_size=inner_size * (raw.integer("n_shared_experts", 0, minimum=0) if raw.get("n_shared_experts") else 0),
    )
