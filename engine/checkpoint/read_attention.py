"""Reading of the attention that config.json describes: latents, indexers, layers with a delta rule, and what only Gemma
4, MiMo-V2-Flash or Kimi-Linear has. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

from .config_file import ConfigFile, Fields
from .model_config import INDEX, DeltaConfig, Further, Gemma4Config, IndexConfig, LatentConfig

_LETTERS = {"F": "full", "S": "shared"}  # of index_topk_pattern

_MAX_PICKS = 8192  # that kernels/attention/triton_picks.py can choose

_KINDS = ("full_attention", "sliding_attention")
_KIMI_NAMES = {  # names that readers know: those of Kimi-Linear
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
    "scoring_func": "moe_router_activation_func",
}
_KIMI_HEADS = {  # fields of transformers' class: of linear_attn_config, and names that readers know
    "linear_num_heads": ("num_heads", ("linear_num_key_heads", "linear_num_value_heads")),
    "linear_head_dim": ("head_dim", ("linear_key_head_dim", "linear_value_head_dim")),
    "linear_conv_kernel_dim": ("short_conv_kernel_size", ("linear_conv_kernel_dim",)),
}
_SIZES = ("num_attention_heads", "head_dim", "v_head_dim")  # alike in layers with a window, which files say with swa_


def read_latent(raw: ConfigFile) -> LatentConfig:
    """Read the widths of latents and heads, and the scale of the scores."""
    num_heads = raw.integer("num_attention_heads")
    if raw.integer("num_key_value_heads", num_heads) != num_heads:
        raise raw.error("num_key_value_heads", f"is not served; num_attention_heads ({num_heads}) is")
    if raw.flag("attention_bias"):
        raise raw.error("attention_bias", "is not served; false is")
    plain_dim, rope_dim = raw.integer("qk_nope_head_dim"), raw.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise raw.error("qk_rope_head_dim", "is odd, and rotary embeddings turn pairs")
    return LatentConfig(
        rank=raw.integer("kv_lora_rank"),
        query_rank=None if raw.get("q_lora_rank") is None else raw.integer("q_lora_rank"),
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        value_dim=raw.integer("v_head_dim"),
        is_interleaved=not raw.has("rope_interleave") or raw.flag("rope_interleave"),
        scale=(plain_dim + rope_dim) ** -0.5 * _score_factor(raw),
    )


def _score_factor(raw: ConfigFile) -> float:
    """Return the factor by which a stretched context scales the scores of attention."""
    fields = raw.section("rope_parameters" if raw.get("rope_parameters") else "rope_scaling")
    weight = fields.get("mscale_all_dim")
    if not weight or (fields.get("rope_type") or fields.get("type") or "default") == "default":
        return 1.0
    factor = fields.number("factor")
    scale = 1.0 if factor <= 1 else 0.1 * fields.number("mscale_all_dim") * math.log(factor) + 1.0
    return scale * scale


def read_index(raw: ConfigFile, *, is_interleaved: bool) -> IndexConfig:
    """Read the indexers. `is_interleaved`: what the family means if the file does not say how keys are rotated."""
    rope_dim, head_dim = raw.integer("qk_rope_head_dim"), raw.integer("index_head_dim")
    is_told = "indexer_rope_interleave"
    if head_dim < rope_dim:
        raise raw.error("index_head_dim", f"is less than qk_rope_head_dim ({rope_dim}), which is rotated")
    if raw.get("q_lora_rank") is None:
        raise raw.error("q_lora_rank", "is not served; indexers read the latent of queries", value="null")
    if raw.integer("index_topk") > _MAX_PICKS:
        raise raw.error("index_topk", f"is more than {_MAX_PICKS}, the most tokens that an indexer can choose here")
    return IndexConfig(
        num_heads=raw.integer("index_n_heads"),
        head_dim=head_dim,
        num_picks=raw.integer("index_topk"),
        is_interleaved=is_interleaved if raw.get(is_told) is None else raw.flag(is_told),
    )


def read_index_keys(raw: ConfigFile, *, may_share: bool = False) -> tuple[Further, ...]:
    """Read the pool of index keys. `may_share`: some layers may use the picks of a layer before them, and have none."""
    types = _index_types(raw) if may_share else None
    layers = tuple(i for i in range(raw.integer("num_hidden_layers")) if types is None or types[i] == "full")
    return (Further(INDEX, layers, raw.integer("index_head_dim")),)


def _index_types(raw: ConfigFile) -> list[str]:
    """Return the kind of each layer: listed, as a pattern of letters, or every so many layers."""
    num_layers = raw.integer("num_hidden_layers")
    key = "indexer_types" if raw.get("indexer_types") is not None else "index_topk_pattern"
    listed: Any = raw.get(key)
    if listed is None:
        step, offset = raw.integer("index_topk_freq", 1), raw.integer("index_skip_topk_offset", 2, minimum=0)
        types = ["shared" if max(i - offset + 1, 0) % step else "full" for i in range(num_layers)]
    else:
        letters = cast(list[Any], [*listed] if isinstance(listed, list | str) else [])
        types = [_LETTERS.get(str(each), str(each)) for each in letters]
        if len(types) != num_layers or not set(types) <= {"full", "shared"}:
            raise raw.error(key, f"must list {num_layers} layers, each full or shared")
    if types[0] != "full":
        raise raw.error(key, "lets the first layer share picks, but no layer before it has any")
    return types


def read_delta(raw: ConfigFile) -> DeltaConfig:
    """Read the layers with a delta rule, which the file lists, or which are all but every fourth one."""
    num_layers, kinds = raw.integer("num_hidden_layers"), raw.get("layer_types")
    if kinds is None:
        step = raw.integer("full_attention_interval", 4)
        kinds = ["linear_attention" if (i + 1) % step else "full_attention" for i in range(num_layers)]
    raw.get("full_attention_interval")  # of a file that has both
    if not isinstance(kinds, list) or len(cast(list[Any], kinds)) != num_layers:
        raise raw.error("layer_types", f"must list {num_layers} layers")
    if set(cast(list[Any], kinds)) != {"linear_attention", "full_attention"}:
        raise raw.error("layer_types", "is not served; a mixture of linear_attention and full_attention is")
    num_key_heads, num_value_heads = raw.integer("linear_num_key_heads"), raw.integer("linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise raw.error("linear_num_key_heads", f"does not divide linear_num_value_heads ({num_value_heads})")
    return DeltaConfig(
        layers=tuple(i for i, kind in enumerate(cast(list[Any], kinds)) if kind == "linear_attention"),
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=raw.integer("linear_key_head_dim"),
        value_dim=raw.integer("linear_value_head_dim"),
        num_taps=raw.integer("linear_conv_kernel_dim", 4, minimum=2),
    )


def read_gemma4(raw: ConfigFile) -> Gemma4Config:
    """Read the parts beside the heads."""
    layer_types, num_shared = raw.get("layer_types"), raw.integer("num_kv_shared_layers", 0, minimum=0)
    if not isinstance(layer_types, list) or cast(list[Any], layer_types)[-1:] != ["full_attention"]:
        raise raw.error("layer_types", "must be a list whose last layer is full_attention")
    if num_shared and set(layer_types[:-num_shared]) != set(cast(list[Any], layer_types)):
        raise raw.error("num_kv_shared_layers", "leaves no layer of some kind in layer_types with KV of its own")
    if raw.get("use_bidirectional_attention") not in (None, False, "vision"):  # images are not served
        raise raw.error("use_bidirectional_attention", "is not served; null and 'vision' are")
    if not raw.get("rope_parameters"):
        raise raw.error("rope_parameters", "is not served; write those of full_attention and sliding_attention into it")
    if raw.integer("vocab_size_per_layer_input") < raw.integer("vocab_size"):
        raise raw.error("vocab_size_per_layer_input", f"is less than vocab_size ({raw.integer('vocab_size')})")
    return Gemma4Config(
        num_shared_layers=num_shared,
        has_wide_shared_mlp=raw.flag("use_double_wide_mlp"),
        values_are_keys=raw.flag("attention_k_eq_v"),
        input_size=raw.integer("hidden_size_per_layer_input", 0, minimum=0),
        input_vocab_size=raw.integer("vocab_size_per_layer_input"),
    )


def global_heads(raw: ConfigFile, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Return the number of KV heads and the width of a head in layers without a window, of two spellings. The arguments
    are those of layers with a window."""
    by_layer = raw.section("per_layer_config")
    if not raw.get("per_layer_config"):
        if raw.has("per_layer_config"):  # an empty one, as all layers are alike
            return num_kv_heads, head_dim
        own = raw.integer("num_global_key_value_heads", num_kv_heads)
        return own if raw.flag("attention_k_eq_v") else num_kv_heads, raw.integer("global_head_dim", 512)
    kinds = cast(list[Any], raw.get("layer_types"))
    unbounded = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    names = {int(name): name for name in by_layer.unread() if name.isdecimal()}  # such as 05
    layers = [by_layer.section(names.get(layer, str(layer))) for layer in unbounded]
    found = {(each.integer("num_key_value_heads", num_kv_heads), each.integer("head_dim", head_dim)) for each in layers}
    if by_layer.unread() or len(found) > 1:
        raise raw.error("per_layer_config", "is not served: layers without a window, and these alone, must be alike")
    return found.pop()


def respell_mimo(raw: ConfigFile) -> None:
    """Name the fields of MiMo-V2-Flash as transformers' class does, with its defaults. Published files have other
    names, and say things of layers with a window that the class takes for granted."""
    num_layers = raw.integer("num_hidden_layers")
    windowed = raw.get("hybrid_layer_pattern") or [i > 0 and (i + 1) % 6 > 0 for i in range(num_layers)]
    sparse = raw.get("moe_layer_freq") or [i > 0 for i in range(num_layers)]
    if not isinstance(windowed, list) or not isinstance(sparse, list):
        raise raw.error("hybrid_layer_pattern", "and moe_layer_freq must be lists with a number for each layer")
    fields: dict[str, tuple[str, Any]] = {
        "layer_types": ("hybrid_layer_pattern", [_KINDS[bool(each)] for each in windowed]),
        "mlp_layer_types": ("moe_layer_freq", ["sparse" if each else "dense" for each in sparse]),
        "rms_norm_eps": ("layernorm_epsilon", raw.number("layernorm_epsilon", 1e-5)),
    }
    for name, (published, value) in fields.items():
        if raw.get(name) is None:
            raw.replace({name: value})
        elif raw.get(published) is not None and raw.get(name) != value:
            raise raw.error(published, f"differs from {name} ({raw.get(name)}); correct the wrong one")
    if raw.get("sliding_window_size") is not None:  # without the query itself
        raw.replace({"sliding_window": raw.integer("sliding_window_size") + 1})
    num_kv_heads = raw.integer("num_key_value_heads")
    wanted = {name: raw.integer(name) for name in _SIZES} | {"num_key_value_heads": 2 * num_kv_heads}
    for name, size in wanted.items():
        if raw.get(f"swa_{name}") not in (None, size):
            raise raw.error(f"swa_{name}", f"is not served; {size} is")


def value_dim(raw: ConfigFile, head_dim: int) -> int | None:
    """Return the width of values; None: that of keys."""
    width = raw.integer("v_head_dim")
    if width > head_dim:
        raise raw.error("v_head_dim", f"is not served; {head_dim} (head_dim) or less is")
    return width if width < head_dim else None


def respell_kimi_linear(raw: ConfigFile) -> None:
    """Name the fields of Kimi-Linear as those of DeepSeek-V3 and Qwen3-Next."""
    for key in ("rope_scaling", "rope_parameters"):
        if raw.get(key):
            raise raw.error(key, "is not served: no layer rotates queries and keys; null is")
    raw.get("rope_theta")
    for name, published in _KIMI_NAMES.items():
        _say(raw, name, published, raw.get(published))
    linear = raw.section("linear_attn_config")
    for name, (inner, known) in _KIMI_HEADS.items():
        _say(raw, name, f"linear_attn_config.{inner}", linear.get(inner))
        raw.replace(dict.fromkeys(known, raw.get(name)))
    _say(raw, "layer_types", "linear_attn_config", _kinds_of_kimi(raw, linear))


def _say(raw: ConfigFile, name: str, published: str, value: Any) -> None:
    """Give `name` the value of another field, `published`, unless the file has it."""
    if raw.get(name) is None:
        raw.replace({name: value})
    elif value not in (None, raw.get(name)):
        raise raw.error(name, f"differs from {published} ({value!r}); correct the wrong one")


def _kinds_of_kimi(raw: ConfigFile, linear: Fields) -> list[str] | None:
    """Return the kind of each layer, whose numbers begin with one; None: the file does not list them so."""
    num_layers, named = raw.integer("num_hidden_layers"), ("kda_layers", "full_attn_layers")
    listed: list[Any] = [linear.get(name) for name in named]
    if listed == [None, None]:
        return None
    lists = [cast(list[Any], each) if isinstance(each, list) else [None] for each in listed]
    if sorted(map(repr, lists[0] + lists[1])) != sorted(map(repr, range(1, num_layers + 1))):
        raise linear.error("kda_layers", f"and full_attn_layers must list the layers 1 to {num_layers} once")
    return ["linear_attention" if layer in lists[0] else "full_attention" for layer in range(1, num_layers + 1)]


def read_kimi_delta(raw: ConfigFile) -> DeltaConfig:
    """Read the layers of Kimi-Linear with a delta rule, whose states decay by channel."""
    delta = read_delta(raw)
    return replace(delta, decay_dim=delta.key_dim)
