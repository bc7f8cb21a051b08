"""The choice of the draft length of the next round: recent acceptance against the times of rounds, without loss.

A round of K steps brings a sequence of acceptance a (of a draft whose predecessors were right) 1 + a + .. + a^K
tokens, and takes what the table of times says for its batch, and for catching up where rounds without drafts left rows
out. The K with the most tokens a second wins, 0 included, and keeps its place until another is clearly better.

That is an estimate, and estimates err. So what drafting brought is booked, in rounds without drafts, the unit of all
losses and gains here: a round that took as long as two of them and brought three tokens a sequence has gained one. Only
what is in the account may be lost: `_LOAN` at the start, `_SHARE` of all time, and gains, up to a bound. Where it is
used up nothing is drafted, whatever the estimate says. So in N rounds' time drafting can cost about `_LOAN` + `_SHARE`
* N, and the last round's overdraft.

A node begins with a few rounds without drafts, since the table does not know of its work beside them.

While nothing is drafted nothing is learnt. A part of the time pays for trying again, half as much after each try that
led nowhere, until another sequence comes. While drafts are made, a round without them is run now and then, most often
at first: what drafts are measured against must be known too. Between two of those one has a step more than seems best,
in case the table is wrong about those that are not run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from .draft_shape import DraftShape
from .step_times import StepTimes

FIRST_GUESS = 0.88  # acceptance before anything is known: high, so that drafts are tried
_BETTER_THAN_DRAFTS, _BETTER_THAN_NOTHING = 1.03, 1.06  # what another choice must be
_NOTHING_IS_BETTER = 1.04  # than its estimate: drafts use caches too, and their handoff
_OWN_DECAY, _ALL_DECAY = 0.95, 0.98  # of what was seen, a round
_GUESS_WEIGHT = 6.0  # tries that the first guess counts for
_OVERHEAD_RATE = 0.1
_ALL_WEIGHT = 4.0  # tries that the average of all sequences counts for in one sequence's estimate
_DOUBT = 2.0  # wrong tries that are added where a loss must be bounded
_HORIZON = 16  # rounds over which catching up must pay

_LOAN, _SHARE = 6.0, 0.005
_MOST_GAINS = 30.0  # of one sequence; chance is smaller in larger batches, by the square root
_TRIED_SHARE, _MOST_HALVINGS, _MOST_CREDIT = 0.015, 3, 6.0
_TRIED_DRAFTS = 8  # of all sequences together
_LOOKED_AGAIN = 24  # rounds without drafts until the next look; they cost the host next to nothing
_PLAIN_AFTER, _MOST_DOUBLINGS = 2, 5  # rounds with drafts until one without, doubled each time
_CLOSE, _MOST_DOUBLINGS_CLOSE = 1.25, 3  # less often where drafting pays clearly
_MEASURED_SHARE = 0.03  # of the time, for catching up after them


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
        """Another sequence has the slot now."""
        self._own[slot] = _Rate()
        self._num_halvings = self._until_look = 0

    def rests(self) -> bool:
        """Whether the next round is one without drafts whoever takes part. To be asked once a round, so that what
        `choose` wants to know need not be found out."""
        if self.times.is_begun and (self.num_steps or not self._until_look):
            return False
        self._until_look -= self._until_look > 0
        return True

    def choose(self, slots: Sequence[int], usable: Sequence[int], num_missed: int = 0) -> int:
        """Steps of a round of these sequences, each of which could use `usable` drafts; the drafter must catch up on
        `num_missed` rows of theirs first."""
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
        """Whether a round that was run need not be observed: one in _LOOKED_AGAIN tells enough while nothing is
        drafted."""
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
        """A round of `num_steps` was run: by sequence, how many drafts it would have taken and how many it took;
        `overhead_s` is what the node's step took beside it, `num_caught_up` as many rows as `choose` was told of. None:
        not known, since there was other work."""
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
        """Estimate for a draft whose predecessors were right; the lower, the more `doubt`."""
        own, average = self._own[slot], self._all.num_right / (self._all.num_tries + doubt)
        return (own.num_right + _ALL_WEIGHT * average) / (own.num_tries + _ALL_WEIGHT)

    def _best(self, slots: Sequence[int], usable: Sequence[int], num_missed: int, choices: Sequence[int]) -> int:
        """By the estimate alone."""
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
        """What a round may lose, at least 0: all drafts, or where the account could not bear that, so many as doubt
        leaves wrong."""
        loss = self._cost(len(slots), steps, num_missed) - 1
        if loss > self.balance:
            loss += 1 - self._expected(slots, usable, _DOUBT)[steps] / len(slots)
        return max(0.0, loss)

    def _cost(self, num_seqs: int, num_steps: int, num_missed: int) -> float:
        """Return the cost of a step, in steps without drafts."""
        seconds = self._seconds(num_seqs, num_steps) + self.times.catch_up_seconds(num_missed)
        return seconds / self._seconds(num_seqs, 0)

    def _seconds(self, num_seqs: int, num_steps: int) -> float:
        """Return the seconds of a step with such a round."""
        return self.times.seconds(num_seqs, num_steps) + self._overhead_s

    def _expected(self, slots: Sequence[int], usable: Sequence[int], doubt: float = 0.0) -> list[float]:
        """Tokens of a round of 0, 1, .. steps: a sequence's 1 + rate + .. + rate ** drafts."""
        tokens = [float(len(slots))] + [0.0] * self.shape.num_steps
        for slot, limit in zip(slots, usable, strict=True):
            rate = power = self.acceptance(slot, doubt)
            for steps in range(1, limit + 1):
                tokens[steps] += power
                power *= rate
        return list(itertools.accumulate(tokens))

    def _try(self, slots: Sequence[int], usable: Sequence[int], num_missed: int, steps: int) -> int:
        """0, or `steps` while a try is under way, which begins when there is credit for it: some rounds that might
        bring nothing, of which the first one catches up."""
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
        """Rounds with drafts until one without."""
        most = _MOST_DOUBLINGS_CLOSE if self._is_close else _MOST_DOUBLINGS
        missed = self.times.catch_up_seconds(num_seqs * self._leaves_rows_out) / self._seconds(num_seqs, 0)
        return max(_PLAIN_AFTER << min(most, self.times.num_seen(num_seqs, 0)), int(missed / _MEASURED_SHARE))

    def _book(self, num_seqs: int, took: float, gain: float) -> None:
        """A step that took as long as `took` steps without drafts."""
        bound = min(_MOST_GAINS / math.sqrt(num_seqs), _LOAN + self.times.num_seen(num_seqs, 0))
        self.balance = max(-bound, min(bound, self.balance + gain + _SHARE * took))
        self._credit = min(_MOST_CREDIT, self._credit + _TRIED_SHARE * 0.5**self._num_halvings * took)
