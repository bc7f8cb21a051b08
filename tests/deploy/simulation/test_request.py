"""A simulated request and its record."""

from __future__ import annotations

import pytest

from baton.deploy.simulation.figures import Record
from baton.deploy.simulation.request import SimulatedRequest
from baton.deploy.simulation.traffic import Arrival


def test_the_record_of_an_answer() -> None:
    request = SimulatedRequest(0, Arrival(1.0, 100, 3))
    request.take_first(1.5)
    assert (request.length, request.num_left) == (101, 2)
    request.end_gap(1.75)
    request.num_received, request.last_s = 3, 2.0
    assert request.record == Record(0.5, 0.25, 0.25, 0.25)


def test_a_single_token_has_no_gaps() -> None:
    request = SimulatedRequest(0, Arrival(0.0, 100, 1))
    request.take_first(0.5)
    assert request.record == Record(0.5, 0.0, 0.0, 0.0)


def test_an_answer_that_is_not_whole_has_no_record() -> None:
    request = SimulatedRequest(0, Arrival(0.0, 100, 2))
    request.take_first(0.5)
    with pytest.raises(AssertionError):
        _ = request.record
