"""How long rounds take, as far as the thread of a decode node can tell; for the choice of how much to draft."""

from __future__ import annotations

import time
from typing import NamedTuple

_OTHER_SHARE = 0.5  # of a round's time for other work, beyond which that time says little of the round
_MOST_PASSED = 8  # rounds in a row: where there is always other work, it belongs to a round


class RoundTime(NamedTuple):
    """What a round's time says of rounds like it. None: nothing, since the thread was busy with arrivals, or away."""

    seconds: float | None
    overhead_s: float | None  # of its step beyond that; 0 where it is hidden behind the next round


class StepClock:
    """One node's. A step: `begin`, `ready`, then `submit` of a round and `settle` of that one, or of the one before
    where rounds overlap, and `end`."""

    def __init__(self, overlaps: bool) -> None:
        self._overlaps = overlaps
        self._begun_at = self._settled_at = self._ended_at = 0.0
        self._other_s = 0.0  # since the last round was settled
        self._num_passed = 0

    def begin(self) -> None:
        """A step begins. Since the last one the thread was elsewhere."""
        self._begun_at = time.monotonic()
        self._other_s += self._begun_at - self._ended_at

    def ready(self) -> None:
        """Messages and arrivals have been seen to."""
        self._other_s += time.monotonic() - self._begun_at

    def submit(self) -> float:
        """A round is about to be submitted. Returns from when on the time is its own, for `settle`."""
        return self._begun_at if self._overlaps else time.monotonic()

    def settle(self, since: float) -> float:
        """A round's results are there. Returns the seconds it took, whatever else was done in them."""
        now = time.monotonic()
        seconds = now - max(since, self._settled_at)
        self._settled_at = now
        return seconds

    def judge(self, seconds: float) -> RoundTime:
        """Of the round settled last, after its tokens have been seen to."""
        overhead_s = 0.0 if self._overlaps else time.monotonic() - self._begun_at - seconds
        is_passed = self._other_s > _OTHER_SHARE * seconds and self._num_passed < _MOST_PASSED
        self._num_passed = self._num_passed + 1 if is_passed else 0
        self._other_s = 0.0
        if not is_passed:
            return RoundTime(seconds, overhead_s)
        return RoundTime(None if self._overlaps else seconds, None)

    def end(self) -> None:
        """The step ends."""
        self._ended_at = time.monotonic()
