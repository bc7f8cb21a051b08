"""Statistics of rounds count drafts that a sequence could accept, and no others."""

from __future__ import annotations

from baton.engine.rounds.rounds import RoundStats
from baton.engine.work import Accepted, Masking


def test_drafts_are_counted_by_position() -> None:
    stats = RoundStats([0] * 3)
    for num_accepted, num_drafted in ((2, 3), (0, 2), (0, 0), (3, 3)):
        stats.count(Accepted([1] * (num_accepted + 1), [None] * (num_accepted + 1), num_accepted, num_drafted))
    assert stats == RoundStats([2, 2, 1], num_verified=3, num_drafted=8, num_accepted=5)


def test_masks_are_counted_by_round() -> None:
    stats = RoundStats([])
    for masking in (Masking(0.25, is_late=True), None, Masking(0.5, is_late=False)):
        stats.count_masks(masking)
    assert stats == RoundStats([], masked_rounds=2, late_masks=1, mask_s=0.75)
