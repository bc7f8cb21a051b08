"""MiMo-V2-Flash: its config.json and pools. test_odd_shapes.py compares its numbers and its text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from published_configs import PUBLISHED

from baton.engine.checkpoint.model_config import ModelConfig, RopeConfig, WindowConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.metadata.errors import ConfigError, ModelError
from baton.metadata.handoff.schema.schema import make_schema, page_bytes, pool_words, pools

MIMO = PUBLISHED["mimo-v2-flash"]
SHARES = (("full_attention", 0.334), ("sliding_attention", 0.5))
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def read(directory: Path, fields: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(fields))
    return read_model_config(directory)


def test_a_published_file_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    config = read(tmp_path, MIMO)
    assert (config.head_dim, config.value_dim, config.rotary_dim, config.value_scale) == (192, 128, 64, 0.707)
    assert config.sliding_window[:7] == (None, *[129] * 4, None, 129) and config.sliding_window[-1] is None
    assert (config.rope, config.rms_norm_eps) == (RopeConfig(theta=5e6), 1e-5)
    assert config.window == WindowConfig(RopeConfig(theta=1e4), 8, 192, has_pool=True)
    assert config.experts is not None and config.experts.layers == tuple(range(1, 48)) and config.experts.scaling == 1
    spelled = {
        key: value for key, value in MIMO.items() if not key.startswith(("swa_num", "swa_head", "swa_v", "hybrid"))
    }
    assert read(tmp_path, spelled) == config, "each sixth layer has no window anyway"


def test_a_token_takes_as_many_bytes_as_its_keys_and_values_are_wide(tmp_path: Path) -> None:
    schema = make_schema(read(tmp_path, MIMO).pool("bfloat16"), page_size=64)
    assert {name: pool_words(pool) for name, pool in pools(schema).items()} == {
        "target": "9 layers x (k: 4 heads x 192 bfloat16)",
        "target.window": "39 layers x (k: 8 heads x 192 bfloat16)",
        "target.values": "9 layers x (v: 4 heads x 128 bfloat16)",
        "target.window_values": "39 layers x (v: 8 heads x 128 bfloat16)",
    }
    assert page_bytes(schema) == 64 * 2 * (9 * 4 + 39 * 8) * (192 + 128)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"v_head_dim": 256, "swa_v_head_dim": None}, r"v_head_dim = 256 is not served; 192 \(head_dim\) or less is"),
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads = 4 is not served; 8 is"),
        ({"swa_head_dim": 128}, "swa_head_dim = 128 is not served; 192 is"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias"),
        ({"attention_projection_layout": "fused_qkv"}, "attention_projection_layout"),
        ({"hybrid_layer_pattern": "1"}, "must be lists"),
        (
            {"quantization_config": FP8_BLOCKS},
            "quantization_config = 'fp8' scales blocks of 128 rows, which heads of 192",
        ),
        (
            {"rope_parameters": {kind: {"rope_theta": 1e4, "partial_rotary_factor": share} for kind, share in SHARES}},
            "sliding_attention.partial_rotary_factor = 0.5 is not served; that of full_attention .0.334. is",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        read(tmp_path, MIMO | changes)


def test_narrow_values_are_not_kept_in_fp8(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="values narrower than keys, which are kept in the model's type"):
        read(tmp_path, MIMO).pool("bfloat16", "fp8")
