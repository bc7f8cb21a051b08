"""The shape of a round's drafts: a chain of K tokens, or a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class DraftShape(NamedTuple):
    """Shape of a round's drafts."""

    num_steps: int  # K, depth
    topk: int = 1
    num_tokens: int = 0  # N of a tree, drafts verified per round; a chain has as many as steps

    @property
    def is_chain(self) -> bool:
        return self.topk == 1

    @property
    def num_drafts(self) -> int:
        """Return N."""
        return self.num_steps if self.is_chain else self.num_tokens

    @property
    def max_drafts(self) -> int:
        """Return the number of candidates of a tree of this depth and width."""
        return self.topk + (self.num_steps - 1) * self.topk**2 if self.num_steps else 0

    @property
    def num_slots(self) -> int:
        """Return the number of token slots after the last one with KV that a round writes, in any pool."""
        return 1 + max(self.num_drafts, self.num_steps, self.topk * self.num_steps)

    @property
    def choices(self) -> Sequence[int]:
        """Return the numbers of steps that a round may have: a tree is drafted whole or not at all."""
        return range(self.num_steps + 1) if self.is_chain else (0, self.num_steps)

    def with_steps(self, num_steps: int) -> DraftShape:
        """Return the same shape with one of `choices`."""
        assert num_steps in self.choices, (num_steps, self)
        if self.is_chain or num_steps == self.num_steps:
            return self._replace(num_steps=num_steps)
        return DraftShape(0)


NO_DRAFTS = DraftShape(0)
