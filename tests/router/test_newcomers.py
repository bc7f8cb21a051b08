"""Who is let in, waits, or is refused when; in a registry without sockets, by a clock that the test turns."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import msgspec
import pytest

from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import Capacity, Load, ModelCard, NodeStats
from baton.router.registry import MAX_EMPTY_GROUPS, MAX_LINES, MAX_WAITING, Registry

from .fake_nodes import make_layout


class Clocked:
    """A registry without sockets: what it sends, whom it lets in, and a clock that the test turns."""

    def __init__(self) -> None:
        self.sent: dict[bytes, list[m.ToNode]] = defaultdict(list)
        self.joined: list[str] = []
        self.spoken: defaultdict[bytes, list[int]] = defaultdict(list)
        self.registry = Registry("r" * 16, self._send, lambda node: self.joined.append(node.hello.epoch), _ignore)
        self.now = 100.0

    def hello(self, epoch: str, name: str = "d0", model: str = "fake", **changes: Any) -> bytes:
        """Says it; returns the peer."""
        card = ModelCard(model, 512, 1000, (), None, "a" * 16, None)
        hello = m.Hello(
            role="decode",
            node_id=name,
            epoch=epoch,
            protocol_min=m.PROTOCOL_MIN,
            protocol_max=m.PROTOCOL_MAX,
            layout=make_layout(),
            target_fingerprint="f" * 16,
            draft_fingerprint=None,
            model=card,
            capacity=Capacity(num_pages=8, page_size=16, max_running=4),
            data_address="",
            protocol=m.PROTOCOL_MAX,
        )
        peer = f"{name}:{epoch}".encode()
        self.registry.hello(peer, msgspec.structs.replace(hello, **changes), self.now)
        return peer

    def after(self, seconds: float, *beating: bytes) -> None:
        """Time passes in which some nodes beat."""
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            for peer in beating:
                self.registry.beat(self.registry.nodes[peer], BEAT, self.now)
            self.registry.check(self.now)

    def answers(self, peer: bytes) -> list[type]:
        return [type(message) for message in self.sent[peer]]

    def _send(self, peer: bytes, message: m.ToNode, protocol: int) -> bool:
        self.sent[peer].append(message)
        self.spoken[peer].append(protocol)
        return True


def _ignore(*_: object) -> None:
    pass


BEAT = m.Heartbeat(1, "idle", 0.0, 10.0, Load(free_pages=8, running=0, waiting=0), NodeStats())


def test_who_comes_under_the_name_of_a_dead_node_is_let_in_once_that_is_known() -> None:
    clocked = Clocked()
    old = clocked.hello("old")
    clocked.after(3.0, old)
    new = clocked.hello("new")  # within milliseconds after a kill
    clocked.after(0.3)
    clocked.registry.greet_again(new)  # a beat of the newcomer
    clocked.hello("new")
    assert clocked.answers(new) == [] and clocked.joined == ["old"]
    clocked.after(0.9)  # since the last beat
    assert clocked.answers(new) == [m.Welcome] and clocked.joined == ["old", "new"]
    assert list(clocked.registry.nodes) == [new]


def test_a_closed_connection_frees_the_name_at_once() -> None:
    clocked = Clocked()
    old = clocked.hello("old")
    new = clocked.hello("new")
    clocked.registry.connection_lost(old, clocked.now)
    clocked.after(0.1)
    assert clocked.answers(new) == [m.Welcome]


def test_who_comes_under_the_name_of_a_living_node_is_refused() -> None:
    clocked = Clocked()
    old = clocked.hello("old")
    new = clocked.hello("new")
    clocked.registry.beat(
        clocked.registry.nodes[old], BEAT, clocked.now + 0.05
    )  # sent before its kill, for all we know
    clocked.after(0.1)
    assert clocked.answers(new) == []
    clocked.after(0.4, old)
    clocked.hello("new")  # its patience starts no other wait
    clocked.after(0.4, old)
    (refusal,) = clocked.sent[new]
    assert isinstance(refusal, m.Refusal) and "'d0'" in refusal.reason
    assert list(clocked.registry.nodes) == [old] and clocked.joined == ["old"]


def test_who_waits_for_a_name_and_goes_is_forgotten_and_not_any_number_waits() -> None:
    clocked = Clocked()
    clocked.hello("old")
    new = clocked.hello("new")
    clocked.registry.connection_lost(new, clocked.now)
    peers = [clocked.hello(f"e{number}") for number in range(MAX_WAITING + 1)]
    assert clocked.answers(peers[-1]) == [m.Refusal] and not any(map(clocked.answers, peers[:-1]))
    clocked.after(1.5)
    assert clocked.answers(new) == [] and "new" not in clocked.joined


def test_a_rival_that_died_unnoticed_keeps_nobody_out() -> None:
    """All nodes were stopped and are started again with another configuration: whoever comes first meets the dead."""
    clocked = Clocked()
    old = clocked.hello("old", role="prefill", name="p0")
    clocked.after(1.0, old)
    new = clocked.hello("new", layout=make_layout(page_size=32))
    clocked.after(0.4)
    clocked.hello("new", layout=make_layout(page_size=32))
    assert clocked.answers(new) == [] and list(clocked.registry.nodes) == [old]
    clocked.registry.lose(clocked.registry.nodes[old], "dead", clocked.now)
    clocked.after(0.1)
    assert clocked.answers(new) == [m.Welcome] and list(clocked.registry.nodes) == [new]


def test_a_rival_that_lives_keeps_who_does_not_fit_out() -> None:
    clocked = Clocked()
    dead = clocked.hello("dead", role="prefill", name="p0")
    rival = clocked.hello("alive", role="prefill", name="p1", target_fingerprint="e" * 16)
    clocked.after(0.3, dead, rival)
    new = clocked.hello("new", layout=make_layout(page_size=32))
    clocked.after(0.4, rival)
    assert clocked.answers(new) == []
    clocked.after(0.4, rival)
    (refusal,) = clocked.sent[new]
    assert isinstance(refusal, m.Refusal)
    assert refusal.reason.startswith("it can be paired with nobody: prefill node p1"), refusal.reason
    assert new not in clocked.registry.nodes and not list(clocked.registry._waiting)


def test_who_fits_a_node_that_comes_meanwhile_is_let_in() -> None:
    clocked = Clocked()
    rival = clocked.hello("alive", role="prefill", name="p0")
    clocked.after(0.3, rival)
    new = clocked.hello("new", layout=make_layout(page_size=32))
    other = clocked.hello("other", role="prefill", name="p1", layout=make_layout(page_size=32))
    clocked.registry.connection_lost(rival, clocked.now)
    clocked.after(0.1)
    assert clocked.answers(new) == clocked.answers(other) == [m.Welcome]


def test_groups_without_nodes_are_forgotten_but_for_a_few() -> None:
    """A node that comes under ever new model names, and one group that requests wait in."""
    clocked = Clocked()
    registry = clocked.registry
    registry._tokenizers["a" * 16] = registry._tokenizers["b" * 16] = None  # type: ignore[assignment]
    for number in range(50):
        clocked.hello("e", model=f"model-{number}")
    first = next(iter(registry.groups.values()))
    forgotten = registry.trim(lambda group: group is first)
    assert len(registry.groups) == 1 + MAX_EMPTY_GROUPS + 1 == 50 - len(forgotten)
    assert [group.key.model for group in registry.groups.values()][:2] == ["model-0", f"model-{49 - MAX_EMPTY_GROUPS}"]
    assert list(registry._tokenizers) == ["a" * 16]
    assert not registry.trim(lambda group: group is first)


def test_lines_of_nodes_that_come_and_go_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    clocked, begun = Clocked(), time.monotonic()
    with caplog.at_level("INFO", logger="baton.router.registry"):
        for _ in range(200):
            clocked.hello("e")  # joined, and gone before
            clocked.hello("f", name="d1", protocol_max=0, protocol_min=0)  # refused
    assert 0 < len(caplog.records) <= (2 + int(time.monotonic() - begun)) * MAX_LINES


def test_who_says_hello_in_an_older_protocol_than_both_know_is_asked_again() -> None:
    clocked = Clocked()
    peer = clocked.hello("e", protocol=m.PROTOCOL_MIN)
    (asked,) = clocked.sent[peer]
    assert asked == m.HelloAgain(router_epoch="r" * 16, protocol=m.PROTOCOL_MAX) and not clocked.joined
    clocked.hello("e", protocol=m.PROTOCOL_MAX)
    welcome = clocked.sent[peer][1]
    assert isinstance(welcome, m.Welcome) and welcome.protocol == m.PROTOCOL_MAX
    assert clocked.spoken[peer] == [m.PROTOCOL_MAX] * 2


@pytest.mark.parametrize(("highest", "spoken"), [(m.PROTOCOL_MIN, m.PROTOCOL_MIN), (5, 5), (99, m.PROTOCOL_MAX)])
def test_a_node_is_addressed_in_the_highest_protocol_that_both_know(highest: int, spoken: int) -> None:
    clocked = Clocked()
    peer = clocked.hello("e", protocol_max=highest, protocol=0 if highest < 6 else highest)
    (welcome,) = clocked.sent[peer]
    assert isinstance(welcome, m.Welcome) and welcome.protocol == spoken
    assert clocked.spoken[peer] == [spoken] and clocked.registry.nodes[peer].protocol == spoken
    node = clocked.registry.nodes[peer]
    assert node.knows(m.CudaWelcome) == (spoken >= 6) and node.knows(m.Reserve)


def test_a_node_that_starts_anew_is_lost_before_it_is_asked_for_more() -> None:
    clocked = Clocked()
    peer = clocked.hello("e")
    clocked.hello("e", protocol=m.PROTOCOL_MIN)
    assert clocked.answers(peer) == [m.Welcome, m.HelloAgain] and not clocked.registry.nodes
