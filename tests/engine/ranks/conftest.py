"""Boards of a group, for tests of several files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.engine.ranks.board import Board
from baton.engine.ranks.steps import NUM_VALUES


@pytest.fixture
def boards(tmp_path: Path) -> Iterator[list[Board]]:
    """The boards of three ranks."""
    made = [Board(tmp_path, rank, 3, NUM_VALUES, timeout_s=5.0) for rank in range(3)]
    yield made
    for board in made:
        board.close()
