"""Garbage collection of a process that serves streams.

A full collection looks at every object of every running request. With many requests it takes longer than several
tokens, and no stream gets one meanwhile. Here objects of the start are left out, full collections
are rare, and one is made when the process has become idle. Finished requests do not wait for it: they are freed when
nothing refers to them.
"""

from __future__ import annotations

import gc

_FULL_EVERY = 100  # collections of the middle generation; Python's default is 10
_IDLE_S = 1.0  # without a request, before a full collection


class Garbage:
    """Makes full collections while nothing runs."""

    def __init__(self) -> None:
        """Exempt all present objects from collection, since they stay."""
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _FULL_EVERY)
        self._idle_since: float | None = None  # None: something runs
        self._is_collected = True

    def look(self, now: float, *, is_idle: bool) -> None:
        """Make a full collection if the process has just been idle for a while. `now`: monotonic seconds. `is_idle`:
        it has no request. Call it from time to time."""
        if not is_idle:
            self._idle_since, self._is_collected = None, False
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= _IDLE_S and not self._is_collected:
            gc.collect()
            self._is_collected = True
