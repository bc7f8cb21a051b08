"""The sizes of rounds that are captured as graphs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from baton.engine.rounds.sizes import round_sizes


@pytest.mark.parametrize(
    ("max_running", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (13, [1, 2, 4, 8, 13]),
        (50, [1, 2, 4, 8, 16, 32, 48, 50]),
        (256, [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256]),
        (600, [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 600]),
    ],
)
def test_sizes_are_powers_of_two_then_closer_and_the_largest_round(max_running: int, sizes: list[int]) -> None:
    assert round_sizes(max_running) == sizes


def test_little_of_a_large_round_is_padding() -> None:
    for one, two in pairwise(round_sizes(1024)):
        assert two <= 2 * one, (one, two)
        assert two <= 1.5 * one or one < 32, (one, two)
        assert two <= 1.25 * one or one < 128, (one, two)
