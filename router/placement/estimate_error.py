"""Correction of a role's estimated times to the first two tokens by measured ones.

Chunks take longer than a node expects if streams come meanwhile, and a router learns the load of a node late.
"""

from __future__ import annotations

_WEIGHT = 0.25  # of one answer; about the last eight count
_BOUNDS = 0.5, 4.0
_HALF_S = 20.0  # without an answer: a role that gets no prompts is tried again after some time


class EstimateError:
    """The factor by which estimates of a role must be multiplied to be right on average. Times of day are monotonic
    seconds."""

    def __init__(self) -> None:
        self._factor = 1.0
        self._seen_at = 0.0

    def factor(self, now: float) -> float:
        """Return the factor. It goes back to 1 while no answer comes."""
        return self._factor**0.5 ** ((now - self._seen_at) / _HALF_S)

    def observe(self, expected_s: float, actual_s: float, now: float) -> None:
        """The first two tokens came after `actual_s` on average; `expected_s` was the estimate without any factor. Many
        answers may come for prompts that were placed before the first of them: each says the same."""
        if expected_s <= 0:
            return
        least, most = _BOUNDS
        ratio = min(most, max(least, actual_s / expected_s))
        self._factor = self.factor(now) ** (1 - _WEIGHT) * ratio**_WEIGHT
        self._seen_at = now
