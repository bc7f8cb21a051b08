"""The start of a decode node."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.decode_node.config import DecodeConfig
from baton.decode_node.main import run
from baton.metadata.errors import ConfigError


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    """Restore pytest's log handlers after `run` has set up the process's log."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_keys_that_cannot_be_read_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    config = DecodeConfig(model=str(tmp_path / "no model"), device="cpu", keys=str(tmp_path / "no keys"))
    with pytest.raises(ConfigError, match="no keys"):
        run(config)
