"""Times of handoffs of a group of nodes: from a prompt's end to the second token of its output, without one round."""

from __future__ import annotations

from collections import deque
from statistics import median_low

_KEPT = 15


class HandoffTimes:
    """The last measurements. Their median counts: single ones depend on where in a round the last page arrives."""

    def __init__(self) -> None:
        self._lasts: deque[float] = deque(maxlen=_KEPT)

    def observe(self, seconds: float) -> None:
        """A handoff took so long."""
        self._lasts.append(max(0.0, seconds))

    @property
    def expected_s(self) -> float:
        """The seconds of the next handoff; 0: none was measured."""
        return median_low(self._lasts) if self._lasts else 0.0
