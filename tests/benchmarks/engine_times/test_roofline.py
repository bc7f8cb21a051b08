"""The least bytes of a step: weights in the format in which they are stored, and no KV that a window hides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
import tensor_files
from published_configs import PUBLISHED, write_config
from roofline import kv_read_tokens, state_bytes, state_flops, weight_bytes
from safetensors.torch import load_file

from baton.engine.checkpoint.read_config import read_model_config


@pytest.mark.parametrize(
    ("architecture", "fields", "of_expert", "of_others"),
    [("gpt-oss-20b", {}, 17 / 32, 2), ("llama-3.1-8b", synthetic.FP8_BLOCKS, 1, 1), ("qwen3-30b-a3b", {}, 2, 2)],
)
def test_weights_count_as_they_are_stored(
    architecture: str, fields: dict[str, Any], of_expert: float, of_others: float, tmp_path: Path
) -> None:
    config = tensor_files.write_config(tmp_path, synthetic.ARCHITECTURES[architecture] | fields)
    size, head = config.hidden_size, config.hidden_size * config.vocab_size
    others, expert, num_active = config.attention_products, 0, 0
    if config.experts is None:
        others += 3 * size * config.intermediate_size
    else:
        expert, num_active = 3 * size * config.experts.inner_size, config.experts.num_active
    read, products = weight_bytes(config, 1)
    assert read == pytest.approx(config.num_layers * (others * of_others + num_active * expert * of_expert) + 2 * head)
    assert products == config.num_layers * (others + num_active * expert) + head
    if config.experts is not None:
        most = others * of_others + config.experts.num_experts * expert * of_expert
        assert weight_bytes(config, 4096)[0] == pytest.approx(config.num_layers * most + 2 * head)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear"])
def test_matrices_of_layers_with_a_delta_rule_count_as_the_checkpoint_has_them(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    config, stored = read_model_config(checkpoint(family)), load_file(checkpoint(family) / "model.safetensors")
    skipped = (
        "embed_tokens",
        "conv1d",
        "shared_expert_gate",
        "mlp.gate.weight",
        "block_sparse_moe.gate.weight",
        "A_log",
    )
    counted = [
        tensor for name, tensor in stored.items() if tensor.ndim > 1 and not any(each in name for each in skipped)
    ]
    assert weight_bytes(config, 10**6)[0] == pytest.approx(2 * sum(tensor.numel() for tensor in counted), abs=8)


@pytest.mark.parametrize(
    ("name", "state", "rows"),
    [("Qwen3-Next-80B-A3B", 75.5, 14.3), ("Qwen3.5-35B-A3B", 62.9, 11.9), ("Kimi-Linear-48B-A3B", 41.9, 15.8)],
)
def test_a_step_of_a_published_model_reads_its_active_weights_and_a_state_per_sequence(
    name: str, state: float, rows: float, tmp_path: Path
) -> None:
    """MB of the states of a sequence in float32, and of the rows of half a block in all layers."""
    config = read_model_config(write_config(tmp_path, PUBLISHED[name]))
    assert weight_bytes(config, 1)[1] / 1e9 == pytest.approx(3.2, abs=0.4), "A3B"
    assert state_bytes(config, 8) == pytest.approx(8e6 * (state * 65 / 64 + rows), rel=0.005)
    assert state_flops(config) > 0 and state_bytes(replace(config, delta=None), 8) == 0


def test_a_window_bounds_the_kv_that_is_read(tmp_path: Path) -> None:
    config = tensor_files.write_config(tmp_path, synthetic.ARCHITECTURES["gpt-oss-20b"])
    assert kv_read_tokens(config, 8, 8 * 1000) == (8 * 1000 + 8 * 128) // 2
    assert kv_read_tokens(config, 8, 8 * 100) == 8 * 100
