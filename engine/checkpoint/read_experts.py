"""Reading of the mixtures of experts that config.json describes. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from ...kernels.formats import SwigluClamp
from ..models.family import NUM_EXPERTS
from .config_file import ConfigFile
from .model_config import ExpertsConfig, Scoring

_ALPHA = 1.702  # of published files of gpt-oss, which do not name it
# how experts are chosen by scores of each kind: topk_method of config.json, first what it means if it is missing
_METHODS: dict[Scoring, tuple[str, ...]] = {"softmax": ("greedy", "group_limited_greedy"), "sigmoid": ("noaux_tc",)}


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


def read_deepseek_experts(raw: ConfigFile, scoring: Scoring, num_ranking: int | None = None) -> ExpertsConfig:
    """Read the settings that DeepSeek's models and those of its shape share. `scoring` is the family's. `num_ranking`:
    scores that rank a group, of a family whose files do not name a method."""
    num_experts = raw.integer("n_routed_experts")
    num_active = num_active_of(raw, num_experts)
    check_scoring(raw, scoring)
    methods = _METHODS[scoring]
    method = raw.get("topk_method") or methods[0]
    if method not in methods:
        served = f"{' and '.join(methods)} {'is' if len(methods) == 1 else 'are'}"
        raise raw.error("topk_method", f"is not served for this architecture; {served}")
    has_groups = method != "greedy" or num_ranking is not None
    num_groups = raw.integer("n_group", 1) if has_groups else 1
    num_active_groups = raw.integer("topk_group", 1) if has_groups else 1
    if num_experts % num_groups:
        raise raw.error("n_group", f"does not divide n_routed_experts ({num_experts})")
    if num_active_groups > num_groups:
        raise raw.error("topk_group", f"is more than there are groups ({num_groups})")
    num_ranking = num_ranking or (2 if scoring == "sigmoid" else 1)
    num_per_group = num_experts // num_groups
    if num_groups > 1 and (num_active > num_active_groups * num_per_group or num_ranking > num_per_group):
        raise raw.error("n_group", f"leaves a token fewer than {num_active} experts to choose from")
    inner_size = raw.integer("moe_intermediate_size")
    return ExpertsConfig(
        num_experts,
        num_active,
        inner_size,
        raw.flag("norm_topk_prob"),
        _layers_with_experts(raw),
        scoring,
        has_bias=method == "noaux_tc",
        num_groups=num_groups,
        num_active_groups=num_active_groups,
        num_ranking=num_ranking if num_groups > 1 else 1,
        scaling=raw.number("routed_scaling_factor", 1.0),
        shared_size=inner_size * (raw.integer("n_shared_experts", 0, minimum=0) if raw.get("n_shared_experts") else 0),
    )


def _layers_with_experts(raw: ConfigFile) -> tuple[int, ...]:
    """Return the layers behind the first ones that have experts, or those that `mlp_layer_types` calls sparse."""
    num_layers, types = raw.integer("num_hidden_layers"), raw.get("mlp_layer_types")
    by_layer = isinstance(raw.get("moe_layer_freq"), list)  # then `mlp_layer_types` says the same
    step, has_first = 1 if by_layer else raw.integer("moe_layer_freq", 1), raw.get("first_k_dense_replace") is not None
    first = raw.integer("first_k_dense_replace", None if types is None else 0, minimum=0)
    layers = tuple(layer for layer in range(first, num_layers) if layer % step == 0)
    if types is None:
        return layers
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
        raise raw.error("mlp_layer_types", f"must list {num_layers} layers, each dense or sparse")
    sparse = tuple(layer for layer, kind in enumerate(types) if kind == "sparse")
    if has_first and sparse != layers:
        raise raw.error("mlp_layer_types", f"differs from first_k_dense_replace ({first}); correct the wrong one")
    return sparse


def read_glm_experts(raw: ConfigFile) -> ExpertsConfig:
    """Read the settings of GLM-4.5."""
    return read_deepseek_experts(raw, "sigmoid")


def read_qwen3_experts(raw: ConfigFile) -> ExpertsConfig:
    """Read the settings of Qwen3, which names the layers with experts."""
    num_layers, num_experts = raw.integer("num_hidden_layers"), num_experts_of(raw)
    num_active = num_active_of(raw, num_experts)
    step, dense = raw.integer("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise raw.error("mlp_only_layers", "must be a list of layer numbers")
    layers = tuple(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense)
    inner_size = raw.integer("moe_intermediate_size")
    return ExpertsConfig(num_experts, num_active, inner_size, raw.flag("norm_topk_prob"), layers)


def read_shared_qwen_experts(raw: ConfigFile, *, norms: bool = False) -> ExpertsConfig | None:
    """Read the settings of Qwen3-Next and Qwen3.5, which also have an expert for all tokens. Return None if all layers
    are dense. `norms`: the family's weights of experts sum to one, whatever the file says."""
    raw.fill({"norm_topk_prob": True})
    experts = read_qwen3_experts(raw)
    if norms and not experts.norm_topk_prob:
        raise raw.error("norm_topk_prob", "is not served for this architecture; true is", value=False)
    return replace(experts, shared_size=raw.integer("shared_expert_intermediate_size")) if experts.layers else None


def respell_qwen3_5(raw: ConfigFile) -> None:
    """Fill in the width of dense layers, of which a Qwen3.5 with experts has none."""
    raw.fill({"intermediate_size": raw.integer("moe_intermediate_size")})


def read_minimax_experts(raw: ConfigFile) -> ExpertsConfig:
    """Read the settings of MiniMax-M2, which has experts in every layer."""
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


def read_gpt_oss_experts(raw: ConfigFile) -> ExpertsConfig:
    """Read the settings of gpt-oss, whose experts have a clamped activation."""
    num_experts = num_experts_of(raw)
    return ExpertsConfig(
        num_experts,
        num_active_of(raw, num_experts),
        raw.integer("intermediate_size"),
        norm_topk_prob=True,
        layers=tuple(range(raw.integer("num_hidden_layers"))),
        clamp=SwigluClamp(raw.positive("swiglu_limit", raw.get("swiglu_limit")), raw.number("swiglu_alpha", _ALPHA)),
    )


def read_mistral4_experts(raw: ConfigFile) -> ExpertsConfig | None:
    """Read the experts of Mistral 4, which ranks groups as DeepSeek-V3 does and scores as V2 does."""
    experts = read_deepseek_experts(raw, "softmax", num_ranking=2)
    return replace(experts, is_stacked=True) if experts.layers else None


def read_gemma4_experts(raw: ConfigFile) -> ExpertsConfig | None:
    """Read the experts of Gemma 4, which stand beside the dense layer in every layer, if the file switches them on."""
    if not raw.flag("enable_moe_block"):
        return None
    num_experts, num_active = raw.integer("num_experts"), raw.integer("top_k_experts")
    if num_active > num_experts:
        raise raw.error("top_k_experts", f"is more than there are experts ({num_experts})")
    return ExpertsConfig(
        num_experts,
        num_active,
        raw.integer("moe_intermediate_size"),
        norm_topk_prob=True,
        layers=tuple(range(raw.integer("num_hidden_layers"))),
        shared_size=raw.integer("intermediate_size"),
        is_stacked=True,
    )


def read_latent_experts(raw: ConfigFile, scoring: Scoring) -> ExpertsConfig | None:
    """Return None if all layers are dense. `scoring`: as of `read_deepseek_experts`."""
    if raw.get("n_routed_experts") is None:
        return None
    experts = read_deepseek_experts(raw, scoring)
    return experts if experts.layers else None


def read_v2_experts(raw: ConfigFile) -> ExpertsConfig | None:
    """Read the experts of DeepSeek-V2. norm_topk_prob is refused, because transformers ignores it for V2."""
    experts, is_ignored = read_latent_experts(raw, "softmax"), raw.flag("norm_topk_prob")
    if experts is not None and is_ignored:
        raise raw.error("norm_topk_prob", "is not served for DeepseekV2ForCausalLM; false is")
    return experts
