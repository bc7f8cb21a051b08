"""The gaps beside the first request of a kind: what is made of the times of reads."""

from __future__ import annotations

import pytest
from bench_first_request import Window, largest_gap_s, rows


def test_a_gap_counts_in_the_window_that_it_overlaps() -> None:
    reads = [[0.0, 0.1, 0.4, 0.5], [0.0, 0.2, 0.3, 0.5]]
    assert largest_gap_s(reads, 0.0, 0.09) == pytest.approx(0.2)
    assert largest_gap_s(reads, 0.35, 0.39) == pytest.approx(0.3)  # one that began before the window
    assert largest_gap_s(reads, 0.41, 0.45) == pytest.approx(0.2)
    assert largest_gap_s(reads, 0.6, 0.7) == 0.0


def test_the_first_request_of_a_kind_stands_apart() -> None:
    steps = [index * 0.01 for index in range(400)]  # seconds
    held = [at if at <= 2.0 else at + 0.04 for at in steps]  # one gap of 50 ms, from 2.00 to 2.05
    windows = [Window("greedy", 0.5, 0.6), Window("greedy", 1.2, 1.3), Window("top_p", 1.95, 2.1)]
    greedy, top_p = rows([steps, held], [*windows, Window("top_p", 2.7, 2.8)])
    assert (greedy["kind"], top_p["kind"]) == ("greedy", "top_p")
    assert greedy["step_ms"] == pytest.approx(10) and top_p["step_ms"] == pytest.approx(10)
    assert greedy["first_ms"] == pytest.approx(10) and greedy["later_ms"] == pytest.approx(10)
    assert top_p["first_ms"] == pytest.approx(50) and top_p["steps"] == pytest.approx(5)
    assert top_p["later_ms"] == pytest.approx(10)
