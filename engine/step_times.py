"""Times of rounds by batch size and draft steps: measured at the start, corrected while rounds run."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Mapping

_ENOUGH_S = 0.5  # of measuring on a slow machine
_NUM_RUNS = 4
_COMMON_RATE, _OWN_RATE = 0.05, 0.05  # shares of an error that move the common correction, and that of one kind
_TRUST = 2.0  # how many measurements the table counts for: the first ones correct more
_SPREAD, _ENOUGH = 0.1, 20  # of a measurement; more than 20 say no more, because old ones are forgotten
_MAX_ERROR = 0.5  # of a logarithm; more is a pause of the machine or a kernel that compiles, and says little
_NUM_FIRST = 3  # rounds without drafts, of which the one in the middle is believed
_CATCH_UP_CALL = 0.3  # of a round without drafts: a guess, since nothing is measured at the start
_MAX_CATCH_UP_ERROR = 1.5
_FORGOTTEN = 0.999  # factor per round without drafts on a correction that speaks against drafts


class _Correction:
    """A logarithm of a factor, and the number of its measurements."""

    __slots__ = ("_firsts", "count", "log")

    def __init__(self, log: float = 0.0) -> None:
        self.log, self.count = log, 0
        self._firsts: list[float] = []

    def begin(self, log: float) -> None:
        """Take one of the first measurements. Their median replaces the first guess."""
        self._firsts.append(log)
        self.log = sorted(self._firsts)[len(self._firsts) // 2]
        self.count += 1

    def correct(self, error: float) -> None:
        self.log += max(_OWN_RATE, 1 / (_TRUST + self.count)) * error
        self.count += 1


class StepTimes:
    """A table of seconds by (batch size, steps), linear between the measured points.

    The table is of short sequences on an idle machine. The times of real rounds correct it: by one factor for all, for
    the machine and the lengths of contexts, and by one factor for each number of steps and magnitude of batch size.
    Catching up on rows that the drafter has not seen has a time per call and a time per row."""

    def __init__(self, seconds: Mapping[tuple[int, int], float]) -> None:
        """`seconds` holds, for each of some batch sizes, the same numbers of steps, 0 among them."""
        self._seconds = dict(seconds)
        self._sizes = sorted({size for size, _ in seconds})
        self._steps = sorted({steps for _, steps in seconds})
        assert self._steps[0] == 0 and len(seconds) == len(self._sizes) * len(self._steps), sorted(seconds)
        self._known: dict[tuple[int, int], float] = {}  # what `_table` found
        self._log_common = 0.0
        self._own: dict[tuple[int, int], _Correction] = {}  # by steps and magnitude of the size
        self._last = {False: _Correction(), True: _Correction()}  # used last, of rounds without and with drafts
        self._catch_up = _Correction()
        self._num_plain = 0

    @property
    def is_begun(self) -> bool:
        """Whether enough rounds without drafts were observed. The table alone leaves out the node's other work."""
        return self._num_plain >= _NUM_FIRST

    @classmethod
    def measure(cls, run: Callable[[int, int], float], max_size: int, steps: Collection[int]) -> StepTimes:
        """Measure a table. `run(batch size, steps)` runs a round and returns its seconds.

        A few sizes are measured, each with the first two and the last of `steps` by turns, so that other work on the
        machine disturbs all of them alike. The first turn does not count. Sizes beyond two are left out after half a
        second."""
        sizes = sorted({1, *(size for size in (4, 16) if size < max_size), max_size})
        steps = sorted({*sorted(steps)[:2], max(steps)})
        seconds: dict[tuple[int, int], float] = {}
        spent_s = 0.0
        for index, size in enumerate(sizes):
            if index >= 2 and spent_s > _ENOUGH_S:
                break
            runs = [{num_steps: run(size, num_steps) for num_steps in steps} for _ in range(_NUM_RUNS)]
            for num_steps in steps:
                seconds[size, num_steps] = min(each[num_steps] for each in runs[1:])
            spent_s += sum(sum(each.values()) for each in runs)
        return cls(_undisturbed(seconds))

    def seconds(self, size: int, num_steps: int) -> float:
        """Return the seconds of a round of `size` sequences; sizes and steps beyond those measured are extrapolated."""
        own = self._own.get((num_steps, size.bit_length()))
        log = self._first_log(size, num_steps) if own is None else own.log
        return math.exp(self._log_common + log) * self._table(size, num_steps)

    def _first_log(self, size: int, num_steps: int) -> float:
        """Return the correction (a logarithm) of a kind of round that was not observed yet: that of the last round with
        or without drafts.

        If no round with drafts was observed, the excess of rounds without drafts over the table counts as other work of
        the node. It is added to the table's time, not multiplied, because drafts would not add to that work. This errs
        in favour of drafts, and their rounds then show their real time."""
        last = self._last[num_steps > 0]
        if num_steps == 0 or last.count:
            return last.log
        beside = max(0.0, self.seconds(size, 0) - self._table(size, 0))
        return math.log(1 + beside / self._table(size, num_steps)) - self._log_common if beside else last.log

    def catch_up_seconds(self, num_rows: int) -> float:
        """Return the seconds of running the drafter over that many rows before a round."""
        if num_rows == 0:
            return 0.0
        first = self._steps[min(1, len(self._steps) - 1)]
        one, two = (self._table(size, first) - self._table(size, 0) for size in (1, 2))  # what a draft takes
        call = max(one, _CATCH_UP_CALL * self._table(1, 0))
        expected = call + (num_rows - 1) * max(0.0, two - one)
        return expected * math.exp(self._log_common + self._catch_up.log)

    def num_seen(self, size: int, num_steps: int) -> int:
        """Return the number of such rounds that have corrected the table."""
        own = self._own.get((num_steps, size.bit_length()))
        return 0 if own is None else own.count

    def doubt(self, size: int) -> float:
        """Return the relative error that the ratio of rounds with and without drafts may have. It falls with the number
        of observed rounds."""
        counts = (self.num_seen(size, 0), self._last[True].count)
        return sum(_SPREAD / math.sqrt(1 + min(_ENOUGH, count)) for count in counts)

    def observe(self, size: int, num_steps: int, seconds: float, num_caught_up: int = 0) -> float:
        """Correct the table by the `seconds` of a round, catching up on `num_caught_up` rows included. Return the
        seconds without the part that looks like a disturbance."""
        expected_s, catch_up_s = self.seconds(size, num_steps), self.catch_up_seconds(num_caught_up)
        if num_caught_up:
            error = _bounded(math.log(max(seconds - expected_s, 1e-6) / catch_up_s), _MAX_CATCH_UP_ERROR)
            self._catch_up.correct(error)
            return min(seconds, expected_s + catch_up_s * math.exp(_MAX_CATCH_UP_ERROR))
        error = math.log(max(seconds, 1e-6) / expected_s)
        is_drafted = num_steps > 0
        own = self._own.get((num_steps, size.bit_length()))
        if own is None:
            own = self._own[num_steps, size.bit_length()] = _Correction(self._first_log(size, num_steps))
        self._last[is_drafted] = own
        if not is_drafted and own.count < _NUM_FIRST:
            self._num_plain += 1
            own.begin(own.log + error)
            return self.seconds(size, 0)
        error = _bounded(error, _MAX_ERROR)
        own.correct(error)
        self._log_common += _COMMON_RATE * min(1.0, own.count / 8) * error
        if not is_drafted and self._last[True].log > 0:
            self._last[True].log *= _FORGOTTEN
        return expected_s * math.exp(error)

    def _table(self, size: int, num_steps: int) -> float:
        """Return the table's seconds, kept because every round asks."""
        known = self._known.get((size, num_steps))
        if known is None:

            def at(column: int) -> float:
                return _between(self._sizes, size, lambda row: self._seconds[row, column])

            known = self._known[size, num_steps] = max(1e-9, _between(self._steps, num_steps, at))
        return known


def _undisturbed(seconds: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Return the table with no time above that of a round of as many or more sequences and steps. Such a time was
    disturbed, for example by another node that starts on the same device."""
    return {
        (size, steps): min(took for (other, more), took in seconds.items() if other >= size and more >= steps)
        for size, steps in seconds
    }


def _bounded(error: float, bound: float) -> float:
    return max(-bound, min(bound, error))


def _between(known: list[int], x: int, value: Callable[[int], float]) -> float:
    """Interpolate linearly between two of `known` (rising), and extrapolate beyond them."""
    if len(known) == 1:
        return value(known[0])
    high = min(max(1, bisect.bisect_left(known, x)), len(known) - 1)
    left, right = known[high - 1], known[high]
    share = (x - left) / (right - left)
    return (1 - share) * value(left) + share * value(right)
