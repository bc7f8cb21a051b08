"""One round of speculation: propose, verify, accept, observe (positions: drafters/base.py).

The output is the target's own whatever the drafter proposes: every emitted token is the one that the target samples at
its position, with that position's noise, given the tokens before it. A drafter decides only how many come at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..metadata.hidden_layout import HiddenLayout
from ..metadata.request import TokenLogprobs
from .batch import BatchRow, ForwardBatch
from .drafters.base import Drafted, Drafter, PromptChunk
from .engine import Engine
from .sampling import sample
from .sampling_state import SamplingBatch


class Accepted(NamedTuple):
    """What a round brought one sequence."""

    token_ids: list[int]  # t_0 .. t_a, at least one; fewer where the target's logits are no numbers
    logprobs: list[TokenLogprobs | None]
    num_accepted: int  # a: drafts that equal the target's tokens
    num_drafted: int  # K


@dataclass(slots=True)
class RoundStats:
    """Counts since the start."""

    accepted_at: list[int]  # by draft position: how often that draft was accepted
    num_verified: int = 0  # sequences verified, once a round each
    num_drafted: int = 0
    num_accepted: int = 0

    def count(self, num_steps: int, num_accepted: Sequence[int]) -> None:
        """One round of some sequences."""
        self.num_verified += len(num_accepted)
        self.num_drafted += num_steps * len(num_accepted)
        self.num_accepted += sum(num_accepted)
        for accepted in num_accepted:
            for at in range(accepted):
                self.accepted_at[at] += 1


class Rounds:
    """Runs rounds of one engine and one drafter. One thread."""

    def __init__(self, engine: Engine, drafter: Drafter) -> None:
        self._engine = engine
        self._drafter = drafter
        self.stats = RoundStats([0] * drafter.num_steps)

    @property
    def hidden(self) -> HiddenLayout:
        """Of the drafter."""
        return self._drafter.hidden

    def run(self, sequences: Sequence[Drafted], num_steps: int) -> list[Accepted]:
        """`num_steps` drafts for each sequence (0: none). Pages must cover num_computed + num_steps + 1 tokens.

        Stores the KV of all verified tokens and updates each sequence's `draft`; the caller appends the tokens, of
        which the last has no KV yet, and counts the others as computed. No sequences: nothing runs."""
        if not sequences:
            return []
        with torch.inference_mode():
            drafts = self._drafter.propose(sequences, num_steps)
            assert drafts.shape == (len(sequences), num_steps) and drafts.dtype == torch.int64, drafts
            hidden, logits = self._verify(sequences, drafts)
            states = [
                sequence.sampling.ahead(step, drafts[row, :step])
                for row, sequence in enumerate(sequences)
                for step in range(num_steps + 1)
            ]
            sampled = sample(logits, SamplingBatch.of(states, self._engine.device))
            targets = sampled.token_ids.view(len(sequences), num_steps + 1)
            num_accepted = _count_accepted(drafts, targets)
            self._drafter.observe(sequences, hidden, targets, num_accepted)
            self.stats.count(num_steps, num_accepted)
            logprobs: list[TokenLogprobs | None] = [None] * len(states)
            if sampled.logprobs is not None:
                logprobs = sampled.logprobs.to_rows(len(states))
            num_valid = sampled.is_valid.view(targets.shape).long().cumprod(1).sum(1).tolist()
            results: list[Accepted] = []
            for row, tokens in enumerate(targets.tolist()):
                start, count = row * (num_steps + 1), min(num_accepted[row] + 1, num_valid[row])
                accepted = Accepted(tokens[:count], logprobs[start : start + count], num_accepted[row], num_steps)
                results.append(accepted)
            return results

    def recompute(self, sequences: Sequence[Drafted], rows: Sequence[BatchRow], hidden: torch.Tensor | None) -> None:
        """After a preemption: tokens of `sequences` were computed again, as `rows` say, with these extend states
        [num_tokens, width]. Only KV is made anew: a sequence has kept its `draft`, which is of the same tokens, and
        draft KV that depends on tokens not known yet is stored anew by the next `observe`."""
        chunks = [
            PromptChunk(each.token_ids, row.position, row.position + len(row.input_ids), each.pages)
            for each, row in zip(sequences, rows, strict=True)
        ]
        with torch.inference_mode():
            self._drafter.observe_prompt(chunks, hidden)

    def _verify(self, sequences: Sequence[Drafted], drafts: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The target's extend state [num_sequences, K + 1, width] (None where nobody wants it) and its logits
        [num_sequences * (K + 1), vocab_size] at the bonus and draft tokens."""
        engine, num_rows = self._engine, drafts.shape[1] + 1
        bonus = torch.tensor([[sequence.token_ids[-1]] for sequence in sequences], device=engine.device)
        rows = [BatchRow([0] * num_rows, each.num_computed, each.pages, num_rows) for each in sequences]
        batch = ForwardBatch.build(rows, engine.pool.page_size, engine.device)
        batch = replace(batch, input_ids=torch.cat([bonus, drafts], dim=1).flatten())
        extend, final = engine.states(batch)
        hidden = None if extend is None else extend.view(len(sequences), num_rows, -1)
        return hidden, engine.model.logits(final)


def _count_accepted(drafts: torch.Tensor, targets: torch.Tensor) -> list[int]:
    """Per row, how many drafts equal the target's token from the start."""
    return (drafts == targets[:, :-1]).long().cumprod(1).sum(1).tolist()
