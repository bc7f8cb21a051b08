"""The expected seconds of rounds: the least of the last measurements of the kind most alike."""

from __future__ import annotations

from baton.decode_node.round_seconds import RoundSeconds


def test_rounds_with_drafts_have_times_of_their_own() -> None:
    rounds = RoundSeconds(0.006)
    assert rounds.expected(9, 3) == 0.006
    for seconds in (0.012, 0.010, 0.011):
        rounds.observe(8, 3, seconds)
    assert rounds.expected(9, 3) == 0.010 and rounds.expected(9, 0) == 0.006
    for _ in range(3):
        rounds.observe(8, 3, 0.02)
    assert rounds.expected(9, 3) == 0.02
