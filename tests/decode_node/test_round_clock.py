"""The round clock, on a clock that only the test moves: times of rounds, and which of them are not used."""

from __future__ import annotations

import pytest

from baton.decode_node import round_clock
from baton.decode_node.round_clock import RoundClock, RoundSeconds, RoundTime


class Clock:
    """Replaces the module's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(round_clock.time, "monotonic", lambda: self.now)

    def passes(self, milliseconds: float) -> None:
        self.now += milliseconds / 1000


def in_ms(time: RoundTime) -> tuple[float | None, ...]:
    return tuple(None if each is None else round(1000 * each, 6) for each in time)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def one_after_the_other(clock: Clock, rounds: RoundClock, arrivals_ms: float, away_ms: float = 0.0) -> RoundTime:
    """Run a step with a round of 10 ms, and 1 ms each for the plan before it and the tokens after it."""
    clock.passes(away_ms)
    rounds.begin_step()
    clock.passes(arrivals_ms)
    rounds.end_arrivals()
    clock.passes(1)
    since = rounds.submit()
    clock.passes(10)
    seconds = rounds.settle(since, 0)
    clock.passes(1)
    judged = rounds.judge(seconds)
    rounds.end_step()
    return judged


def test_rounds_one_after_the_other_are_timed(clock: Clock) -> None:
    """Arrivals do not count in the round's time, only in its step's."""
    rounds = RoundClock(overlaps=False)
    one_after_the_other(clock, rounds, 0)
    assert in_ms(one_after_the_other(clock, rounds, 0.5)) == (10, 2.5)
    assert in_ms(one_after_the_other(clock, rounds, 20)) == (10, None)
    assert in_ms(one_after_the_other(clock, rounds, 0, away_ms=100)) == (10, None)
    assert in_ms(one_after_the_other(clock, rounds, 0)) == (10, 2)


def overlapping(clock: Clock, rounds: RoundClock, since: float, arrivals_ms: float) -> tuple[RoundTime, float]:
    """Run a step that submits a round and settles the round before, which takes 10 ms or until the step gets to it."""
    rounds.begin_step()
    clock.passes(arrivals_ms)
    rounds.end_arrivals()
    next_since = rounds.submit()
    clock.passes(max(1.0, 9 - arrivals_ms))
    seconds = rounds.settle(since, 0)
    clock.passes(1)
    judged = rounds.judge(seconds)
    rounds.end_step()
    return judged, next_since


def test_overlapping_rounds_are_timed(clock: Clock) -> None:
    """Short work beside a round is hidden. A burst of arrivals is not."""
    rounds, since = RoundClock(overlaps=True), 0.0
    for index, arrivals_ms in enumerate((0, 2, 30, 0)):
        judged, since = overlapping(clock, rounds, since, arrivals_ms)
        if index:  # before the first one the node was idle
            assert in_ms(judged) == {0: (10, 0), 2: (10, 0), 30: (None, None)}[arrivals_ms], arrivals_ms
        else:
            assert in_ms(judged) == (None, None)


def test_a_round_that_arrivals_have_outlasted_is_not_timed(clock: Clock) -> None:
    for late_ms, is_used in ((2, True), (10, False)):
        rounds = RoundClock(overlaps=True)
        overlapping(clock, rounds, 0.0, 0)
        _, since = overlapping(clock, rounds, clock.now, 0)
        rounds.begin_step()
        rounds.end_arrivals()
        clock.passes(16 - late_ms)
        begun = clock.now
        clock.passes(late_ms)
        rounds.overrun(begun)
        judged = rounds.judge(rounds.settle(since, 0))
        assert (judged.seconds is not None) == is_used


def test_if_there_are_always_arrivals_some_times_are_used(clock: Clock) -> None:
    rounds, since = RoundClock(overlaps=True), 0.0
    judged = [RoundTime(None, None)]
    for _ in range(20):
        one, since = overlapping(clock, rounds, since, 30)
        judged.append(one)
    assert sum(each.seconds is not None for each in judged) == 2


def test_a_round_is_submitted_before_the_one_under_way_can_end(clock: Clock) -> None:
    """By a fifth of its time, or a millisecond; and at once if no such round has been timed."""
    rounds = RoundClock(overlaps=True)
    for num_steps, milliseconds, ahead in ((0, 10, 2), (5, 20, 4), (0, 2, 1)):
        rounds.begin_step()
        since = rounds.submit()
        clock.passes(milliseconds)
        rounds.settle(since, num_steps)
        assert rounds.submit_by(num_steps) == pytest.approx(clock.now + (milliseconds - ahead) / 1000)
        assert rounds.submit_by(3) < clock.now
        assert rounds.submit_by(num_steps, has_chunk=True) < clock.now, "none was measured"
    since = rounds.submit()
    clock.passes(30)
    before_s = rounds.submit_by(0) - clock.now
    rounds.settle(since, 0, has_chunk=True)
    assert rounds.submit_by(0, has_chunk=True) > clock.now + 0.020, "a round with a chunk takes longer"
    assert rounds.submit_by(0) - clock.now == pytest.approx(before_s + 0.030), "the others take as long as before"


def test_rounds_with_drafts_have_times_of_their_own() -> None:
    rounds = RoundSeconds(0.006)
    assert rounds.expected(9, 3) == 0.006
    for seconds in (0.012, 0.010, 0.011):
        rounds.observe(8, 3, seconds)
    assert rounds.expected(9, 3) == 0.010 and rounds.expected(9, 0) == 0.006
    for _ in range(3):
        rounds.observe(8, 3, 0.02)
    assert rounds.expected(9, 3) == 0.02
