"""NGRAM: prompt lookup (Saxena 2023). What followed the latest earlier occurrence of the last tokens is proposed.

No model and no state: proposals are a function of the sequence's tokens, so nothing crosses a handoff. It needs the
tokens on the CPU before a round, which is the declared path without overlap.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from ...metadata.hidden_layout import HiddenLayout
from .base import Drafted, DraftState, PromptChunk, PromptTail

MAX_NGRAM = 4
MIN_NGRAM = 1


class NgramDrafter:
    """Owns nothing."""

    name = "ngram"
    is_shifted = False

    def __init__(self, hidden: HiddenLayout, num_steps: int, device: torch.device) -> None:
        self.num_steps = num_steps
        self.hidden = hidden
        self._device = device

    def propose(self, sequences: Sequence[Drafted], num_steps: int) -> torch.Tensor:
        """[num_sequences, num_steps] int64; where nothing is found, the last token again."""
        found = [lookup(sequence.token_ids, num_steps) for sequence in sequences]
        return torch.tensor(found, dtype=torch.int64, device=self._device)

    def observe(
        self,
        sequences: Sequence[Drafted],
        hidden: torch.Tensor | None,
        targets: torch.Tensor,
        num_accepted: Sequence[int],
    ) -> None:
        for sequence in sequences:
            sequence.draft = DraftState(None, None)

    def observe_prompt(self, chunks: Sequence[PromptChunk], hidden: torch.Tensor | None) -> None:
        """Nothing to keep."""

    def finish_prompt(self, tails: Sequence[PromptTail], hidden: torch.Tensor | None) -> list[DraftState]:
        return [DraftState(None, None) for _ in tails]


def lookup(token_ids: Sequence[int], num_steps: int) -> list[int]:
    """`num_steps` tokens after the latest earlier occurrence of the longest suffix that has one, padded."""
    ids = array("i", token_ids)
    data, width = ids.tobytes(), ids.itemsize
    for length in range(min(MAX_NGRAM, len(ids) - 1), MIN_NGRAM - 1, -1):
        at = _rfind(data, data[-length * width :], len(data) - width, width)
        if at is not None:
            following = ids[at + length :].tolist()[:num_steps]
            return following + [ids[-1]] * (num_steps - len(following))
    return [ids[-1]] * num_steps


def _rfind(data: bytes, suffix: bytes, end: int, width: int) -> int | None:
    """Index of the last token at which `suffix` begins, ending before byte `end`."""
    at = data.rfind(suffix, 0, end)
    while at >= 0 and at % width:
        at = data.rfind(suffix, 0, at + len(suffix) - 1)
    return at // width if at >= 0 else None
