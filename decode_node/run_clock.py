"""How a sequence spent its time on a decode node: rounds, and preemptions between them. For the request's timeline."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..metadata.wire.request import MAX_PREEMPTIONS, Preemption
from ..metadata.wire.times import add_bounded


class RunClock:
    """One sequence's. A round costs it one addition; the time is read only when something else happens."""

    __slots__ = ("_clock", "_paused_at", "_ran_s", "_resumed_at", "_since", "_steps", "_tokens", "num_steps", "told")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_steps = 0
        self.told: list[Preemption] = []  # at most MAX_PREEMPTIONS: neighbours are joined
        self._clock = clock
        self._since = self._ran_s = self._paused_at = 0.0
        self._steps = self._tokens = 0  # of the run before the last preemption: first its start, then its length
        self._resumed_at: float | None = None  # it has pages again, and no round yet

    def start(self, num_generated: int) -> None:
        """It runs from now on."""
        self._begin_run(self._clock(), num_generated)

    def step(self, num_generated: int) -> None:
        """A round with it is over; so many tokens had been generated before."""
        if self._resumed_at is not None:
            self._end_preemption(self._clock(), num_generated)
        self.num_steps += 1

    def preempted(self, num_generated: int) -> None:
        """Its pages are gone."""
        now = self._clock()
        if self._resumed_at is not None:  # once more, before a round
            self._end_preemption(now, num_generated)
        self._paused_at, self._ran_s = now, now - self._since
        self._steps, self._tokens = self.num_steps - self._steps, num_generated - self._tokens

    def resumed(self) -> None:
        """It has pages again, and its KV is recomputed."""
        self._resumed_at = self._clock()

    def _end_preemption(self, now: float, num_generated: int) -> None:
        assert self._resumed_at is not None
        waited_s, recompute_s = self._resumed_at - self._paused_at, now - self._resumed_at
        item = Preemption(1, self._steps, self._tokens, self._ran_s, waited_s, recompute_s)
        add_bounded(self.told, item, MAX_PREEMPTIONS)
        self._resumed_at = None
        self._begin_run(now, num_generated)

    def _begin_run(self, now: float, num_generated: int) -> None:
        self._since, self._steps, self._tokens = now, self.num_steps, num_generated
