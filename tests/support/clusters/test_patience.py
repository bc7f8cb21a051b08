"""Time limits of tests hold on an idle machine, and are stretched on a busy one."""

from __future__ import annotations

import os
from types import SimpleNamespace

import patience
import pytest
from patience import MOST, Patience, load_factor


def test_limits_are_stretched_by_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    cases = {"0.10 9 9 1/90 7": 1.0, "6.00 0 0 2/90 7": 3.0, "0.10 0 0 8/90 7": 4.0, "50.0 0 0 60/90 7": MOST}
    assert {loads: load_factor(loads) for loads in cases} == cases


def test_a_limit_is_used_up_by_the_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    now, factor = 0.0, 1.0
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(patience, "load_factor", lambda: factor)
    limit = Patience(10.0)
    now = 5.0
    assert not limit.is_over()
    now, factor = 24.0, 4.0
    assert not limit.is_over()
    now, factor = 25.0, 1.0
    assert limit.is_over()
