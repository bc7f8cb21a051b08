"""Gemma 4: published files, its pools, and tensors of keys that nobody reads. Text and logits are compared in
test_odd_shapes.py, numbers in 16 bits in test_gemma.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from index_picks import forward
from model_pools import pools_of
from published_configs import PUBLISHED, write_config
from safetensors.torch import load_file, save_file
from ties import Reference

from baton.engine.checkpoint.model_config import Gemma4Config, RopeConfig, WindowConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.registry import load_model
from baton.engine.ranks.shares import check_shares
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.work import BatchRow
from baton.metadata.errors import ConfigError, ModelError
from baton.metadata.handoff.schema.kv_layout import planes_of

SMALL, LARGE = PUBLISHED["Gemma-4-E2B"], PUBLISHED["Gemma-4-31B"]


def test_published_files_are_read(tmp_path: Path) -> None:
    small = read_model_config(write_config(tmp_path, SMALL))
    assert small.gemma4 == Gemma4Config(20, True, False, 256, 262144)
    assert small.window == WindowConfig(RopeConfig(theta=1e4), 1, 256, has_pool=True)
    assert (small.num_kv_heads, small.head_dim) == (1, 512)
    assert small.rope == RopeConfig("proportional", 1e6, share=0.25)
    assert (small.softcap, small.score_scale, small.tie_word_embeddings) == (30.0, 1.0, True)
    large = read_model_config(write_config(tmp_path, LARGE))
    assert large.window is not None
    assert large.gemma4 == Gemma4Config(0, False, True, 0, 262144)
    assert (large.num_kv_heads, large.head_dim) == (4, 512)
    assert large.window == WindowConfig(RopeConfig(theta=1e4), 16, 256, has_pool=True)
    check_shares(large, 8, "gemma")
    with pytest.raises(ConfigError, match="gemma has 3 KV heads, which 2 ranks cannot share"):
        check_shares(replace(large, window=replace(large.window, num_kv_heads=3)), 2, "gemma")


def test_layers_with_a_window_have_a_pool_and_layers_without_keys_take_no_bytes(tmp_path: Path) -> None:
    """In the small model the last 20 of 35 layers share the keys of layers 13 and 14."""
    config = read_model_config(write_config(tmp_path, SMALL))
    pool = config.pool("bfloat16")
    [windowed] = pool.further
    assert (pool.num_layers, windowed.name, windowed.num_layers) == (3, "window", 12)
    assert [(plane.name, plane.num_heads, plane.head_dim) for plane in planes_of(pool)] == [
        ("k", 1, 512),
        ("v", 1, 512),
    ]
    assert [(plane.name, plane.num_heads, plane.head_dim) for plane in windowed.planes] == [
        ("k", 1, 256),
        ("v", 1, 256),
    ]
    assert [config.kv_place(layer) for layer in (0, 4, 13, 14, 15, 19, 33, 34)] == [0, 0, 11, 2, 11, 2, 11, 2]
    fp8 = config.pool("bfloat16", "fp8")
    assert {plane.dtype for plane in (*planes_of(fp8), *fp8.further[0].planes)} == {"float8_e4m3fn"}


def test_a_layer_shares_the_keys_of_its_own_kind_where_all_lie_in_one_pool(tmp_path: Path) -> None:
    text = SMALL["text_config"] | {"global_head_dim": SMALL["text_config"]["head_dim"]}
    config = read_model_config(write_config(tmp_path, SMALL | {"text_config": text}))
    assert not config.has_window_pool
    assert [config.kv_place(layer) for layer in (0, 4, 13, 14, 15, 19, 33, 34)] == [0, 4, 13, 14, 13, 14, 13, 14]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"enable_moe_block": True}, "num_experts = None must be a whole number of at least 1"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts = 5 is more than there are"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not served"),
        ({"layer_types": ["sliding_attention"] * 35}, "layer_types = .* whose last layer is full_attention"),
        ({"num_kv_shared_layers": 34}, "num_kv_shared_layers = 34 leaves no layer of some kind"),
        ({"layer_types": None}, "must be a list whose last layer"),
        ({"rope_parameters": None}, "rope_parameters = None is not served; write those of full_attention"),
        ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input = 100 is less than vocab_size"),
        ({"global_head_dim": 33}, "global_head_dim = 33 is odd"),
        (
            {"per_layer_config": {"03": {"head_dim": 8}}},
            "per_layer_config = .* layers without a window, and these alone",
        ),
        (
            {"per_layer_config": {"04": {"sliding_window": 8}}, "global_head_dim": None},
            "per_layer_config.04.sliding_window = 8 is unknown",
        ),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping = -1 must be a positive number"),
    ],
)
def test_refusals_name_the_value(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    text = SMALL["text_config"] | fields
    with pytest.raises(ModelError, match=words):
        read_model_config(write_config(tmp_path, SMALL | {"text_config": text}))


def test_keys_of_layers_that_share_others_are_left_alone(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Published files hold them, and nobody reads them."""
    model = checkpoint("gemma4_text", num_kv_shared_layers=1)
    config, tensors = read_model_config(model), load_file(model / "model.safetensors")
    pools, batch = pools_of(config, 4, 6), ForwardBatch.build([BatchRow([5, 6, 7], 0, [1])], 4, "cpu")
    expected = load_model(model, config, torch.float32, "cpu").forward(batch, pools)
    unread = {f"model.layers.2.self_attn.{name}.weight": torch.ones(2, 2) for name in ("k_proj", "v_proj", "k_norm")}
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((model / file).read_bytes())
    save_file(tensors | unread, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(load_model(tmp_path, config, torch.float32, "cpu").forward(batch, pools), expected)


def test_a_file_without_widths_by_layer_has_one_for_all(checkpoint: Callable[..., Path]) -> None:
    """transformers writes an empty per_layer_config if heads are alike."""
    model = checkpoint("gemma4_text", head_dim=24, global_head_dim=24)
    config = read_model_config(model)
    assert (config.head_dim, config.has_window_pool) == (24, False)
    ids = list(range(3, 33))
    torch.testing.assert_close(forward(model, ids)[0], Reference(model).all_logits(ids), atol=1e-4, rtol=0)
