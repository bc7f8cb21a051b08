"""Figures of a load, from what its requests came to."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from baton.deploy.bench.client import Reply
from baton.deploy.bench.figures import LoadFigures, load_figures, percentiles
from baton.deploy.bench.sender import SentRequest
from baton.deploy.simulation.figures import Slo


def answered(ttft_s: float, *gaps_s: float, error: str | None = None) -> SentRequest:
    times = array("d", [1.0 + ttft_s + sum(gaps_s[:index]) for index in range(len(gaps_s) + 1)])
    reply = Reply(sent_s=1.0, times=times, end_s=times[-1], num_counted=len(times), prompt_len=10, error=error)
    return SentRequest(0.0, 0.0, 1, len(times), [1], reply)


def figures_of(*asked: SentRequest, **more: Any) -> LoadFigures:
    fields = {"asked": list(asked), "took_s": 2.0, "cpu_share": 0.1, "is_complete": True, "stalls_s": [0.0]}
    return load_figures(SimpleNamespace(**fields | more), 4.0, 1, [Slo(200, 12)])  # type: ignore[arg-type]


def test_percentiles_are_interpolated() -> None:
    found = percentiles([0.004, 0.001, 0.003, 0.002, 0.005])
    assert found is not None
    assert (found.p50, found.p90, found.max) == pytest.approx((3.0, 4.6, 5.0))
    assert percentiles([]) is None


def test_a_request_of_one_token_has_no_time_per_further_token() -> None:
    found = figures_of(answered(0.1), answered(0.1, 0.02, 0.04))
    assert found.tpot is not None and found.tpot.p50 == pytest.approx(30)
    assert found.gap is not None and found.gap.max == pytest.approx(40)
    assert found.itl is not None and found.itl.p50 == pytest.approx(30)
    assert figures_of(answered(0.1)).tpot is None
    assert [each.tpot_ms for each in found.requests] == [None, pytest.approx(30)]


def test_goodput_counts_failed_requests_as_not_good() -> None:
    found = figures_of(answered(0.1, 0.01), answered(0.3, 0.01), answered(0.1, 0.01, error="HTTP 429"))
    (good,) = found.goodput
    assert (good.per_s, good.share) == (0.5, pytest.approx(1 / 3))
    assert (found.answered, found.failed, found.tokens, found.tokens_per_s) == (2, 1, 4, 2.0)


def test_without_an_answer_there_are_no_percentiles() -> None:
    found = figures_of()
    assert (found.ttft, found.goodput[0].share, found.doubts) == (None, 0.0, [])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"stalls_s": [0.02] * 3}, "read answers up to 20.0 ms late"),
        ({"cpu_share": 0.8}, "took 80% of a core"),
        ({"asked": [answered(0.1)._replace(late_s=0.03)]}, "sent requests up to 30.0 ms late"),
    ],
)
def test_a_busy_client_doubts_its_figures(more: dict[str, Any], words: str) -> None:
    (doubt,) = figures_of(answered(0.1, 0.01), **more).doubts
    assert words in doubt
    assert figures_of(answered(0.1, 0.01), stalls_s=[0.0015]).doubts == []


def test_a_delay_that_is_small_beside_the_times_is_no_doubt() -> None:
    assert figures_of(answered(10.0, 1.0), stalls_s=[0.02]).doubts == []
