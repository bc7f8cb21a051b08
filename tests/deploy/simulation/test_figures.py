"""Figures of a load: percentiles and goodput."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.deploy.simulation.figures import Record, Slo, percentile, summary


def test_percentiles_are_those_of_numpy() -> None:
    draw = random.Random(1)
    for size in (1, 2, 7, 100):
        values = sorted(draw.random() for _ in range(size))
        for percent in (0, 50, 90, 99, 100):
            assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_goodput_counts_requests_within_both_bounds() -> None:
    records = [
        Record(0.1, 0.010, 0.01, 0.02),
        Record(0.3, 0.010, 0.01, 0.02),
        Record(0.1, 0.020, 0.01, 0.05),
        Record(0.2, 0.012, 0.01, 0.01),
    ]
    row = summary(records, 2.0, [Slo(200, 12), Slo(1000, 15)])
    assert row["goodput_200_12"] == 1.0 and row["good_share_200_12"] == 0.5
    assert row["goodput_1000_15"] == 1.5 and row["requests"] == 4
    assert row["ttft_ms_p50"] == pytest.approx(150) and row["gap_ms_p99"] == pytest.approx(50, rel=0.03)


def test_without_requests_there_are_no_percentiles() -> None:
    assert summary([], 1.0, [Slo(200, 12)]) == {"requests": 0, "goodput_200_12": 0.0, "good_share_200_12": 0.0}


def test_an_slo_is_read() -> None:
    assert Slo.parse("200,12") == Slo(200.0, 12.0)


@pytest.mark.parametrize("text", ["200", "200,12,3", "a,b", "", "200,0", "-1,12", "nan,12", "200,inf"])
def test_a_wrong_slo_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=repr(text)):
        Slo.parse(text)
