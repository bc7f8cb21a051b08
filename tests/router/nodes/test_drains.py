"""Drained nodes: their requests move once, in time, and only if another node can take them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.router.errors import Conflict, NotFound
from baton.router.nodes.drains import Drains
from baton.router.nodes.node import Node

from ..sites import make_hello


class Drained:
    """Two decode nodes of a group, and the nodes that were evicted."""

    def __init__(self) -> None:
        self.live: list[Any] = []
        group: Any = SimpleNamespace(live=lambda role: self.live)
        self.first, self.other = (Node(make_hello("decode", name), group, 0.0) for name in ("d0", "d1"))
        self.live.append(self.other)
        self.evicted: list[Any] = []
        self.nodes: dict[bytes, Any] = {b"d0": self.first, b"d1": self.other}
        self.drains = Drains(self.nodes)

    def check(self, now: float) -> None:
        self.evicted += self.drains.due(now)


def test_remaining_requests_are_moved_once_when_the_time_is_over() -> None:
    drained = Drained()
    drained.drains.begin("d0", 5.0)
    assert drained.first.is_cordoned
    now = 0.0
    drained.check(now + 4.0)
    assert drained.evicted == []
    for after_s in (6.0, 6.25, 60.0):
        drained.check(now + after_s)
    assert drained.evicted == [drained.first]


def test_requests_that_no_other_node_can_take_stay_until_one_can() -> None:
    drained = Drained()
    drained.live.clear()
    drained.drains.begin("d0", 0.0)
    now = 0.0
    drained.check(now + 1.0)
    assert drained.evicted == []
    drained.live.append(drained.other)
    drained.check(now + 2.0)
    assert drained.evicted == [drained.first]


def test_a_drain_that_was_taken_back_moves_nothing() -> None:
    drained = Drained()
    drained.drains.begin("d0", 1.0)
    assert drained.drains.undo("d0") == [drained.first] and not drained.first.is_cordoned
    drained.check(60.0)
    assert drained.evicted == []


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(NotFound, match="'d7' is not here; joined are: d0, d1"):
        Drained().drains.begin("d7", 1.0)


def test_a_drain_belongs_to_the_name_until_the_node_leaves() -> None:
    drained = Drained()
    drained.drains.begin("d0", 5.0)
    again = Node(drained.first.hello, drained.first.group, 0.0)
    drained.drains.joined(again)
    assert again.is_cordoned and not drained.other.is_cordoned
    drained.drains.left(again)
    fresh = Node(drained.first.hello, drained.first.group, 0.0)
    drained.drains.joined(fresh)
    assert not fresh.is_cordoned


def test_a_node_that_leaves_is_not_put_back() -> None:
    drained = Drained()
    drained.drains.begin("d0", 5.0)
    drained.first.leave()
    with pytest.raises(Conflict, match=r"d0 is leaving.*cannot be undone"):
        drained.drains.undo("d0")


def test_a_drain_of_a_node_that_is_gone_can_be_undone() -> None:
    drained = Drained()
    drained.drains.begin("d0", 5.0)
    del drained.nodes[b"d0"]
    with pytest.raises(NotFound, match=r"d0.* will not drain when it comes back"):
        drained.drains.undo("d0")
    again = Node(drained.first.hello, drained.first.group, 0.0)
    drained.drains.joined(again)
    assert not again.is_cordoned
