"""Attention to windows and entries as published files and transformers' class describe it (DeepSeek-V4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from published_configs import PUBLISHED, write_config

from baton.engine.checkpoint.model_config import ModelConfig, RopeConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.registry import tensor_specs
from baton.engine.ranks.shares import check_shares
from baton.kernels.formats import SwigluClamp
from baton.metadata.errors import ConfigError, ModelError
from baton.metadata.handoff.schema.kv_layout import KvLayout
from baton.metadata.handoff.schema.schema import handoff_bytes, make_schema, page_bytes


def read(tmp_path: Path, published: str = "DeepSeek-V4-Flash", **changes: Any) -> ModelConfig:
    fields = {key: value for key, value in (PUBLISHED[published] | changes).items() if value != "absent"}
    return read_model_config(write_config(tmp_path, fields))


def test_the_published_file_says_what_each_layer_sees(tmp_path: Path) -> None:
    config = read(tmp_path)
    compressed, experts, index = config.compressed, config.experts, config.index
    assert compressed is not None and experts is not None and index is not None
    assert compressed.kinds == ("window",) * 2 + ("sparse", "heavy") * 20 + ("sparse",)
    assert (compressed.window, compressed.sparse_rate, compressed.heavy_rate, compressed.page_unit) == (
        128,
        4,
        128,
        128,
    )
    assert config.rope == RopeConfig(theta=10_000.0)
    assert compressed.rope == RopeConfig("yarn", 160_000.0, 16.0, 65_536, attention_factor=1.0)
    assert (compressed.rope_dim, compressed.query_rank, compressed.num_groups, compressed.group_rank) == (
        64,
        1024,
        8,
        1024,
    )
    assert (index.num_heads, index.head_dim, index.num_picks) == (64, 128, 512)
    assert (config.hc_mult, config.handoff_hidden_size, compressed.num_sinkhorn_steps) == (4, 4 * 4096, 20)
    assert (experts.num_experts, experts.num_active, experts.shared_size, experts.scaling) == (256, 6, 2048, 1.5)
    assert experts.scoring == "sqrtsoftplus" and experts.clamp == SwigluClamp(10.0, 1.0, 0.0)
    assert experts.hash_layers == (0, 1, 2) and experts.layers == tuple(range(43))
    assert config.quantization is not None and config.quantization.words == "fp8 blocks, fp4, rounding ue8m0"
    assert config.context_len == 1_048_576


def test_the_fields_of_transformers_class_say_the_same(tmp_path: Path) -> None:
    published = read(tmp_path)
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    ropes = {
        "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.125},
        "compress": {**PUBLISHED["DeepSeek-V4-Flash"]["rope_scaling"], "rope_theta": 160000, "rope_type": "yarn"},
    }
    of_class = read(
        tmp_path,
        compress_ratios="absent",
        layer_types=[kinds[each] for each in PUBLISHED["DeepSeek-V4-Flash"]["compress_ratios"][:43]],
        compress_rates={kinds[4]: 4, kinds[128]: 128},
        num_hash_layers="absent",
        mlp_layer_types=["hash_moe"] * 3 + ["moe"] * 40,
        qk_rope_head_dim="absent",
        partial_rotary_factor=0.125,
        rope_scaling="absent",
        rope_parameters=ropes,
    )
    assert of_class == published


@pytest.mark.parametrize("factor", ["absent", None, 1.0])
def test_cosines_of_entries_have_no_factor(factor: float | str | None, tmp_path: Path) -> None:
    """In both forms of the file, though transformers derives 1.277 if that of its class lacks the factor."""
    published, more = (
        PUBLISHED["DeepSeek-V4-Flash"]["rope_scaling"],
        {} if factor == "absent" else {"attention_factor": factor},
    )
    ropes = {"main": {"rope_theta": 10000}, "compress": {**published, **more, "rope_theta": 160000}}
    for config in (read(tmp_path, rope_scaling={**published, **more}), read(tmp_path, rope_parameters=ropes)):
        assert config.compressed is not None and config.compressed.rope.attention_factor == 1.0


def test_the_published_file_of_pro_says_what_each_layer_sees(tmp_path: Path) -> None:
    """Its first layers have entries of 128 tokens, where those of Flash have a window alone."""
    config = read(tmp_path, "DeepSeek-V4-Pro")
    compressed, experts, index = config.compressed, config.experts, config.index
    assert compressed is not None and experts is not None and index is not None
    assert compressed.kinds == ("heavy",) * 2 + ("sparse", "heavy") * 29 + ("sparse",)
    assert (compressed.query_rank, compressed.num_groups, compressed.group_rank) == (1536, 16, 1024)
    assert (index.num_heads, index.head_dim, index.num_picks) == (64, 128, 1024)
    assert (config.num_heads, config.hc_mult, config.handoff_hidden_size) == (128, 4, 4 * 7168)
    assert (experts.num_experts, experts.num_active, experts.shared_size, experts.scaling) == (384, 6, 3072, 2.5)
    assert experts.hash_layers == (0, 1, 2) and experts.layers == tuple(range(61))
    check_shares(config, 8, "pro", has_all_heads=False)


LAYERS = {"DeepSeek-V4-Flash": (43, 21, 20), "DeepSeek-V4-Pro": (61, 30, 31)}  # all, sparse, heavy


@pytest.mark.parametrize("name", LAYERS)
def test_bytes_per_token_are_those_of_the_schema(name: str, tmp_path: Path) -> None:
    """One entry for 4 tokens and one for 128, an index key for 4, and rows of each token."""
    num_layers, num_sparse, num_heavy = LAYERS[name]
    pool = read(tmp_path, name).pool("bfloat16")
    sizes = {each.name: KvLayout.of(each, 128).page_bytes / 128 for each in pool.further}
    assert sizes == {
        "index": num_sparse * 128 / 4 * 2,
        "sparse_entries": num_sparse * 512 / 4 * 2,
        "heavy_entries": num_heavy * 512 / 128 * 2,
        "index_inputs": num_sparse * 4 * 128 * 4,
        "sparse_inputs": num_sparse * 4 * 512 * 4,
        "heavy_sums": num_heavy * 2 * 512 * 4,
    }
    assert KvLayout.of(pool, 128).page_bytes / 128 == num_layers * 512 * 2


@pytest.mark.parametrize(
    ("name", "kept", "tail"), [("DeepSeek-V4-Flash", 6_880, 95_872), ("DeepSeek-V4-Pro", 9_848, 137_920)]
)
def test_only_entries_are_kept_for_all_tokens(name: str, kept: int, tail: int, tmp_path: Path) -> None:
    """docs/models.md states these bytes per token."""
    target = read(tmp_path, name).with_tail().pool("bfloat16")
    windows = {each.name: each.window for each in target.further if each.window}
    assert windows == {"index_inputs": 8, "sparse_inputs": 8, "heavy_sums": 2, "window": 128}
    schema = make_schema(target, page_size=128)
    assert page_bytes(schema) == 128 * kept
    assert page_bytes(schema, of_tails=True) == 128 * tail
    for length, num_tails in ((1, 1), (128, 1), (129, 2), (254, 2), (255, 1), (4096, 1), (4097, 2)):
        expected = -(-length // 128) * 128 * kept + num_tails * 128 * tail
        assert handoff_bytes(schema, length).target_kv == expected, length


def test_a_prediction_layer_sees_a_window_alone(tmp_path: Path) -> None:
    layer = read(tmp_path).of_prediction_layers(1)
    assert layer.compressed is not None and layer.compressed.kinds == ("window",) and layer.further == ()
    assert layer.experts is not None and layer.experts.hash_layers == () and layer.sliding_window == (128,)
    assert layer.compressed.page_unit == 1 and layer.pool("bfloat16").num_layers == 1


def test_experts_are_packed_and_other_layers_are_in_blocks(tmp_path: Path) -> None:
    config = read(tmp_path, num_hidden_layers=3, compress_ratios=[0, 4, 128], num_hash_layers=1)
    names = {"layers.0.ffn.experts.0.w1.scale", "layers.0.attn.wq_b.scale", "layers.0.attn.wq_b.weight"}
    names |= {f"layers.{i}.ffn.experts.{e}.w{w}.scale" for i in range(3) for e in range(256) for w in (1, 2, 3)}
    specs = {spec.name: spec for spec in tensor_specs(config, names)}
    packed, scales = specs["layers.0.ffn.experts.0.w2.weight"], specs["layers.0.ffn.experts.0.w2.scale"]
    assert (packed.shape, packed.dtypes) == ((4096, 1024), ("I8", "U8"))
    assert (scales.shape, scales.dtypes[0]) == ((4096, 64), "F8_E8M0")
    in_blocks = specs["layers.0.attn.wq_b.scale"]
    assert in_blocks.shape == (256, 8) and "F8_E8M0" in in_blocks.dtypes
    assert specs["layers.0.attn.wq_b.weight"].dtypes == ("F8_E4M3",)
    assert specs["layers.0.ffn.gate.tid2eid"].shape == (129280, 6) and "layers.1.ffn.gate.tid2eid" not in specs
    assert "layers.0.ffn.gate.bias" not in specs and "layers.1.ffn.gate.bias" in specs
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.1.attn.kv_norm.weight"} <= specs.keys()
    assert specs["layers.2.attn.compressor.ape"].shape == (128, 512)
    assert specs["layers.1.attn.compressor.ape"].shape == (4, 1024)
    assert specs["layers.1.attn.indexer.compressor.ape"].shape == (4, 256)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compress_ratios": [0] * 42}, "compress_ratios = .* must list 43 layers, each one of 0, 4, 128"),
        ({"compress_ratios": [0] * 42 + [2]}, "compress_ratios = .* must list 43 layers"),
        ({"compress_ratios": [0] * 43 + [4]}, "and 0 behind them"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types = .* each sliding_attention or compressed_sparse"),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types = .* each hash_moe or moe"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2 is not served"),
        ({"o_groups": 7}, r"o_groups = 7 does not divide num_attention_heads \(64\)"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not served"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False is not served"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not served"),
        ({"expert_dtype": "int4"}, "expert_dtype = 'int4' is not served; fp8 and fp4 are"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63 must be even"),
        ({"partial_rotary_factor": "0.125"}, "partial_rotary_factor = '0.125' must be a positive number"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25 rotates other than 64 of 512 numbers"),
        ({"rope_parameters": {"main": {"partial_rotary_factor": 0.25}, "compress": {}}}, "0.25 rotates other than 64"),
        ({"rope_scaling": {"type": "yarn", "factor": 16, "attention_factor": 1.2}}, "attention_factor = 1.2 is not"),
        ({"kv_source_layers": [2, 8]}, "kv_source_layers = .* is unknown"),
        ({"engram_layer_ids": [3]}, "engram_layer_ids = .* is unknown"),
        ({"hc_mult": "absent"}, "hc_mult is missing"),
        ({"num_hash_layers": "absent"}, "num_hash_layers = None must be a whole number"),
    ],
)
def test_refusals_name_the_value(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        read(tmp_path, **change)


def test_keys_that_are_also_values_are_not_kept_in_fp8(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="DeepseekV4ForCausalLM has keys that are also values"):
        read(tmp_path).pool("bfloat16", "fp8")
