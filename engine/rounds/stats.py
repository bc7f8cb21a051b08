"""Statistics of rounds: how many drafts were made and accepted, and what grammars cost."""

from __future__ import annotations

from dataclasses import dataclass

from ..work import Accepted, Masking


@dataclass(slots=True)
class RoundStats:
    """Counts since the start."""

    accepted_at: list[int]  # by draft position: how often that draft was accepted
    num_verified: int = 0  # sequences whose drafts were verified, once per round
    num_drafted: int = 0
    num_accepted: int = 0
    masked_rounds: int = 0  # with grammars
    late_masks: int = 0  # of these, the rounds in which the device waited for the masks
    mask_s: float = 0.0  # that the host took to fill masks

    def count_masks(self, masking: Masking | None) -> None:
        """Count what the grammars of a round cost, if it had some."""
        if masking is not None:
            self.masked_rounds += 1
            self.late_masks += masking.is_late
            self.mask_s += masking.fill_s

    def count(self, accepted: Accepted) -> None:
        """Count a round of one sequence, if the sequence could accept a draft."""
        if not accepted.num_drafted:
            return
        self.num_verified += 1
        self.num_drafted += accepted.num_drafted
        self.num_accepted += accepted.num_accepted
        for at in range(accepted.num_accepted):
            self.accepted_at[at] += 1
