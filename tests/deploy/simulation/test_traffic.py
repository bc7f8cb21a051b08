"""Traffic: when requests arrive."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from baton.deploy.simulation.traffic import Arrival, arrival_times, poisson, read_trace


def test_poisson_arrivals_have_their_rate_and_their_spread() -> None:
    arrivals = poisson(50.0, 200.0, 1024, 256, seed=3)
    assert len(arrivals) == pytest.approx(10_000, rel=0.03)
    assert all(each[1:] == (1024, 256, (), None) for each in arrivals)
    gaps = [two.at_s - one.at_s for one, two in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 == pytest.approx(mean, rel=0.05)  # as of an exponential distribution
    assert poisson(50.0, 200.0, 1024, 256, seed=3) == arrivals != poisson(50.0, 200.0, 1024, 256, seed=4)


def test_a_trace_starts_at_zero_and_may_be_replayed_faster() -> None:
    entries = [{"timestamp": 3000, "input_length": 7, "output_length": 2}, {"timestamp": 1000, "input_length": 5}]
    entries[1]["output_length"] = 1
    lines = [json.dumps(entry | {"hash_ids": [1]}) for entry in entries]
    assert read_trace(lines) == [Arrival(0.0, 5, 1, (1,)), Arrival(2.0, 7, 2, (1,))]
    assert read_trace(lines, speed=4.0) == [Arrival(0.0, 5, 1, (1,)), Arrival(0.5, 7, 2, (1,))]


def test_a_trace_may_hold_the_prompts_themselves() -> None:
    (arrival,) = read_trace(['{"prompt": "twelve chars", "output_length": 2}'], is_timed=False)
    assert arrival == Arrival(0.0, 3, 2, text="twelve chars")


def test_arrivals_are_even_or_come_in_bursts() -> None:
    assert arrival_times(4.0, 1.1, seed=1, burstiness=None) == [0.25, 0.5, 0.75, 1.0]
    bursts = arrival_times(50.0, 200.0, seed=1, burstiness=0.25)
    gaps = [two - one for one, two in pairwise(bursts)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.02, rel=0.05) and deviation / mean == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is '{'"),
        ("[1, 2]", "must be a JSON object"),
        ('{"timestamp": 1, "input_length": 3}', "output_length"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 3}', "asks for 0 \\+ 3 tokens"),
        ('{"timestamp": 1, "input_length": 1.5, "output_length": 3}', "use whole numbers"),
        ('{"timestamp": 1, "prompt": 7, "output_length": 3}', "prompt is no text"),
        ('{"timestamp": 1, "input_length": "7", "output_length": 3}', "use whole numbers"),
    ],
)
def test_a_line_that_is_no_request_is_named(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_trace(['{"timestamp": 0, "input_length": 1, "output_length": 1}', line])
