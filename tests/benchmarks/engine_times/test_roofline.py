"""The least bytes of a step: weights in the format in which they are stored, and no KV that a window hides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import synthetic
import tensor_files
from roofline import kv_read_tokens, weight_bytes


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


def test_a_window_bounds_the_kv_that_is_read(tmp_path: Path) -> None:
    config = tensor_files.write_config(tmp_path, synthetic.ARCHITECTURES["gpt-oss-20b"])
    assert kv_read_tokens(config, 8, 8 * 1000) == (8 * 1000 + 8 * 128) // 2
    assert kv_read_tokens(config, 8, 8 * 100) == 8 * 100
