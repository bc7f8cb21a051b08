"""The ends of all prompts whose last token a step computes: first tokens, and the drafter's states after them.

One pass samples the first tokens of all choices of all prompts, and a second pass drafts after them. Both are submitted
without waiting for the device. The host waits twice, however many prompts end: first for the tokens, which go to the
router, then for the drafts. Every row is computed by itself, so a prompt whose logits are NaN does not affect others.
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
from .request import Request


class PromptEnd(NamedTuple):
    """A request and its choices when its last token was submitted. Some may be dropped before the results are read."""

    request: Request
    units: list[Unit]
    states: list[SamplingState]
    block_tables: list[list[int]]

    @classmethod
    def of(cls, request: Request) -> PromptEnd:
        tables = [request.block_table(index) for index in range(len(request.choices))]
        return cls(request, list(request.choices), list(request.choices.values()), tables)


class FirstSample(NamedTuple):
    """The first tokens of a prompt's choices, in order. All are None if the logits are NaN."""

    token_ids: list[int | None]
    logprobs: list[TokenLogprobs | None]


class PromptEnds:
    """Submits the sampling and the drafting after prompts that end in one step, and reads the results."""

    def __init__(self, engine: Engine, ends: Sequence[PromptEnd], logits: Tensor, hidden: Tensor | None) -> None:
        """Submit the sampling. The caller has entered inference mode. `logits` [num_ends, vocab_size] and `hidden`
        [num_ends, extend width] are those of the last prompt positions; `hidden` is None if no drafter takes it."""
        assert ends and len(logits) == len(ends), (len(ends), logits.shape)
        self.ends = list(ends)
        self._engine = engine
        self._hidden = hidden
        states = [state for end in ends for state in end.states]
        self._num_logprobs = [state.params.num_logprobs for state in states]
        sampling = SamplingBatch.of(states, engine.device)
        self._sample = SubmittedSample.of(self._per_choice(logits, range(len(ends))), sampling)
        self._handed = [row for row, end in enumerate(ends) if end.request.tickets]
        if len(self._handed) < len(ends):
            sampling = SamplingBatch.of([state for row in self._handed for state in ends[row].states], engine.device)
        self._sampling = sampling  # before the first tokens, for the choices that are handed over
        self._draft: DraftState | None = None
        self._draft_rows: dict[Unit, int] = {}
        self._event: torch.cuda.Event | None = None

    def draft(self) -> None:
        """Submit the drafter's work for all choices that are handed over, before their first tokens are known on the
        host. It stores the draft KV of the last prompt positions. A second call does nothing."""
        if self._engine.drafter is None or not self._handed or self._draft is not None:
            return
        with torch.inference_mode():
            self._draft = self._finish_prompts().to_host()
        units = [unit for row in self._handed for unit in self.ends[row].units]
        self._draft_rows = {unit: row for row, unit in enumerate(units)}
        self._event = recorded_event(self._engine.device)

    def tokens(self) -> list[FirstSample]:
        """Wait for the first tokens and return them, prompt by prompt."""
        ids, logprobs = self._sample.read(self._num_logprobs)
        stops = accumulate((len(end.units) for end in self.ends), initial=0)
        return [FirstSample(ids[start:stop], logprobs[start:stop]) for start, stop in pairwise(stops)]

    @property
    def event(self) -> torch.cuda.Event | None:
        """The event after the work that was submitted last; None on a CPU."""
        return self._sample.event if self._event is None else self._event

    def wait(self) -> None:
        """Wait until everything is computed. The draft KV is then in the pages."""
        if self._event is not None:
            self._event.synchronize()

    def drafted(self, unit: Unit) -> DraftState | None:
        """Return the drafter's state of one choice, on the host; None without a drafter. Call `wait` first."""
        return None if self._draft is None else self._draft.row(self._draft_rows[unit])

    def _finish_prompts(self) -> DraftState:
        drafter = self._engine.drafter
        assert drafter is not None
        tails: list[PromptTail] = []
        for row in self._handed:
            request, block_tables = self.ends[row].request, self.ends[row].block_tables
            self._copy_tail_pages(request, block_tables)
            before = None if request.extend_rows is None else request.extend_rows[:-1]
            tails += [PromptTail(request.token_ids, block_table, before) for block_table in block_tables]
        tokens = self._sample.token_ids
        if len(self._handed) < len(self.ends):
            starts = list(accumulate((len(end.units) for end in self.ends), initial=0))
            tokens = self._rows(tokens, [each for row in self._handed for each in range(starts[row], starts[row + 1])])
        hidden = None if self._hidden is None else self._per_choice(self._hidden, self._handed)
        after = self._sampling.ahead(torch.ones_like(tokens[:1, None]), tokens[:, None])
        return drafter.finish_prompt(tails, tokens, hidden, after)

    def _copy_tail_pages(self, request: Request, block_tables: Sequence[Sequence[int]]) -> None:
        """Copy the pages that a first token changes, for every choice but the first."""
        for block_table in block_tables[1:]:
            for source, copy in zip(
                block_tables[0][request.num_shared :], block_table[request.num_shared :], strict=True
            ):
                self._engine.copy_page(source, copy)

    def _per_choice(self, values: Tensor, prompts: Sequence[int]) -> Tensor:
        """Return the rows of these prompts, repeated for each of their choices."""
        return self._rows(values, [row for row in prompts for _ in self.ends[row].units])

    def _rows(self, values: Tensor, index: Sequence[int]) -> Tensor:
        """Select rows. If `index` names all rows in order, return `values` itself."""
        if list(index) == list(range(len(values))):
            return values
        return values.index_select(0, to_device(torch.tensor(index), values.device))
