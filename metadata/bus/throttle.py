"""A limit on how often something happens, for example one log line per second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Throttle:
    """Allows something at most `most` times in `interval_s` seconds."""

    def __init__(self, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic, *, most: int = 1) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._most = most
        self._num_left = 0
        self._next = -math.inf  # when the count starts anew

    def is_due(self) -> bool:
        """Return True if it may happen now, and count it. The count starts anew `interval_s` after the first of `most`
        times."""
        now = self._clock()
        if now >= self._next:
            self._next, self._num_left = now + self._interval_s, self._most
        self._num_left -= 1
        return self._num_left >= 0
