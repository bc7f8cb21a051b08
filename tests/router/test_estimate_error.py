"""Estimates are corrected by what came."""

from __future__ import annotations

import pytest

from baton.router.estimate_error import EstimateError


def test_an_estimate_that_is_always_too_short_is_corrected() -> None:
    error = EstimateError()
    for _ in range(40):
        error.observe(0.1 * error.factor, 0.15)
    assert error.factor == pytest.approx(1.5, rel=0.01)


def test_one_slow_answer_changes_little() -> None:
    error = EstimateError()
    error.observe(0.1, 60.0)
    assert 1.0 < error.factor < 1.2
    error.observe(0.0, 60.0)
    assert error.factor < 1.2, "nothing was expected"


def test_the_correction_is_bounded() -> None:
    error = EstimateError()
    for _ in range(100):
        error.observe(0.1, 60.0)
    assert error.factor == 4.0
    for _ in range(100):
        error.observe(0.1, 0.001)
    assert error.factor == 0.5
