"""A chunk: the prompt tokens of one step, which the device computes together.

A step asks the device for the target's forward over the chunk and for the drafter's forward. For prompts whose last
token is in the chunk, it also asks for first tokens and for the drafts after them (prompt_ends.py). `submit` returns
before the device is done, so the node can submit the next chunk before it reads the results of this one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..engine.batch import Computed
from ..engine.copies import recorded_event, to_device
from ..engine.drafters.base import PromptChunk
from ..engine.engine import Engine
from ..engine.logprobs import Logprobs, compute_logprobs
from ..metadata.wire.request import TokenLogprobs
from .prompt_ends import PromptEnd, PromptEnds
from .request import Request
from .scheduler import StepPlan

_MAX_CHOICES = 256  # sampled in one pass, which holds a row of logits per choice


class PromptScores(NamedTuple):
    """Log-probabilities of some of a prompt's own tokens, readable once the chunk is computed."""

    request: Request
    logprobs: Logprobs

    def read(self) -> list[TokenLogprobs]:
        num_logprobs = self.request.generation.params.num_logprobs or 0
        rows = self.logprobs.to_rows([num_logprobs] * len(self.logprobs.chosen))
        return [entry for entry in rows if entry is not None]


class SubmittedChunk(NamedTuple):
    """A chunk that the device computes or has computed."""

    plan: StepPlan
    begun: float  # monotonic seconds
    submitted: float
    event: torch.cuda.Event | None  # recorded after the chunk's KV; None: the KV was computed before `submit` returned
    scores: list[PromptScores]
    ends: list[PromptEnds]

    @property
    def is_done(self) -> bool:
        """Whether a device reports that it has computed everything. Always False on a CPU."""
        events = [self.event, *(ends.event for ends in self.ends)]
        return all(event is not None and event.query() for event in events)

    def wait(self) -> float:
        """Wait until the chunk's KV is computed. Return when that was, in monotonic seconds, as the host sees it."""
        if self.event is None:
            return self.submitted
        self.event.synchronize()
        return time.monotonic()

    def draft(self) -> None:
        """Submit the drafter's work after the first tokens, too."""
        for ends in self.ends:
            ends.draft()


def submit(engine: Engine, plan: StepPlan) -> SubmittedChunk:
    """Submit the planned tokens to the device, and record in their requests that they are submitted."""
    begun = time.monotonic()
    scores: list[PromptScores] = []
    with torch.inference_mode():
        computed = engine.compute([row for _, row in plan])
        if engine.drafter is not None:
            chunks = [
                PromptChunk(request.token_ids, row.position, row.position + len(row.input_ids), request.pages)
                for request, row in plan
            ]
            engine.drafter.observe_prompt(chunks, computed.extend)
        _keep_rows(engine, plan, computed.extend)
        logits = computed.logits.split([row.num_logits for _, row in plan])
        for (request, row), own in zip(plan, logits, strict=True):
            request.submit_chunk(len(row.input_ids))
            if request.generation.prompt_logprobs:
                scores += _score(request, row.position, own)
        submitted, event = time.monotonic(), recorded_event(engine.device)
        ends = [PromptEnds(engine, *each) for each in _ends(plan, computed)]
    return SubmittedChunk(plan, begun, submitted, event, scores, ends)


def _keep_rows(engine: Engine, plan: StepPlan, extend: Tensor | None) -> None:
    """Keep the target's states of the last positions, which some drafters read after the next chunk."""
    num_rows = 0 if engine.drafter is None else engine.drafter.hidden.num_target_rows
    if num_rows == 0 or extend is None:
        return
    for (request, _), own in zip(plan, extend.split([len(row.input_ids) for _, row in plan]), strict=True):
        request.keep_rows(own, 1 + num_rows)


def _score(request: Request, position: int, logits: Tensor) -> Iterator[PromptScores]:
    """Score the prompt's tokens from position + 1 on, by the logits from `position` on."""
    targets = request.token_ids[position + 1 : min(position + 1 + logits.shape[0], request.prompt_len)]
    if targets:
        ids = to_device(torch.tensor(targets), logits.device)
        scored = compute_logprobs(logits[: len(targets)], ids, request.generation.params.num_logprobs or 0)
        yield PromptScores(request, scored.to_host())


def _ends(plan: StepPlan, computed: Computed) -> Iterator[tuple[list[PromptEnd], Tensor, Tensor | None]]:
    """Yield the prompts that the chunk completes, in batches of at most _MAX_CHOICES choices (a prompt is not split).

    Each batch comes with the logits and the extend states of its prompts' last positions.
    """
    batch: list[PromptEnd] = []
    last_tokens: list[int] = []  # indices into the chunk's tokens
    logit_rows: list[int] = []
    num_tokens = num_logits = num_choices = 0
    for request, row in plan:
        num_tokens += len(row.input_ids)
        num_logits += row.num_logits
        if not request.is_submitted:
            continue
        if batch and num_choices + len(request.choices) > _MAX_CHOICES:
            yield _gather(batch, last_tokens, logit_rows, computed)
            batch, last_tokens, logit_rows, num_choices = [], [], [], 0
        batch.append(PromptEnd.of(request))
        last_tokens.append(num_tokens - 1)
        logit_rows.append(num_logits - 1)
        num_choices += len(request.choices)
    if batch:
        yield _gather(batch, last_tokens, logit_rows, computed)


def _gather(
    ends: list[PromptEnd], last_tokens: Sequence[int], logit_rows: Sequence[int], computed: Computed
) -> tuple[list[PromptEnd], Tensor, Tensor | None]:
    index = to_device(torch.tensor([last_tokens, logit_rows]), computed.logits.device)
    hidden = None if computed.extend is None else computed.extend.index_select(0, index[0])
    return ends, computed.logits.index_select(0, index[1]), hidden
