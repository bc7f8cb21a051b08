"""Limit how often something happens, for example a line of the log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Throttle:
    """Lets something happen at most `most` times in `interval_s` seconds."""

    def __init__(self, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic, *, most: int = 1) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._most = most
        self._num_left = 0
        self._next = -math.inf  # when as many may happen again

    def is_due(self) -> bool:
        """True when it may happen now, which counts; `interval_s` after the first of `most` the count starts anew."""
        now = self._clock()
        if now >= self._next:
            self._next, self._num_left = now + self._interval_s, self._most
        self._num_left -= 1
        return self._num_left >= 0
