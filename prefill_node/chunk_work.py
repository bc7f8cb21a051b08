"""The work of a chunk: the prompt tokens of one step, which the device computes together.

`submit` makes the work of a step's plan, and asks the device for it. It returns before the device is done, so the node
can submit the next chunk before it reads the results of this one.
"""

from __future__ import annotations

from typing import NamedTuple

from ..engine.prompts.executor import BegunChunk, PromptExecutor
from ..engine.work import Chunk, ChunkRow
from .prompt_ends import PromptEnd, batches, tails
from .scheduler import PlannedChunk, StepPlan


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
