"""How long a round takes, by batch size and draft steps: measured at the start, corrected while rounds run."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Mapping

_ENOUGH_S = 0.5  # of measuring, where it is slow
_COMMON_RATE, _OWN_RATE = 0.1, 0.05  # shares of an error that move everybody's correction, and one kind of round's own
_MAX_ERROR = 0.3  # of a logarithm; more is a pause of the machine or a kernel that compiles, and says little
_FORGOTTEN = 0.995  # what is kept of a correction a round, while rounds of its kind are not run


class StepTimes:
    """A table of seconds by (batch size, steps), linear between what was measured.

    The table is of short sequences on an idle machine. What rounds really take corrects it: by a factor for all, as the
    machine and the contexts are, and one for rounds with drafts and for those without."""

    def __init__(self, seconds: Mapping[tuple[int, int], float]) -> None:
        """`seconds` holds, for each of some batch sizes, the same numbers of steps, 0 among them."""
        self._seconds = dict(seconds)
        self._sizes = sorted({size for size, _ in seconds})
        self._steps = sorted({steps for _, steps in seconds})
        assert self._steps[0] == 0 and len(seconds) == len(self._sizes) * len(self._steps), sorted(seconds)
        self._known: dict[tuple[int, int], float] = {}  # what `_table` found
        self._log_common = 0.0
        self._log_own = {False: 0.0, True: 0.0}  # by whether anything is drafted

    @classmethod
    def measure(cls, run: Callable[[int, int], float], max_size: int, steps: Collection[int]) -> StepTimes:
        """`run(batch size, steps)` runs a round and returns its seconds. A few sizes, the first two of `steps` and the
        last; the first run of each is not counted. Sizes beyond two are left out once half a second has gone."""
        sizes = sorted({1, *(size for size in (4, 16) if size < max_size), max_size})
        steps = sorted({*sorted(steps)[:2], max(steps)})
        seconds: dict[tuple[int, int], float] = {}
        spent_s = 0.0
        for index, size in enumerate(sizes):
            if index >= 2 and spent_s > _ENOUGH_S:
                break
            for num_steps in steps:
                runs = [run(size, num_steps) for _ in range(3)]
                seconds[size, num_steps] = min(runs[1:])
                spent_s += sum(runs)
        return cls(seconds)

    def seconds(self, size: int, num_steps: int) -> float:
        """Of a round of `size` sequences; sizes and steps beyond those measured are extrapolated."""
        return math.exp(self._log_common + self._log_own[num_steps > 0]) * self._table(size, num_steps)

    def observe(self, size: int, num_steps: int, seconds: float) -> None:
        """A round took so long."""
        error = math.log(max(seconds, 1e-6) / self.seconds(size, num_steps))
        error = max(-_MAX_ERROR, min(_MAX_ERROR, error))
        self._log_common += _COMMON_RATE * error
        self._log_own[num_steps > 0] += _OWN_RATE * error
        self._log_own[num_steps == 0] *= _FORGOTTEN

    def _table(self, size: int, num_steps: int) -> float:
        """Kept, since every round asks."""
        known = self._known.get((size, num_steps))
        if known is None:

            def at(column: int) -> float:
                return _between(self._sizes, size, lambda row: self._seconds[row, column])

            known = self._known[size, num_steps] = max(1e-9, _between(self._steps, num_steps, at))
        return known


def _between(known: list[int], x: int, value: Callable[[int], float]) -> float:
    """Linear interpolation between two of `known`, the outer two beyond them."""
    if len(known) == 1:
        return value(known[0])
    high = min(max(1, bisect.bisect_left(known, x)), len(known) - 1)
    left, right = known[high - 1], known[high]
    share = (x - left) / (right - left)
    return (1 - share) * value(left) + share * value(right)
