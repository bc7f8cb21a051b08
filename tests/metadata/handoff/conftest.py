"""Ends of data links that a test opens, closed when it is over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def nodes() -> Iterator[list[Any]]:
    """A list for nodes and pools. They are closed when the test is over, the last first."""
    opened: list[Any] = []
    yield opened
    for node in reversed(opened):
        node.close()
