"""The chunk budget decides the length of chunks on a decode node: how many prompt tokens it computes beside a round.

    gap between two tokens of a stream = round + chunk beside it <= the bound

The operator gives the bound in seconds, or it is DEFAULT_GAP rounds at the present batch. A chunk is as long as the
bound allows. The times are those of the forwards that will run: a chunk shares the round's forward, or it has one of
its own (engine/pace/mixed_sizes.py). Without streams a chunk has its full length.

Prompts must advance even if the bound leaves no room for LEAST_TOKENS beside a round:

- If the operator gave the bound, a chunk of full length runs beside one round of RARE. So 1 gap in RARE is longer than
  the bound, and the 99th percentile of the gaps holds. The node reports that it has no room, and the router sends
  prompts elsewhere if it can.
- If the operator gave none, a chunk that takes about twice as long as one of LEAST_TOKENS runs beside one round of
  several. They are so many that the mean gap is at most DEFAULT_GAP rounds.

The default bound yields to two other aims:

- Small total delay. If chunks can share the round's forward, the node looks at the lengths with which the prompts that
  wait take at most QUEUE_S. It chooses the one with the smallest total delay of the streams. This is often longer than
  the bound allows: one long chunk delays the streams less than several short ones.
- Bounded queue. If the prompts that wait would take longer than QUEUE_S within the bound, chunks have their full
  length. So the bound delays a first token by QUEUE_S at most, and a load that the node can serve does not pile up.

A stream may also start while the device computes chunks without a round. Its first round comes after them. So the node
submits at most MAX_AHEAD chunks before the device is done with them. While pages for a stream are on the way, these
chunks and a round keep the operator's bound together.

Times vary, and a bound on the 99th percentile needs a margin for that. Each chunk after which a gap was too long makes
the margin larger by STEP, and each other one smaller by STEP / RARE. So the margin settles at the quantile of which
about 1 chunk in RARE breaks the bound.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ..engine.pace.mixed_sizes import EVERY_SIZE, MixedSizes
from ..engine.pace.step_times import ChunkCosts
from ..engine.work import BatchRow
from .round_clock import RoundSeconds

DEFAULT_GAP = 1.5  # rounds
LEAST_TOKENS = 16  # of a chunk; a shorter one takes hardly less time
RARE = 200  # rounds, of which one may break the operator's bound
QUEUE_S = 0.05
MAX_AHEAD = 2  # chunks that the device has before it while nothing streams: it computes one, and the other is next
STEP = 0.05  # of the bound
_MOST_MARGIN = 0.5  # of the bound: a gap that is too long need not be the fault of a chunk


class PromptTokens(NamedTuple):
    """Prompt tokens that a step computes."""

    num_tokens: int
    depth: int  # tokens before them, the mean over prompts
    num_prompts: int = 1

    @classmethod
    def of(cls, rows: Sequence[BatchRow]) -> PromptTokens:
        """Return the tokens of some prompts as one chunk."""
        num_tokens = sum(len(row.input_ids) for row in rows)
        return cls(num_tokens, sum(row.position * len(row.input_ids) for row in rows) // num_tokens, len(rows))


class Queue(NamedTuple):
    """Prompt tokens that wait to be computed. The step takes the first ones."""

    num_tokens: int  # all of them
    depth: int = 0  # tokens before the first one
    num_done: int = 0  # of `depth`: computed here, not found in a cache
    is_scored: bool = False  # the first ones are scored, so they never share the forward of a round


class ChunkRoom(NamedTuple):
    """The most that a step may compute of prompts."""

    num_tokens: int
    num_prompts: int | None = None  # None: any number
    is_mixed: bool = False  # it is to share the round's forward, so no token of it may be scored


class Alone(NamedTuple):
    """Chunks in a row without a round beside them, before one round."""

    mean: PromptTokens
    num_chunks: int
    since: float  # monotonic seconds


class ChunksAlone:
    """Collects the chunks that were submitted since the last round. Nobody waits for them before the next round."""

    def __init__(self) -> None:
        self._chunks: list[PromptTokens] = []
        self._since = 0.0

    def add(self, chunk: PromptTokens, since: float) -> None:
        """A chunk was submitted in the step that began at `since` (monotonic seconds)."""
        if not self._chunks:
            self._since = since
        self._chunks.append(chunk)

    def take(self) -> Alone | None:
        """Return the chunks, and forget them; None if there are none."""
        chunks, self._chunks = self._chunks, []
        if not chunks:
            return None
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        depth = sum(chunk.depth * chunk.num_tokens for chunk in chunks) // num_tokens
        return Alone(PromptTokens(num_tokens // len(chunks), depth), len(chunks), self._since)


class ChunkPace(NamedTuple):
    """The pace of prompts beside streams: a chunk of `num_tokens` beside one round of `every`."""

    num_tokens: int
    every: int
    is_within: bool  # the chunk keeps the bound
    is_mixed: bool  # the chunk shares the round's forward


class _Chunk(NamedTuple):
    """A chunk beside a round, and the seconds by which it makes the round longer."""

    num_tokens: int
    is_mixed: bool
    seconds: float


class PromptRate(NamedTuple):
    """Figures for the router: the times of a prompt on this node under the present load."""

    token_s: float  # seconds per token
    fixed_s: float  # per prompt, besides its tokens
    round_s: float
    has_room: bool
    num_paced: int = 0  # tokens that `token_s` holds for, if more than these wait; 0: for all
    rest_token_s: float = 0.0  # seconds per token beyond them


class ChunkBudget:
    """Knows the times of rounds and chunks of one node, and the rounds since the last chunk."""

    def __init__(
        self,
        costs: ChunkCosts,
        rounds: RoundSeconds,
        chunk_tokens: int,
        max_gap_s: float | None,
        mixed: MixedSizes = EVERY_SIZE,
    ) -> None:
        """`chunk_tokens`: the most tokens of a chunk. `max_gap_s`: the operator's bound, None if there is none.
        `mixed`: the rounds and chunks that share a forward."""
        self._costs, self._rounds, self._mixed = costs, rounds, mixed
        self._prepared = functools.cache(mixed.lengths)  # asked several times in each step
        self._holds = functools.lru_cache(maxsize=1 << 12)(mixed.holds)  # likewise
        self._chunk_tokens = chunk_tokens
        self._max_gap_s = max_gap_s
        self._margin = 0.0  # of the bound
        self._num_plain = 0  # rounds since the last one with a chunk beside it

    def room(self, num_streams: int, num_steps: int, queue: Queue) -> ChunkRoom:
        """Return how much of the prompts the next step may compute beside a round of `num_streams` sequences with
        `num_steps` draft steps. 0 sequences: nothing streams, but a stream is about to start."""
        if num_streams == 0:
            return ChunkRoom(self._num_ahead(num_steps, queue))
        pace = self.pace(num_streams, num_steps, queue)
        if self._num_plain + 1 < pace.every:
            return ChunkRoom(0)
        return ChunkRoom(pace.num_tokens, self._mixed.max_prompts if pace.is_mixed else None, pace.is_mixed)

    def pace(self, num_streams: int, num_steps: int, queue: Queue) -> ChunkPace:
        """Return how prompts advance beside `num_streams` streams."""
        chunk = self._least_delay(num_streams, num_steps, queue) if self._max_gap_s is None else None
        if chunk is None:
            return self._bounded_pace(num_streams, num_steps, queue)
        round_s = self._rounds.expected(num_streams, num_steps)
        return ChunkPace(chunk.num_tokens, 1, round_s + chunk.seconds <= self._bound_s(round_s), chunk.is_mixed)

    def _bounded_pace(self, num_streams: int, num_steps: int, queue: Queue) -> ChunkPace:
        """Return the pace by the bound, or that of chunks of full length if the operator gave none and it would take
        too long."""
        round_s, lengths = self._rounds.expected(num_streams, num_steps), self._lengths(num_streams, num_steps, queue)
        full = self._chunk(num_streams, num_steps, self._chunk_tokens, queue)
        within_s = self._bound_s(round_s) * (1 - self._margin) - round_s
        chunk = self._longest(num_streams, num_steps, queue, lengths, within_s)
        least = lengths[0] if lengths else min(LEAST_TOKENS, self._chunk_tokens)
        if chunk.num_tokens >= least:
            pace = ChunkPace(chunk.num_tokens, 1, True, chunk.is_mixed)
        elif self._max_gap_s is not None:
            return ChunkPace(full.num_tokens, RARE, False, full.is_mixed)
        else:
            least_s = self._chunk(num_streams, num_steps, least, queue).seconds
            chunk = self._longest(num_streams, num_steps, queue, lengths, 2 * least_s)
            spare_s = (DEFAULT_GAP - 1) * round_s  # per round
            pace = ChunkPace(
                max(1, chunk.num_tokens), max(1, math.ceil(chunk.seconds / spare_s)), False, chunk.is_mixed
            )
        if self._max_gap_s is None:
            token_s = (pace.every * round_s + chunk.seconds) / pace.num_tokens
            if queue.num_tokens * token_s > QUEUE_S:
                return ChunkPace(full.num_tokens, 1, False, full.is_mixed)
        return pace

    def rate(self, num_streams: int, num_steps: int) -> PromptRate:
        """Return how long prompts take beside `num_streams` streams within the bound. A long queue advances by chunks
        of full length until the rest takes QUEUE_S. A short one may take less, since `pace` prefers a longer chunk if
        it delays the streams less."""
        full_s = self._costs.seconds(self._chunk_tokens, 0, is_mixed=False)
        if num_streams == 0:
            least = min(LEAST_TOKENS, self._chunk_tokens)
            is_mixed = self._mixed.holds(1, 0, least)  # with the first round
            token_s = full_s / self._chunk_tokens
            fixed_s = max(0.0, self._costs.seconds(least, 0, is_mixed=is_mixed) - least * token_s)
            return PromptRate(token_s, fixed_s, self._rounds.expected(1, num_steps), True)
        round_s = self._rounds.expected(num_streams, num_steps)
        pace = self._bounded_pace(num_streams, num_steps, Queue(0))
        chunk_s = self._costs.seconds(pace.num_tokens, 0, is_mixed=pace.is_mixed)
        token_s = (pace.every * round_s + chunk_s) / pace.num_tokens
        num_paced, rest_token_s = 0, 0.0
        if self._max_gap_s is None:
            full = self._chunk(num_streams, num_steps, self._chunk_tokens, Queue(0))
            num_paced, rest_token_s = int(QUEUE_S / token_s), (round_s + full.seconds) / full.num_tokens
        # a prompt comes in the middle of a round, and its last chunk is on average half as long as the others
        fixed_s = round_s / 2 + token_s * pace.num_tokens / 2
        if pace.is_mixed:  # the last chunk shares the forward of the first round
            fixed_s = max(0.0, fixed_s - round_s)
        has_room = pace.is_within or self._max_gap_s is None
        return PromptRate(token_s, fixed_s, round_s, has_room, num_paced, rest_token_s)

    def begin_round(self, *, has_chunk: bool) -> None:
        """A round is submitted, with a chunk beside it or without one."""
        self._num_plain = 0 if has_chunk else self._num_plain + 1

    def end_round(self, num_streams: int, num_steps: int, seconds: float) -> None:
        """A round without a chunk is over."""
        self._rounds.observe(num_streams, num_steps, seconds)

    def end_beside(self, num_streams: int, num_steps: int, chunk: PromptTokens, seconds: float) -> None:
        """A chunk that is not scored and the round beside it are over, after so many seconds together."""
        num_tokens, depth, num_prompts = chunk
        is_mixed = self._holds(num_streams, num_steps, num_tokens, num_prompts)
        round_s = self._rounds.expected(num_streams, num_steps)
        bound_s = self._bound_s(round_s)
        if round_s + self._costs.seconds(num_tokens, depth, is_mixed=is_mixed) <= bound_s:  # it was expected to keep it
            change = STEP if seconds > bound_s else -STEP / RARE
            self._margin = min(_MOST_MARGIN, max(0.0, self._margin + change))
        self._costs.observe(num_tokens, depth, seconds - round_s, is_mixed=is_mixed)

    def end_alone(self, num_streams: int, num_steps: int, chunks: Alone, seconds: float) -> None:
        """Chunks and one round after them are over, after so many seconds together."""
        seconds -= self._rounds.expected(num_streams, num_steps)
        num_tokens, depth, _ = chunks.mean
        self._costs.observe(num_tokens, depth, seconds / chunks.num_chunks, is_mixed=False)

    def _num_ahead(self, num_steps: int, queue: Queue) -> int:
        """Return the tokens of a chunk, of which MAX_AHEAD may lie before the first round of a stream."""
        if self._max_gap_s is None:
            return self._chunk_tokens
        within_s = (self._max_gap_s * (1 - self._margin) - self._rounds.expected(1, num_steps)) / MAX_AHEAD
        num_tokens = self._costs.most_tokens(within_s, queue.depth, self._chunk_tokens, is_mixed=False)
        return num_tokens if num_tokens >= LEAST_TOKENS else self._chunk_tokens

    def _chunk(self, num_streams: int, num_steps: int, num_tokens: int, queue: Queue) -> _Chunk:
        is_mixed = not queue.is_scored and self._holds(num_streams, num_steps, num_tokens)
        return _Chunk(num_tokens, is_mixed, self._costs.seconds(num_tokens, queue.depth, is_mixed=is_mixed))

    def _longest(
        self, num_streams: int, num_steps: int, queue: Queue, lengths: Sequence[int], within_s: float
    ) -> _Chunk:
        """Return the longest chunk that makes a round at most `within_s` longer. `lengths`: those for which forwards
        with the round are prepared. A longer chunk, which reads the weights once more, must bring more tokens per
        second."""
        chunks = [self._chunk(num_streams, num_steps, each, queue) for each in lengths]
        mixed = max((each for each in chunks if each.seconds <= within_s), default=_Chunk(0, True, 0.0))
        is_mixed = not queue.is_scored and self._holds(num_streams, num_steps, self._chunk_tokens)
        num_tokens = self._costs.most_tokens(within_s, queue.depth, self._chunk_tokens, is_mixed=is_mixed)
        if lengths and num_tokens <= lengths[-1]:  # so short a chunk would be padded
            return mixed
        own = self._chunk(num_streams, num_steps, num_tokens, queue) if num_tokens else _Chunk(0, is_mixed, 0.0)
        round_s = self._rounds.expected(num_streams, num_steps)
        return max(mixed, own, key=lambda each: each.num_tokens / (round_s + each.seconds))

    def _lengths(self, num_streams: int, num_steps: int, queue: Queue) -> list[int]:
        """Return the lengths of chunks, rising, that are prepared to share the round's forward."""
        lengths = [] if queue.is_scored else self._prepared(num_streams, num_steps)
        return [each for each in lengths if each <= self._chunk_tokens]

    def _least_delay(self, num_streams: int, num_steps: int, queue: Queue) -> _Chunk | None:
        """Return the shared chunk with the smallest total delay of the streams, among those that finish the queue
        within QUEUE_S. None if there is none. The computed part of the first prompt counts as queued, so that a long
        prompt does not slow down at its end."""
        round_s, num_tokens = self._rounds.expected(num_streams, num_steps), queue.num_tokens + queue.num_done
        lengths = self._lengths(num_streams, num_steps, queue)
        chunks = [_Chunk(each, True, self._costs.seconds(each, queue.depth, is_mixed=True)) for each in lengths]
        chunks = [each for each in chunks if num_tokens * (round_s + each.seconds) <= QUEUE_S * each.num_tokens]
        return min(
            chunks,
            key=lambda each: (math.ceil(queue.num_tokens / each.num_tokens) * each.seconds, -each.num_tokens),
            default=None,
        )

    def _bound_s(self, round_s: float) -> float:
        return DEFAULT_GAP * round_s if self._max_gap_s is None else self._max_gap_s
