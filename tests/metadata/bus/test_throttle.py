"""The throttle: how many events it lets through in a period."""

from __future__ import annotations

from baton.metadata.bus.throttle import Throttle


def test_throttle() -> None:
    now = 0.0
    throttle = Throttle(1.0, lambda: now)
    assert [throttle.is_due(), throttle.is_due()] == [True, False]
    now = 0.99
    assert not throttle.is_due()
    now = 1.0
    assert [throttle.is_due(), throttle.is_due()] == [True, False]


def test_throttle_of_several() -> None:
    now = 0.0
    throttle = Throttle(1.0, lambda: now, most=3)
    assert [throttle.is_due() for _ in range(5)] == [True, True, True, False, False]
    now = 0.99
    assert not throttle.is_due()
    now = 1.5
    assert [throttle.is_due() for _ in range(4)] == [True, True, True, False]
    now = 2.4
    assert not throttle.is_due()
