"""NGRAM: prompt lookup (Saxena 2023). What followed the last tokens where they stood before is proposed: in the
request's own text, else in finished requests of the same salt, which share one structure (suffixes.py).

No model and no state on the device: proposals are a function of tokens, so nothing crosses a handoff. It needs the
tokens on the CPU before a round, which is the declared path without overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import Tensor

from ...metadata.handoff.schema.hidden_layout import HiddenLayout
from ..pace.draft_length import DraftShape
from ..rounds.trees import Drafts
from ..sampling.batch import SamplingBatch
from ..state.model_pools import ModelPools
from .base import DraftState, PromptChunk, PromptTail, RoundRows
from .family import Family, Speculation, Wanted
from .suffixes import MAX_MATCH, MIN_MATCH, OwnSuffixes, SharedSuffixes

MAX_NGRAM = 4
MIN_NGRAM = 1
SHARED_TOKENS = 1 << 18  # of finished requests, some 65 bytes each


class NgramDrafter:
    """Owns the texts that it looks in: those of running sequences, by slot, and of finished ones."""

    has_kv = False

    @property
    def proposer(self) -> Self:
        """The drafter itself, which looks texts up on the host."""
        return self

    def __init__(self, hidden: HiddenLayout, shape: DraftShape) -> None:
        self.shape = shape
        self.hidden = hidden
        self._own: dict[int, OwnSuffixes] = {}
        self._shared = SharedSuffixes(SHARED_TOKENS)

    def use_pools(self, target: ModelPools, draft: ModelPools | None) -> None:
        del target, draft

    def allocate(self, num_rows: int) -> DraftState:
        return DraftState()

    def propose(self, rows: RoundRows, shape: DraftShape) -> Drafts:
        """Return the proposals that `lookup` found on the host."""
        assert rows.proposed is not None
        return Drafts(rows.proposed[:, : shape.num_steps])

    def lookup(self, slot: int, token_ids: Sequence[int], salt: str, num_steps: int) -> list[int]:
        """Return likely tokens after `token_ids`, which have grown since the slot's last lookup. The last token pads
        them to `num_steps` tokens. If only a short suffix was found in the own text, finished requests are searched
        too."""
        own = self._own.setdefault(slot, OwnSuffixes())
        own.extend(token_ids[len(own) :])
        found = self._find(own, token_ids, salt, num_steps)
        return found + [token_ids[-1]] * (num_steps - len(found))

    def replay(self, slot: int, token_ids: Sequence[int], salt: str, num_steps: int, num_tries: int) -> tuple[int, int]:
        """Propose for the last tokens as if they had not come yet, and count the right proposals, as `HostProposer`
        says. Nothing is looked up for the tokens before them."""
        own = self._own.setdefault(slot, OwnSuffixes())
        place = max(len(own), len(token_ids) - 2 * num_tries, 1)
        num_right = num_tried = 0
        while place < len(token_ids) and num_tried < num_tries:
            own.extend(token_ids[len(own) : place])
            came = token_ids[place : place + num_steps]
            found = self._find(own, token_ids[max(0, place - MAX_MATCH - 1) : place], salt, len(came))
            pairs = zip(found, came, strict=False)
            accepted = next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(found))
            num_right, num_tried = num_right + accepted, num_tried + min(accepted + 1, len(came))
            place += accepted + 1
        own.extend(token_ids[len(own) : place])
        return num_right, num_tried

    def _find(self, own: OwnSuffixes, token_ids: Sequence[int], salt: str, num_steps: int) -> list[int]:
        """Return up to `num_steps` likely tokens after `own`, whose last tokens are those of `token_ids`."""
        found = own.lookup(num_steps, MIN_MATCH, MAX_NGRAM) or self._shared.lookup(token_ids, salt, num_steps)
        return found or own.lookup(num_steps, MIN_NGRAM, MIN_MATCH - 1) or []

    def forget(self, slot: int, token_ids: Sequence[int], salt: str) -> None:
        """The slot's sequence is over; others may find its text from now on."""
        if self._own.pop(slot, None) is not None:
            self._shared.add(token_ids, salt)

    def observe(self, rows: RoundRows, hidden: Tensor | None, targets: Tensor, num_accepted: Tensor) -> DraftState:
        return DraftState()

    def observe_prompt(self, chunks: Sequence[PromptChunk], hidden: Tensor | None) -> None:
        """Nothing to keep."""

    def finish_prompt(
        self, tails: Sequence[PromptTail], tokens: Tensor, hidden: Tensor | None, sampling: SamplingBatch
    ) -> DraftState:
        return DraftState()


# --- the family ---


def _read(wanted: Wanted) -> Speculation:
    return Speculation(
        algorithm=wanted.algorithm,
        shape=wanted.shape,
        hidden=wanted.layout(),
        make=lambda loading: NgramDrafter(loading.hidden, loading.shape),
    )


FAMILY = Family(name="ngram", read=_read)
