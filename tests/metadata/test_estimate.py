"""Estimates: what they believe, what they forget, and how sure they are."""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
from collections.abc import Sequence

import pytest
from estimate_traces import TRACES, regret

from baton.metadata.estimate import Estimate, Fading


def test_nothing_is_known_before_the_first_measurement() -> None:
    estimate = Estimate(memory=16)
    assert (estimate.mean, estimate.upper(2), estimate.error, estimate.count) == (0.0, 0.0, 0.0, 0)


def test_the_first_measurements_weigh_the_same_and_later_ones_are_forgotten() -> None:
    estimate, values = Estimate(memory=4), [1.0, 5.0, 3.0, 7.0]
    for value in values:
        estimate.observe(value)
    assert estimate.mean == pytest.approx(statistics.mean(values))
    estimate.observe(8.0)
    assert estimate.mean == pytest.approx(4.0 + (8.0 - 4.0) / 4)
    for _ in range(100):
        estimate.observe(2.0)
    assert estimate.mean == pytest.approx(2.0)
    assert estimate.upper(2) == pytest.approx(2.0)


def test_after_a_change_earlier_measurements_weigh_less() -> None:
    estimate = Estimate(memory=16)
    for _ in range(16):
        estimate.observe(1.0)
    estimate.fade(1)
    estimate.observe(3.0)
    assert estimate.mean == 2.0


@pytest.mark.parametrize("firsts", list(itertools.permutations([1.1, 1.2, 1000.0])), ids=str)
def test_a_disturbance_only_adds_to_a_time(firsts: Sequence[float]) -> None:
    for memory in (1, 32):
        estimate = Estimate(num_kept=3, memory=memory)
        for seconds in firsts:
            estimate.observe(seconds)
        assert estimate.mean == pytest.approx(1.1)
        for _ in range(3):
            estimate.observe(1.1)
        mean = estimate.mean
        assert [estimate.observe(1000.0) for _ in range(2)] == pytest.approx([0.0, 0.0]) and estimate.mean == mean


def test_the_first_measurement_alone_does_not_change_a_guess() -> None:
    estimate = Estimate(2.0, num_kept=3, memory=32)
    assert estimate.observe(40.0) == 0.0 and estimate.mean == 2.0
    assert estimate.observe(3.0) == pytest.approx(1.0) and estimate.mean == 3.0


def test_a_guess_with_a_weight_counts_as_so_many_measurements() -> None:
    estimate = Estimate(0.0, memory=4, weight=3)
    estimate.observe(1.0)
    assert estimate.mean == 0.25


def test_the_median_of_the_last_ones_takes_outliers_on_both_sides() -> None:
    estimate = Estimate(num_kept=15, quantile=0.5)
    for seconds in (0.02, 0.5, 0.01):
        estimate.observe(seconds)
    assert estimate.mean == 0.02
    for _ in range(15):
        estimate.observe(0.0)
    assert estimate.mean == 0.0


def test_bad_news_fade_and_good_news_stay() -> None:
    for bad, good in ((4.0, 0.5), (1.5, 0.25)):
        estimate = Estimate(1.0, memory=4, weight=1, fading=Fading(1.0, 10.0, 5.0))
        for _ in range(60):
            estimate.observe(bad, 100.0)
        assert estimate.at(110.0) == pytest.approx(bad)
        assert estimate.at(115.0) == pytest.approx(1 + (bad - 1) / 2) and estimate.at(1000.0) == pytest.approx(1.0)
        for _ in range(60):
            estimate.observe(good, 100.0)
        assert estimate.at(1000.0) == pytest.approx(good)


def test_the_error_follows_the_spread_and_shrinks_with_what_was_seen() -> None:
    errors: list[float] = []
    for spread in (0.01, 0.1):
        estimate, rng = Estimate(num_kept=3, memory=32), random.Random(1)
        for count in range(200):
            estimate.observe(rng.gauss(0.0, spread))
            if count in (4, 199):
                errors.append(estimate.error)
    assert errors[0] > errors[1] > 0 and errors[2] > errors[3] > 0, errors
    assert 3 < errors[3] / errors[1] < 30 and math.isclose(errors[1], 0.01 / math.sqrt(32 / 3), rel_tol=2.0), errors


# --- regret: decisions lose no more than they did when each had an estimator of its own ---
# `python tests/support/oracles/estimate_traces.py SEEDS DECISION` prints such figures. The bounds are those of the
# estimators that `Estimate` replaced, over the same seeds.

NUM_SEEDS = {"drafts": 16, "gaps": 8, "placement": 10, "retry": 10}
BOUNDS = {  # in the order of TRACES
    "drafts": [(0.01248,), (0.01229,), (0.01919,), (-0.03068,), (0.03892,)],
    "gaps": [(0.00348, 0.3485), (0.00741, 0.7147), (0.00530, 1.1275), (0.00429, 0.9582), (0.00588, 1.3965)],
    "placement": [(0.00018,), (0.01275,), (0.00017,), (0.00032,), (0.00061,)],
    "retry": [(0.07328,), (0.22959,), (0.08983,), (0.10687,), (0.09996,)],
}
SLACK = {"drafts": (0.0002,), "gaps": (0.0001, 0.01), "placement": (0.0001,), "retry": (0.0001,)}  # of the seeds
SLOW = {"drafts", "gaps"}  # test_draft_length.py and test_chunk_length.py hold less of them in less time


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("decision", NUM_SEEDS)
def test_decisions_lose_no_more_than_by_the_estimators_before(decision: str, trace: str) -> None:
    if decision in SLOW and "BATON_WHOLE_MATRIX" not in os.environ:
        pytest.skip("takes long; runs with BATON_WHOLE_MATRIX=1")
    bounds = BOUNDS[decision][TRACES.index(trace)]
    found = regret(decision, trace, NUM_SEEDS[decision])
    assert all(each <= bound + slack for each, bound, slack in zip(found, bounds, SLACK[decision], strict=True)), found
