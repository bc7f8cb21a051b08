"""Scarce descriptors: whoever holds most connections without a request loses one, and nobody who is being served."""

from __future__ import annotations

from typing import cast

import pytest

from baton.metadata.bus import descriptors
from baton.metadata.bus.connections import Stranger
from baton.metadata.bus.descriptors import Descriptors, NodePort, group_of


class Fake:
    def __init__(self) -> None:
        self.is_closed = False

    def force_close(self) -> None:
        self.is_closed = True


def test_the_longest_waiting_of_the_address_with_most_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "YOUNG_S", 0.0)
    table = Descriptors(100)
    assert table.take(94) and not table.take(95), "none may be closed"
    greedy, modest = [Fake() for _ in range(5)], [Fake() for _ in range(3)]
    for each in modest:
        table.wait(each, "10.0.0.2")
    for each in greedy:
        table.wait(each, "10.0.0.1")
    table.remove(greedy[0])  # has a request
    table.remove(greedy[0])
    assert table.take(79) and not any(each.is_closed for each in greedy)
    assert table.take(80)
    assert [each.is_closed for each in greedy] == [False, True, False, False, False]
    table.wait(greedy[0], "10.0.0.1")  # is behind the others now
    assert table.take(95)
    assert [each.is_closed for each in greedy] == [False, True, True, False, False]
    for each in greedy:
        table.remove(each)
    table.wait(modest[0], "10.0.0.9")  # the client behind the proxy is known now
    for _ in range(3):
        table.wait(Fake(), "10.0.0.4")
    monkeypatch.setattr(descriptors, "YOUNG_S", 60.0)
    assert table.take(89)
    assert len(table._waiting["10.0.0.4"]) == 3, "their requests may be under way"  # type: ignore[attr-defined]
    assert table.take(90)
    assert len(table._waiting["10.0.0.4"]) == 2  # type: ignore[attr-defined]
    assert not any(each.is_closed for each in modest)
    assert table.make_room() and not Descriptors(100).make_room()
    assert table.is_reserved(90) and not table.is_reserved(89)


class FakeStranger(Fake):
    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address


def test_strangers_at_the_port_of_nodes_have_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "YOUNG_S", 0.0)
    port = NodePort(400)
    nodes, greedy = (
        [FakeStranger(address) for _ in range(count)] for address, count in (("10.0.0.1", 30), ("10.0.0.2", 400))
    )
    for each in nodes + greedy:
        port.come(cast(Stranger, each))
    assert sum(not each.is_closed for each in greedy) == 80 - len(nodes) and not any(each.is_closed for each in nodes)
    for each in nodes:
        port.go(cast(Stranger, each))
    assert all(each.is_closed for each in greedy[: 400 - 50]) and not greedy[-1].is_closed


def test_addresses_of_one_host_are_one() -> None:
    assert group_of("2001:db8::1") == group_of("2001:db8::ffff:2") != group_of("2001:db8:0:1::1")
    assert group_of("::ffff:10.0.0.1") == group_of("10.0.0.1") != group_of("10.0.0.2")
    assert group_of("") == ""
