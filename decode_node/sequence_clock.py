"""The clock of a sequence measures its runs and the preemptions between them. The router puts them into the trace."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..metadata.wire.request import MAX_PREEMPTIONS, Preemption
from ..metadata.wire.times import add_bounded


class SequenceClock:
    """The times of one sequence. A round only counts up; the time is read when a run begins or ends."""

    __slots__ = (
        "_clock",
        "_paused_at",
        "_ran_s",
        "_resumed_at",
        "_since",
        "_steps",
        "_tokens",
        "num_steps",
        "preemptions",
    )

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_steps = 0
        self.preemptions: list[Preemption] = []  # at most MAX_PREEMPTIONS: neighbours are joined
        self._clock = clock
        self._since = self._ran_s = self._paused_at = 0.0
        self._steps = self._tokens = 0  # counts at the start of the run; after a preemption, what the run added to them
        self._resumed_at: float | None = None  # the sequence has pages again, but no round since

    def start(self, num_generated: int) -> None:
        """The first run begins."""
        self._begin_run(self._clock(), num_generated)

    def step(self, num_generated: int) -> None:
        """Count a round. `num_generated` tokens had been generated before it."""
        if self._resumed_at is not None:
            self._end_preemption(self._clock(), num_generated)
        self.num_steps += 1

    def preempt(self, num_generated: int) -> None:
        """The run ends: the sequence has lost its pages."""
        now = self._clock()
        if self._resumed_at is not None:  # preempted again before a round
            self._end_preemption(now, num_generated)
        self._paused_at, self._ran_s = now, now - self._since
        self._steps, self._tokens = self.num_steps - self._steps, num_generated - self._tokens

    def resume(self) -> None:
        """The sequence has pages again. Its KV is recomputed before its next round, which begins a run."""
        self._resumed_at = self._clock()

    def _end_preemption(self, now: float, num_generated: int) -> None:
        assert self._resumed_at is not None
        waited_s, recompute_s = self._resumed_at - self._paused_at, now - self._resumed_at
        preemption = Preemption(1, self._steps, self._tokens, self._ran_s, waited_s, recompute_s)
        add_bounded(self.preemptions, preemption, MAX_PREEMPTIONS)
        self._resumed_at = None
        self._begin_run(now, num_generated)

    def _begin_run(self, now: float, num_generated: int) -> None:
        self._since, self._steps, self._tokens = now, self.num_steps, num_generated
