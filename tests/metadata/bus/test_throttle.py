"""A throttle allows something a number of times per interval, by its own clock."""

from __future__ import annotations

from baton.metadata.bus.throttle import Throttle


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_event_is_allowed_once_per_interval() -> None:
    clock = Clock()
    throttle = Throttle(2.0, clock)
    assert [throttle.is_due(), throttle.is_due()] == [True, False]
    clock.now += 1.9
    assert not throttle.is_due()
    clock.now += 0.1
    assert [throttle.is_due(), throttle.is_due()] == [True, False]


def test_events_are_allowed_several_times_per_interval_from_the_first_on() -> None:
    clock = Clock()
    throttle = Throttle(2.0, clock, most=2)
    assert throttle.is_due()
    clock.now += 1.5
    assert [throttle.is_due(), throttle.is_due()] == [True, False]
    clock.now += 0.5
    assert [throttle.is_due(), throttle.is_due(), throttle.is_due()] == [True, True, False]
