"""What is learned of a group's pace, and what those who are sent away are told."""

from __future__ import annotations

import math

import numpy as np
import pytest

from baton.router.pace import MAX_RETRY_S, NUM_SPREADS, SOON_S, Pace


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
    for _ in range(200):  # their times come; nodes are as full as before
        now += 0.5
        pace.granted(now)
    later = pace.retry_after_s(now, 1)
    assert later == pytest.approx(0.5), "promises that have passed bind nobody"


def test_a_faster_pace_brings_new_promises_nearer() -> None:
    """Those of before were made when a grant took two seconds."""
    pace, now = full(2.0)
    assert max(pace.retry_after_s(now, 1) for _ in range(20)) == pytest.approx(40.0)
    for _ in range(100):
        now += 0.05
        pace.granted(now)
    assert pace.retry_after_s(now, 1) < 20 * 0.06


def test_promises_are_void_as_nodes_have_room_again_and_again() -> None:
    pace, now = full(1.0)
    for _ in range(30):
        pace.retry_after_s(now, 1)
    left: list[float] = []
    for _ in range(6):
        pace.unblocked()
        pace.unblocked()  # nothing happens as long as nodes have room
        left.append(pace.num_promised(now))
        pace.blocked(now)
    assert left == [15, 7, 3, 1, 0, 0]


def test_a_pace_is_learned_in_as_many_grants_as_there_are_slots() -> None:
    """Two slots, whose requests begin together and take a second each."""
    pace = Pace()
    pace.blocked(0.0)
    told: list[float] = []
    for now in (1.0, 2.0, 3.0):
        for _ in range(2):
            pace.served(1.0, 10)
            pace.granted(now)
        told.append(pace.retry_after_s(now, 10, 2))
        pace._promises.clear()
    assert told == pytest.approx([5.0 * 2 / 4, 5.0 * 4 / 6, 5.0 * 6 / 8]), "of few samples less is believed"


def test_a_grant_that_is_overdue_counts() -> None:
    """Long requests follow short ones."""
    pace, now = full(0.05)
    before = pace.retry_after_s(now, 10)
    assert before == pytest.approx(0.5)
    assert pace.retry_after_s(now + 20, 10) > 5


def test_without_any_measure_those_who_are_refused_come_again_soon_and_not_all_at_once() -> None:
    pace = Pace()
    pace.blocked(0.0)
    told = [pace.retry_after_s(0.0, 1, 2) for _ in range(300)]
    assert sorted(set(told)) == told and SOON_S[0] < told[0] and told[-1] < SOON_S[1]
    assert max(np.histogram(told, 20)[0]) < 300 / 2
    assert pace.retry_after_s(10.0, 20, 2) == MAX_RETRY_S, "none of two has ended in ten seconds: five for each"


def test_nobody_is_sent_away_for_ever() -> None:
    pace, now = full(30.0)
    assert max(pace.retry_after_s(now, 1000) for _ in range(10)) == MAX_RETRY_S
    assert math.isfinite(Pace().retry_after_s(now, 1))
