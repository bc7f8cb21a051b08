"""Requests under way, by the ids that their answers carry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.router.errors import NotFound
from baton.router.http.server.in_flight import InFlight


def test_ended_requests_are_not_in_flight() -> None:
    """One of the prompts of a body has ended: a cancel reaches only the others. When all have ended, the id is unknown,
    though the answer is still being written."""
    aborted: list[Any] = []
    in_flight = InFlight(lambda request, reason: aborted.append(request))
    caller: Any = SimpleNamespace(is_admin=False)
    over, running = SimpleNamespace(is_over=True), SimpleNamespace(is_over=False)
    both: Any = [over, running]
    with in_flight.listed({"a", "b"}, caller, both):
        in_flight.cancel("b", caller)
        assert aborted == [running]
        running.is_over = True
        with pytest.raises(NotFound, match="'a'"):
            in_flight.cancel("a", caller)
    assert aborted == [running]
    with pytest.raises(NotFound):
        in_flight.cancel("a", caller)
