"""The comparison of simulated with real runs: the error that `baton plan` states is the one that is found."""

from __future__ import annotations

import pytest
from bench_plan import MEASURED, NAME, Cell, Comparison, Load, Measured, compare, comparison_table, largest_errors

from baton.deploy.simulation.times import find, read


def test_the_stated_error_is_the_largest_one_found() -> None:
    times = read(find(NAME))
    comparisons = [compare(times, measured, 40) for measured in MEASURED]
    ttft, tpot = largest_errors(comparisons)
    assert times.error is not None
    assert (times.error.ttft_p50, times.error.tpot_p99) == (
        pytest.approx(ttft, abs=0.005),
        pytest.approx(tpot, abs=0.005),
    )
    for each in comparisons:  # what is known of the real goodput
        low, high = each.measured.good_share
        assert low <= each.good_share.middle <= high, each.measured.load.name


def test_the_bounds_of_a_goodput_follow_from_percentiles() -> None:
    load = Load(1, 1, 1.0)
    assert Measured(load, 100, 190, 5, 6).good_share == (0.99, 1.0)
    assert Measured(load, 100, 210, 5, 6).good_share == (0.5, 0.99)
    assert Measured(load, 210, 220, 5, 6).good_share == (0.0, 0.5)


def test_a_cell_holds_nine_of_ten_runs_and_the_error_of_the_median() -> None:
    cell = Cell.of([float(value) for value in range(101)])
    assert (cell.low, cell.middle, cell.high) == (5.0, 50.0, 95.0)
    assert cell.error(40) == pytest.approx(0.25)
    assert cell.words(40, 0) == "40 / 50 (5 to 95): +25%"
    comparison = Comparison(MEASURED[0], cell, cell, cell, cell, cell)
    assert len({line.count("|") for line in comparison_table([comparison]).splitlines()}) == 1
