"""The draft length: how many draft steps each round has, 0 included, in a chain or a tree (`DraftShape`). The choice
maximizes tokens per second, and bounds what drafts may lose (`StepChooser`).

The gain. Let a be the share of drafts that are accepted if all drafts before them were. A round of K draft steps yields
1 + a + .. + a^K tokens per sequence. step_times.py says how long it takes. Added to that is the time to catch up on
rows that rounds without drafts left out. The K with the most tokens per second wins. The estimate of a is optimistic:
as if PRIOR_TRIES more drafts had been right. So drafts that were not seen for some MEMORY rounds are tried again.

The balance. The unit is the time of a round without drafts. A round that takes two of these and yields three tokens per
sequence adds one to the balance. The balance begins at FIRST_BALANCE, and grows by SHARE of all time. A round drafts
only as much as the balance can bear to lose. The loss is estimated pessimistically: as if PRIOR_TRIES more drafts had
been wrong, and as if its time were too short by its error. Gains are booked with the same error.

The bound. As far as its times of rounds are right, a node loses at most FIRST_BALANCE + SHARE * N rounds to drafts in
the time of N rounds, beside the loss of the last round that drafted. The first measurement of each kind of round is not
believed, and may hide a loss of its own.

Measuring. While drafts are made, a round without drafts is run now and then, because its time is the unit. So is a
round with one step more or fewer than the best, by turns, in case its time is wrong. These cost at most SHARE of the
tokens, and are as frequent as that allows. (README.md beside this file derives the five numbers.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ...metadata.estimate import Estimate
from .step_times import MEMORY, SHARE, StepTimes


class DraftShape(NamedTuple):
    """The shape of a round's drafts: a chain of K tokens, or a tree."""

    num_steps: int  # K, depth
    topk: int = 1
    num_tokens: int = 0  # N of a tree, drafts verified per round; a chain has as many as steps

    @property
    def is_chain(self) -> bool:
        return self.topk == 1

    @property
    def num_drafts(self) -> int:
        """The number of drafted tokens of a sequence that a round verifies: N."""
        return self.num_steps if self.is_chain else self.num_tokens

    @property
    def max_drafts(self) -> int:
        """Return the number of candidates of a tree of this depth and width."""
        return self.topk + (self.num_steps - 1) * self.topk**2 if self.num_steps else 0

    @property
    def num_slots(self) -> int:
        """Return the number of token slots after the last one with KV that a round writes, in any pool."""
        return 1 + max(self.num_drafts, self.num_steps, self.topk * self.num_steps)

    @property
    def choices(self) -> Sequence[int]:
        """Return the numbers of steps that a round may have: a tree is drafted whole or not at all."""
        return range(self.num_steps + 1) if self.is_chain else (0, self.num_steps)

    def with_steps(self, num_steps: int) -> DraftShape:
        """Return the same shape with one of `choices`."""
        assert num_steps in self.choices, (num_steps, self)
        if self.is_chain or num_steps == self.num_steps:
            return self._replace(num_steps=num_steps)
        return DraftShape(0)


NO_DRAFTS = DraftShape(0)


FIRST_BALANCE = 2.5  # rounds without drafts
PRIOR_TRIES = 6.0  # drafts

_KEPT_PER_ROUND = 1 - 1 / MEMORY  # of what was seen


class _Rate:
    """Counts of right drafts and of tries. Older ones count less."""

    __slots__ = ("_at", "num_right", "num_tries")

    def __init__(self, now: int = 0) -> None:
        self.num_right = self.num_tries = 0.0
        self._at = now

    def fade(self, now: int) -> None:
        """Count what was seen less, for the rounds since the last call."""
        if now != self._at:
            kept = _KEPT_PER_ROUND ** (now - self._at)
            self.num_right, self.num_tries, self._at = self.num_right * kept, self.num_tries * kept, now

    def add(self, num_right: float, num_tries: float) -> None:
        self.num_right += num_right
        self.num_tries += num_tries


class StepChooser:
    """Chooses the number of draft steps of each round. A sequence is known by its slot."""

    def __init__(self, shape: DraftShape, times: StepTimes, num_slots: int) -> None:
        """`shape` is the most that a round drafts."""
        self.times = times
        self.shape = shape
        self.num_steps = 0  # of the last round, one that only measures left out
        self.balance = FIRST_BALANCE  # in rounds without drafts
        self._now = 0  # rounds
        self._all = _Rate()
        self._own = [_Rate() for _ in range(num_slots)]
        # of a step beyond its round
        self._overhead_s = Estimate(0.0, memory=MEMORY, weight=MEMORY - 1)
        self._num_resting = 0  # rounds without drafts until the estimate is made again
        self._num_unseen = 0  # rounds without drafts that were not booked
        self._since_plain = self._since_near = 0.0  # tokens since a round of no steps, or of a near choice, measured
        self._tries_more = True  # next; otherwise one fewer
        self._leaves_rows_out = False  # whether rounds without drafts must be caught up on

    def admit(self, slot: int) -> None:
        """Forget the slot's last sequence: another one has the slot now."""
        self._own[slot] = _Rate(self._now)
        self.wake()

    def wake(self) -> None:
        """Rest no more: other sequences run now."""
        self._num_resting = 0

    def rests(self) -> bool:
        """Return whether the next round drafts nothing, whichever sequences take part. Ask once per round: if so, the
        caller need not find out the arguments of `choose`."""
        self._now += 1
        if self._num_resting == 0:
            return False
        self._num_resting -= 1
        return True

    def learn(self, slot: int, num_right: int, num_tries: int) -> None:
        """Learn from drafts of a slot: `num_right` of `num_tries` would have been accepted."""
        for rate in (self._own[slot], self._all):
            rate.fade(self._now)
            rate.add(num_right, num_tries)

    def choose(self, slots: Sequence[int], usable: Sequence[int], num_missed: int = 0, kind: Hashable = None) -> int:
        """Return the number of steps of a round, of which `rests` said that it may draft. The i-th sequence could use
        usable[i] drafts. Before it drafts, the drafter must catch up on `num_missed` rows of these sequences. `kind`:
        the kind of sampling; rounds of one kind take the same time."""
        num_seqs, most = len(slots), max(usable)
        if self._num_unseen:
            self._book(float(self._num_unseen), 0.0)
            self.times.pass_over(self._num_unseen)
            self._num_unseen = 0
        if not self.times.is_begun(kind):
            return 0
        choices = [steps for steps in self.shape.choices if steps <= most or (most and not self.shape.is_chain)] or [0]
        plain_s = self._seconds(num_seqs, 0, kind)
        took = {steps: self._seconds(num_seqs, steps, kind) / plain_s for steps in choices}
        late = self.times.catch_up_seconds(num_missed) / plain_s
        tokens, least_tokens = (self._expected(rates, usable) for rates in self._rates(slots))

        def speed(steps: int) -> float:
            return tokens[steps] / (took[steps] + (late / MEMORY if steps else 0.0))

        def loss(steps: int) -> float:
            """The most that a round may lose: all drafts are wrong, or at least fewer are right than it seems."""
            at_most = late + took[steps] * (1 + self.times.error(num_seqs, steps, kind))
            return max(0.0, at_most - max(1.0, least_tokens[steps]))

        best = max(choices, key=lambda steps: (speed(steps), -steps))
        wanted = best
        while wanted and loss(wanted) > self.balance:
            wanted = wanted - 1 if self.shape.is_chain else 0
        self.num_steps = wanted
        if not wanted:
            self._rest(loss(choices[1]) if best else None)
            return 0
        self._since_plain, self._since_near = (
            self._since_plain + tokens[wanted],
            self._since_near + tokens[wanted],
        )
        per_plain = tokens[wanted] / took[wanted]  # tokens of the best choice in the time of a round without drafts
        missed_s = self.times.catch_up_seconds(num_seqs * self._leaves_rows_out)
        if self._since_plain * SHARE / 2 >= per_plain * (1 + missed_s / plain_s) - 1:
            self._since_plain = 0.0
            return 0
        near = self._near(wanted, choices)
        if near is not None and self._since_near * SHARE / 2 >= per_plain * took[near] - tokens[near]:
            self._since_near, self._tries_more = 0.0, near < wanted
            return near if loss(near) <= self.balance else wanted
        return wanted

    def _near(self, steps: int, choices: Sequence[int]) -> int | None:
        """Return one step more or fewer, whichever is to be tried next, if it is a choice."""
        sides = (steps + 1, steps - 1) if self._tries_more else (steps - 1, steps + 1)
        return next((each for each in sides if each > 0 and each in choices), None)

    def passes_over(self, num_steps: int) -> bool:
        """Return whether the caller may leave out `observe` after this round. While the chooser rests, one observed
        round is enough."""
        is_passed = num_steps == 0 and 0 < self._num_resting < MEMORY - 1
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
        kind: Hashable = None,
    ) -> None:
        """Learn from a round of `num_steps` that was run.

        `limits` and `num_accepted` are by sequence: the drafts that it could have accepted, and those that it did.
        `seconds` is the time of the round, `overhead_s` the time of the node's step beside it, and `num_caught_up` the
        `num_missed` of `choose`. A time is None if the node did other work meanwhile."""
        num_seqs = len(slots)
        if overhead_s is not None and seconds is not None:
            self._overhead_s.observe(min(overhead_s, seconds))
        self._leaves_rows_out |= num_caught_up > 0
        plain_s = self._seconds(num_seqs, 0, kind)
        if seconds is None:
            seconds = self.times.seconds(num_seqs, num_steps, kind) + self.times.catch_up_seconds(num_caught_up)
        else:
            seconds = self.times.observe(num_seqs, num_steps, seconds, num_caught_up, kind)
        if num_steps == 0:
            self._book(1.0, 0.0)
            return
        for slot, limit, accepted in zip(slots, limits, num_accepted, strict=True):
            if limit:
                self.learn(slot, accepted, min(accepted + 1, limit))
        took = max(1.0, (seconds + self._overhead_s.mean) / plain_s)
        at_most = took * (1 + self.times.error(num_seqs, num_steps, kind))
        self._book(took, 1 + sum(num_accepted) / num_seqs - at_most)

    def acceptance(self, slot: int) -> float:
        """Return the pessimistic estimate of the share of accepted drafts of a slot."""
        _, [least] = self._rates([slot])
        return least

    def _rates(self, slots: Sequence[int]) -> tuple[list[float], list[float]]:
        """Return the optimistic and the pessimistic estimates of the shares of accepted drafts, by sequence: of its own
        tries, and of PRIOR_TRIES tries with the average rate of all sequences. That average has PRIOR_TRIES more tries,
        which were all right or all wrong."""
        average, now = self._all, self._now
        average.fade(now)
        added_if_wrong = PRIOR_TRIES * average.num_right / (average.num_tries + PRIOR_TRIES)
        added_if_right = added_if_wrong + PRIOR_TRIES * PRIOR_TRIES / (average.num_tries + PRIOR_TRIES)
        right: list[float] = []
        wrong: list[float] = []
        for slot in slots:
            own = self._own[slot]
            own.fade(now)
            num_tries = own.num_tries + PRIOR_TRIES
            right.append((own.num_right + added_if_right) / num_tries)
            wrong.append((own.num_right + added_if_wrong) / num_tries)
        return right, wrong

    def _expected(self, rates: Sequence[float], usable: Sequence[int]) -> list[float]:
        """Return the expected tokens per sequence of a round of 0, 1, .. steps: 1 + rate + .. + rate ** steps."""
        tokens = [1.0] + [0.0] * self.shape.num_steps
        for rate, limit in zip(rates, usable, strict=True):
            power = 1 / len(rates)
            for steps in range(1, limit + 1):
                power *= rate
                tokens[steps] += power
        return list(itertools.accumulate(tokens))

    def _seconds(self, num_seqs: int, num_steps: int, kind: Hashable) -> float:
        """Return the seconds of the node's step with a round of `num_steps`: with drafts no less than without."""
        plain_s = self.times.seconds(num_seqs, 0, kind)
        return max(plain_s, self.times.seconds(num_seqs, num_steps, kind)) + self._overhead_s.mean

    def _rest(self, least: float | None) -> None:
        """Rest until the account can bear `least`; None: until what was seen is old."""
        num_rounds = MEMORY if least is None else math.ceil((least - self.balance) / SHARE)
        self._num_resting = max(1, min(MEMORY, num_rounds)) - 1

    def _book(self, took: float, gain: float) -> None:
        """Book a step that took as long as `took` steps without drafts and gained `gain` of them. The balance is at
        most MEMORY and at least -FIRST_BALANCE. Drafts alone cannot bring it there; a pause of the process can."""
        self.balance = max(-FIRST_BALANCE, min(float(MEMORY), self.balance + gain + SHARE * took))
