"""Estimates are corrected by what came."""

from __future__ import annotations

import pytest

from baton.router.placement.estimate_error import EstimateError


@pytest.mark.parametrize("num_under_way", [1, 4, 64])
def test_an_estimate_that_is_always_too_short_is_corrected(num_under_way: int) -> None:
    """However many prompts are placed before the answer to the first comes."""
    error = EstimateError()
    for step in range(40 + num_under_way):
        now = 0.01 * step
        if step >= num_under_way:
            error.observe(0.1, 0.15, now)
            assert 1.0 < error.factor(now) < 1.5001
    assert error.factor(now) == pytest.approx(1.5, rel=0.01)


def test_one_slow_answer_changes_little() -> None:
    error = EstimateError()
    error.observe(0.1, 60.0, 1.0)
    assert error.factor(1.0) == pytest.approx(4**0.25)
    error.observe(0.0, 60.0, 1.0)
    assert error.factor(1.0) == pytest.approx(4**0.25), "nothing was expected"


def test_the_correction_is_bounded() -> None:
    error = EstimateError()
    for _ in range(100):
        error.observe(0.1, 60.0, 1.0)
    assert error.factor(1.0) == pytest.approx(4.0)
    for _ in range(100):
        error.observe(0.1, 0.001, 1.0)
    assert error.factor(1.0) == pytest.approx(0.5)


def test_a_role_that_gets_no_prompts_is_tried_again() -> None:
    error = EstimateError()
    for _ in range(100):
        error.observe(0.1, 60.0, 1.0)
    assert error.factor(21.0) == pytest.approx(2.0) and error.factor(81.0) < 1.1
