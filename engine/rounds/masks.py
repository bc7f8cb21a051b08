"""Masks of the sequences that run: they say which tokens the grammars allow at each node of a round.

A round with grammars waits for its drafts on the host, in the middle (round.py). By then the round before is done, so
the matchers first go on by what that brought. They fill the masks while the device verifies the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..sampling.grammar import DraftChain, Grammars, Mask, Matcher
from ..sampling.state import SamplingState
from .trees import Drafts


class RoundMasks:
    """Owns the matcher of each slot whose sequence has a grammar. One thread."""

    def __init__(self, grammars: Grammars, *, pinned: bool) -> None:
        """`pinned`: the masks are copied to a device."""
        self._grammars = grammars
        self._pinned = pinned
        self._matchers: dict[int, Matcher] = {}  # by slot

    def load(self, slot: int, state: SamplingState) -> None:
        """Give the slot to a sequence."""
        self._matchers.pop(slot, None)
        if state.params.grammar is not None:
            self._matchers[slot] = self._grammars.matcher(state)

    def of(self, slots: Sequence[int]) -> list[Matcher | None]:
        """Return the matchers of the sequences in these slots; None: the sequence has no grammar."""
        return [self._matchers.get(slot) for slot in slots]

    def fill(self, matchers: Sequence[Matcher | None], drafts: Drafts) -> Tensor:
        """Return the tokens that each node may be, [num_seqs * (N + 1), num_words] int32 on the host, given `drafts` on
        the host, which may have more rows, of padding. Sequences without a grammar may have every token."""
        num_seqs, num_nodes = len(drafts.tokens), drafts.tokens.shape[1] + 1
        shape = (num_seqs * num_nodes, self._grammars.num_words)
        allowed = torch.full(shape, -1, dtype=torch.int32, pin_memory=self._pinned)
        masks: Mask = allowed.numpy()
        rows = drafts.tokens.tolist()
        chains = [
            DraftChain(matcher, index * num_nodes, rows[index])
            for index, matcher in enumerate(matchers)
            if matcher is not None
        ]
        if drafts.parents is None:
            self._grammars.fill(masks, chains)
        else:
            parents = drafts.parents.tolist()
            for chain in chains:
                self._grammars.fill_tree(masks, chain, parents[chain.row // num_nodes])
        return allowed
