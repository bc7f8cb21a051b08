"""Statistics of rounds: how many drafts were made and accepted."""

from __future__ import annotations

from dataclasses import dataclass, field

from .work import Accepted


@dataclass(slots=True)
class RoundStats:
    """Counts since the start."""

    accepted_at: list[int]  # by draft position: how often that draft was accepted
    num_verified: int = 0  # sequences whose drafts were verified, once per round
    num_drafted: int = 0
    num_accepted: int = 0
    idle_rounds: list[int] = field(default_factory=list[int])  # by rank, if each has sequences of its own

    def count(self, accepted: Accepted) -> None:
        """Count a round of one sequence, if the sequence could accept a draft."""
        if not accepted.num_drafted:
            return
        self.num_verified += 1
        self.num_drafted += accepted.num_drafted
        self.num_accepted += accepted.num_accepted
        for at in range(accepted.num_accepted):
            self.accepted_at[at] += 1
