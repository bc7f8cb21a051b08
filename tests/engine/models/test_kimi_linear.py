"""Kimi-Linear: published files, refusals and pages. Its numbers and its text are compared in test_odd_shapes.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from index_picks import forward
from published_configs import PUBLISHED, write_config
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from baton.engine.checkpoint.read_config import read_model_config
from baton.metadata.errors import ModelError

FIELDS = PUBLISHED["Kimi-Linear-48B-A3B"]
LINEAR: dict[str, Any] = FIELDS["linear_attn_config"]


def test_a_published_file_means_what_transformers_writes_for_it(tmp_path: Path) -> None:
    """The latter has other names, layers that count from zero, and no list of its own for the delta rule."""
    own = {key: value for key, value in FIELDS.items() if not key.startswith("rope_")}
    theirs = AutoConfig.from_pretrained(write_config(tmp_path / "theirs", own))
    del theirs.linear_attn_config, theirs.moe_router_activation_func
    theirs.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["layer_types"][2:5] == ["linear_attention", "full_attention", "linear_attention"]
    ours = read_model_config(write_config(tmp_path / "ours", FIELDS))
    assert ours == read_model_config(tmp_path / "saved")
    assert ours.delta is not None and ours.delta.layers[:4] == (0, 1, 2, 4) and len(ours.delta.layers) == 20
    assert ours.experts is not None and ours.experts.layers == tuple(range(1, 27))
    assert (ours.experts.num_active, ours.experts.shared_size, ours.experts.scoring) == (8, 1024, "sigmoid")
    assert ours.context_len == 1 << 20


def test_a_sequence_keeps_latents_of_seven_layers_and_the_states_of_twenty(tmp_path: Path) -> None:
    """A row of a token has a decay of each channel."""
    pool = read_model_config(write_config(tmp_path, FIELDS)).with_tail().pool("bfloat16", page_size=64)
    [latents], (rows, _, states) = pool.planes, pool.further
    assert (pool.num_layers, latents.num_heads, latents.head_dim) == (7, 1, 512 + 64)
    assert [(each.num_layers, each.planes[0].num_heads) for each in (rows, states)] == [(20, 32), (20, 32)]
    assert rows.planes[0].head_dim == 3 * 128 + 1 + 128
    assert (64 * states.planes[0].head_dim, states.planes[0].dtype) == (128 * 128, "float32")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling = .* is not served: no layer rotates"),
        ({"mla_use_nope": False}, "mla_use_nope = False is not served for KimiLinearForCausalLM; True is"),
        ({"use_grouped_topk": False}, "use_grouped_topk = False is not served"),
        ({"moe_router_activation_func": "softmax"}, "scoring_func = 'softmax' is not served .* sigmoid is"),
        ({"num_experts_per_tok": 4}, r"num_experts_per_tok = 4 differs from num_experts_per_token \(8\)"),
        ({"linear_attn_config": LINEAR | {"kda_layers": [1, 2]}}, "kda_layers = .* must list the layers 1 to 27 once"),
        ({"linear_attn_config": LINEAR | {"full_attn_layers": 4}}, "kda_layers = .* must list the layers"),
        ({"linear_attn_config": LINEAR | {"num_heads": None}}, "linear_num_key_heads = None must be a whole number"),
        ({"linear_attn_config": LINEAR | {"gate_lower_bound": -5.0}}, "gate_lower_bound = -5.0 is unknown"),
        ({"linear_attn_config": None}, "linear_num_key_heads = None must be|layer_types"),
    ],
)
def test_refusals_name_the_value(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        read_model_config(write_config(tmp_path, FIELDS | fields))


def test_dense_layers_are_found_by_their_published_names(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """transformers writes them by the name of mixtures."""
    model = checkpoint("kimi_linear")
    tensors = load_file(model / "model.safetensors")
    pattern = re.compile(r"block_sparse_moe\.(?=(gate|up|down)_proj)")
    published = {pattern.sub("mlp.", name): each for name, each in tensors.items()}
    assert published.keys() - tensors.keys() == {
        f"model.layers.0.mlp.{each}_proj.weight" for each in ("gate", "up", "down")
    }
    for each in ("config.json", "tokenizer.json"):
        (tmp_path / each).symlink_to(model / each)
    save_file(published, tmp_path / "model.safetensors", {"format": "pt"})
    ids = list(range(1, 20))
    assert torch.equal(forward(tmp_path, ids)[0], forward(model, ids)[0])
