"""A simulated decode node, whose rounds take given times and whose drafts are right with given chances.

It is for tests of the draft length (engine/pace/draft_length.py). Nothing here reads a clock; a seed decides all.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.engine.pace.draft_length import DraftShape, StepChooser
from baton.engine.pace.step_times import StepTimes
from baton.engine.work import MAX_MISSED

SIZES, MEASURED_STEPS = (1, 4, 16), (0, 1, 5)


@dataclass(frozen=True, slots=True)
class Machine:
    """Times of rounds, in any unit: plain + steps * step + rows * row; catching up takes call + rows * row_missed."""

    plain: float
    step: float
    row: float
    call: float = 0.0
    row_missed: float = 0.0
    beside: float = 0.0  # what a step takes beside its round, which the table does not know
    has_draft_kv: bool = True
    noise: float = 0.0  # standard deviation of the logarithm of what is measured
    pauses: float = 0.0  # share of rounds that are measured as taking ten times as long
    wrong: float = 1.0  # by what the table of times errs for rounds with drafts
    wrong_plain: float = 1.0  # and for those without
    growth: float = 0.0  # by which a round takes longer per 1,000 rounds, since contexts grow
    factors: tuple[float, ...] = (1.0,)  # by kind of sampling, on the times of rounds; the table has the first kind's

    def seconds(self, size: int, steps: int, kind: int = 0) -> float:
        return self.beside + self.factors[kind] * self._round_seconds(size, steps)

    def _round_seconds(self, size: int, steps: int) -> float:
        return self.plain + steps * self.step + size * (steps + 1) * self.row

    def catch_up_seconds(self, num_rows: int) -> float:
        return self.call + num_rows * self.row_missed if num_rows else 0.0

    def best_speed(self, size: int, rate: float) -> float:
        """Return the speed of the best fixed number of steps, that without drafts being 1. `rate`: of drafts that are
        right."""
        plain = self.seconds(size, 0)
        return max(sum(rate**i for i in range(k + 1)) * plain / self.seconds(size, k) for k in range(6))

    def table(self) -> StepTimes:
        def known(size: int, steps: int) -> float:
            return (self.wrong if steps else self.wrong_plain) * self._round_seconds(size, steps)

        return StepTimes({(size, steps): known(size, steps) for size in SIZES for steps in MEASURED_STEPS})


@dataclass(slots=True)
class _Stream:
    slot: int
    text: Callable[[int], float]
    num_tokens: int = 0
    num_missed: int = 0


@dataclass(slots=True)
class World:
    """`batch` streams of `length` tokens at a time, each followed by another. `text(stream, token)`: the chance that a
    draft for that token is right."""

    machine: Machine
    text: Callable[[int, int], float]
    batch: int
    length: int = 128
    shape: DraftShape = DraftShape(5)
    seed: int = 0
    fixed_steps: int | None = None  # instead of what a chooser says
    kinds_last: int = 64  # rounds of one kind of sampling, before those of the next
    num_tokens: int = 0
    seconds: float = 0.0  # without noise and pauses, which would come without drafts as well
    chosen: list[int] = field(default_factory=list)
    chooser: StepChooser = field(init=False)
    _rng: random.Random = field(init=False)
    _streams: list[_Stream] = field(init=False)
    _num_streams: int = 0
    _plain_seconds: float = 0.0  # of the rounds so far, if they had drafted nothing

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self.chooser = StepChooser(self.shape, self.machine.table(), self.batch)
        self._streams = [self._begin(slot) for slot in range(self.batch)]
        for number, stream in enumerate(self._streams[1:]):  # some way in, so that they do not end together
            stream.num_tokens = number * self.length // self.batch

    def run(self, num_tokens: int) -> float:
        """Run until the streams have made `num_tokens` each on average. Return the speed; without drafts it is 1."""
        tokens, seconds, rounds, plain = self.num_tokens, self.seconds, len(self.chosen), self._plain_seconds
        while self.num_tokens - tokens < num_tokens * self.batch:
            self._round()
        mean = (self._plain_seconds - plain) / (len(self.chosen) - rounds)
        return (self.num_tokens - tokens) * mean / self.batch / (self.seconds - seconds)

    def _begin(self, slot: int) -> _Stream:
        number = self._num_streams
        self._num_streams += 1
        self.chooser.admit(slot)
        return _Stream(slot, lambda token: self.text(number, token))

    def _round(self) -> None:
        slots = [stream.slot for stream in self._streams]
        usable = [self._usable(stream) for stream in self._streams]
        late = [stream for stream in self._streams if 0 < stream.num_missed <= MAX_MISSED]
        num_rows = sum(stream.num_missed for stream in late)
        kind = len(self.chosen) // self.kinds_last % len(self.machine.factors)
        steps = 0
        if not self.chooser.rests() and any(usable):
            self._replay()
            steps = self.chooser.choose(slots, usable, num_rows, kind) if self.fixed_steps is None else self.fixed_steps
            steps = min(steps, max(usable))
        if steps == 0:
            num_rows = 0
        grown = 1 + self.machine.growth * len(self.chosen) / 1000
        took = grown * self.machine.seconds(self.batch, steps, kind) + self.machine.catch_up_seconds(num_rows)
        limits = [min(steps, most) for most in usable]
        accepted = [self._accept(stream, most) for stream, most in zip(self._streams, limits, strict=True)]
        measured = took * math.exp(self._rng.gauss(0.0, self.machine.noise))
        if self._rng.random() < self.machine.pauses:
            measured *= 10
        if not self.chooser.passes_over(steps):
            self.chooser.observe(slots, steps, limits, accepted, measured, 0.0, num_rows, kind)
        self._plain_seconds += grown * self.machine.seconds(self.batch, 0, kind)
        self.seconds += took
        self.chosen.append(steps)
        for stream, brought in zip(list(self._streams), accepted, strict=True):
            self._advance(stream, steps, 1 + brought)

    def _advance(self, stream: _Stream, steps: int, num_tokens: int) -> None:
        stream.num_tokens += num_tokens
        self.num_tokens += num_tokens
        if steps and stream.num_missed <= MAX_MISSED:
            stream.num_missed = 0
        elif self.machine.has_draft_kv:
            stream.num_missed += 1
        if stream.num_tokens >= self.length:
            self._streams[stream.slot] = self._begin(stream.slot)

    def _replay(self) -> None:
        """Tell the chooser which drafts would have been right, as a drafter without KV does on the host."""
        if self.machine.has_draft_kv or self.chooser.num_steps:
            return
        for stream in self._streams:
            accepted = self._accept(stream, self.shape.num_steps)
            self.chooser.learn(stream.slot, accepted, min(accepted + 1, self.shape.num_steps))

    def _usable(self, stream: _Stream) -> int:
        if stream.num_missed > MAX_MISSED:
            return 0
        return max(0, min(self.shape.num_steps, self.length - stream.num_tokens - 1))

    def _accept(self, stream: _Stream, most: int) -> int:
        for at in range(most):
            if self._rng.random() >= stream.text(stream.num_tokens + at):
                return at
        return most
