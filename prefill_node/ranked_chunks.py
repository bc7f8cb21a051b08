"""Chunks of ranks that have prompts of their own: each rank computes the planned tokens of its prompts.

StepPlan --by rank--> one Chunk per rank --> OwnWorkPrompts --> ChunkUnderWay, done on all ranks
"""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.prompts.executor import OwnPromptExecutor
from ..engine.work import ChunkReport, FirstTokens, HandoffRows, Scores
from .chunk_work import ChunkUnderWay, note_submitted, work_of
from .scheduler import StepPlan


@dataclass(frozen=True, slots=True)
class DoneTails:
    """First tokens and metadata rows of prompts that ended on one rank. A `BegunTails` whose work is done."""

    tokens: list[FirstTokens]
    rows: list[HandoffRows]

    def draft(self) -> None:
        """Do nothing: the rank has drafted."""

    def first_tokens(self) -> list[FirstTokens]:
        return self.tokens

    def wait_rows(self) -> list[HandoffRows]:
        return self.rows


@dataclass(frozen=True, slots=True)
class DoneChunk:
    """The reports of all ranks together, rank by rank. A `BegunChunk` whose work is done."""

    scores: Scores
    tails: list[DoneTails]

    @classmethod
    def of(cls, reports: list[ChunkReport]) -> DoneChunk:
        """Join reports of all ranks. The times are those of the first rank that began and of the last one to end."""
        scores = Scores(
            begun=min(report.scores.begun for report in reports),
            computed=max(report.scores.computed for report in reports),
            logprobs=[logprobs for report in reports for logprobs in report.scores.logprobs],
        )
        tails = [
            DoneTails(list(tokens), list(rows))
            for report in reports
            for tokens, rows in zip(report.first_tokens, report.rows, strict=True)
        ]
        return cls(scores, tails)

    @property
    def is_done(self) -> bool:
        return True

    @property
    def is_computed(self) -> bool:
        return True

    def wait(self) -> Scores:
        return self.scores

    def draft(self) -> None:
        """Do nothing: the ranks have drafted."""


def submit(prompts: OwnPromptExecutor, num_ranks: int, plan: StepPlan) -> ChunkUnderWay:
    """Let all ranks compute the planned tokens, and record in the requests that they are submitted.

    `plan` is sorted by rank. Raises RankLost."""
    plans: list[StepPlan] = [[each for each in plan if each.request.rank == rank] for rank in range(num_ranks)]
    assert plan == [each for own in plans for each in own], "reports come rank by rank"
    works = [work_of(own) if own else None for own in plans]
    reports = prompts.run([None if work is None else work[0] for work in works])
    note_submitted(plan)
    ends = [batch for work in works if work is not None for batch in work[1]]
    return ChunkUnderWay(plan, ends, DoneChunk.of(reports))
