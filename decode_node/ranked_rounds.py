"""Rounds of ranks that have sequences of their own: gives the plans of all ranks to their executors.

RankedPlan --> Rounds of each rank --> executors, which begin when the works of all ranks are there
                                                  |
(sequence, Accepted) of all ranks <---------------'
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from ..engine.executor import Executor
from ..engine.rounds import Rounds
from ..engine.work import Accepted
from .ranked_scheduler import RankedPlan
from .sequence import Sequence


class RankedRounds:
    """Owns the rounds of each rank. One thread."""

    def __init__(self, executors: Seq[Executor]) -> None:
        """`executors`: of each rank. Their works wait for each other (`RankQueue`)."""
        self.ranks = [Rounds(executor) for executor in executors]

    def admit(self, sequence: Sequence, row: bytes | None) -> None:
        """Give a sequence a slot of its rank, as `Rounds.admit`."""
        self.ranks[sequence.rank].admit(sequence, row)

    def release(self, sequence: Sequence) -> None:
        """Take the slot of a sequence that is over."""
        self.ranks[sequence.rank].release(sequence)

    def run(self, plan: RankedPlan) -> list[tuple[Sequence, Accepted]]:
        """Do the planned chunks and the round of all ranks. Return what the round brought each sequence that has not
        left its slot. A rank with nothing to do does the same without rows."""
        for rounds, own in zip(self.ranks, plan.ranks, strict=True):
            if own.rows:
                rounds.recompute(own.sequences, own.rows)
                for sequence, row in zip(own.sequences, own.rows, strict=True):
                    sequence.compute(len(row.input_ids))
        submitted = [
            rounds.submit(own.decoding, plan.shape, own.limits) if own.decoding else None
            for rounds, own in zip(self.ranks, plan.ranks, strict=True)
        ]
        results: list[tuple[Sequence, Accepted]] = []
        for rounds, own, each in zip(self.ranks, plan.ranks, submitted, strict=True):
            if each is not None:
                rows = zip(own.decoding, rounds.collect(each).rows, strict=True)
                results += [(sequence, accepted) for sequence, accepted in rows if accepted is not None]
        return results
