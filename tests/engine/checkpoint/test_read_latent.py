"""Latents as published files describe them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from published_configs import PUBLISHED, write_config

from baton.engine.checkpoint.config_file import ConfigFile
from baton.engine.checkpoint.read_attention import read_latent
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
