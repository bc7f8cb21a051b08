"""Numbers of ranks that cannot share a published model, by the sentence that says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from published_configs import PUBLISHED, write_config

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.ranks.shares import check_shares
from baton.metadata.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "size", "has_all_heads", "words"),
    [
        ("Qwen2.5-7B", 4, False, None),
        ("Qwen2.5-7B", 8, False, "m has 28 query heads, which 8 ranks cannot divide; let --tp be a divisor"),
        ("Qwen2.5-7B", 8, True, None),
        ("Qwen2.5-7B", 5, True, "m has 18944 hidden units, which 5 ranks cannot divide; let --dp-attention be a"),
        ("Mistral-7B-v0.3", 16, False, None),  # several ranks have one KV head
        ("Qwen3-32B-FP8", 16, False, None),
        ("DeepSeek-V3", 32, False, "m has FP8 scales for blocks of 128; 32 ranks would have .* cuts a block"),
        ("gpt-oss-20b", 8, False, None),
        ("Qwen3-Next-80B-A3B", 16, False, None),
        ("Kimi-Linear-48B-A3B", 32, False, None),
        (
            "Qwen3-Next-80B-A3B",
            12,
            True,
            "m has 5120 hidden units, which 12 ranks cannot divide; let --dp-attention be",
        ),
    ],
)
def test_shares(name: str, size: int, has_all_heads: bool, words: str | None, tmp_path: Path) -> None:
    config = read_model_config(write_config(tmp_path, PUBLISHED[name]))
    if words is None:
        check_shares(config, size, "m", has_all_heads=has_all_heads)
        return
    with pytest.raises(ConfigError, match=words):
        check_shares(config, size, "m", has_all_heads=has_all_heads)
