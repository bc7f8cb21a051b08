"""Pacing: what a decode node learns of its rounds. It decides how much the next rounds draft, and how long chunks of
prompts beside them may be.

The clock times the rounds (round_clock.py). Times of rounds and chunks correct the budget of chunks (chunk_length.py),
and the chooser of draft lengths (engine/pace/draft_length.py) if drafts adapt.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq
from typing import NamedTuple

from ..engine.pace.draft_length import PRIOR_TRIES, DraftShape, StepChooser
from ..engine.pace.padding import measure_costs, measure_round
from ..engine.pace.step_times import StepTimes
from ..engine.rounds.executor import Executor
from ..engine.rounds.rounds import Rounds, Submitted
from ..engine.work import Accepted
from .chunk_length import ChunkBudget, ChunksAlone, PromptTokens
from .round_clock import RoundClock, RoundSeconds, RoundTime
from .sequence import Sequence

_MAX_MEASURED = 16  # sequences in the largest round that is timed at the start; times of larger ones are extrapolated


class SubmittedRound(NamedTuple):
    """A round that the device computes or has computed."""

    sequences: list[Sequence]
    submitted: Submitted
    since: float  # monotonic seconds
    step_since: float  # monotonic seconds: the begin of the step, or the end of the last settled round if that is later
    chunk: PromptTokens | None  # the prompts or lost tokens that the step computes beside it
    is_scored: bool  # tokens of the chunk are scored, which takes longer

    @property
    def has_chunk(self) -> bool:
        """Whether a chunk makes the step longer: one of this node, or of another rank of its group."""
        return self.chunk is not None or self.submitted.is_delayed

    @property
    def num_steps(self) -> int:
        return self.submitted.shape.num_steps


class SettledTimes(NamedTuple):
    """Seconds of a settled round, and of its whole step. Other work is included."""

    round_s: float
    step_s: float


class Pacing:
    """The clock of one node's rounds, its budget of chunks, and its chooser of draft lengths (None: drafts do not
    adapt)."""

    def __init__(
        self,
        rounds: Rounds,
        chunk: int,
        page_size: int,
        *,
        is_adaptive: bool,
        max_gap_s: float | None,
        overlaps: bool,
    ) -> None:
        """Measure rounds and chunks on the device. The arguments are those of the node."""
        executor = rounds.executor
        self._rounds, self._executor = rounds, executor
        self.chooser = _measured_chooser(executor) if is_adaptive and executor.shape.num_steps else None
        costs = measure_costs(executor, min(chunk, executor.context_len - 1), page_size)
        round_s = RoundSeconds(measure_round(executor, 1, 0))
        self.budget = ChunkBudget(costs, round_s, chunk, max_gap_s, executor.mixed_sizes)
        self.alone = ChunksAlone()
        self.clock = RoundClock(overlaps)
        self._num_idle = 0  # steps of other ranks that were counted as rounds

    def count_rounds_elsewhere(self) -> None:
        """Count the rounds of other ranks in which this node had no work: its next chunk waits for so many."""
        steps = self._executor.group_steps
        while steps is not None and self._num_idle < steps.num_idle:
            self._num_idle += 1
            self.budget.begin_round(has_chunk=False)

    def choose(self, sequences: list[Sequence], usable: list[int]) -> DraftShape:
        """Return how much the next round drafts. `usable`: the number of drafts that each sequence could accept."""
        assert self.chooser is not None
        if self.chooser.num_steps == 0 and self._executor.proposer is not None:
            for sequence in sequences:
                if sequence.slot is not None:
                    self.chooser.learn(sequence.slot, *self._rounds.replay(sequence, int(PRIOR_TRIES)))
        num_missed = self._rounds.num_missed(sequences)
        slots = [each.slot for each in sequences if each.slot is not None]
        num_steps = self.chooser.choose(slots, usable, num_missed, self._rounds.kind(sequences))
        return self._executor.shape.with_steps(num_steps)

    def settle(self, done: SubmittedRound) -> SettledTimes:
        """The results of a round have come. Return its times, for `learn`."""
        step_since = max(done.step_since, self.clock.settled_at)
        seconds = self.clock.settle(done.since, done.num_steps, has_chunk=done.has_chunk)
        return SettledTimes(seconds, self.clock.settled_at - step_since)

    def learn(self, done: SubmittedRound, times: SettledTimes, live: Seq[tuple[int, Accepted]]) -> None:
        """Learn from a round whose tokens are processed. `live`: slot and results of the sequences that it served."""
        num_streams, num_steps = len(done.sequences), done.num_steps
        round_time = self.clock.judge(times.round_s)
        alone = self.alone.take()
        if done.submitted.is_delayed:
            round_time = RoundTime(None, None)
        elif done.chunk is not None:  # chunks alone, which the device may not have done before, make it look longer
            if alone is None and not done.is_scored:
                self.budget.end_beside(num_streams, num_steps, done.chunk, times.step_s)
            round_time = RoundTime(None, None)
        elif alone is not None:
            self.budget.end_alone(num_streams, num_steps, alone, self.clock.settled_at - alone.since)
        elif round_time.seconds is not None:
            self.budget.end_round(num_streams, num_steps, round_time.seconds)
        if self.chooser is not None and live and not self.chooser.passes_over(num_steps):
            self.chooser.observe(
                [slot for slot, _ in live],
                num_steps,
                [accepted.num_drafted for _, accepted in live],
                [accepted.num_accepted for _, accepted in live],
                *round_time,
                done.submitted.num_caught_up,
                done.submitted.kind,
            )


def _measured_chooser(executor: Executor) -> StepChooser:
    """Return a chooser of draft lengths that knows the times of rounds."""
    measure = functools.partial(measure_round, executor)
    times = StepTimes.measure(measure, min(executor.num_slots, _MAX_MEASURED), executor.shape.choices)
    return StepChooser(executor.shape, times, executor.num_slots)
