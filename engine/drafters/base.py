"""What a drafter is: something that a node has, which proposes the next tokens of a sequence.

Positions (DESIGN.md section 4). A sequence has L tokens with target KV, positions 0 .. L - 1, and its bonus token, the
last one sampled, belongs at position L. A round of K steps:

    propose   d_1 .. d_K for positions L + 1 .. L + K
    verify    the target runs bonus, d_1 .. d_K at positions L .. L + K and samples t_0 .. t_K for L + 1 .. L + K + 1
    accept    a = how many d_j equal t_(j-1) from the start; t_0 .. t_a are new, t_a is the next bonus, L grows by a + 1
    observe   the drafter sees the target's hidden states and tokens of L .. L + K and makes its own state for L + a + 1

The same two calls serve prompts: `observe_prompt` for each chunk as it is computed and `finish_prompt` once the token
after the prompt is known, on a prefill node and when a decode node recomputes a preempted sequence.

Zero rows. A node without work runs nothing, so `propose` and `observe` always have a sequence. `finish_prompt` has none
when a recomputed chunk ends no prompt: its `hidden` is then [0, width], of the same width as ever. And the one token of
a prompt's last chunk leaves `observe_prompt` without a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...metadata.hidden_layout import HiddenLayout
from ..sampling_state import SamplingState


@dataclass(slots=True, eq=False)
class DraftState:
    """What a drafter keeps of a sequence between rounds, besides KV; what prefill hands to decode."""

    tokens: torch.Tensor | None  # [num_proposals] int64, d_1 .. of the next round, known already; None: none is
    hidden: torch.Tensor | None  # [recurrent width]; None where no state goes from round to round
    rows: torch.Tensor | None = None  # [num_target_rows, extend width] of positions .. L - 1; zeros before position 0


class Drafted(Protocol):
    """What a drafter needs of a sequence."""

    token_ids: list[int]  # the last one is the bonus token
    num_computed: int  # L
    pages: list[int]
    sampling: SamplingState
    draft: DraftState | None


class Drafter(Protocol):
    """Proposes tokens in the target's vocabulary. One thread; tensors on the engine's device."""

    @property
    def name(self) -> str: ...

    @property
    def num_steps(self) -> int:
        """K, the most tokens a round drafts."""
        ...

    @property
    def hidden(self) -> HiddenLayout: ...

    @property
    def is_shifted(self) -> bool:
        """Whether its KV at position i depends on tokens after i (the schema's `key_lookahead` says on how many): at
        the last prompt positions thus on the first token."""
        ...

    def propose(self, sequences: Sequence[Drafted], num_steps: int) -> torch.Tensor:
        """[num_sequences, num_steps] int64. Called in every round, also with `num_steps` 0."""
        ...

    def observe(
        self,
        sequences: Sequence[Drafted],
        hidden: torch.Tensor | None,
        targets: torch.Tensor,
        num_accepted: Sequence[int],
    ) -> None:
        """After a verify: `hidden` [num_sequences, K + 1, extend width] of the target, `targets` [num_sequences, K + 1]
        int64 its tokens, `num_accepted` one a sequence. Called before the sequences have grown. Sets their `draft`."""
        ...

    def observe_prompt(self, chunks: Sequence[PromptChunk], hidden: torch.Tensor | None) -> None:
        """Prompt tokens were computed: `hidden` [num_tokens, extend width], chunks end to end."""
        ...

    def finish_prompt(self, tails: Sequence[PromptTail], hidden: torch.Tensor | None) -> list[DraftState]:
        """The token after each prompt is known: `hidden` [num_tails, extend width] of the last prompt positions."""
        ...


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens start .. stop - 1 of a prompt, computed by the target just now."""

    token_ids: Sequence[int]  # the whole prompt
    start: int
    stop: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class PromptTail:
    """A prompt and the token sampled after it (the bonus token)."""

    token_ids: Sequence[int]  # the whole prompt
    token: int
    pages: Sequence[int]
    sampling: SamplingState  # with `token` appended
    rows: torch.Tensor | None = None  # [min(num_target_rows, prompt_len - 1), extend width], positions before the last

    @property
    def prompt_len(self) -> int:
        return len(self.token_ids)
