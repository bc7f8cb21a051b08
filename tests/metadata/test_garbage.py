"""Garbage is collected when nothing runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from baton.metadata.garbage import Garbage


class _Knot:
    """An object that refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def garbage() -> Iterator[Garbage]:
    thresholds = gc.get_threshold()
    yield Garbage()
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def old_garbage() -> weakref.ref[_Knot]:
    """Return a reference to garbage of the oldest generation."""
    knot = _Knot()
    for generation in (0, 1):
        gc.collect(generation)
    return weakref.ref(knot)


def test_full_collections_are_rare_and_pass_over_what_was_there(garbage: Garbage) -> None:
    assert gc.get_threshold()[2] == 100 and gc.get_freeze_count() > 10_000


def test_a_full_collection_follows_the_last_request(garbage: Garbage) -> None:
    garbage.look(1.0, is_idle=False)
    found = old_garbage()
    for now, is_idle in ((9.0, False), (10.0, True), (10.9, True), (10.95, False), (11.0, True), (11.9, True)):
        garbage.look(now, is_idle=is_idle)
        assert found() is not None, now
    garbage.look(12.0, is_idle=True)
    assert found() is None


def test_an_idle_process_collects_once(garbage: Garbage) -> None:
    garbage.look(1.0, is_idle=True)
    found = old_garbage()
    garbage.look(9.0, is_idle=True)
    assert found() is not None, "nothing has run"
    garbage.look(10.0, is_idle=False)
    for now in (11.0, 12.0):
        garbage.look(now, is_idle=True)
    assert found() is None
    found = old_garbage()
    garbage.look(20.0, is_idle=True)
    assert found() is not None
