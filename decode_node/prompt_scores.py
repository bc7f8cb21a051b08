"""Log-probabilities of a local prompt's tokens, collected chunk by chunk until the router gets them all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..metadata.wire.request import TokenLogprobs


@dataclass(slots=True, eq=False)
class PromptScores:
    """Log-probabilities of the prompt's tokens after the first. The state of position i scores token i + 1."""

    num_wanted: int  # tokens of the prompt after the first
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    @property
    def is_complete(self) -> bool:
        return len(self.logprobs) == self.num_wanted

    @property
    def num_skippable(self) -> int:
        """Positions from the start whose states are not needed any more."""
        return len(self.logprobs)

    def num_scored(self, start: int, num_new: int) -> int:
        """Return how many of the `num_new` positions from `start` on score a token of the prompt."""
        return max(0, min(num_new, self.num_wanted - start))

    def take(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take the scores of the positions from `start` on. After a preemption some are computed a second time."""
        assert start <= len(self.logprobs), (start, len(self.logprobs))
        self.logprobs[start:] = logprobs
