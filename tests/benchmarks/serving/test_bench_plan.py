"""The comparison of simulated with real runs: the error that `baton plan` states is the one that is found."""

from __future__ import annotations

import pytest
from bench_plan import MEASURED, NAME, Comparison, compare, comparison_row, largest_errors

from baton.deploy.simulation.times import find, read


def test_the_stated_error_is_the_largest_one_found() -> None:
    times = read(find(NAME))
    ttft, tpot = largest_errors([compare(times, real) for real in MEASURED])
    assert times.error is not None
    assert times.error.ttft_p50 == pytest.approx(ttft, abs=0.005)
    assert times.error.tpot_p99 == pytest.approx(tpot, abs=0.005)


def test_an_error_is_a_share_of_the_real_value() -> None:
    real = MEASURED[0]
    comparison = Comparison(real, real._replace(ttft_p50=1.25 * real.ttft_p50, tpot_p99=0.5 * real.tpot_p99))
    assert comparison.error("ttft_p50") == pytest.approx(0.25)
    assert largest_errors([Comparison(real, real), comparison]) == (pytest.approx(0.25), pytest.approx(0.5))
    assert comparison_row(comparison)["tpot_p99"].endswith("-50%")
