"""Traffic: when requests arrive."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from baton.deploy.simulation.traffic import Arrival, poisson, read_trace


def test_poisson_arrivals_have_their_rate_and_their_spread() -> None:
    arrivals = poisson(50.0, 200.0, 1024, 256, seed=3)
    assert len(arrivals) == pytest.approx(10_000, rel=0.03)
    assert all(each[1:] == (1024, 256) for each in arrivals)
    gaps = [two.at_s - one.at_s for one, two in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 == pytest.approx(mean, rel=0.05)  # as of an exponential distribution
    assert poisson(50.0, 200.0, 1024, 256, seed=3) == arrivals != poisson(50.0, 200.0, 1024, 256, seed=4)


def test_a_trace_starts_at_zero_and_may_be_replayed_faster() -> None:
    entries = [{"timestamp": 3000, "input_length": 7, "output_length": 2}, {"timestamp": 1000, "input_length": 5}]
    entries[1]["output_length"] = 1
    lines = [json.dumps(entry | {"hash_ids": [1]}) for entry in entries]
    assert read_trace(lines) == [Arrival(0.0, 5, 1), Arrival(2.0, 7, 2)]
    assert read_trace(lines, speed=4.0) == [Arrival(0.0, 5, 1), Arrival(0.5, 7, 2)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is '{'"),
        ("[1, 2]", "must be a JSON object"),
        ('{"timestamp": 1, "input_length": 3}', "output_length"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 3}', "asks for 0 \\+ 3 tokens"),
        ('{"timestamp": 1, "input_length": 1.5, "output_length": 3}', "use whole numbers"),
        ('{"timestamp": 1, "input_length": "7", "output_length": 3}', "use whole numbers"),
    ],
)
def test_a_line_that_is_no_request_is_named(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_trace(['{"timestamp": 0, "input_length": 1, "output_length": 1}', line])
