"""Times of rounds: the round clock measures them on the host, and `RoundSeconds` expects the next ones by that."""

from __future__ import annotations

import time
from typing import NamedTuple

from ..engine.pace.step_times import KEPT
from ..metadata.estimate import Estimate

_OTHER_SHARE = 0.5  # a round's time is not used if other work took more than this share of it ...
LEAST_AHEAD_S, SHARE_AHEAD = 1e-3, 0.2  # of a round, before whose end the next one is submitted
_MAX_PASSED = 8  # ... unless so many rounds in a row were not used: then other work is the normal case


class RoundTime(NamedTuple):
    """The time of a round. None: unknown, because the thread was busy with arrivals or was not in the loop."""

    seconds: float | None
    overhead_s: float | None  # the rest of the round's step; 0 if it is hidden behind the next round


class RoundClock:
    """The times of one node's rounds.

    Call in each step: `begin_step`, `end_arrivals`, `overrun` if arrivals took too long, then `submit` for a new round
    and `settle` for this round or, if rounds overlap, for the one before, then `judge`, and `end_step`.
    """

    def __init__(self, overlaps: bool) -> None:
        self._overlaps = overlaps
        self._begun_at = self._settled_at = self._ended_at = 0.0
        self._other_s = 0.0  # time for other work since the last round was settled
        self._num_passed = 0
        self._last_s: dict[tuple[int, bool], float] = {}  # of the last round, by draft steps and chunk beside it

    @property
    def step_since(self) -> float:
        """The moment, monotonic seconds, from which a chunk and the round after it take time: the step's begin, or the
        end of the round before if that came later."""
        return max(self._begun_at, self._settled_at)

    @property
    def settled_at(self) -> float:
        """When the results of the last round came, monotonic seconds."""
        return self._settled_at

    def begin_step(self) -> None:
        """A step begins. The time since the last step went to other work."""
        self._begun_at = time.monotonic()
        self._other_s += self._begun_at - self._ended_at

    def end_arrivals(self) -> None:
        """Messages and arrivals are processed. Their time counts as other work."""
        self._other_s += time.monotonic() - self._begun_at

    def overrun(self, since: float) -> None:
        """The round under way has ended while arrivals were processed, from `since` on. Their time counts as other
        work."""
        self._other_s += time.monotonic() - since

    def submit(self) -> float:
        """A round is about to be submitted. Return the moment from which its time counts, for `settle`."""
        return self._begun_at if self._overlaps else time.monotonic()

    def settle(self, since: float, num_steps: int, *, has_chunk: bool = False) -> float:
        """The results of a round of `num_steps` draft steps, with a chunk beside it or not, have come. Return the
        seconds that it took, other work included."""
        now = time.monotonic()
        seconds = now - max(since, self._settled_at)
        self._settled_at, self._last_s[num_steps, has_chunk] = now, seconds
        return seconds

    def submit_by(self, num_steps: int, *, has_chunk: bool = False) -> float:
        """Return the moment, monotonic seconds, by which the round after the one under way must be submitted, so that
        the device is not left without work. The one under way has `num_steps` draft steps, and a chunk beside it or
        not. It began when the last one was settled."""
        lasts = self._last_s.get((num_steps, has_chunk), 0.0)
        return self._settled_at + lasts - max(LEAST_AHEAD_S, SHARE_AHEAD * lasts)

    def judge(self, seconds: float) -> RoundTime:
        """Return the times of the last settled round, None for those that other work distorted.

        Call it after the tokens of the round are processed.
        """
        overhead_s = 0.0 if self._overlaps else time.monotonic() - self._begun_at - seconds
        is_passed = self._other_s > _OTHER_SHARE * seconds and self._num_passed < _MAX_PASSED
        self._num_passed = self._num_passed + 1 if is_passed else 0
        self._other_s = 0.0
        if not is_passed:
            return RoundTime(seconds, overhead_s)
        return RoundTime(None if self._overlaps else seconds, None)

    def end_step(self) -> None:
        """The step ends."""
        self._ended_at = time.monotonic()


class RoundSeconds:
    """Expected seconds of rounds without a chunk beside them, by draft steps and magnitude of the batch."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: of a round of one sequence without drafts, measured at the start."""
        self._kinds: dict[tuple[int, int], Estimate] = {}
        self.observe(1, 0, seconds)

    def observe(self, num_seqs: int, num_steps: int, seconds: float) -> None:
        """A round of `num_seqs` sequences with `num_steps` draft steps took so long."""
        kind = (num_steps, num_seqs.bit_length())
        if kind not in self._kinds:
            self._kinds[kind] = Estimate(num_kept=KEPT)
        self._kinds[kind].observe(seconds)

    def expected(self, num_seqs: int, num_steps: int) -> float:
        """Return the seconds of such a round. A kind that was never measured takes those of the kind most like it."""
        kind = (num_steps, num_seqs.bit_length())
        like = min(self._kinds, key=lambda each: (abs(each[0] - kind[0]), abs(each[1] - kind[1]), each))
        return self._kinds[like].mean
