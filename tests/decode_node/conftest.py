"""Fixtures of the decode node's tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import drafters
import pytest
from matrix import Plain


@pytest.fixture(scope="module")
def plain(checkpoint: Callable[..., Path]) -> Callable[[str], tuple[Path, Plain]]:
    """`plain(name)`: the model that a drafter is for, and its output without speculation, computed once per model."""
    plain_of = functools.cache(Plain.of)

    def get(name: str) -> tuple[Path, Plain]:
        model = drafters.target_of(name, checkpoint)
        return model, plain_of(model)

    return get
