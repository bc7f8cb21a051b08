"""The bound on gaps: the largest chunk beside a round."""

from __future__ import annotations

import math

import pytest
from simulated import TIMES

from baton.deploy.simulation.costs import Costs, Piece
from baton.deploy.simulation.gap_bound import GapBound

COSTS = Costs(TIMES, 64)


@pytest.mark.parametrize(("batch", "context_tokens", "max_gap_s"), [(1, 100, None), (8, 5000, None), (8, 5000, 0.03)])
def test_a_step_keeps_the_bound_and_one_token_more_breaks_it(
    batch: int, context_tokens: int, max_gap_s: float | None
) -> None:
    largest = GapBound(COSTS, 1024, max_gap_s).largest(batch, context_tokens, 0)
    round_s = COSTS.round_s(batch, context_tokens)
    bound_s = 1.5 * round_s if max_gap_s is None else max_gap_s
    assert round_s + COSTS.beside_s([Piece(largest, 0)], batch) <= bound_s
    assert round_s + COSTS.beside_s([Piece(largest + 1, 0)], batch) > bound_s


def test_no_chunk_fits_a_bound_of_one_round() -> None:
    assert GapBound(COSTS, 1024, COSTS.round_s(4, 400)).largest(4, 400, 0) == 0


def test_without_a_round_or_without_a_bound_the_chunk_is_whole() -> None:
    assert GapBound(COSTS, 1024, 0.001).largest(0, 0, 0) == 1024
    assert GapBound(COSTS, 1024, math.inf).largest(64, 99_999, 0) == 1024
