"""Seconds of chunks of prompt tokens on a decode node: measured at the start, corrected while chunks run.

The table is of chunks with a forward of their own, at the beginning of a sequence. A joint chunk, which shares the
forward of a round, or one behind a long history, takes longer or shorter. So each kind of chunk has a correction in
seconds: joint or not, by magnitude of the chunk and of its history. It is the least of the last KEPT measurements,
since a disturbance (a pause, another process) only adds to a time. A chunk in the step of a round counts with the time
by which it makes the round longer.

A kind with fewer measurements takes the correction of the kind most like it, unless its own ones are less. A joint
chunk of which nothing is measured takes as long as one with its own forward, which is the longest that it can take. A
correction that adds to the table is forgotten after MEMORY other chunks: such chunks may not be tried any more, and
would never be measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from ...metadata.estimate import Estimate
from .step_times import KEPT, MEMORY, between

_ENOUGH_S = 0.5  # of measuring at the start on a slow machine
_NUM_RUNS = 3
_DEPTH_UNIT = 1024  # tokens of history; shorter ones count as none
_LEAST_SHARE = 0.01  # of the table's time, which no correction goes below


class _Kind(NamedTuple):
    is_joint: bool
    size: int  # magnitude of the chunk
    depth: int  # magnitude of its history


class ChunkCosts:
    """A table of seconds by tokens, linear between the measured points, and its corrections."""

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
            runs = [run(size) for _ in range(1 + _NUM_RUNS)]
            seconds[size] = min(runs[1:])
            spent_s += sum(runs)
        return cls(seconds)

    def learn_joint(self, run: Callable[[int], float], lengths: Sequence[int]) -> None:
        """Measure joint chunks of these lengths. `run(num_tokens)` returns the seconds by which a chunk makes a round
        longer."""
        for num_tokens in lengths:
            for _ in range(1 + KEPT):  # the first one does not count
                self.observe(num_tokens, 0, run(num_tokens), is_joint=True)

    def seconds(self, num_tokens: int, depth: int, *, is_joint: bool) -> float:
        """Return the seconds of a chunk of `num_tokens` behind `depth` tokens. Lengths beyond those measured are
        extrapolated."""
        base = self._table(num_tokens)
        kind = _Kind(is_joint, num_tokens.bit_length(), _magnitude(depth))
        return max(_LEAST_SHARE * base, base + self._correction(kind))

    def observe(self, num_tokens: int, depth: int, seconds: float, *, is_joint: bool) -> None:
        """Correct the table by the seconds of a chunk; in the step of a round: those by which the round was longer."""
        kind = _Kind(is_joint, num_tokens.bit_length(), _magnitude(depth))
        self._num_measured += 1
        estimate = self._measured.setdefault(kind, Estimate(num_kept=KEPT))
        estimate.observe(max(0.0, seconds) - self._table(num_tokens), self._num_measured)
        long_ago = self._num_measured - MEMORY
        for old in [old for old, each in self._measured.items() if each.mean > 0 and each.seen_at < long_ago]:
            del self._measured[old]
        self._corrections.clear()

    def most_tokens(self, within_s: float, depth: int, most: int, *, is_joint: bool) -> int:
        """Return the length of the longest chunk, up to `most`, that takes at most `within_s`."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(middle, depth, is_joint=is_joint) <= within_s:
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
        known = [each for each in known if each.is_joint == kind.is_joint] or [
            each for each in known if not each.is_joint
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
