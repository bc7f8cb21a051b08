"""The ends of all prompts whose last token a step computes: their first tokens, and the drafter's states after these.

One pass samples for all choices of all prompts, and one more drafts. Both are asked of the device without waiting for
it; the host waits when it reads, for the tokens first: they go to the router. However many prompts end, it waits twice.
A prompt whose logits are no numbers spoils nobody: every row is computed by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..engine.copies import recorded_event, to_device
from ..engine.drafters.base import DraftState, PromptTail
from ..engine.engine import Engine
from ..engine.sampling import SubmittedSample
from ..engine.sampling_batch import SamplingBatch
from ..engine.sampling_state import SamplingState
from ..metadata.wire.request import TokenLogprobs, Unit
from .job import PrefillJob


class PromptEnd(NamedTuple):
    """A prompt and its choices as they were when its last token was submitted; some may be gone when it is read."""

    job: PrefillJob
    units: list[Unit]
    states: list[SamplingState]
    block_tables: list[list[int]]

    @classmethod
    def of(cls, job: PrefillJob) -> PromptEnd:
        tables = [job.pages_of(index) for index in range(len(job.choices))]
        return cls(job, list(job.choices), list(job.choices.values()), tables)


class FirstSample(NamedTuple):
    """What the choices of a prompt begin with, in order. None of them has a token where the logits are no numbers."""

    token_ids: list[int | None]
    logprobs: list[TokenLogprobs | None]


class PromptEnds:
    """Those of a step, under way on the device or done."""

    def __init__(self, engine: Engine, ends: Sequence[PromptEnd], logits: Tensor, hidden: Tensor | None) -> None:
        """Samples, in inference mode. `logits` [num_ends, vocab_size] and `hidden` [num_ends, extend width] (None where
        no drafter takes it) are of the last prompt positions."""
        assert ends and len(logits) == len(ends), (len(ends), logits.shape)
        self.ends = list(ends)
        self._engine = engine
        self._hidden = hidden
        states = [state for end in ends for state in end.states]
        self._num_logprobs = [state.params.num_logprobs for state in states]
        sampling = SamplingBatch.of(states, engine.device)
        self._sample = SubmittedSample.of(self._per_choice(logits, range(len(ends))), sampling)
        self._handed = [row for row, end in enumerate(ends) if end.job.tickets]
        if len(self._handed) < len(ends):
            sampling = SamplingBatch.of([state for row in self._handed for state in ends[row].states], engine.device)
        self._sampling = sampling  # before the first tokens, of the choices that are handed over
        self._draft: DraftState | None = None
        self._draft_rows: dict[Unit, int] = {}
        self._event: torch.cuda.Event | None = None

    def draft(self) -> None:
        """Asks the drafter, if there is one, for the states of the choices that are handed over, whatever their first
        tokens turn out to be; draft KV of the last prompt positions is stored. A second call does nothing."""
        if self._engine.drafter is None or not self._handed or self._draft is not None:
            return
        with torch.inference_mode():
            self._draft = self._finish_prompts().to_host()
        units = [unit for row in self._handed for unit in self.ends[row].units]
        self._draft_rows = {unit: row for row, unit in enumerate(units)}
        self._event = recorded_event(self._engine.device)

    def tokens(self) -> list[FirstSample]:
        """Waits for them. Prompt by prompt."""
        ids, logprobs = self._sample.read(self._num_logprobs)
        stops = accumulate((len(end.units) for end in self.ends), initial=0)
        return [FirstSample(ids[start:stop], logprobs[start:stop]) for start, stop in pairwise(stops)]

    @property
    def event(self) -> torch.cuda.Event | None:
        """Of what was asked for last; None where the device is the host."""
        return self._sample.event if self._event is None else self._event

    def wait(self) -> None:
        """Returns when all that was asked for is done: draft KV lies in the pages."""
        if self._event is not None:
            self._event.synchronize()

    def drafted(self, unit: Unit) -> DraftState | None:
        """After `wait`: one row on the host; None without a drafter."""
        return None if self._draft is None else self._draft.row(self._draft_rows[unit])

    def _finish_prompts(self) -> DraftState:
        drafter = self._engine.drafter
        assert drafter is not None
        tails: list[PromptTail] = []
        for row in self._handed:
            job, block_tables = self.ends[row].job, self.ends[row].block_tables
            self._copy_tail_pages(job, block_tables)
            before = None if job.extend_rows is None else job.extend_rows[:-1]
            tails += [PromptTail(job.token_ids, block_table, before) for block_table in block_tables]
        tokens = self._sample.token_ids
        if len(self._handed) < len(self.ends):
            starts = list(accumulate((len(end.units) for end in self.ends), initial=0))
            tokens = self._rows(tokens, [each for row in self._handed for each in range(starts[row], starts[row + 1])])
        hidden = None if self._hidden is None else self._per_choice(self._hidden, self._handed)
        after = self._sampling.ahead(torch.ones_like(tokens[:1, None]), tokens[:, None])
        return drafter.finish_prompt(tails, tokens, hidden, after)

    def _copy_tail_pages(self, job: PrefillJob, block_tables: Sequence[Sequence[int]]) -> None:
        """Every choice but the first has copies of its own of the pages that its first token changes."""
        for block_table in block_tables[1:]:
            for source, copy in zip(block_tables[0][job.num_shared :], block_table[job.num_shared :], strict=True):
                self._engine.copy_page(source, copy)

    def _per_choice(self, values: Tensor, prompts: Sequence[int]) -> Tensor:
        """Rows of these prompts, once for each choice."""
        return self._rows(values, [row for row in prompts for _ in self.ends[row].units])

    def _rows(self, values: Tensor, index: Sequence[int]) -> Tensor:
        """`values` itself where that is all of it."""
        if list(index) == list(range(len(values))):
            return values
        return values.index_select(0, to_device(torch.tensor(index), values.device))
