"""Latents and indexers as published files describe them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from published_configs import PUBLISHED, write_config

from baton.engine.checkpoint.config_file import ConfigFile
from baton.engine.checkpoint.model_config import Further, ModelConfig
from baton.engine.checkpoint.read_attention import read_latent
from baton.engine.checkpoint.read_config import read_model_config
from baton.metadata.errors import ModelError


def read(tmp_path: Path, **changes: Any) -> Any:
    directory = write_config(tmp_path, PUBLISHED["DeepSeek-V2-Lite"] | changes)
    return read_latent(ConfigFile(directory / "config.json"))


def test_a_stretched_context_scales_the_scores(tmp_path: Path) -> None:
    latent = read(tmp_path)
    assert (latent.rank, latent.query_rank, latent.plain_dim, latent.rope_dim, latent.value_dim) == (
        512,
        None,
        128,
        64,
        128,
    )
    assert latent.scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert read(tmp_path, rope_scaling=None).scale == 192**-0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_key_value_heads": 8}, r"num_key_value_heads = 8 is not served; num_attention_heads \(16\) is"),
        ({"attention_bias": True}, "attention_bias = True is not served; false is"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63 is odd"),
    ],
)
def test_refusals_name_the_value(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        read(tmp_path, **change)


def test_null_means_what_transformers_takes_it_for(tmp_path: Path) -> None:
    assert not read(tmp_path, rope_interleave=None).is_interleaved and read(tmp_path).is_interleaved
    with pytest.raises(ModelError, match="rope_theta = None must be a positive number"):
        read_whole(tmp_path, "Mistral 4 without images", rope_parameters=None)


def read_whole(tmp_path: Path, name: str, **changes: Any) -> ModelConfig:
    return read_model_config(write_config(tmp_path, PUBLISHED[name] | changes))


def test_each_layer_of_deepseek_has_an_indexer_that_turns_halves(tmp_path: Path) -> None:
    config = read_whole(tmp_path, "DeepSeek-V3.2")
    assert config.index is not None
    assert (config.index.num_heads, config.index.head_dim, config.index.num_picks) == (64, 128, 2048)
    assert not config.index.is_interleaved and config.latent is not None and config.latent.is_interleaved
    assert config.further == (Further("index", tuple(range(61)), 128),)


def test_some_layers_of_glm_share_the_picks_of_a_layer_before_them(tmp_path: Path) -> None:
    listed = read_whole(tmp_path, "GLM-5.2")
    assert listed.index is not None and listed.index.is_interleaved
    assert listed.further[0].layers == (0, 1, 2, *range(6, 78, 4)) and len(listed.further[0].layers) == 21
    by_step = read_whole(tmp_path, "GLM-5.2", indexer_types=None)
    letters = "".join("F" if i in listed.further[0].layers else "S" for i in range(78))
    by_letters = read_whole(tmp_path, "GLM-5.2", indexer_types=None, index_topk_pattern=letters)
    assert by_step.further == by_letters.further == listed.further
    assert read_whole(tmp_path, "GLM-5").further[0].layers == tuple(range(78))
    assert not read_whole(tmp_path, "GLM-5", indexer_rope_interleave=False).index.is_interleaved


def test_a_prediction_layer_has_an_indexer_of_its_own(tmp_path: Path) -> None:
    layer = read_whole(tmp_path, "GLM-5.2").of_prediction_layers(1)
    assert layer.num_layers == 1 and layer.further == (Further("index", (0,), 128),)
    assert layer.pool("bfloat16").further[0].num_layers == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"index_head_dim": 32}, r"index_head_dim = 32 is less than qk_rope_head_dim \(64\), which is rotated"),
        ({"index_topk": 0}, "index_topk = 0 must be a whole number of at least 1"),
        ({"index_topk": 8193}, "index_topk = 8193 is more than 8192, the most tokens that an indexer can choose here"),
        ({"index_topk": None}, "index_topk = None must be a whole number of at least 1"),
        ({"q_lora_rank": None}, "q_lora_rank = 'null' is not served; indexers read the latent of queries"),
        ({"indexer_types": ["full"] * 77}, "indexer_types = .* must list 78 layers, each full or shared"),
        ({"indexer_types": ["shared"] + ["full"] * 77}, "lets the first layer share picks, but no layer before it has"),
        ({"index_topk_pattern": "F" * 77 + "X"}, "index_topk_pattern = 'F+X' must list 78 layers"),
        (
            {"mlp_layer_types": None, "first_k_dense_replace": None},
            "first_k_dense_replace or mlp_layer_types is missing, and its default is not certain",
        ),
        ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype = 'bfloat16' is not served for GlmMoeDsaForCausalLM"),
        ({"index_kpool": 4}, "index_kpool = 4 is unknown, and could change what GlmMoeDsaForCausalLM computes"),
        ({"layer_types": ["full_attention"] * 78}, "layer_types = .* is not served; indexed_attention and deep"),
    ],
)
def test_refusals_of_indexers_name_the_value(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        read_whole(tmp_path, "GLM-5", **change)
