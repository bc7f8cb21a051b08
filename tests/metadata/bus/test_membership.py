"""A node's membership writes every message in the protocol that it agreed on with the router."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from patience import until

from baton.engine.state.pages import Owner, PagePool
from baton.engine.state.prefix_cache import PrefixCache
from baton.metadata.bus.hub import Hub
from baton.metadata.bus.membership import Membership, _why_unwelcome
from baton.metadata.wire.membership import CachedPages, Hello, HelloAgain, Leaving, TellPages, Welcome
from baton.metadata.wire.messages import ToRouter
from baton.metadata.wire.node_info import Load, NodeStats
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN, Message


class Newest(Message, frozen=True, tag="newest"):
    since: ClassVar[int] = PROTOCOL_MAX


@pytest.fixture
def hello(sample: Any) -> Hello:
    return sample(Hello, node_id="n", epoch="1", protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, protocol=0)


class Router:
    """A hub that answers Hello as the registry does, in the protocol that it is told to agree on."""

    def __init__(self, protocol: int) -> None:
        self.protocol = protocol
        self.got: list[ToRouter] = []
        self.hub = Hub("tcp://127.0.0.1:*", "e0", None, self._take, lambda _: None)
        self.hub.start()

    def _welcome(self) -> Welcome:
        key = b"key" if self.protocol >= CachedPages.since else b""
        return Welcome(router_epoch="e0", protocol=self.protocol, need_tokenizer=False, page_key=key)

    def _take(self, peer: bytes, message: ToRouter) -> None:
        self.got.append(message)
        if isinstance(message, Hello):
            if self.protocol >= 6 and message.protocol < self.protocol:
                self.hub.send(peer, HelloAgain(router_epoch="e0", protocol=self.protocol), self.protocol)
            else:
                self.hub.send(peer, self._welcome(), self.protocol)


@pytest.mark.parametrize("protocol", [5, PROTOCOL_MAX])
async def test_messages_are_written_in_the_agreed_protocol(hello: Hello, protocol: int) -> None:
    router = Router(protocol)
    membership = Membership(hello, router.hub.address, lambda: None, None, 1.0)  # type: ignore[arg-type,return-value]
    membership.member = SimpleNamespace(cache=PrefixCache(PagePool(10, 4)))  # type: ignore[assignment]
    try:
        membership.start()
        received: list[object] = []

        def is_joined() -> bool:
            received.extend(membership.receive())
            return membership._session.is_joined

        await until(is_joined)
        assert received == []
        assert membership._session.protocol == membership._heartbeat._agreed.protocol == protocol
        hellos = [message.protocol for message in router.got if isinstance(message, Hello)]
        assert hellos == ([0] if protocol == 5 else [0, protocol])
        membership._session._heard_at -= 60  # the router falls silent: the next may be older
        membership.receive()
        assert membership._heartbeat._agreed.protocol == PROTOCOL_MIN
    finally:
        membership.close()
        router.hub.close()


async def test_a_node_tells_its_cached_pages_from_the_welcome_on_and_again_if_asked(hello: Hello) -> None:
    router = Router(PROTOCOL_MAX)
    membership = Membership(hello, router.hub.address, lambda: None, None, 1.0)  # type: ignore[arg-type,return-value]
    cache = PrefixCache(PagePool(10, 4))
    idle = SimpleNamespace(allow_for=lambda _: None)
    load, stats = Load(free_pages=1, running=0, waiting=0), NodeStats()
    membership.member = SimpleNamespace(  # type: ignore[assignment]
        cache=cache, handoff=idle, load=lambda: load, stats=lambda: stats
    )
    try:
        membership.start()

        def told() -> list[CachedPages]:
            membership.receive()
            membership.report()
            return [message for message in router.got if isinstance(message, CachedPages)]

        await until(lambda: len(told()) == 1)
        lease = cache.insert([1] * 8, cache.allocate(2, Owner.REQUEST))
        await until(lambda: len(told()) == 2)
        router.hub.send(b"n:1", TellPages(router_epoch="e0"))
        await until(lambda: len(told()) == 3)
        assert [(each.number, len(each.stored)) for each in told()] == [(0, 0), (1, 32), (0, 32)]
        membership._session._heard_at -= 60  # the router falls silent
        assert len(told()) == 3 and membership._news.wait_s(0.0) is None
        cache.release(lease)
    finally:
        membership.close()
        router.hub.close()


def test_a_message_that_the_next_router_may_not_know_is_not_sent(hello: Hello) -> None:
    membership = Membership(hello, "tcp://127.0.0.1:1", lambda: None, None, 1.0)  # type: ignore[arg-type,return-value]
    try:
        membership.send(Newest())  # type: ignore[arg-type]
        assert membership._link.sent == 0
        membership.send(Leaving(done=False))
        assert membership._link.sent == 1
    finally:
        membership.close()


def test_a_node_without_a_router_says_so_later_and_later(hello: Hello, monkeypatch: Any, caplog: Any) -> None:
    """A healthy start takes a while, and a line every few seconds would fill the log of a node that waits for days."""
    now = 1000.0
    monkeypatch.setattr("baton.metadata.bus.membership.time", SimpleNamespace(monotonic=lambda: now))
    membership = Membership(hello, "tcp://127.0.0.1:1", lambda: None, None, 1.0)  # type: ignore[arg-type,return-value]
    at: list[float] = []
    try:
        for _ in range(1200):
            membership._complain_without_router()
            at += [now - 1000.0] * len(caplog.records)
            lines = caplog.text
            caplog.clear()
            assert "keys" not in lines
            now += 1.0
    finally:
        membership.close()
    assert at == [10, 30, 70, 150, 310, 550, 790, 1030]


@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("outlook", ["unreachable", "refused", "too slow", "connected"])
def test_the_keys_are_named_only_if_they_can_be_the_cause(outlook: Any, is_listed: bool) -> None:
    """A router does not answer a key that is not in its allow-list."""
    words = _why_unwelcome(outlook, "is the key right?", is_listed=is_listed)
    assert ("is the key right?" in words) == (outlook == "refused" or (outlook == "too slow" and is_listed))
    assert ("slow" in words) == (outlook == "too slow")
