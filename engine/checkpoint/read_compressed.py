"""Reading of DeepSeek-V4's config.json: attention to a window and to entries, streams, and mixtures. Imports no torch.

Published files and transformers' class have unlike fields. `respell_deepseek_v4` makes those of the class."""

from __future__ import annotations

from typing import Any, cast

from ...kernels.formats import SwigluClamp
from ...metadata.wire.request import MAX_DRAFT_STEPS
from .config_file import ConfigFile
from .model_config import ENTRY_POOLS, INDEX, CompressedConfig, ExpertsConfig, Further, IndexConfig, Kind, RopeConfig
from .read_experts import check_scoring, num_active_of

_KINDS: dict[str, Kind] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "sparse",
    "heavily_compressed_attention": "heavy",
}
_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_OF_RATIO = {0: "sliding_attention"} | {rate: name for name, rate in _RATES.items()}
_MLPS = {True: "hash_moe", False: "moe"}


def respell_deepseek_v4(raw: ConfigFile) -> None:
    """Name the fields of DeepSeek-V4 as transformers' class does. Raises ModelError for values of no such model."""
    num_layers, head_dim = raw.integer("num_hidden_layers"), raw.integer("head_dim")
    types, mlps = raw.get("layer_types"), raw.get("mlp_layer_types")
    if types is None:
        types = _types_of_ratios(raw, num_layers)
    if mlps is None:
        num_hash = raw.integer("num_hash_layers", minimum=0)
        mlps = [_MLPS[layer < num_hash] for layer in range(num_layers)]
    for key, value, served in (("layer_types", types, tuple(_KINDS)), ("mlp_layer_types", mlps, (*_MLPS.values(),))):
        if not isinstance(value, list) or len(value) != num_layers or not set(value) <= set(served):
            raise raw.error(key, f"must list {num_layers} layers, each {' or '.join(served)}", value=value)
    share = None if raw.get("partial_rotary_factor") is None else raw.number("partial_rotary_factor")
    rope_dim = raw.integer("qk_rope_head_dim", 64 if share is None else int(share * head_dim))
    if rope_dim % 2 or rope_dim > head_dim or rope_dim > raw.integer("index_head_dim"):
        raise raw.error("qk_rope_head_dim", f"must be even and fit in heads of {head_dim}", value=rope_dim)
    ropes = _ropes(raw)
    for each in (share, *(rope.pop("partial_rotary_factor", None) for rope in ropes.values())):
        if each is not None and int(raw.positive("partial_rotary_factor", each) * head_dim) != rope_dim:
            raise raw.error("partial_rotary_factor", f"rotates other than {rope_dim} of {head_dim} numbers", value=each)
    inner_size = raw.integer("moe_intermediate_size")
    raw.replace(
        {
            "layer_types": types,
            "mlp_layer_types": mlps,
            "compress_rates": _rates(raw),
            "qk_rope_head_dim": rope_dim,
            "partial_rotary_factor": None,
            "intermediate_size": inner_size * raw.integer("n_shared_experts", 1),
            "rope_parameters": ropes,
            "rope_scaling": None,
        }
    )


def _types_of_ratios(raw: ConfigFile, num_layers: int) -> list[str]:
    """Return the kinds of layers. The list may go on with those of prediction layers, which have a window alone."""
    ratios = raw.get("compress_ratios")
    listed = cast(list[Any], ratios) if isinstance(ratios, list) else []
    if len(listed) < num_layers or any(each not in _OF_RATIO for each in listed) or any(listed[num_layers:]):
        served = ", ".join(map(str, _OF_RATIO))
        raise raw.error("compress_ratios", f"must list {num_layers} layers, each one of {served}, and 0 behind them")
    return [_OF_RATIO[each] for each in listed[:num_layers]]


def _rates(raw: ConfigFile) -> dict[str, int]:
    """Return the tokens of an entry by the kind of layer."""
    given = raw.section("compress_rates")
    spelled = {"compressed_sparse_attention": "compress_rate_csa", "heavily_compressed_attention": "compress_rate_hca"}
    return {name: raw.integer(spelled[name], given.integer(name, rate)) for name, rate in _RATES.items()}


def _ropes(raw: ConfigFile) -> dict[str, dict[str, Any]]:
    """Return the rotary settings of layers with a window alone, and of those with entries.

    Sines and cosines have no factor: published files do not name one, and DeepSeek's own code has none. transformers
    writes 1.0 when it reads such a file. Of a file in the form of its class that lacks the factor, which neither
    writes, it derives another one."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    fields: Any = raw.get(key)
    if not isinstance(fields, dict):
        raise raw.error(key, "must be an object")
    plain, wide = raw.get("rope_theta"), raw.get("compress_rope_theta")
    given = cast(dict[str, Any], fields)
    if isinstance(given.get("main"), dict) and isinstance(given.get("compress"), dict):
        main, compress = dict(given["main"]), dict(given["compress"])
    else:
        main = {"rope_theta": 10_000.0 if plain is None else plain}
        compress = {**given, "rope_theta": 160_000.0 if wide is None else wide}
    if (compress.get("rope_type") or compress.get("type")) == "yarn":
        if compress.get("attention_factor") not in (None, 1):
            raise raw.error("attention_factor", "is not served; 1.0 is", value=compress["attention_factor"])
        compress["attention_factor"] = 1.0
    return {"main": main, "compress": compress}


def read_compressed(raw: ConfigFile) -> CompressedConfig:
    """Read the attention and the streams. The rotary settings of entries are read by the caller."""
    num_heads, num_groups = raw.integer("num_attention_heads"), raw.integer("o_groups")
    if num_heads % num_groups:
        raise raw.error("o_groups", f"does not divide num_attention_heads ({num_heads})")
    if raw.integer("num_key_value_heads") != 1:
        raise raw.error("num_key_value_heads", "is not served for this architecture; 1 is")
    rates = raw.get("compress_rates")
    return CompressedConfig(
        kinds=tuple(_KINDS[each] for each in raw.get("layer_types")),
        window=raw.integer("sliding_window"),
        sparse_rate=rates["compressed_sparse_attention"],
        heavy_rate=rates["heavily_compressed_attention"],
        rope=RopeConfig(),
        rope_dim=raw.integer("qk_rope_head_dim"),
        query_rank=raw.integer("q_lora_rank"),
        num_groups=num_groups,
        group_rank=raw.integer("o_lora_rank"),
        num_sinkhorn_steps=raw.integer("hc_sinkhorn_iters", 20),
        hc_eps=raw.number("hc_eps", 1e-6),
    )


def read_entry_index(raw: ConfigFile) -> IndexConfig | None:
    """Read the indexers; None if no layer has one."""
    if "compressed_sparse_attention" not in raw.get("layer_types"):
        return None
    return IndexConfig(
        num_heads=raw.integer("index_n_heads"),
        head_dim=raw.integer("index_head_dim"),
        num_picks=raw.integer("index_topk"),
        is_interleaved=True,
    )


def read_entry_pools(raw: ConfigFile) -> tuple[Further, ...]:
    """Read the pools that lie beside the pool of keys. An entry is divided among the slots of its tokens.

    An entry of two windows is made of the inputs of their tokens; an entry of one window, of its sums up to the token
    before (kernels/entries/entries.py). A tail page keeps these rows of its last tokens alone: of what an unfinished
    window reads, and of one round. The rows of a round may be rejected, so they must not take the places of the rows
    before it."""
    compressed, head_dim, index_dim = read_compressed(raw), raw.integer("head_dim"), raw.integer("index_head_dim")
    sparse, heavy = (
        tuple(i for i, kind in enumerate(compressed.kinds) if kind == wanted) for wanted in ("sparse", "heavy")
    )
    of_two, of_one = 2 * compressed.sparse_rate, 2  # tokens whose rows make an entry
    keys, of_sparse, of_heavy = (ENTRY_POOLS[kind] for kind in (INDEX, "sparse", "heavy"))

    def rows(name: str, layers: tuple[int, ...], width: int, num_read: int) -> Further:
        num_kept = num_read + MAX_DRAFT_STEPS + 1
        return Further(name, layers, width, dtype="float32", num_read=num_read, num_kept=num_kept)

    pools = (
        Further(keys.entries, sparse, -(-index_dim // compressed.sparse_rate)),
        Further(of_sparse.entries, sparse, -(-head_dim // compressed.sparse_rate)),
        Further(of_heavy.entries, heavy, -(-head_dim // compressed.heavy_rate)),
        rows(keys.inputs, sparse, 4 * index_dim, of_two),
        rows(of_sparse.inputs, sparse, 4 * head_dim, of_two),
        rows(of_heavy.inputs, heavy, 2 * head_dim, of_one),
    )
    return tuple(pool for pool in pools if pool.layers)


def read_entry_experts(raw: ConfigFile) -> ExpertsConfig:
    """Read the mixtures, which every layer has."""
    check_scoring(raw, "sqrtsoftplus")
    num_experts, inner_size = raw.integer("n_routed_experts"), raw.integer("moe_intermediate_size")
    return ExpertsConfig(
        num_experts,
        num_active_of(raw, num_experts),
        inner_size,
        norm_topk_prob=True,
        layers=tuple(range(raw.integer("num_hidden_layers"))),
        scoring="sqrtsoftplus",
        has_bias=True,
        scaling=raw.number("routed_scaling_factor"),
        shared_size=inner_size * raw.integer("n_shared_experts", 1),
        clamp=SwigluClamp(raw.number("swiglu_limit"), 1.0, 0.0),
        hash_layers=tuple(i for i, kind in enumerate(raw.get("mlp_layer_types")) if kind == "hash_moe"),
    )
