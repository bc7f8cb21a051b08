"""How much to draft in the next round: what the drafter lately got right, against what rounds take.

A round of K steps brings a sequence of acceptance a (of a draft whose predecessors were right) 1 + a + .. + a^K tokens,
and takes what the table of times says for its batch. The K with the most tokens a second wins, 0 included, and keeps
its place until another is clearly better; more clearly where nothing is drafted, since the drafter must catch up first.

While nothing is drafted nothing is learnt, so a hundredth of the time is spent on trying again: every round without
drafts adds to a credit, and a round with one is run when the credit pays for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .step_times import StepTimes
from .trees import DraftShape

FIRST_GUESS = 0.85  # acceptance before anything is known: high, so that drafts are tried
_CLEARLY_BETTER = 1.04
_BETTER_THAN_NOTHING = 1.06
_EXPLORED_SHARE = 0.01
_OWN_DECAY, _ALL_DECAY = 0.95, 0.98  # of what was seen, a round
_OVERHEAD_RATE = 0.1
_ALL_WEIGHT = 4.0  # tries that the average of all sequences counts for in one sequence's estimate


class _Rate:
    """Right tries among all, older ones counting less and less."""

    __slots__ = ("num_right", "num_tries")

    def __init__(self, rate: float = 0.0, weight: float = 0.0) -> None:
        self.num_right, self.num_tries = rate * weight, weight

    def add(self, num_right: int, num_tries: int, decay: float) -> None:
        self.num_right = self.num_right * decay + num_right
        self.num_tries = self.num_tries * decay + num_tries


class StepChooser:
    """Chooses the steps of each round. Sequences are told apart by their slots."""

    def __init__(self, shape: DraftShape, times: StepTimes, num_slots: int) -> None:
        """`shape` is the most that a round drafts."""
        self.times = times
        self.shape = shape
        self.num_steps = shape.num_steps  # of the last round
        self._all = _Rate(FIRST_GUESS, 1.0)
        self._own = [_Rate() for _ in range(num_slots)]
        self._credit_s = 0.0
        self._overhead_s = 0.0  # of a step beyond its round

    def admit(self, slot: int) -> None:
        """Another sequence has the slot now."""
        self._own[slot] = _Rate()

    def choose(self, slots: Sequence[int], usable: Sequence[int]) -> int:
        """Steps of a round of these sequences, each of which could use `usable` drafts."""
        num_seqs, most = len(slots), max(usable)
        choices = [steps for steps in self.shape.choices if steps <= most or (most and not self.shape.is_chain)] or [0]
        tokens = self._expected(slots, usable)
        speeds = {steps: tokens[steps] / self._seconds(num_seqs, steps) for steps in choices}
        best = max(speeds, key=lambda steps: (speeds[steps], -steps))
        last = min(choices, key=lambda steps: abs(steps - self.num_steps))
        margin = _CLEARLY_BETTER if last else _BETTER_THAN_NOTHING
        self.num_steps = best if speeds[best] > margin * speeds[last] else last
        return self._explore(num_seqs, choices) if self.num_steps == 0 else self.num_steps

    def observe(
        self,
        slots: Sequence[int],
        num_steps: int,
        limits: Sequence[int],
        num_accepted: Sequence[int],
        seconds: float,
        overhead_s: float = 0.0,
    ) -> None:
        """A round of `num_steps` was run: by sequence, how many drafts it would have taken and how many it took;
        `overhead_s` is what the node's step took beside it."""
        self._overhead_s += _OVERHEAD_RATE * (min(overhead_s, seconds) - self._overhead_s)
        self.times.observe(len(slots), num_steps, seconds)
        for slot, limit, accepted in zip(slots, limits, num_accepted, strict=True):
            if limit:
                num_tries = min(accepted + 1, limit)
                self._own[slot].add(accepted, num_tries, _OWN_DECAY)
                self._all.add(accepted, num_tries, _ALL_DECAY)

    def acceptance(self, slot: int) -> float:
        """Estimate for a draft whose predecessors were right."""
        own, average = self._own[slot], self._all.num_right / self._all.num_tries
        return (own.num_right + _ALL_WEIGHT * average) / (own.num_tries + _ALL_WEIGHT)

    def _seconds(self, num_seqs: int, num_steps: int) -> float:
        """Of a step with such a round."""
        return self.times.seconds(num_seqs, num_steps) + self._overhead_s

    def _expected(self, slots: Sequence[int], usable: Sequence[int]) -> list[float]:
        """Tokens of a round of 0, 1, .. steps: a sequence's 1 + rate + .. + rate ** drafts."""
        tokens = [float(len(slots))] + [0.0] * self.shape.num_steps
        for slot, limit in zip(slots, usable, strict=True):
            rate = power = self.acceptance(slot)
            for steps in range(1, limit + 1):
                tokens[steps] += power
                power *= rate
        return list(itertools.accumulate(tokens))

    def _explore(self, num_seqs: int, choices: Sequence[int]) -> int:
        """0, or a step once it is paid for: a round of it, and one to catch up, that might bring nothing."""
        plain_s = self._seconds(num_seqs, 0)
        self._credit_s += _EXPLORED_SHARE * plain_s
        tried = choices[min(1, len(choices) - 1)]
        if self._credit_s < self._seconds(num_seqs, tried) + plain_s:
            return 0
        self._credit_s = 0.0
        return tried
