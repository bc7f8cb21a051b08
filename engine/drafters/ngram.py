"""NGRAM: prompt lookup (Saxena 2023). What followed the latest earlier occurrence of the last tokens is proposed.

No model and no state: proposals are a function of the sequence's tokens, so nothing crosses a handoff. It needs the
tokens on the CPU before a round, which is the declared path without overlap.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from torch import Tensor

from ...metadata.hidden_layout import HiddenLayout
from ..sampling_batch import SamplingBatch
from ..trees import Drafts, DraftShape
from .base import DraftState, PromptChunk, PromptTail, RoundRows

MAX_NGRAM = 4
MIN_NGRAM = 1


class NgramDrafter:
    """Owns nothing."""

    name = "ngram"
    is_shifted = False
    has_kv = False

    def __init__(self, hidden: HiddenLayout, shape: DraftShape) -> None:
        self.shape = shape
        self.hidden = hidden

    def allocate(self, num_rows: int) -> DraftState:
        return DraftState()

    def propose(self, rows: RoundRows, shape: DraftShape) -> Drafts:
        """What `lookup` found on the host."""
        assert rows.proposed is not None
        return Drafts(rows.proposed[:, : shape.num_steps])

    def lookup(self, token_ids: Sequence[int], num_steps: int) -> list[int]:
        """What follows `token_ids`, padded to `num_steps`."""
        return lookup(token_ids, num_steps)

    def observe(self, rows: RoundRows, hidden: Tensor | None, targets: Tensor, num_accepted: Tensor) -> DraftState:
        return DraftState()

    def observe_prompt(self, chunks: Sequence[PromptChunk], hidden: Tensor | None) -> None:
        """Nothing to keep."""

    def finish_prompt(self, tails: Sequence[PromptTail], hidden: Tensor | None, sampling: SamplingBatch) -> DraftState:
        return DraftState()


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
