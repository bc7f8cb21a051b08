"""The work of a chunk: the prompt tokens of one step, which the device computes together.

`submit` makes the work of a step's plan, and asks the device for it. It returns before the device is done, so the node
can submit the next chunk before it reads the results of this one. If the last token of a prompt is in the chunk, its
choices sample their first tokens, and tickets follow (`PromptEnd`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..engine.prompts.executor import BegunChunk, PromptExecutor
from ..engine.sampling.state import SamplingState
from ..engine.work import Chunk, ChunkRow, CopyPages, Tail, Tails
from ..metadata.wire.request import Unit
from .request import Request
from .scheduler import PlannedChunk, StepPlan

_MAX_CHOICES = 256  # sampled in one pass, which holds a row of logits per choice


class PromptEnd(NamedTuple):
    """A request and its choices when its last token was submitted. Some may be dropped before the results are read."""

    row: int  # of the chunk
    request: Request
    units: list[Unit]
    states: list[SamplingState]
    block_tables: list[list[int]]
    tail_tables: list[list[int] | None]

    @classmethod
    def of(cls, row: int, request: Request) -> PromptEnd:
        """Return the end of the prompt whose last tokens are this row of the chunk."""
        num = len(request.choices)
        tables = (
            [request.block_table(index) for index in range(num)],
            [request.tail_table(index) for index in range(num)],
        )
        return cls(row, request, list(request.choices), list(request.choices.values()), *tables)

    @property
    def tail(self) -> Tail:
        """Return the work for the device."""
        return Tail(
            row=self.row,
            states=self.states,
            block_tables=self.block_tables,
            tail_tables=self.tail_tables,
            copies=self._copies(),
            is_handed_over=bool(self.request.tickets),
            num_cached=self.request.num_cached,
        )

    def _copies(self) -> CopyPages:
        """Return the copies of the pages that a first token changes, for every choice but the first."""
        num_shared, tail = self.request.num_shared, self.request.tail
        own, *others = [block_table[num_shared:] for block_table in self.block_tables]
        sources, targets = own * len(others), [page for pages in others for page in pages]
        if tail is not None and self.request.tail_copies:
            sources += tail.numbers(range(num_shared, len(tail.pages))) * len(others)
            targets += self.request.tail_copies[: len(targets)]
        return CopyPages(sources, targets)


def batches(ends: Sequence[PromptEnd]) -> list[list[PromptEnd]]:
    """Return the ends in batches of at most _MAX_CHOICES choices. A prompt is not split."""
    found: list[list[PromptEnd]] = []
    num_choices = 0
    for end in ends:
        if not found or num_choices + len(end.units) > _MAX_CHOICES:
            found.append([])
            num_choices = 0
        found[-1].append(end)
        num_choices += len(end.units)
    return found


def tails(ends: Sequence[PromptEnd]) -> Tails:
    """Return the work of one batch."""
    return Tails([end.tail for end in ends])


class ChunkUnderWay(NamedTuple):
    """A chunk that the device computes or has computed."""

    plan: StepPlan
    ends: list[list[PromptEnd]]  # the prompts of each `Tails` of the work
    submitted: BegunChunk


def submit(prompts: PromptExecutor, plan: StepPlan) -> ChunkUnderWay:
    """Submit the planned tokens to the device, and record in their requests that they are submitted.

    Raises OutOfMemory if the device has no memory for the chunk. The requests are then unchanged.
    """
    chunk, ends = work_of(plan)
    submitted = prompts.submit(chunk)
    note_submitted(plan)
    return ChunkUnderWay(plan, ends, submitted)


def work_of(plan: StepPlan) -> tuple[Chunk, list[list[PromptEnd]]]:
    """Return the work of a plan, and the prompts of each of its `Tails`."""
    ends = batches([PromptEnd.of(row, planned.request) for row, planned in enumerate(plan) if planned.is_last])
    return Chunk([_row(planned) for planned in plan], [tails(batch) for batch in ends]), ends


def note_submitted(plan: StepPlan) -> None:
    """Record in the requests that their planned tokens are submitted."""
    for request, row in plan:
        request.submit_chunk(len(row.input_ids))


def _row(planned: PlannedChunk) -> ChunkRow:
    """Return the planned tokens as work."""
    request, row = planned
    return ChunkRow(request.key, request.token_ids, row, request.generation.params.num_logprobs or 0)
