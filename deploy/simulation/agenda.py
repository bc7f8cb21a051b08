"""The agenda: events that are to happen, in time order. Those of one time happen in the order in which they came."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Agenda:
    """Owns the time of a simulation, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_added = 0

    def at(self, when: float, action: Callable[..., None], *args: Any) -> None:
        """Call `action(*args)` at the time `when`, which is not in the past."""
        assert when >= self.now, (when, self.now)
        self._num_added += 1
        heapq.heappush(self._events, (when, self._num_added, action, args))

    def run(self) -> None:
        """Let all events happen, those that others add included."""
        events, pop = self._events, heapq.heappop
        while events:
            self.now, _, action, args = pop(events)
            action(*args)
