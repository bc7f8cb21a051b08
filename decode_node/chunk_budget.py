"""The chunk budget decides how many tokens of prompts a decode node computes beside a round.

    gap between two tokens of a stream = round + chunk beside it <= the bound

The operator gives the bound in seconds, or it is DEFAULT_GAP rounds at the present batch. A chunk is as long as the
bound allows. Without streams a chunk has its full length. Prompts must advance even if the bound leaves no room for
LEAST_TOKENS beside a round. The rules for that are:

- The operator gave the bound. A chunk of full length runs beside one round of RARE. So 1 gap in RARE is longer than the
  bound, and the 99th percentile of the gaps holds. The node reports that it has no room, and the router sends prompts
  elsewhere if it can.
- The operator gave none. A chunk that takes about twice as long as one of LEAST_TOKENS runs beside one round of
  several. They are so many that the mean gap is at most DEFAULT_GAP rounds. If the prompts that wait would take longer
  than QUEUE_S at this pace, chunks have their full length: otherwise prompts would wait ever longer under a load that
  the node can serve.

Times vary, and a bound on the 99th percentile needs a margin for that. Each chunk after which a gap was too long makes
the margin larger by STEP, and each other one smaller by STEP / RARE. So the margin rests where about 1 chunk in RARE
breaks the bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..engine.chunk_costs import ChunkCosts
from ..engine.work import BatchRow
from .round_seconds import RoundSeconds

DEFAULT_GAP = 1.5  # rounds
LEAST_TOKENS = 16  # of a chunk; a shorter one takes hardly less time
RARE = 200  # rounds, of which one may break the operator's bound
QUEUE_S = 1.0
STEP = 0.05  # of the bound
_MOST_MARGIN = 0.5  # of the bound: a gap that is too long need not be the fault of a chunk


class PromptTokens(NamedTuple):
    """Prompt tokens that a step computes."""

    num_tokens: int
    depth: int  # tokens before them, the mean over prompts

    @classmethod
    def of(cls, rows: Sequence[BatchRow]) -> PromptTokens:
        """Return the tokens of some prompts as one chunk."""
        num_tokens = sum(len(row.input_ids) for row in rows)
        return cls(num_tokens, sum(row.position * len(row.input_ids) for row in rows) // num_tokens)


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


class PromptRate(NamedTuple):
    """Figures for the router: the times of a prompt on this node under the present load."""

    token_s: float  # seconds per token
    fixed_s: float  # per prompt, besides its tokens
    round_s: float
    has_room: bool


class ChunkBudget:
    """Knows the times of rounds and chunks of one node, and the rounds since the last chunk."""

    def __init__(
        self,
        costs: ChunkCosts,
        rounds: RoundSeconds,
        chunk_tokens: int,
        max_gap_s: float | None,
        joint_tokens: Sequence[int] = (),
    ) -> None:
        """`chunk_tokens`: the most tokens of a chunk. `max_gap_s`: the operator's bound, None if there is none.
        `joint_tokens`: `Executor.joint_tokens`."""
        self._costs, self._rounds = costs, rounds
        self._chunk_tokens = chunk_tokens
        self._joint_tokens = [each for each in joint_tokens if each <= chunk_tokens]
        self._least_tokens = min([LEAST_TOKENS, chunk_tokens] if not self._joint_tokens else self._joint_tokens)
        self._max_gap_s = max_gap_s
        self._margin = 0.0  # of the bound
        self._num_plain = 0  # rounds since the last chunk beside one

    def num_tokens(self, num_streams: int, num_steps: int, depth: int, num_queued: int) -> int:
        """Return how many tokens of prompts the next step may compute beside a round of `num_streams` sequences with
        `num_steps` draft steps. The tokens have `depth` tokens before them, and `num_queued` tokens wait in all."""
        pace = self.pace(num_streams, num_steps, depth, num_queued)
        return pace.num_tokens if self._num_plain + 1 >= pace.every else 0

    def pace(self, num_streams: int, num_steps: int, depth: int, num_queued: int) -> ChunkPace:
        """Return how prompts advance beside `num_streams` streams."""
        round_s = self._rounds.expected(num_streams, num_steps)
        room_s = self._bound_s(round_s) * (1 - self._margin) - round_s
        num_tokens = self._most_tokens(room_s, depth)
        if num_tokens >= self._least_tokens:
            pace = ChunkPace(num_tokens, 1, True)
        elif self._max_gap_s is not None:
            return ChunkPace(self._chunk_tokens, RARE, False)
        else:
            least_s = self._beside_s(self._least_tokens, depth)
            num_tokens = max(1, self._most_tokens(2 * least_s, depth))
            spare_s = (DEFAULT_GAP - 1) * round_s  # per round
            pace = ChunkPace(num_tokens, max(1, math.ceil(self._beside_s(num_tokens, depth) / spare_s)), False)
        if self._max_gap_s is None and num_queued * self._token_s(pace, round_s, depth) > QUEUE_S:
            return ChunkPace(self._chunk_tokens, 1, False)
        return pace

    def rate(self, num_streams: int, num_steps: int, num_queued: int) -> PromptRate:
        """Return how long prompts take beside `num_streams` streams."""
        full_s = self._costs.seconds(self._chunk_tokens, 0, is_beside=False)
        if num_streams == 0:
            least = min(LEAST_TOKENS, self._chunk_tokens)
            token_s = full_s / self._chunk_tokens
            fixed_s = max(0.0, self._costs.seconds(least, 0, is_beside=False) - least * token_s)
            return PromptRate(token_s, fixed_s, self._rounds.expected(1, num_steps), True)
        round_s = self._rounds.expected(num_streams, num_steps)
        pace = self.pace(num_streams, num_steps, 0, num_queued)
        token_s = self._token_s(pace, round_s, 0)
        # a prompt comes in the middle of a round, and its last chunk is on average half as long as the others
        fixed_s = round_s / 2 + token_s * pace.num_tokens / 2
        return PromptRate(token_s, fixed_s, round_s, pace.is_within or self._max_gap_s is None)

    def end_round(self, num_streams: int, num_steps: int, seconds: float | None) -> None:
        """A round without a chunk is over. `seconds` None: other work distorted its time."""
        self._num_plain += 1
        if seconds is not None:
            self._rounds.observe(num_streams, num_steps, seconds)

    def end_beside(self, num_streams: int, num_steps: int, chunk: PromptTokens, seconds: float | None) -> None:
        """A chunk and the round beside it are over, after so many seconds together. None: other work is in them."""
        self._num_plain = 0
        if seconds is None:
            return
        round_s = self._rounds.expected(num_streams, num_steps)
        bound_s = self._bound_s(round_s)
        if round_s + self._beside_s(*chunk) <= bound_s:  # it was expected to keep the bound
            change = STEP if seconds > bound_s else -STEP / RARE
            self._margin = min(_MOST_MARGIN, max(0.0, self._margin + change))
        self._costs.observe(*chunk, seconds - round_s, is_beside=True)

    def end_alone(self, num_streams: int, num_steps: int, chunks: Alone, seconds: float) -> None:
        """Chunks and one round after them are over, after so many seconds together."""
        self._num_plain += 1
        seconds -= self._rounds.expected(num_streams, num_steps)
        self._costs.observe(*chunks.mean, seconds / chunks.num_chunks, is_beside=False)

    def _most_tokens(self, within_s: float, depth: int) -> int:
        """Return the length of the longest chunk that makes a round at most `within_s` longer. Chunks that share the
        round's forward have the lengths for which this is prepared; others are as long as two of the longest of these,
        since they read the weights once more."""
        num_tokens = self._costs.most_tokens(within_s, depth, self._chunk_tokens)
        if not self._joint_tokens or num_tokens >= 2 * self._joint_tokens[-1]:
            return num_tokens
        fitting = (each for each in self._joint_tokens if self._beside_s(each, depth) <= within_s)
        return max(fitting, default=0)

    def _bound_s(self, round_s: float) -> float:
        return DEFAULT_GAP * round_s if self._max_gap_s is None else self._max_gap_s

    def _beside_s(self, num_tokens: int, depth: int) -> float:
        return self._costs.seconds(num_tokens, depth, is_beside=True)

    def _token_s(self, pace: ChunkPace, round_s: float, depth: int) -> float:
        """Return the seconds per token of prompts at this pace."""
        return (pace.every * round_s + self._beside_s(pace.num_tokens, depth)) / pace.num_tokens
