"""Rounds of ranks that have sequences of their own: gives the sequences of each rank to its executor.

    StepPlan --> Rounds of each rank --> RankQueues, which begin when the works of all ranks are there
                                              |
    reports, in the order of the plan <-------'

A rank with nothing to do does the same without rows. A chunk is never computed beside a round, but before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, TypeVar

from ..engine.draft_shape import DraftShape
from ..engine.executor import WaitingExecutor
from ..engine.round_stats import RoundStats
from ..engine.rounds import LocalChunk, Rounds, Running, Submitted
from ..engine.sampling_state import Needs
from ..engine.work import BatchRow, RoundTokens, Scores
from ..metadata.wire.request import TokenLogprobs
from .sequence import Sequence

_Item = TypeVar("_Item")


class _UnderWay(NamedTuple):
    """A round of all ranks."""

    order: list[int]  # the rank of each sequence
    parts: dict[int, Submitted]  # of each rank that has sequences


class _Computed(NamedTuple):
    """A row of a chunk."""

    rank: int
    is_scored: bool


class RankedRounds:
    """Owns the rounds of each rank. A `NodeRounds` (parts.py). One thread."""

    def __init__(self, queues: Seq[WaitingExecutor]) -> None:
        """`queues`: of each rank."""
        self.queues = list(queues)
        self.stats = RoundStats([0] * self.queues[0].shape.num_steps)
        self.ranks = [Rounds(queue, self.stats) for queue in queues]
        self._under_way: deque[_UnderWay] = deque()  # the oldest round first
        self._chunk: list[_Computed] = []  # each row of the last `recompute`

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
        parts: dict[int, Submitted] = {}
        for rank, own in _by_rank(sequences).items():
            part = [sequences[index] for index in own], shape, [limits[index] for index in own]
            parts[rank] = self.ranks[rank].submit(*part)
        order = [each.rank for each in sequences]
        self._under_way.append(_UnderWay(order, parts))
        return Submitted(
            list(sequences),
            [number for each in sequences if (number := self.number(each)) is not None],
            shape,
            _in_order(order, {rank: part.limits for rank, part in parts.items()}),
            sum(part.num_caught_up for part in parts.values()),
            self.kind(sequences),
        )

    def collect(self, submitted: Submitted) -> RoundTokens:
        """Wait for the oldest round, which `submitted` describes, as `Rounds.collect`."""
        order, parts = self._under_way.popleft()
        assert len(order) == len(submitted.sequences), (order, submitted)
        rows = {rank: self.ranks[rank].collect(part).rows for rank, part in parts.items()}
        return RoundTokens(_in_order(order, rows))

    def recompute(self, sequences: Seq[Sequence], rows: Seq[BatchRow]) -> None:
        """Compute tokens, as `Rounds.recompute`. The KV is in the pages when this returns."""
        self._chunk = [_Computed(each.rank, row.num_scored > 0) for each, row in zip(sequences, rows, strict=True)]
        for rank, own in _by_rank(sequences).items():
            self.ranks[rank].recompute([sequences[index] for index in own], [rows[index] for index in own])
        self.queues[0].flush()

    def collect_scores(self) -> Scores:
        """Return the report of the last `recompute`, some of whose rows had scored tokens."""
        scored = sorted({rank for rank, is_scored in self._chunk if is_scored})
        reports = {rank: self.ranks[rank].collect_scores() for rank in scored}
        nothing: list[list[TokenLogprobs]] = [[] for _ in self._chunk]
        logprobs = {rank: reports[rank].logprobs if rank in reports else nothing for rank in range(len(self.ranks))}
        begun = min(report.begun for report in reports.values())
        computed = max(report.computed for report in reports.values())
        return Scores(begun, computed, _in_order([rank for rank, _ in self._chunk], logprobs))

    def reads_tokens(self, shape: DraftShape) -> bool:
        return self.ranks[0].reads_tokens(shape)

    def num_missed(self, sequences: Seq[Sequence]) -> int:
        return self.ranks[0].num_missed(sequences)

    def kind(self, sequences: Seq[Sequence]) -> Needs:
        """Return the kind of sampling of a round of these sequences: ranks do the same kind."""
        return self.ranks[0].kind(sequences)

    def replay(self, sequence: Sequence, num_tries: int) -> tuple[int, int]:
        return self.ranks[sequence.rank].replay(sequence, num_tries)


def _by_rank(sequences: Seq[Sequence]) -> dict[int, list[int]]:
    """Return the indices of the sequences of each rank that has some."""
    found: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        found.setdefault(sequence.rank, []).append(index)
    return found


def _in_order(order: Seq[int], parts: Mapping[int, Seq[_Item]]) -> list[_Item]:
    """Return the items of all ranks, of which `order` names the rank of each."""
    each = {rank: iter(items) for rank, items in parts.items()}
    return [next(each[rank]) for rank in order]


def _ours(sequence: Running) -> Sequence:
    assert isinstance(sequence, Sequence), sequence
    return sequence
