"""Computes prompts, and tokens that lost their KV, on a decode node: in chunks, between rounds or beside them.

    Recompute --> target's forward --> observe_prompt --> ... the last chunk --> finish_prompt --> the slot

A chunk beside a round has its forward there (round.py); `take` does the rest.

A local prompt is a prompt that the decode node computes itself. All its tokens but the last one get KV here. The last
token is the bonus token of the sequence's first round, and that round samples the first token of the output. So the
drafter's state is made as on a prefill node whose prompt ended one token earlier: the last token of the prompt stands
for the sampled one. If a request asks for log-probabilities of its prompt, the forward that stores token i also scores
token i + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..device import to_device
from ..drafters.base import PromptChunk, PromptTail
from ..engine import Engine
from ..rounds.slots import Slots
from ..sampling.batch import SamplingBatch
from ..work import BatchRow, LocalRow, Recompute
from .prompts import SubmittedScores


class _Kept(NamedTuple):
    """The target's states of the last positions before `stop`, [<= num_states, extend width]."""

    stop: int
    states: Tensor


class LocalPrompts:
    """Owns the states that are kept of a local prompt between two chunks, at most `num_states` rows per slot."""

    def __init__(self, engine: Engine, slots: Slots) -> None:
        """`slots` get the drafter's states."""
        self._engine, self._slots = engine, slots
        self.kept: dict[int, _Kept] = {}  # by slot, of prompts that are not whole

    @property
    def num_states(self) -> int:
        """Positions at the end of a prompt whose target states the drafter needs."""
        drafter = self._engine.drafter
        return 0 if drafter is None or drafter.hidden.extend is None else 1 + drafter.hidden.num_target_rows

    def compute(self, work: Recompute) -> SubmittedScores | None:
        """Submit the tokens, their log-probabilities if some are scored, and the drafter's state after the prompts that
        end. Return the log-probabilities. If the device has no memory for it, what was kept stays as it was."""
        computed = self._engine.compute(work.rows)
        scores = None
        if work.is_scored:
            scores = SubmittedScores.of(self._engine, work.rows, work.token_ids, work.num_logprobs, computed.final)
        self.take(work, computed.extend)
        return scores

    def take(self, work: Recompute, extend: Tensor | None) -> None:
        """Do the part of `compute` that follows the target's forward, given the states `extend` [num_tokens, extend
        width] of all rows, end to end. None: the drafter takes none, or there is no drafter."""
        drafter = self._engine.drafter
        if drafter is None:
            return
        chunks = [
            PromptChunk(token_ids, row.position, _stop(row), row.pages, row.tail)
            for token_ids, row in zip(work.token_ids, work.rows, strict=True)
        ]
        drafter.observe_prompt(chunks, extend)
        if not work.local or extend is None:
            return
        own = extend.split([len(row.input_ids) for row in work.rows])
        latest = [self._latest(local, work.rows[local.row], own[local.row]) for local in work.local]
        ends = [(local, kept) for local, kept in zip(work.local, latest, strict=True) if local.sampling is not None]
        if ends:
            self._finish(work, [local for local, _ in ends], [kept.states for _, kept in ends])
        for local, kept in zip(work.local, latest, strict=True):
            if local.sampling is None:
                self.kept[local.slot] = kept
            else:
                self.forget(local.slot)

    def forget(self, slot: int) -> None:
        """Free what is kept for a slot, if there is anything."""
        self.kept.pop(slot, None)

    def _latest(self, local: LocalRow, row: BatchRow, states: Tensor) -> _Kept:
        """Return the states of the last positions, given those of the row, [len(row.input_ids), extend width]. What was
        kept before a preemption is of other positions, and is left out."""
        kept, latest = self.kept.get(local.slot), states[-self.num_states :]
        if kept is not None and kept.stop == row.position and len(latest) < self.num_states:
            latest = torch.cat([kept.states, latest])[-self.num_states :]
        return _Kept(_stop(row), latest.clone())

    def _finish(self, work: Recompute, ends: list[LocalRow], states: list[Tensor]) -> None:
        """Store the drafter's state after the prompts of `ends` in their slots.

        states: the target's, of the last positions of each prompt, [<= num_states, extend width]."""
        drafter, device = self._engine.drafter, self._engine.device
        assert drafter is not None
        tails: list[PromptTail] = []
        for local, kept in zip(ends, states, strict=True):
            row, token_ids = work.rows[local.row], work.token_ids[local.row]
            assert _stop(row) == len(token_ids) - 1, (row.position, len(row.input_ids), len(token_ids))
            tails.append(PromptTail(token_ids[:-1], row.pages, kept[:-1], row.tail))
        tokens = torch.tensor([work.token_ids[local.row][-1] for local in ends])
        hidden = torch.stack([kept[-1] for kept in states])
        sampling = SamplingBatch.of([local.sampling for local in ends if local.sampling is not None], device)
        state = drafter.finish_prompt(tails, to_device(tokens, device), hidden, sampling)
        self._slots.load_draft(to_device(torch.tensor([local.slot for local in ends]), device), state)


def _stop(row: BatchRow) -> int:
    return row.position + len(row.input_ids)
