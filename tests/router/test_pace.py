"""What is learned of a group's pace, and what those who are sent away are told."""

from __future__ import annotations

import math

import pytest

from baton.router.pace import MAX_RETRY_S, NUM_SPREADS, Pace


def full(interval_s: float, num_grants: int = 100) -> tuple[Pace, float]:
    """A group whose nodes are full and grant at this interval, and the time."""
    pace, now = Pace(), 1000.0
    pace.blocked(now)
    for _ in range(num_grants):
        now += interval_s
        pace.granted(now)
    return pace, now


def test_the_wait_is_the_queue_times_the_interval() -> None:
    pace, _ = full(0.5)
    assert pace.wait_s(0) == pytest.approx(0.5)
    assert pace.wait_s(9) == pytest.approx(5.0)


def test_nobody_waits_where_there_is_room_whatever_it_was_like_before() -> None:
    pace, now = full(0.5)
    pace.unblocked()
    assert pace.wait_s(100) == 0
    for _ in range(1000):  # grants with room tell how many come, not how many could
        now += 10.0
        pace.granted(now)
    pace.blocked(now)
    assert pace.wait_s(0) == pytest.approx(0.5)


def test_time_without_a_queue_is_no_interval() -> None:
    pace, now = full(0.5)
    pace.unblocked()
    pace.blocked(now + 500)
    pace.granted(now + 500.5)
    assert pace.wait_s(0) == pytest.approx(0.5)


def test_the_wait_of_the_first_counts_from_when_it_found_no_room() -> None:
    """However often it is looked at meanwhile."""
    pace = Pace()
    for now in (10.0, 10.5, 11.9):
        pace.blocked(now)
    pace.granted(12.0)
    assert pace.wait_s(0) == pytest.approx(2.0)


def test_the_pace_follows_a_change() -> None:
    pace, now = full(0.1)
    for _ in range(50):
        now += 1.0
        pace.granted(now)
    assert pace.wait_s(0) == pytest.approx(1.0, rel=0.1)


def test_how_long_requests_take() -> None:
    pace = Pace()
    assert pace.service_s(1000) == 0
    for _ in range(100):
        pace.served(4.0, 40)
    assert pace.service_s(1000) == pytest.approx(4.0)
    assert pace.service_s(10) == pytest.approx(1.0), "a short one takes less"


def test_requests_that_take_unlike_times_are_given_more_than_the_mean() -> None:
    pace = Pace()
    for _ in range(200):
        pace.served(3.0, 10)
        pace.served(5.0, 10)
    assert pace.service_s(1000) == pytest.approx(4.0 + NUM_SPREADS * 1.0, rel=0.1)
    assert pace.service_s(5) == pytest.approx((4.0 + NUM_SPREADS * 1.0) / 2, rel=0.1)


def test_those_who_are_sent_away_come_back_one_after_the_other() -> None:
    pace, now = full(0.5)
    times = [pace.retry_after_s(now, 1) for _ in range(20)]
    assert times == pytest.approx([0.5 * place for place in range(1, 21)])
    later = pace.retry_after_s(now + 100, 1)
    assert later == pytest.approx(0.5), "promises that have passed bind nobody"


def test_nobody_is_sent_away_for_ever() -> None:
    pace, now = full(30.0)
    assert max(pace.retry_after_s(now, 1000) for _ in range(10)) == MAX_RETRY_S
    assert math.isfinite(Pace().retry_after_s(now, 1))
