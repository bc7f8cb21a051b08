"""The sequences of a benchmark are compared with the planted text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_sequences import check
from planted_text import PlantedText
from published_configs import PUBLISHED, write_config


def engine(directory: Path, **config: Any) -> Any:
    write_config(directory, PUBLISHED["Llama-3.1-8B"] | {"vocab_size": 1024, **config})
    return SimpleNamespace(model_dir=directory)


def test_tokens_of_a_planted_model_are_checked_and_counted(tmp_path: Path) -> None:
    planted, prompt = engine(tmp_path, _planted=True), [3, 1, 4, 1, 5]
    text = PlantedText(1024).continuation(prompt, 6)
    assert check(planted, prompt, text) == 6
    with pytest.raises(AssertionError, match="not the planted text"):
        check(planted, prompt, [*text[:-1], text[-1] ^ 1])


def test_tokens_of_an_unplanted_model_are_not_checked(tmp_path: Path) -> None:
    assert check(engine(tmp_path), [3, 1], [7, 7]) == 0
