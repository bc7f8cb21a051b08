"""Chooses the number of draft steps of each round from measured times of rounds and from accepted drafts.

The estimate. If a is the share of accepted drafts (of those whose predecessors were right), a round of K steps yields
1 + a + .. + a^K tokens per sequence. It takes as long as step_times.py says, plus the time to catch up on rows that
rounds without drafts left out. The K with the most tokens per second wins, 0 included. It stays until another K is
better by a margin.

The account. An estimate can be wrong, so the losses and gains of drafting are booked, in units of one round without
drafts: a round that took as long as two of these and yielded three tokens per sequence has gained one. The chooser
drafts only what the account can bear to lose: `_LOAN` at the start, `_SHARE` of all time, and gains up to a bound. If
the account is empty, nothing is drafted. So drafting costs at most about `_LOAN` + `_SHARE` * N in N rounds, plus the
overdraft of the last round.

Measuring. A node begins with a few rounds without drafts, because the table of times leaves out the node's own work.
While nothing is drafted, a part of the time pays for a try. Each try that failed halves the part, until a new sequence
comes. While drafts are made, a round without drafts is run now and then, most often at first, because their time is
the unit. Half-way between two of these, a round has one step more than the best, in case its time is wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from .draft_shape import DraftShape
from .step_times import StepTimes

FIRST_GUESS = 0.88  # acceptance before anything is known: high, so that drafts are tried
_BETTER_THAN_DRAFTS, _BETTER_THAN_NOTHING = 1.03, 1.06  # by which another choice must be faster
_NOTHING_IS_BETTER = 1.04  # than its estimate: drafting also costs caches and handoffs
_OWN_DECAY, _ALL_DECAY = 0.95, 0.98  # of older tries, per round
_GUESS_WEIGHT = 6.0  # tries that the first guess counts for
_OVERHEAD_RATE = 0.1
_ALL_WEIGHT = 4.0  # tries that the average of all sequences counts for in one sequence's estimate
_DOUBT = 2.0  # wrong tries that are added where a loss must be bounded
_HORIZON = 16  # rounds over which catching up must pay

_LOAN, _SHARE = 6.0, 0.005
_MOST_GAINS = 30.0  # of one sequence; chance is smaller in larger batches, by the square root
_TRIED_SHARE, _MOST_HALVINGS, _MOST_CREDIT = 0.015, 3, 6.0
_TRIED_DRAFTS = 8  # of all sequences together
_LOOKED_AGAIN = 24  # rounds without drafts until the estimate is made again
_PLAIN_AFTER, _MOST_DOUBLINGS = 2, 5  # rounds with drafts until one without, doubled each time
_CLOSE, _MOST_DOUBLINGS_CLOSE = 1.25, 3  # if drafting gains less than this factor
_MEASURED_SHARE = 0.03  # of the time, for catching up after rounds without drafts


class _Rate:
    """A share of right tries. Older tries count less."""

    __slots__ = ("num_right", "num_tries")

    def __init__(self, rate: float = 0.0, weight: float = 0.0) -> None:
        self.num_right, self.num_tries = rate * weight, weight

    def add(self, num_right: int, num_tries: int, decay: float) -> None:
        self.num_right = self.num_right * decay + num_right
        self.num_tries = self.num_tries * decay + num_tries


class StepChooser:
    """Chooses the number of draft steps of each round. A sequence is known by its slot."""

    def __init__(self, shape: DraftShape, times: StepTimes, num_slots: int) -> None:
        """`shape` is the most that a round drafts."""
        self.times = times
        self.shape = shape
        self.num_steps = shape.num_steps  # of the last round, one without drafts that only measures left out
        self.balance = _LOAN  # in rounds without drafts
        self._all = _Rate(FIRST_GUESS, _GUESS_WEIGHT)
        self._own = [_Rate() for _ in range(num_slots)]
        self._overhead_s = 0.0  # of a step beyond its round
        self._credit = _LOAN  # for trying
        self._num_halvings = 0
        self._num_to_try = 0  # rounds of the try under way
        self._until_look = 0
        self._num_unseen = 0  # rounds without drafts since the last look, which were not booked
        self._since_plain = _PLAIN_AFTER  # rounds with drafts; as if there had been some
        self._leaves_rows_out = False  # whether rounds without drafts must be caught up on
        self._is_close = False  # whether drafting hardly pays, if at all

    def admit(self, slot: int) -> None:
        """Forget the slot's last sequence: another one has the slot now."""
        self._own[slot] = _Rate()
        self._num_halvings = self._until_look = 0

    def rests(self) -> bool:
        """Return whether the next round drafts nothing, whichever sequences take part. Ask once per round: if so, the
        caller need not find out the arguments of `choose`."""
        if self.times.is_begun and (self.num_steps or not self._until_look):
            return False
        self._until_look -= self._until_look > 0
        return True

    def choose(self, slots: Sequence[int], usable: Sequence[int], num_missed: int = 0) -> int:
        """Return the number of steps of a round. The i-th sequence could use usable[i] drafts. Before it drafts, the
        drafter must catch up on `num_missed` rows of these sequences."""
        if self.rests():
            return 0
        num_seqs, most = len(slots), max(usable)
        if self._num_unseen:
            self._book(num_seqs, float(self._num_unseen), 0.0)
            self._num_unseen = 0
        choices = [steps for steps in self.shape.choices if steps <= most or (most and not self.shape.is_chain)] or [0]
        wanted = self._allowed(self._best(slots, usable, num_missed, choices), slots, usable, num_missed)
        if wanted:
            self._num_halvings = self._num_to_try = 0
        elif len(choices) > 1:
            wanted = self._try(slots, usable, num_missed, choices[1])
        self.num_steps = wanted
        if wanted == 0:
            self._until_look = _LOOKED_AGAIN
        elif self._since_plain >= self._plain_after(num_seqs):
            self._since_plain = 0
            return 0
        elif self._since_plain == self._plain_after(num_seqs) // 2 and wanted + 1 in choices:
            return self._allowed(wanted + 1, slots, usable, num_missed)
        return wanted

    def passes_over(self, num_steps: int) -> bool:
        """Return whether the caller may leave out `observe` after this round. While nothing is drafted, one observed
        round in _LOOKED_AGAIN is enough."""
        is_passed = num_steps == 0 and 0 < self._until_look < _LOOKED_AGAIN and self.times.is_begun
        self._num_unseen += is_passed
        return is_passed

    def observe(
        self,
        slots: Sequence[int],
        num_steps: int,
        limits: Sequence[int],
        num_accepted: Sequence[int],
        seconds: float | None,
        overhead_s: float | None = 0.0,
        num_caught_up: int = 0,
    ) -> None:
        """Learn from a round of `num_steps` that was run.

        `limits` and `num_accepted` are by sequence: the drafts that it could have accepted, and those that it did.
        `seconds` is the time of the round, `overhead_s` the time of the node's step beside it, and `num_caught_up` the
        `num_missed` of `choose`. A time is None if the node did other work meanwhile."""
        num_seqs = len(slots)
        if overhead_s is not None and seconds is not None:
            self._overhead_s += _OVERHEAD_RATE * (min(overhead_s, seconds) - self._overhead_s)
        plain_s = self._seconds(num_seqs, 0)
        if seconds is None:
            seconds = self.times.seconds(num_seqs, num_steps) + self.times.catch_up_seconds(num_caught_up)
        else:
            seconds = self.times.observe(num_seqs, num_steps, seconds, num_caught_up)
        if num_steps == 0:
            self._since_plain = 0
            self._book(num_seqs, 1.0, 0.0)
            return
        self._since_plain += 1
        for slot, limit, accepted in zip(slots, limits, num_accepted, strict=True):
            if limit:
                num_tries = min(accepted + 1, limit)
                self._own[slot].add(accepted, num_tries, _OWN_DECAY)
                self._all.add(accepted, num_tries, _ALL_DECAY)
        took = (seconds + self._overhead_s) / plain_s
        self._book(num_seqs, took, 1 + sum(num_accepted) / num_seqs - took)

    def acceptance(self, slot: int, doubt: float = 0.0) -> float:
        """Return the estimated share of accepted drafts of a slot. More `doubt` lowers it."""
        own, average = self._own[slot], self._all.num_right / (self._all.num_tries + doubt)
        return (own.num_right + _ALL_WEIGHT * average) / (own.num_tries + _ALL_WEIGHT)

    def _best(self, slots: Sequence[int], usable: Sequence[int], num_missed: int, choices: Sequence[int]) -> int:
        """Return the steps of the fastest choice by the estimate alone."""
        num_seqs = len(slots)
        tokens = self._expected(slots, usable)
        self._leaves_rows_out |= num_missed > 0
        once = self.times.catch_up_seconds(max(num_missed, num_seqs * self._leaves_rows_out)) / _HORIZON
        doubt = 1 + self.times.doubt(num_seqs)
        speeds = {steps: tokens[steps] / (self._seconds(num_seqs, steps) + once) / doubt for steps in choices}
        speeds[0] = _NOTHING_IS_BETTER * num_seqs / self._seconds(num_seqs, 0)
        best = max(speeds, key=lambda steps: (speeds[steps], -steps))
        last = min(choices, key=lambda steps: abs(steps - self.num_steps))
        self._is_close = speeds[best] < _CLOSE * speeds[0]
        margin = _BETTER_THAN_DRAFTS if last else _BETTER_THAN_NOTHING
        return best if speeds[best] > margin * speeds[last] else last

    def _allowed(self, steps: int, slots: Sequence[int], usable: Sequence[int], num_missed: int) -> int:
        """Return as many of `steps` as the account can bear to lose."""
        while steps and self._loss(steps, slots, usable, num_missed) > self.balance:
            steps = steps - 1 if self.shape.is_chain else 0
        return steps

    def _loss(self, steps: int, slots: Sequence[int], usable: Sequence[int], num_missed: int) -> float:
        """Return the most that a round may lose, at least 0. That is the case that all drafts are wrong. If the account
        cannot bear it, the loss is that of a doubtful estimate instead."""
        loss = self._cost(len(slots), steps, num_missed) - 1
        if loss > self.balance:
            loss += 1 - self._expected(slots, usable, _DOUBT)[steps] / len(slots)
        return max(0.0, loss)

    def _cost(self, num_seqs: int, num_steps: int, num_missed: int) -> float:
        """Return the cost of a step, in steps without drafts."""
        seconds = self._seconds(num_seqs, num_steps) + self.times.catch_up_seconds(num_missed)
        return seconds / self._seconds(num_seqs, 0)

    def _seconds(self, num_seqs: int, num_steps: int) -> float:
        """Return the seconds of the node's step with a round of `num_steps`."""
        return self.times.seconds(num_seqs, num_steps) + self._overhead_s

    def _expected(self, slots: Sequence[int], usable: Sequence[int], doubt: float = 0.0) -> list[float]:
        """Return the expected tokens of a round of 0, 1, .. steps: per sequence, 1 + rate + .. + rate ** steps."""
        tokens = [float(len(slots))] + [0.0] * self.shape.num_steps
        for slot, limit in zip(slots, usable, strict=True):
            rate = power = self.acceptance(slot, doubt)
            for steps in range(1, limit + 1):
                tokens[steps] += power
                power *= rate
        return list(itertools.accumulate(tokens))

    def _try(self, slots: Sequence[int], usable: Sequence[int], num_missed: int, steps: int) -> int:
        """Return `steps` while a try is under way, else 0. A try is a few rounds with drafts; the first of them catches
        up. It begins when the credit covers the loss of all of them."""
        if self._num_to_try:
            self._num_to_try -= 1
            if self._num_to_try and self._allowed(steps, slots, usable, num_missed):
                return steps
            self._num_to_try = 0
            self._num_halvings = min(_MOST_HALVINGS, self._num_halvings + 1)
            return 0
        num_rounds = max(2, math.ceil(_TRIED_DRAFTS / len(slots)))
        price = self._cost(len(slots), steps, num_missed) - 1
        price += (num_rounds - 1) * max(0.0, self._cost(len(slots), steps, 0) - 1)
        if price > min(self._credit, self.balance):
            return 0
        self._credit, self._num_to_try = 0.0, num_rounds
        return steps

    def _plain_after(self, num_seqs: int) -> int:
        """Return the number of rounds with drafts between two rounds without."""
        most = _MOST_DOUBLINGS_CLOSE if self._is_close else _MOST_DOUBLINGS
        missed = self.times.catch_up_seconds(num_seqs * self._leaves_rows_out) / self._seconds(num_seqs, 0)
        return max(_PLAIN_AFTER << min(most, self.times.num_seen(num_seqs, 0)), int(missed / _MEASURED_SHARE))

    def _book(self, num_seqs: int, took: float, gain: float) -> None:
        """Book a step that took as long as `took` steps without drafts and gained `gain` of them."""
        bound = min(_MOST_GAINS / math.sqrt(num_seqs), _LOAN + self.times.num_seen(num_seqs, 0))
        self.balance = max(-bound, min(bound, self.balance + gain + _SHARE * took))
        self._credit = min(_MOST_CREDIT, self._credit + _TRIED_SHARE * 0.5**self._num_halvings * took)
