"""The comparison of `auto` with other shapes in simulated cells."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench_places import Cell, Figures, capacity, figures, row_of
from bench_plan import NAME

from baton.deploy.simulation.cluster import ClusterShape
from baton.deploy.simulation.times import find, read

TIMES = read(find(NAME))
GOOD = Figures(30.0, 60.0, 6.0, (1.0, 0.5, 0.1), 0.0)


@pytest.mark.parametrize(
    ("good", "is_worse"),
    [((1.0, 0.5, 0.1), False), ((0.975, 0.49, 0.1), False), ((0.96, 0.9, 0.9), True), ((1.0, 0.48, 0.1), True)],
)
def test_a_cell_is_worse_by_more_than_3_percent_for_any_slo(good: tuple[float, ...], is_worse: bool) -> None:
    cell = Cell(64, 128, 2.0, GOOD, replace(GOOD, good=good), GOOD)
    assert cell.is_worse_than(GOOD) == is_worse
    assert (row_of(cell)["auto is worse than"] == "never, decode nodes alone") == is_worse


def test_a_difference_of_a_few_requests_does_not_count() -> None:
    low = replace(GOOD, good=(0.0, 0.0, 0.008))
    assert not Cell(64, 128, 2.0, low, replace(low, good=(0.0, 0.0, 0.004)), low).is_worse_than(low)


def test_a_tenth_of_the_capacity_is_a_light_load() -> None:
    rate = capacity(TIMES, 1024, 128, 2)
    assert rate == pytest.approx(2 * capacity(TIMES, 1024, 128, 1)) and rate > capacity(TIMES, 4096, 128, 2)
    found = figures(ClusterShape(1, 1, "auto"), TIMES, (rate / 10, 1024, 128), 1, 10.0)
    assert found.good == (1.0, 1.0, 1.0) and found.ttft_p50 < 50
