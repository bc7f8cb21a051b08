"""What a step asks of the device: the target's forward over a chunk of prompts, the drafter's, and the prompts' ends.

A step is submitted and settled (node.py). On a CUDA device the two are apart: the next chunk is submitted before the
results of the one before are read, so that the device has work while the host sends, packs and offers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..engine.batch import BatchRow, Computed
from ..engine.copies import recorded_event, to_device
from ..engine.drafters.base import PromptChunk
from ..engine.engine import Engine
from ..engine.logprobs import Logprobs, compute_logprobs
from ..metadata.wire.request import TokenLogprobs
from .job import PrefillJob
from .prompt_ends import PromptEnd, PromptEnds

Plan = list[tuple[PrefillJob, BatchRow]]

_MOST_CHOICES = 256  # that are sampled at once: a row of logits each, and more where they are processed


class PromptScores(NamedTuple):
    """Log-probabilities of some of a prompt's own tokens, on the host once the chunk is computed."""

    job: PrefillJob
    logprobs: Logprobs

    def read(self) -> list[TokenLogprobs]:
        num_logprobs = self.job.request.params.num_logprobs or 0
        rows = self.logprobs.to_rows([num_logprobs] * len(self.logprobs.chosen))
        return [entry for entry in rows if entry is not None]


class SubmittedChunk(NamedTuple):
    """Under way, or done."""

    plan: Plan
    begun: float  # monotonic seconds
    submitted: float
    event: torch.cuda.Event | None  # the target's and the drafter's KV of the chunk lie in the pages; None: they do
    scores: list[PromptScores]
    ends: list[PromptEnds]

    @property
    def is_done(self) -> bool:
        """Whether a device says that it has done all of it."""
        events = [self.event, *(ends.event for ends in self.ends)]
        return all(event is not None and event.query() for event in events)

    def wait(self) -> float:
        """Returns when the chunk is computed: monotonic seconds of that moment, as far as the host can know."""
        if self.event is None:
            return self.submitted
        self.event.synchronize()
        return time.monotonic()

    def draft(self) -> None:
        """Ask for the drafts after first tokens too, now."""
        for ends in self.ends:
            ends.draft()


def submit(engine: Engine, plan: Plan) -> SubmittedChunk:
    """Begin the chunk. Jobs know then what is submitted of them, not that it is computed."""
    begun = time.monotonic()
    scores: list[PromptScores] = []
    with torch.inference_mode():
        computed = engine.compute([row for _, row in plan])
        if engine.drafter is not None:
            chunks = [
                PromptChunk(job.token_ids, row.position, row.position + len(row.input_ids), job.pages)
                for job, row in plan
            ]
            engine.drafter.observe_prompt(chunks, computed.extend)
        _keep_rows(engine, plan, computed.extend)
        logits = computed.logits.split([row.num_logits for _, row in plan])
        for (job, row), own in zip(plan, logits, strict=True):
            job.num_submitted += len(row.input_ids)
            if job.request.prompt_logprobs:
                scores += _score(job, row.position, own)
        submitted, event = time.monotonic(), recorded_event(engine.device)
        ends = [PromptEnds(engine, *each) for each in _ends(plan, computed)]
    return SubmittedChunk(plan, begun, submitted, event, scores, ends)


def _keep_rows(engine: Engine, plan: Plan, extend: Tensor | None) -> None:
    """A drafter may take the target's states of positions before the last one with it."""
    num_rows = 0 if engine.drafter is None else engine.drafter.hidden.num_target_rows
    if num_rows == 0 or extend is None:
        return
    for (job, _), own in zip(plan, extend.split([len(row.input_ids) for _, row in plan]), strict=True):
        job.keep_rows(own, 1 + num_rows)


def _score(job: PrefillJob, position: int, logits: Tensor) -> Iterator[PromptScores]:
    """Of the prompt's tokens position + 1 .. under the logits of position .. ."""
    targets = job.token_ids[position + 1 : min(position + 1 + logits.shape[0], job.prompt_len)]
    if targets:
        ids = to_device(torch.tensor(targets), logits.device)
        scored = compute_logprobs(logits[: len(targets)], ids, job.request.params.num_logprobs or 0)
        yield PromptScores(job, scored.to_host())


def _ends(plan: Plan, computed: Computed) -> Iterator[tuple[list[PromptEnd], Tensor, Tensor | None]]:
    """The prompts that the chunk completes, in pieces of not too many choices, with logits and extend states of their
    last positions."""
    piece: list[PromptEnd] = []
    tokens: list[int] = []  # of the chunk
    logit_rows: list[int] = []
    num_tokens = num_logits = num_choices = 0
    for job, row in plan:
        num_tokens += len(row.input_ids)
        num_logits += row.num_logits
        if not job.is_submitted:
            continue
        if piece and num_choices + len(job.choices) > _MOST_CHOICES:
            yield _gathered(piece, tokens, logit_rows, computed)
            piece, tokens, logit_rows, num_choices = [], [], [], 0
        piece.append(PromptEnd.of(job))
        tokens.append(num_tokens - 1)
        logit_rows.append(num_logits - 1)
        num_choices += len(job.choices)
    if piece:
        yield _gathered(piece, tokens, logit_rows, computed)


def _gathered(
    ends: list[PromptEnd], tokens: Sequence[int], logit_rows: Sequence[int], computed: Computed
) -> tuple[list[PromptEnd], Tensor, Tensor | None]:
    index = to_device(torch.tensor([tokens, logit_rows]), computed.logits.device)
    hidden = None if computed.extend is None else computed.extend.index_select(0, index[0])
    return ends, computed.logits.index_select(0, index[1]), hidden
