"""Where an engine's files of cached pages lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.engine.config import EngineConfig
from baton.engine.startup import load_engine
from baton.metadata.errors import ConfigError


def test_only_an_engine_of_equal_weights_and_schema_gets_the_files(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    def directory(model: Path) -> str:
        config = EngineConfig(
            model=str(model),
            num_pages=20,
            page_size=4,
            chunk_tokens=8,
            device="cpu",
            threads=1,
            host_cache_gb=0.001,
            disk_cache=str(tmp_path / "files"),
        )
        engine = load_engine(config)
        tier = engine.cache.tier
        assert tier is not None and tier.disk is not None
        path = tier.disk.thread.path
        engine.cache.close()
        return path.name

    llama = directory(checkpoint("llama"))
    assert directory(checkpoint("llama")) == llama, "a later process gets those of an earlier one"
    assert directory(checkpoint("qwen3")) != llama


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"disk_cache": "files"}, "needs --host-cache-gb"),
        ({"host_cache_gb": 0.0}, r"host_cache_gb is 0.0; it must be above 0"),
        ({"disk_cache_ttl": -1.0}, r"disk_cache_ttl is -1.0; it must be above 0"),
    ],
)
def test_settings_that_do_not_work_are_refused_in_words(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**settings)  # type: ignore[arg-type]
