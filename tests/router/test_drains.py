"""Nodes taken out of service: what they hold goes elsewhere in time, once, and only where there is an elsewhere."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from baton.router.drains import Drains
from baton.router.errors import Conflict, NotFound


class Drained:
    """Two decode nodes of a group, and who was evicted."""

    def __init__(self) -> None:
        self.live: list[Any] = []
        group = SimpleNamespace(live=lambda role: self.live)
        self.first, self.other = (
            SimpleNamespace(
                node_id=name, role="decode", group=group, is_cordoned=False, is_leaving=False, evict_at=None
            )
            for name in ("d0", "d1")
        )
        self.live.append(self.other)
        self.evicted: list[Any] = []
        self.nodes = {b"d0": self.first, b"d1": self.other}
        registry: Any = SimpleNamespace(nodes=self.nodes)
        moves: Any = SimpleNamespace(evict=lambda node, reason: self.evicted.append(node))
        self.drains = Drains(registry, moves)


def test_what_is_left_is_moved_once_when_the_time_is_over() -> None:
    drained = Drained()
    assert drained.drains.begin("d0", 5.0) is drained.first and drained.first.is_cordoned
    now = time.monotonic()
    drained.drains.check(now + 4.0)
    assert drained.evicted == []
    for after_s in (6.0, 6.25, 60.0):
        drained.drains.check(now + after_s)
    assert drained.evicted == [drained.first]


def test_what_nobody_else_could_take_stays_until_somebody_can() -> None:
    drained = Drained()
    drained.live.clear()
    drained.drains.begin("d0", 0.0)
    now = time.monotonic()
    drained.drains.check(now + 1.0)
    assert drained.evicted == []
    drained.live.append(drained.other)
    drained.drains.check(now + 2.0)
    assert drained.evicted == [drained.first]


def test_a_drain_that_was_taken_back_moves_nothing() -> None:
    drained = Drained()
    drained.drains.begin("d0", 1.0)
    assert drained.drains.undo("d0") is drained.first and not drained.first.is_cordoned
    drained.drains.check(time.monotonic() + 60.0)
    assert drained.evicted == []


def test_an_unknown_name_is_told_the_others() -> None:
    with pytest.raises(NotFound, match="'d7' is not here; joined are: d0, d1"):
        Drained().drains.begin("d7", 1.0)


def test_a_drain_belongs_to_the_name_until_the_node_leaves() -> None:
    drained = Drained()
    drained.drains.begin("d0", 5.0)
    again = SimpleNamespace(**{**vars(drained.first), "is_cordoned": False})
    drained.drains.joined(again)
    assert again.is_cordoned and not drained.other.is_cordoned
    drained.drains.left(again)
    fresh = SimpleNamespace(**{**vars(drained.first), "is_cordoned": False})
    drained.drains.joined(fresh)
    assert not fresh.is_cordoned


def test_a_node_that_leaves_is_not_put_back() -> None:
    drained = Drained()
    drained.drains.begin("d0", 5.0)
    drained.first.is_leaving = True
    with pytest.raises(Conflict, match=r"d0 is leaving.*cannot be undone"):
        drained.drains.undo("d0")


def test_a_drain_of_a_node_that_is_gone_can_be_undone() -> None:
    drained = Drained()
    drained.drains.begin("d0", 5.0)
    del drained.nodes[b"d0"]
    with pytest.raises(NotFound, match=r"d0.* will not drain when it comes back"):
        drained.drains.undo("d0")
    again = SimpleNamespace(**{**vars(drained.first), "is_cordoned": False})
    drained.drains.joined(again)
    assert not again.is_cordoned
