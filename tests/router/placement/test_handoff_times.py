"""The expected time of a handoff."""

from __future__ import annotations

from baton.router.placement.handoff_times import HandoffTimes


def test_the_median_of_the_last_handoffs_is_expected() -> None:
    times = HandoffTimes()
    assert times.expected_s == 0.0
    for seconds in (0.02, 0.5, 0.01):
        times.observe(seconds)
    assert times.expected_s == 0.02
    for _ in range(15):
        times.observe(-0.1)
    assert times.expected_s == 0.0, "clocks of messages may cross"
