"""Costs: the seconds of rounds, chunks and handoffs of any size, fitted to measured times.

    round      base(bucket of the batch) + a x tokens of all contexts
    chunk      base(tokens) + q x sum of n^2 + h x sum of n x history, over its prompts of n tokens
    together   a chunk, then a round; or one forward pass, if such batches and chunks were measured and it is faster
    handoff    by the tokens of the last chunk, since the pages before it are pulled while that is computed

Bases are linear between measured sizes, those of the smallest size below it, and go on as the last two sizes say above
the largest. A graph of a round serves batches up to its bucket (engine/rounds/sizes.py).
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

from ...engine.pace.draft_length import NO_DRAFTS
from ...engine.pace.mixed_sizes import MixedSize, MixedSizes
from ...engine.rounds.sizes import round_sizes
from .times import ChunkPoint, RoundPoint, Times


class ChunkPart(NamedTuple):
    """Tokens of one prompt in a chunk, behind `history` tokens that are computed already."""

    tokens: int
    history: int


class Curve:
    """A function that is linear between given points."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        self._points = sorted(points)

    @property
    def end(self) -> float:
        """The largest x that was measured."""
        return self._points[-1][0]

    def __call__(self, at: float) -> float:
        points = self._points
        if len(points) == 1 or at <= points[0][0]:
            return points[0][1]
        high = min(bisect_left(points, at, key=lambda point: point[0]), len(points) - 1)
        (x0, y0), (x1, y1) = points[high - 1], points[high]
        return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


class Costs:
    """Seconds of a node's work."""

    def __init__(self, times: Times, max_running: int) -> None:
        """`max_running`: sequences in the largest round."""
        self._per_context_token = _per_context_token(times.rounds)
        slope, shortest = self._per_context_token, _shortest(times.rounds).values()
        base = Curve((each.batch, each.ms - slope * each.batch * each.context) for each in shortest)
        sizes = round_sizes(max_running)
        self._round_ms = [base(next(each for each in sizes if each >= batch)) for batch in range(max_running + 1)]
        self._per_pair, self._per_square = _attention(times.chunks)
        plain = [each for each in times.chunks if each.prompts == 1 and not each.history]
        self._chunk_base = Curve((each.tokens, each.ms - self._per_square * each.tokens**2) for each in plain)
        self._handoff = Curve((each.tokens, each.ms) for each in times.handoffs)
        extra = defaultdict[int, list[tuple[float, float]]](list)
        for each in times.joints:
            extra[each.batch].append((each.tokens, each.ms))
        self._mixed_extra = {batch: Curve(points) for batch, points in sorted(extra.items())}
        sizes = {MixedSize(each.batch, NO_DRAFTS, each.tokens) for each in times.joints}
        self.mixed = MixedSizes(sorted(sizes, key=lambda size: size.num_rows))  # those that were measured
        self.shares_forward = functools.cache(self.mixed.holds)  # asked in every step
        self.router_s = times.router_ms / 1e3

    def round_s(self, batch: int, context_tokens: int) -> float:
        """Return the time of a round. `context_tokens`: of all its sequences together."""
        return (self._round_ms[batch] + self._per_context_token * context_tokens) / 1e3

    def chunk_s(self, pieces: Sequence[ChunkPart]) -> float:
        """Return the time of a chunk alone."""
        squares = sum(piece.tokens**2 for piece in pieces)
        pairs = sum(piece.tokens * piece.history for piece in pieces)
        total = sum(piece.tokens for piece in pieces)
        return (self._chunk_base(total) + self._per_square * squares + self._per_pair * pairs) / 1e3

    def beside_s(self, pieces: Sequence[ChunkPart], batch: int) -> float:
        """Return the time by which a chunk makes a step longer that also runs a round of `batch` sequences."""
        alone_s, total = self.chunk_s(pieces), sum(piece.tokens for piece in pieces)
        if not batch or not self.shares_forward(batch, 0, total, len(pieces)):
            return alone_s
        pairs = sum(piece.tokens * piece.history for piece in pieces)
        extra = next(each for size, each in self._mixed_extra.items() if size >= batch and each.end >= total)
        return min(alone_s, (extra(total) + self._per_pair * pairs) / 1e3)

    def handoff_s(self, num_tokens: int) -> float:
        """Return the time of a handoff whose last chunk has `num_tokens` tokens."""
        return self._handoff(num_tokens) / 1e3


def _shortest(points: Iterable[RoundPoint]) -> dict[int, RoundPoint]:
    """Return the point of the shortest context for each batch size."""
    found: dict[int, RoundPoint] = {}
    for point in sorted(points, key=lambda point: point.context):
        found.setdefault(point.batch, point)
    return found


def _per_context_token(points: Iterable[RoundPoint]) -> float:
    """Return the milliseconds per token of context: least squares over rounds of equal batch."""
    bases = _shortest(points)
    runs = [
        ((each.context - bases[each.batch].context) * each.batch, each.ms - bases[each.batch].ms) for each in points
    ]
    return max(0.0, _slope(runs))


def _attention(points: Sequence[ChunkPoint]) -> tuple[float, float]:
    """Return the milliseconds per pair of a token and a token of its history, and per squared length of a prompt's part
    of a chunk: least squares over chunks of equal size. If no chunk has several prompts, a square counts as half as
    many pairs."""
    alone = [each for each in points if each.prompts == 1]
    plain = Curve((each.tokens, each.ms) for each in alone if not each.history)
    behind = [(each.tokens * each.history, each.ms - plain(each.tokens)) for each in alone if each.history]
    per_pair = max(0.0, _slope(behind))
    alike = [pair for pair in combinations(points, 2) if _differ_in_prompts(*pair)]
    if not alike:
        return per_pair, per_pair / 2
    squares = _slope((_squares(one) - _squares(two), one.ms - two.ms) for one, two in alike)
    return per_pair, max(0.0, squares)


def _differ_in_prompts(one: ChunkPoint, two: ChunkPoint) -> bool:
    return one.tokens == two.tokens and not one.history and not two.history and one.prompts != two.prompts


def _squares(point: ChunkPoint) -> float:
    return point.tokens**2 / point.prompts


def _slope(points: Iterable[tuple[float, float]]) -> float:
    """Return the slope of the line through the origin that fits best."""
    above = below = 0.0
    for x, y in points:
        above, below = above + x * y, below + x * x
    return above / below if below else 0.0
