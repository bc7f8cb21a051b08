"""Rounds of ranks that have sequences of their own: gives the sequences of each rank to its executor.

    StepPlan --> Rounds of each rank --> RankQueues, which begin when the works of all ranks are there
                                              |
    reports, in the order of the plan <-------'

A rank with nothing to do does the same without rows. A chunk is never computed beside a round, but before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence as Seq
from typing import NamedTuple

from ..engine.rounds.draft_shape import DraftShape
from ..engine.rounds.executor import WaitingExecutor
from ..engine.rounds.rounds import LocalChunk, Rounds, Running, Submitted
from ..engine.rounds.stats import RoundStats
from ..engine.sampling.state import Needs, covering
from ..engine.work import BatchRow, RoundTokens, Scores
from ..metadata.wire.request import TokenLogprobs
from .sequence import Sequence


class _Computed(NamedTuple):
    """The rows of a chunk that one rank has computed."""

    rank: int
    num_rows: int
    is_scored: bool


class RankedRounds:
    """Owns the rounds of each rank. A `NodeRounds` (parts.py). Sequences are given rank by rank. One thread."""

    def __init__(self, queues: Seq[WaitingExecutor]) -> None:
        """`queues`: of each rank."""
        self.queues = list(queues)
        self.stats = RoundStats([0] * self.queues[0].shape.num_steps, idle_rounds=[0] * len(queues))
        self.ranks = [Rounds(queue, self.stats) for queue in queues]
        self._under_way: deque[dict[int, Submitted]] = deque()  # by rank, the oldest round first
        self._chunk: list[_Computed] = []  # of the last `recompute`

    def admit(self, sequence: Sequence, row: bytes | None) -> None:
        """Give a sequence a slot of its rank, as `Rounds.admit`."""
        self.ranks[sequence.rank].admit(sequence, row)

    def reload(self, sequence: Sequence) -> None:
        self.ranks[sequence.rank].reload(sequence)

    def release(self, sequence: Sequence) -> None:
        self.ranks[sequence.rank].release(sequence)

    def number(self, sequence: Sequence) -> int | None:
        """Return the number of the sequence's slot among those of all ranks; None: it has none."""
        return None if sequence.slot is None else sequence.rank * self.queues[0].num_slots + sequence.slot

    def submit(
        self, sequences: Seq[Sequence], shape: DraftShape, limits: Seq[int], beside: LocalChunk | None = None
    ) -> Submitted:
        """Begin a round of all ranks, as `Rounds.submit`, after the chunk `beside` it."""
        if beside is not None:
            self.recompute([_ours(each) for each in beside.sequences], beside.rows)
        parts = {rank: self.ranks[rank].submit(sequences[own], shape, limits[own]) for rank, own in _spans(sequences)}
        self.queues[0].flush()
        self._under_way.append(parts)
        for rank in range(len(self.ranks)):
            self.stats.idle_rounds[rank] += rank not in parts
        num_slots = self.queues[0].num_slots
        return Submitted(
            list(sequences),
            [rank * num_slots + slot for rank, part in parts.items() for slot in part.slots],
            shape,
            [limit for part in parts.values() for limit in part.limits],
            sum(part.num_caught_up for part in parts.values()),
            covering(Needs.any_of(part.kind for part in parts.values())),
        )

    def collect(self, submitted: Submitted) -> RoundTokens:
        """Wait for the oldest round, which `submitted` describes, as `Rounds.collect`."""
        parts = self._under_way.popleft()
        rows = [row for rank, part in parts.items() for row in self.ranks[rank].collect(part).rows]
        assert len(rows) == len(submitted.sequences), (len(rows), submitted)
        return RoundTokens(rows)

    def recompute(self, sequences: Seq[Sequence], rows: Seq[BatchRow]) -> None:
        """Compute tokens, as `Rounds.recompute`. The KV is in the pages when this returns."""
        self._chunk.clear()
        for rank, own in _spans(sequences):
            self.ranks[rank].recompute(sequences[own], rows[own])
            is_scored = any(row.num_scored for row in rows[own])
            self._chunk.append(_Computed(rank, len(rows[own]), is_scored))
        self.queues[0].flush()

    def collect_scores(self) -> Scores:
        """Return the report of the last `recompute`, some of whose rows had scored tokens."""
        begun, computed, logprobs = list[float](), list[float](), list[Seq[TokenLogprobs]]()
        for rank, num_rows, is_scored in self._chunk:
            if not is_scored:
                logprobs += [[]] * num_rows
                continue
            report = self.ranks[rank].collect_scores()
            begun.append(report.begun)
            computed.append(report.computed)
            logprobs += report.logprobs
        return Scores(min(begun), max(computed), logprobs)

    def reads_tokens(self, shape: DraftShape) -> bool:
        return self.ranks[0].reads_tokens(shape)

    def num_missed(self, sequences: Seq[Sequence]) -> int:
        return self.ranks[0].num_missed(sequences)

    def kind(self, sequences: Seq[Sequence]) -> Needs:
        """Return the kind of sampling of a round of these sequences: ranks do the same kind."""
        return self.ranks[0].kind(sequences)

    def replay(self, sequence: Sequence, num_tries: int) -> tuple[int, int]:
        return self.ranks[sequence.rank].replay(sequence, num_tries)


def _spans(sequences: Seq[Sequence]) -> list[tuple[int, slice]]:
    """Return the ranks that have some of the sequences, and where these stand."""
    order = [sequence.rank for sequence in sequences]
    assert order == sorted(order), "sequences stand rank by rank"
    return [(rank, slice(bisect_left(order, rank), bisect_right(order, rank))) for rank in dict.fromkeys(order)]


def _ours(sequence: Running) -> Sequence:
    assert isinstance(sequence, Sequence), sequence
    return sequence
