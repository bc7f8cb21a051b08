"""The names of Llama's tensors: which projections are fused, in which order, and what draft heads change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from baton.engine.checkpoint.checkpoint import Checkpoint as Files
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.checkpoint.weights import CheckpointWeights, ListedWeights
from baton.engine.models.llama import read_body, read_layer

Checkpoint = Callable[..., Path]
PREFIX = "model.layers.1"


def test_projections_are_fused_in_order(checkpoint: Checkpoint) -> None:
    model_dir = checkpoint("llama", attention_bias=True, mlp_bias=True)
    weights = CheckpointWeights(Files(model_dir), torch.float32, torch.device("cpu"))
    layer = read_layer(read_model_config(model_dir), weights, PREFIX, 1)
    tensors, x = load_file(model_dir / "model.safetensors"), torch.randn(3, 64)

    def product(name: str) -> torch.Tensor:
        return F.linear(x, tensors[f"{PREFIX}.{name}.weight"], tensors[f"{PREFIX}.{name}.bias"])

    qkv = torch.cat([product(f"self_attn.{part}_proj") for part in "qkv"], dim=1)
    torch.testing.assert_close(layer.body.attention.qkv(x), qkv, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layer.body.attention.out(x), product("self_attn.o_proj"), atol=1e-4, rtol=1e-4)
    assert torch.equal(layer.norm, tensors[f"{PREFIX}.input_layernorm.weight"])
    assert layer.body.attention.index == 1 and layer.body.attention.head_norms is None


def test_each_layer_has_its_own_window_and_head_norms(checkpoint: Checkpoint) -> None:
    kinds = ["sliding_attention", "full_attention"]
    model_dir = checkpoint("qwen3", use_sliding_window=True, sliding_window=7, layer_types=kinds)
    config, weights = read_model_config(model_dir), ListedWeights()
    layers = [read_layer(config, weights, f"model.layers.{i}", i) for i in range(2)]
    assert [layer.body.attention.window for layer in layers] == [7, None]
    assert all(layer.body.attention.head_norms is not None for layer in layers)


def test_a_head_may_read_a_wider_input_and_has_no_input_norm(checkpoint: Checkpoint) -> None:
    listed = ListedWeights()
    body = read_body(read_model_config(checkpoint("llama")), listed, "midlayer", 0, in_size=128)
    shapes = {spec.name: spec.shape for spec in listed.specs}
    assert body.attention.qkv.in_size == 128 and shapes["midlayer.self_attn.v_proj.weight"] == (32, 128)
    assert "midlayer.input_layernorm.weight" not in shapes
