"""An estimate predicts one quantity, mostly seconds, from its measurements.

Router and nodes have one estimate for each question: how long a round takes, a chunk, a handoff, the wait for a grant.
Estimates share nothing. Each decision has a loss of its own, and asks for the mean, for an upper bound, or for the
error of a difference.

- Robust. A disturbance, such as a pause or a kernel that compiles, only adds to a time. So each new measurement counts
  as the least of the last few, or as another quantile of them.
- Mean. The mean of these values. The first ones weigh the same, and later ones are forgotten at a constant rate.
- Guess. An estimate may begin with a guess. If several measurements are kept, the first one alone does not change it.
- Forgetting. A large mean may speak against what is measured, which then is never measured again. So it can go back to
  a smaller value while no measurement comes.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Fading(NamedTuple):
    """How a mean above `to` goes back to it while no measurement comes. The unit of time is that of `Estimate.at`."""

    to: float
    after: float  # the age of the last measurement at which it begins
    half_life: float


class Estimate:
    """The estimate of one quantity. `mean` is 0 before the first measurement if there is no guess."""

    __slots__ = (
        "_fading",
        "_has_guess",
        "_lasts",
        "_memory",
        "_num_kept",
        "_quantile",
        "count",
        "mean",
        "seen_at",
        "spread",
    )

    def __init__(
        self,
        guess: float | None = None,
        *,
        num_kept: int = 1,
        quantile: float = 0.0,
        memory: int = 1,
        weight: int = 0,
        fading: Fading | None = None,
    ) -> None:
        """`guess` counts as `weight` measurements. Of the last `num_kept` measurements, the `quantile` counts: 0 is the
        least, 0.5 the median. The mean is of about `memory` values."""
        self._num_kept, self._quantile, self._memory = num_kept, quantile, memory
        self._has_guess, self._fading = guess is not None, fading
        self.seen_at = 0.0  # when the last measurement was taken
        self.mean = guess or 0.0
        self.spread = 0.0  # the usual distance of a measurement from the mean; 0 if the mean is of one value
        self.count = weight  # of measurements, up to the number that the mean remembers
        self._lasts: list[float] = []  # the last `num_kept` measurements

    def observe(self, measured: float, now: float = 0.0, *, common: float = 0.0) -> float:
        """Take a measurement, of which `common` is known from another estimate: the mean is of the rest. Return by how
        much the measurement shows the mean to be wrong; 0 if it says nothing alone."""
        lasts = self._lasts
        lasts.append(measured)
        if len(lasts) > self._num_kept:
            del lasts[0]
        if self.count < self._memory + self._num_kept - 1:
            self.count += 1
        if self._memory == 1 and not self._has_guess:  # quickly: simulations take millions of them
            before, self.mean, self.seen_at = self.mean, _quantile(lasts, self._quantile) - common, now
            return self.mean - before if self.count > 1 else 0.0
        self.mean, self.seen_at = self.at(now), now
        if self.count == 1:
            self.mean = self.mean if self._has_guess and self._num_kept > 1 else measured - common
            return 0.0
        rate = 1 / max(1, self.count - self._num_kept + 1)
        expected = common + self.mean
        error = _quantile(lasts, self._quantile) - expected
        self.spread += rate * (_quantile([abs(each - expected) for each in lasts], 0.5) - self.spread)
        self.mean += rate * error
        return error

    def at(self, now: float) -> float:
        """Return the mean at a time, for which it may have faded."""
        if self._fading is None or self.mean <= self._fading.to:
            return self.mean
        to, after, half_life = self._fading
        age = now - self.seen_at - after
        return self.mean if age <= 0 else to + (self.mean - to) * 0.5 ** (age / half_life)

    def upper(self, num_spreads: float) -> float:
        """Return a bound that few values exceed: so many spreads above the mean."""
        return self.mean + num_spreads * self.spread

    @property
    def error(self) -> float:
        """The standard error of the mean, roughly. As many measurements as are kept are about as good as one. The error
        of a difference of two estimates is at most the sum of theirs."""
        return self.spread / math.sqrt(max(1.0, min(self.count, self._memory) / self._num_kept))

    def fade(self, count: int) -> None:
        """Let earlier measurements weigh no more than `count` of them: the quantity may have changed."""
        self.count = min(self.count, count)


def _quantile(values: list[float], quantile: float) -> float:
    """Return a quantile; between two values, the lesser one."""
    return sorted(values)[int(quantile * (len(values) - 1))] if quantile else min(values)
