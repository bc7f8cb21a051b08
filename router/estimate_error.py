"""How wrong the estimates of a role are. Chunks take longer than a node expects if streams come meanwhile, and a router
learns the load of a node late. What came so far corrects what is expected next."""

from __future__ import annotations

_WEIGHT = 0.25  # of one answer; about the last eight count
_MOST = 2.0  # factor by which one answer may differ
_BOUNDS = 0.5, 4.0  # of the correction


class EstimateError:
    """The factor by which estimates must be multiplied to be right on average."""

    def __init__(self) -> None:
        self.factor = 1.0

    def observe(self, expected_s: float, actual_s: float) -> None:
        """The first two tokens came after `actual_s` on average. `expected_s` is the estimate, multiplied by the factor
        of that time."""
        if expected_s <= 0:
            return
        ratio = min(_MOST, max(1 / _MOST, actual_s / expected_s))
        least, most = _BOUNDS
        self.factor = min(most, max(least, self.factor * ratio**_WEIGHT))
