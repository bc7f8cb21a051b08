"""The automaton of a node's meeting with the router: by itself with a clock in hand, and over sockets."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from baton.metadata.errors import ConfigError
from baton.metadata.hub import Hub
from baton.metadata.link import Link
from baton.metadata.liveness import Pulse
from baton.metadata.messages import (
    PROTOCOL_MAX,
    Cancel,
    Hello,
    HelloAgain,
    Refusal,
    RouterBeat,
    TokenizerFile,
    ToRouter,
    Welcome,
)
from baton.metadata.node_info import Load
from baton.metadata.session import Joined, RouterChanged, RouterLost, RouterRefused, RouterSession

FILE = TokenizerFile("digest", b"data")
LOAD = Load(free_pages=1, running=0, waiting=0)


def welcome(epoch: str = "a", need: bool = False) -> Welcome:
    return Welcome(router_epoch=epoch, protocol=PROTOCOL_MAX, need_tokenizer=need)


def work(epoch: str = "a") -> Cancel:
    return Cancel(router_epoch=epoch, rid="r", attempt=0, choices=None, reason="")


class Node:
    def __init__(self, hello: Hello) -> None:
        self.now = 100.0
        self.said: list[ToRouter] = []
        self.is_full = False
        self.session = RouterSession(hello, self._send, lambda: FILE, lambda: self.now)
        self.session.start()

    def _send(self, message: ToRouter) -> bool:
        if not self.is_full:
            self.said.append(message)
        return not self.is_full

    def take(self, *messages: Any) -> list[Any]:
        return self.session.take(messages)

    def hellos(self) -> int:
        count = sum(isinstance(message, Hello) for message in self.said)
        self.said.clear()
        return count


@pytest.fixture
def hello(sample: Any) -> Hello:
    return sample(Hello, node_id="node", epoch="1")


@pytest.fixture
def node(hello: Hello) -> Node:
    return Node(hello)


@pytest.fixture
def joined(node: Node) -> Node:
    assert node.take(welcome()) == [Joined("a", PROTOCOL_MAX)]
    node.said.clear()
    node.now += 60
    node.take(RouterBeat(router_epoch="a"))
    return node


def test_start_says_hello_once(node: Node, hello: Hello) -> None:
    assert node.said == [hello]
    node.now += 60
    assert node.take() == []  # no router yet: the Hello waits in the link
    assert node.said == [hello]
    assert not node.session.is_joined


def test_welcome_joins_and_the_tokenizer_is_sent_when_asked(node: Node) -> None:
    assert node.take(welcome(need=True)) == [Joined("a", PROTOCOL_MAX)]
    assert node.said[1:] == [FILE]
    assert node.session.is_joined
    assert node.session.router_epoch == "a"


def test_work_passes_in_order(joined: Node) -> None:
    assert joined.take(work(), RouterBeat(router_epoch="a"), work()) == [work(), work()]
    assert joined.said == []


def test_work_before_the_welcome_is_ignored(node: Node) -> None:
    assert node.take(work(), welcome(), work()) == [Joined("a", PROTOCOL_MAX), work()]
    assert node.session.ignored == 1


def test_hello_again_crossing_the_first_hello_is_not_answered_twice(node: Node) -> None:
    node.now += 0.1
    assert node.take(HelloAgain(router_epoch="a"), HelloAgain(router_epoch="a")) == []
    assert node.hellos() == 1
    node.now += 0.5
    assert node.take(HelloAgain(router_epoch="a")) == []
    assert node.hellos() == 1


def test_hello_again_while_joined_frees_everything(joined: Node) -> None:
    again = HelloAgain(router_epoch="a")
    assert joined.take(again, again, work()) == [RouterChanged("a")]
    assert joined.hellos() == 1
    assert joined.take(welcome(), work()) == [Joined("a", PROTOCOL_MAX), work()]


@pytest.mark.parametrize("first", [HelloAgain(router_epoch="b"), RouterBeat(router_epoch="b"), work("b")])
def test_a_new_epoch_frees_everything_and_says_hello(joined: Node, first: Any) -> None:
    assert joined.take(work(), first, first, work("b")) == [work(), RouterChanged("b")]
    assert joined.hellos() == 1
    assert joined.take(welcome("b"), work("b")) == [Joined("b", PROTOCOL_MAX), work("b")]
    assert joined.hellos() == 0


def test_a_router_that_changes_right_after_the_welcome_hears_hello_at_once(node: Node) -> None:
    assert node.take(welcome()) == [Joined("a", PROTOCOL_MAX)]
    assert node.hellos() == 1
    node.now += 0.1
    assert node.take(HelloAgain(router_epoch="b")) == [RouterChanged("b")]
    assert node.hellos() == 1


def test_a_new_router_that_welcomes_at_once(joined: Node) -> None:
    assert joined.take(welcome("b")) == [RouterChanged("b"), Joined("b", PROTOCOL_MAX)]
    assert joined.hellos() == 0


def test_a_second_welcome_starts_afresh(joined: Node) -> None:
    assert joined.take(work(), welcome(), work()) == [work(), RouterChanged("a"), Joined("a", PROTOCOL_MAX), work()]
    assert joined.hellos() == 0


def test_silence_is_a_lost_router_once(joined: Node) -> None:
    joined.now += 5.0
    assert joined.take() == []
    joined.now += 0.1
    assert joined.take() == [RouterLost(pytest.approx(5.1))]
    joined.now += 60
    assert joined.take() == []
    assert not joined.session.is_joined
    assert joined.hellos() == 0
    assert joined.take(RouterBeat(router_epoch="a"), work()) == []  # nothing is held, so nothing to free
    assert joined.hellos() == 1
    assert joined.take(welcome(), work()) == [Joined("a", PROTOCOL_MAX), work()]


def test_a_node_that_was_held_up_itself_reads_before_it_judges(joined: Node) -> None:
    joined.now += 30
    assert joined.take(RouterBeat(router_epoch="a")) == []
    assert joined.session.is_joined


def test_an_unanswered_hello_is_said_again(node: Node) -> None:
    node.take(RouterBeat(router_epoch="a"))
    node.hellos()
    for _ in range(10):
        node.now += 1.0
        node.take(RouterBeat(router_epoch="a"))
    assert 2 <= node.hellos() <= 5


def test_a_hello_that_found_the_queue_full_is_said_later(joined: Node) -> None:
    joined.is_full = True
    assert joined.take(HelloAgain(router_epoch="a")) == [RouterChanged("a")]
    assert joined.take() == []
    joined.is_full = False
    assert joined.take() == []
    assert joined.hellos() == 1
    assert joined.take() == []
    assert joined.hellos() == 0


def test_refusal_carries_the_reason(node: Node) -> None:
    reason = "page_size is 16 here and 32 there"
    assert node.take(Refusal(router_epoch="a", reason=reason)) == [RouterRefused(reason)]
    assert node.hellos() == 1  # only the first


class WelcomingRouter:
    """The least a router does: Welcome to Hello, HelloAgain to whom it does not know."""

    def __init__(self, address: str, epoch: str) -> None:
        self.known: set[bytes] = set()
        self.files = 0
        self.hub = Hub(address, epoch, None, self._take, self.known.discard)
        self.hub.start()

    def _take(self, peer: bytes, message: ToRouter) -> None:
        epoch = self.hub.epoch
        self.files += isinstance(message, TokenizerFile)
        if isinstance(message, Hello):
            self.known.add(peer)
            self.hub.send(peer, welcome(epoch, need=True))
        elif peer not in self.known:
            self.hub.send(peer, HelloAgain(router_epoch=epoch))


async def _take_until(session: RouterSession, link: Link, event: Any) -> list[Any]:
    seen: list[Any] = []
    end = time.perf_counter() + 5
    while event not in seen:
        assert time.perf_counter() < end, seen
        seen += session.take(link.receive())
        await asyncio.sleep(0.002)
    return seen


async def _bind_again(address: str, epoch: str) -> WelcomingRouter:
    for _ in range(100):
        try:
            return WelcomingRouter(address, epoch)
        except ConfigError:  # the old listener's port is free a moment later
            await asyncio.sleep(0.01)
    raise AssertionError(f"{address} stays taken")


async def test_a_router_restarts_and_forgets_over_sockets(hello: Hello) -> None:
    router = WelcomingRouter("tcp://127.0.0.1:0", "a")
    link = Link(router.hub.address, "node", "1", None)
    pulse = Pulse(router.hub.address, "node", "1", None, load=LOAD, interval_s=0.05)
    session = RouterSession(hello, link.send, lambda: FILE)
    session.start()
    pulse.start()
    try:
        await _take_until(session, link, Joined("a", PROTOCOL_MAX))
        router.hub.close()
        router = await _bind_again(router.hub.address, "b")
        seen = await _take_until(session, link, Joined("b", PROTOCOL_MAX))
        assert seen[0] == RouterChanged("b")
        router.known.clear()  # it forgets: the next beat of an unknown node is answered with HelloAgain
        assert await _take_until(session, link, Joined("b", PROTOCOL_MAX)) == [
            RouterChanged("b"),
            Joined("b", PROTOCOL_MAX),
        ]
        assert router.known == {b"node:1"}
        end = time.perf_counter() + 5
        while router.files < 2 and time.perf_counter() < end:
            await asyncio.sleep(0.002)
        assert router.files >= 2
    finally:
        pulse.close()
        link.close()
        router.hub.close()
