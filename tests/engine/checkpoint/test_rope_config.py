"""Yarn's factor of files that do not state it."""

from __future__ import annotations

import math

import pytest

from baton.engine.checkpoint.rope_config import yarn_attention_factor


@pytest.mark.parametrize(
    ("factor", "mscale", "all_dim", "expected"),
    [
        (32.0, None, None, 0.1 * math.log(32) + 1),
        (1.0, None, None, 1.0),
        (40.0, 1.0, 1.0, 1.0),
        (40.0, 0.707, 1.0, (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
        (40.0, 0.707, None, 0.1 * math.log(40) + 1),  # both or none count
    ],
)
def test_yarn_attention_factor(factor: float, mscale: float | None, all_dim: float | None, expected: float) -> None:
    assert yarn_attention_factor(factor, mscale, all_dim) == pytest.approx(expected)
