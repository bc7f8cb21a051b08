"""Times of steps, measured at the start and corrected while steps run: of rounds (`StepTimes`), and of the chunks of
prompt tokens that a decode node computes (`ChunkCosts`).

A round of one kind in service takes longer or shorter than the table says: contexts are long, filters and penalties
take time, the node does other work beside. So each kind of round has a correction: an estimate of the logarithm of its
time over that of the table. A correction that makes drafts slower fades if no such round runs for MEMORY rounds, so
that a disturbance does not speak against drafts for good.

The table of chunks is of those with a forward of their own, at the beginning of a sequence. A piggybacked chunk, which
shares the forward of a round, or one behind a long history, takes longer or shorter. So each kind of chunk has a
correction in seconds: piggybacked or not, by magnitude of the chunk and of its history. It is the least of the last
KEPT measurements, since a disturbance (a pause, another process) only adds to a time. A chunk in the step of a round
counts with the time by which it makes the round longer.

A kind of chunk with fewer measurements takes the correction of the kind most like it, unless its own ones are less. A
piggybacked chunk of which nothing is measured takes as long as one with its own forward, which is the longest that it
can take. A correction that adds to the table is forgotten after MEMORY other chunks: such chunks may not be tried any
more, and would never be measured again.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from ...metadata.estimate import Estimate, Fading

MEMORY = 32  # rounds after which what was seen counts for little
SHARE = 0.005  # of the time: what a node pays for tries (draft_length.py), and the rate at which bad news are forgotten
KEPT = 3  # measurements of which the least counts

_FADING = Fading(to=0.0, after=MEMORY, half_life=math.log(0.5) / math.log(1 - SHARE))
_ENOUGH_S = 0.5  # of measuring at the start on a slow machine
_NUM_RUNS = 4  # of each measurement; the first does not count
_DEPTH_UNIT = 1024  # tokens of history of a chunk; shorter ones count as none
_LEAST_SHARE = 0.01  # of the time in the table of chunks, which no correction goes below


class StepTimes:
    """A table of seconds by (batch size, steps), linear between the measured points, and its corrections.

    The table is of short greedy sequences on an idle machine. Corrections are kept by kind of sampling, number of steps
    and magnitude of batch size; one more is common to all. Catching up on rows that the drafter has not seen has a time
    per call and a time per row."""

    def __init__(self, seconds: Mapping[tuple[int, int], float]) -> None:
        """`seconds` holds, for each of some batch sizes, the same numbers of steps, 0 among them."""
        self._seconds = dict(seconds)
        self._sizes = sorted({size for size, _ in seconds})
        self._steps = sorted({steps for _, steps in seconds})
        assert self._steps[0] == 0 and len(seconds) == len(self._sizes) * len(self._steps), sorted(seconds)
        self._known: dict[tuple[int, int], float] = {}  # what `_table` found
        self._now = 0  # rounds
        self._common = 0.0
        # by kind, steps, magnitude of the size; the one observed last is at the end
        self._corrections: dict[tuple[Hashable, int, int], Estimate] = {}
        self._num_plain: dict[Hashable, int] = {}  # observed rounds without drafts, by kind
        self._catch_up = Estimate(1.0, num_kept=KEPT, memory=MEMORY)  # a factor on the table's time

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

    def is_begun(self, kind: Hashable = None) -> bool:
        """Whether enough rounds of this kind without drafts were observed. The table alone leaves out the node's other
        work and knows greedy rounds alone."""
        return self._num_plain.get(kind, 0) >= KEPT

    def seconds(self, size: int, num_steps: int, kind: Hashable = None) -> float:
        """Return the seconds of a round of `size` sequences; sizes and steps beyond those measured are extrapolated."""
        own = self._corrections.get((kind, num_steps, size.bit_length()))
        log = self._first_log(size, num_steps, kind) if own is None else own.at(self._now)
        return math.exp(self._common + log) * self._table(size, num_steps)

    def error(self, size: int, num_steps: int, kind: Hashable = None) -> float:
        """Return the relative error that the ratio of rounds with and without drafts may have."""
        found = (self._found(size, 0, kind), self._found(size, num_steps, kind))
        return sum(each.error for each in found if each is not None)

    def catch_up_seconds(self, num_rows: int) -> float:
        """Return the seconds of running the drafter over that many rows before a round."""
        return self._catch_up.mean * self._table_catch_up(num_rows) if num_rows else 0.0

    def observe(
        self, size: int, num_steps: int, seconds: float, num_caught_up: int = 0, kind: Hashable = None
    ) -> float:
        """Correct the table by the `seconds` of a round, catching up on `num_caught_up` rows included. Return the
        seconds without the part that looks like a disturbance."""
        self._now += 1
        expected_s = self.seconds(size, num_steps, kind)
        if num_caught_up:
            self._catch_up.observe(max(0.0, seconds - expected_s) / self._table_catch_up(num_caught_up))
            return expected_s + self.catch_up_seconds(num_caught_up)
        key, is_drafted = (kind, num_steps, size.bit_length()), num_steps > 0
        own = self._corrections.pop(key, None)
        if own is None:
            fading = _FADING if is_drafted else None
            own = Estimate(self._first_log(size, num_steps, kind), num_kept=KEPT, memory=MEMORY, fading=fading)
        self._corrections[key] = own
        if not is_drafted:
            self._num_plain[kind] = self._num_plain.get(kind, 0) + 1
        log = math.log(max(seconds, 1e-9) / self._table(size, num_steps))
        error = own.observe(log, self._now, common=self._common)
        if own.count > KEPT:
            self._common += error / MEMORY
        return expected_s * math.exp(error)

    def pass_over(self, num_rounds: int) -> None:
        """Let rounds go by that were not observed."""
        self._now += num_rounds

    def _found(self, size: int, num_steps: int, kind: Hashable) -> Estimate | None:
        """Return the correction of such rounds, or else of the last rounds with or without drafts, of this kind of
        sampling if there were any."""
        own = self._corrections.get((kind, num_steps, size.bit_length()))
        if own is not None:
            return own
        lasts = [key for key in reversed(self._corrections) if (key[1] > 0) == (num_steps > 0)]
        like = next((key for key in lasts if key[0] == kind), lasts[0] if lasts else None)
        return None if like is None else self._corrections[like]

    def _first_log(self, size: int, num_steps: int, kind: Hashable) -> float:
        """Return the correction of rounds that were not observed yet: that of the last round with or without drafts.

        If no round with drafts was observed, the excess of rounds without drafts over the table counts as other work of
        the node. It is added to the table's time, not multiplied, because drafts would not add to that work. This errs
        in favour of drafts, and their rounds then show their real time."""
        last = self._found(size, num_steps, kind)
        if last is not None:
            return last.at(self._now)
        if num_steps == 0:
            return 0.0
        table_s, plain_s = self._table(size, 0), self.seconds(size, 0, kind)
        if plain_s <= table_s:
            return math.log(plain_s / table_s) - self._common
        return math.log(1 + (plain_s - table_s) / self._table(size, num_steps)) - self._common

    def _table_catch_up(self, num_rows: int) -> float:
        """Return the seconds that the table suggests: a draft step is a call for one row."""
        first = self._steps[min(1, len(self._steps) - 1)]
        one, two = (self._table(size, first) - self._table(size, 0) for size in (1, 2))
        return (max(one, 1e-9) + (num_rows - 1) * max(0.0, two - one)) * math.exp(self._common)

    def _table(self, size: int, num_steps: int) -> float:
        """Return the table's seconds, kept because every round asks."""
        known = self._known.get((size, num_steps))
        if known is None:

            def at(column: int) -> float:
                return between(self._sizes, size, lambda row: self._seconds[row, column])

            known = self._known[size, num_steps] = max(1e-9, between(self._steps, num_steps, at))
        return known


class _Kind(NamedTuple):
    is_mixed: bool
    size: int  # magnitude of the chunk
    depth: int  # magnitude of its history


class ChunkCosts:
    """A table of a chunk's seconds by tokens, linear between the measured points, and its corrections."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """`seconds`: of a chunk of each of some lengths, alone, without history; at least one."""
        self._sizes = sorted(seconds)
        # a longer chunk takes no less
        self._seconds = dict(zip(self._sizes, accumulate((seconds[size] for size in self._sizes), max), strict=True))
        self._measured: dict[_Kind, Estimate] = {}
        self._num_measured = 0
        self._corrections: dict[_Kind, float] = {}  # what `_correction` found since the last measurement

    @classmethod
    def measure(cls, run: Callable[[int], float], max_tokens: int) -> ChunkCosts:
        """Measure a table. `run(num_tokens)` computes a chunk and returns its seconds. The first run of a length does
        not count. Lengths beyond the first are left out after half a second."""
        seconds: dict[int, float] = {}
        spent_s = 0.0
        for size in sorted({min(16, max_tokens), max(1, max_tokens // 4), max_tokens}):
            if seconds and spent_s > _ENOUGH_S:
                break
            runs = [run(size) for _ in range(_NUM_RUNS)]
            seconds[size] = min(runs[1:])
            spent_s += sum(runs)
        return cls(seconds)

    def learn_mixed(self, run: Callable[[int], float], lengths: Sequence[int]) -> None:
        """Measure piggybacked chunks of these lengths. `run(num_tokens)` returns the seconds by which a chunk makes a
        round longer."""
        for num_tokens in lengths:
            for _ in range(1 + KEPT):  # the first one does not count
                self.observe(num_tokens, 0, run(num_tokens), is_mixed=True)

    def seconds(self, num_tokens: int, depth: int, *, is_mixed: bool) -> float:
        """Return the seconds of a chunk of `num_tokens` behind `depth` tokens. Lengths beyond those measured are
        extrapolated."""
        base = self._table(num_tokens)
        kind = _Kind(is_mixed, num_tokens.bit_length(), _magnitude(depth))
        return max(_LEAST_SHARE * base, base + self._correction(kind))

    def observe(self, num_tokens: int, depth: int, seconds: float, *, is_mixed: bool) -> None:
        """Correct the table by the seconds of a chunk; in the step of a round: those by which the round was longer."""
        kind = _Kind(is_mixed, num_tokens.bit_length(), _magnitude(depth))
        self._num_measured += 1
        estimate = self._measured.setdefault(kind, Estimate(num_kept=KEPT))
        estimate.observe(max(0.0, seconds) - self._table(num_tokens), self._num_measured)
        long_ago = self._num_measured - MEMORY
        for old in [old for old, each in self._measured.items() if each.mean > 0 and each.seen_at < long_ago]:
            del self._measured[old]
        self._corrections.clear()

    def most_tokens(self, within_s: float, depth: int, most: int, *, is_mixed: bool) -> int:
        """Return the length of the longest chunk, up to `most`, that takes at most `within_s`."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(middle, depth, is_mixed=is_mixed) <= within_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _correction(self, kind: _Kind) -> float:
        """Return the correction of a kind of chunk: the measured one, or an estimate if few were measured."""
        if kind not in self._corrections:
            own, likely = self._measured.get(kind), self._likely(kind)
            if own is not None:
                likely = own.mean if own.count == KEPT else min(own.mean, likely)
            self._corrections[kind] = likely
        return self._corrections[kind]

    def _likely(self, kind: _Kind) -> float:
        """Return the correction of the known kind most like this one. A correction that adds grows with the chunk: a
        long history or a slow machine costs time per token."""
        known = [other for other, each in self._measured.items() if other != kind and _is_sure(each)]
        known = [each for each in known if each.is_mixed == kind.is_mixed] or [
            each for each in known if not each.is_mixed
        ]
        if not known:
            return 0.0
        like = min(known, key=lambda each: (abs(each.depth - kind.depth), abs(each.size - kind.size), each))
        correction = self._measured[like].mean
        return correction * 2.0 ** (kind.size - like.size) if correction > 0 else correction

    def _table(self, num_tokens: int) -> float:
        least, least_s = self._sizes[0], self._seconds[self._sizes[0]]
        if len(self._sizes) == 1:  # its time is taken as per token, so that a longer chunk counts as too long
            return least_s * max(1.0, num_tokens / least)
        return max(least_s / 2, between(self._sizes, num_tokens, self._seconds.__getitem__))


def _is_sure(estimate: Estimate) -> bool:
    """Return whether other kinds may rely on it: a disturbance makes no chunk faster."""
    return estimate.count == KEPT or estimate.mean < 0


def _magnitude(depth: int) -> int:
    return (depth // _DEPTH_UNIT).bit_length()


def _undisturbed(seconds: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Return the table with no time above that of a round of as many or more sequences and steps. Such a time was
    disturbed, for example by another node that starts on the same device."""
    return {
        (size, steps): min(took for (other, more), took in seconds.items() if other >= size and more >= steps)
        for size, steps in seconds
    }


def between(known: list[int], x: int, value: Callable[[int], float]) -> float:
    """Interpolate linearly between two of `known` (rising), and extrapolate beyond them."""
    if len(known) == 1:
        return value(known[0])
    high = min(max(1, bisect.bisect_left(known, x)), len(known) - 1)
    left, right = known[high - 1], known[high]
    share = (x - left) / (right - left)
    return (1 - share) * value(left) + share * value(right)
