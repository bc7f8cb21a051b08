"""A node's membership writes every message in the protocol that it agreed on with the router."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from key_files import Listed
from patience import until

from baton.engine.state.pages import Owner, PagePool
from baton.engine.state.prefix_cache import PrefixCache
from baton.metadata.bus.channel import RouterGone, why_unwelcome
from baton.metadata.bus.curve import KeyPair
from baton.metadata.bus.hub import Hub
from baton.metadata.bus.membership import Membership
from baton.metadata.errors import Refused
from baton.metadata.wire.membership import (
    CachedPages,
    CanaryTold,
    Hello,
    HelloAgain,
    Leaving,
    Proven,
    Refusal,
    RouterHeartbeat,
    TellCanary,
    TellPages,
    Welcome,
)
from baton.metadata.wire.messages import Cancelled, ToRouter
from baton.metadata.wire.node_info import CanaryOutcome, Load, NodeStats
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN, Message


class Newest(Message, frozen=True, tag="newest"):
    since: ClassVar[int] = PROTOCOL_MAX


@pytest.fixture
def hello(sample: Any) -> Hello:
    return sample(Hello, node_id="n", epoch="1", protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, protocol=0)


class Router:
    """A hub that answers Hello as the registry does, in the protocol that it is told to agree on."""

    def __init__(
        self, protocol: int, epoch: str = "e0", address: str = "tcp://127.0.0.1:*", keys: KeyPair | None = None
    ) -> None:
        self.protocol, self.epoch, self.keys = protocol, epoch, keys
        self.refuses: str | None = None
        self.page_key = b""
        self.got: list[ToRouter] = []
        self.hub = Hub(address, epoch, keys, self._take, lambda _: None)
        self.hub.start()

    def _take(self, peer: bytes, message: ToRouter) -> None:
        self.got.append(message)
        if isinstance(message, Hello):
            if self.refuses is not None:
                self.hub.send(peer, Refusal(router_epoch=self.epoch, reason=self.refuses))
            elif self.protocol >= 6 and message.protocol < self.protocol:
                self.hub.send(peer, HelloAgain(router_epoch=self.epoch, protocol=self.protocol), self.protocol)
            else:
                self.hub.send(
                    peer,
                    Welcome(
                        router_epoch=self.epoch, protocol=self.protocol, need_tokenizer=False, page_key=self.page_key
                    ),
                    self.protocol,
                )


@pytest.mark.parametrize("protocol", [5, PROTOCOL_MAX])
async def test_messages_are_written_in_the_agreed_protocol(hello: Hello, protocol: int) -> None:
    router = Router(protocol)
    membership = Membership(hello, router.hub.address, lambda: None, None, 1.0)  # type: ignore[arg-type,return-value]
    try:
        membership.start()
        received: list[object] = []

        def is_joined() -> bool:
            received.extend(membership.receive())
            return membership._channels[0].session.is_joined

        await until(is_joined)
        assert received == []
        assert (
            membership._channels[0].session.protocol == membership._channels[0].heartbeat._agreed.protocol == protocol
        )
        hellos = [message.protocol for message in router.got if isinstance(message, Hello)]
        assert hellos == ([0] if protocol == 5 else [0, protocol])
        membership._channels[0].session._heard_at -= 60  # the router falls silent: the next may be older
        membership.receive()
        assert membership._channels[0].heartbeat._agreed.protocol == PROTOCOL_MIN
    finally:
        membership.close()
        router.hub.close()


async def test_a_node_tells_each_router_its_cached_pages_and_begins_anew_if_asked(hello: Hello) -> None:
    """Each router has names and numbers of its own."""
    routers = [Router(PROTOCOL_MAX, epoch) for epoch in ("e0", "e1")]
    addresses = ",".join(router.hub.address for router in routers)
    membership = Membership(hello, addresses, lambda: None, None, 1.0)  # type: ignore[arg-type,return-value]
    cache, load = PrefixCache(PagePool(10, 4)), Load(free_pages=1, running=0, waiting=0)
    handoff = SimpleNamespace(allow_for=lambda _: None)
    membership.member = SimpleNamespace(cache=cache, links=handoff, load=lambda: load, stats=NodeStats)  # type: ignore[assignment]
    try:
        for router in routers:
            router.page_key = router.epoch.encode()
        membership.start()

        def told(router: Router) -> list[CachedPages]:
            membership.receive()
            membership.report()
            return [message for message in router.got if isinstance(message, CachedPages)]

        await until(lambda: all(len(told(router)) == 1 for router in routers))
        lease = cache.insert([1] * 8, cache.allocate(2, Owner.REQUEST))
        await until(lambda: all(len(told(router)) == 2 for router in routers))
        routers[0].hub.send(b"n:1", TellPages(router_epoch="e0"))
        await until(lambda: len(told(routers[0])) == 3)
        assert [(each.number, len(each.stored)) for each in told(routers[0])] == [(0, 0), (1, 32), (0, 32)]
        assert [(each.number, len(each.stored)) for each in told(routers[1])] == [(0, 0), (1, 32)]
        assert told(routers[0])[1].stored != told(routers[1])[1].stored
        membership._channels[0].session._heard_at -= 60  # the router falls silent
        membership.receive()
        assert membership._channels[0].news.wait_s(0.0) is None
        cache.release(lease)
    finally:
        membership.close()
        for router in routers:
            router.hub.close()


def test_a_message_that_the_next_router_may_not_know_is_not_sent(hello: Hello) -> None:
    membership = Membership(hello, "tcp://127.0.0.1:1", lambda: None, None, 1.0)  # type: ignore[arg-type,return-value]
    try:
        membership.send_all(Newest())  # type: ignore[arg-type]
        assert membership._channels[0].link.sent == 0
        membership.send_all(Leaving(done=False))
        assert membership._channels[0].link.sent == 1
    finally:
        membership.close()


def test_a_node_without_a_router_says_so_later_and_later(hello: Hello, monkeypatch: Any) -> None:
    """A healthy start takes a while, and a line every few seconds would fill the log of a node that waits for days."""
    now = 1000.0
    monkeypatch.setattr("baton.metadata.bus.channel.time", SimpleNamespace(monotonic=lambda: now))
    membership = Membership(hello, "tcp://127.0.0.1:1", lambda: None, None, 1.0)  # type: ignore[arg-type,return-value]
    at: list[float] = []
    try:
        for _ in range(1200):
            lines = membership._channels[0].unwelcome_words() or ""
            at += [now - 1000.0] * bool(lines)
            assert "keys" not in lines
            now += 1.0
    finally:
        membership.close()
    assert at == [10, 30, 70, 150, 310, 550, 790, 1030]


@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("outlook", ["unreachable", "refused", "too slow", "connected"])
def test_the_keys_are_named_only_if_they_can_be_the_cause(outlook: Any, is_listed: bool) -> None:
    """A router does not answer a key that is not in its allow-list."""
    words = why_unwelcome(outlook, "is the key right?", is_listed=is_listed)
    assert ("is the key right?" in words) == (outlook == "refused" or (outlook == "too slow" and is_listed))
    assert ("slow" in words) == (outlook == "too slow")


class ManyRouters:
    """Routers with epochs of their own, and a node that joins all of them."""

    def __init__(self, hello: Hello, addresses: tuple[str, ...] = ("tcp://127.0.0.1:*",) * 2) -> None:
        self.routers = [Router(PROTOCOL_MAX, f"e{index}", address) for index, address in enumerate(addresses)]
        routers = ",".join(router.hub.address for router in self.routers)
        self.node = Membership(hello, routers, lambda: None, None, 1.0)  # type: ignore[arg-type,return-value]
        self.work: list[Any] = []

    def look(self) -> bool:
        self.work += self.node.receive()
        return True

    async def join(self) -> None:
        self.node.start()
        await until(lambda: self.look() and sorted(self.node.routers) == ["e0", "e1"])

    def close(self) -> None:
        self.node.close()
        for router in self.routers:
            router.hub.close()


@pytest.fixture
async def many(hello: Hello) -> Any:
    many = ManyRouters(hello)
    yield many
    many.close()


async def test_a_message_goes_to_the_router_that_it_is_for(many: ManyRouters) -> None:
    await many.join()
    many.node.send(Cancelled(rid="r", attempt=0), "e1")
    many.node.send(Cancelled(rid="lost", attempt=0), "e7")
    many.node.send_all(Leaving(done=False))
    await until(lambda: all(Leaving(done=False) in router.got for router in many.routers))
    cancelled = [[each.rid for each in router.got if isinstance(each, Cancelled)] for router in many.routers]
    assert cancelled == [[], ["r"]]


async def test_a_router_that_is_lost_takes_its_own_work_with_it(many: ManyRouters) -> None:
    await many.join()
    many.routers[0].hub.close()
    many.node._channels[0].session._heard_at -= 60
    await until(lambda: many.look() and bool(many.work))
    (gone,) = many.work
    assert isinstance(gone, RouterGone) and gone.router == "e0" and many.node.routers == ["e1"]


async def test_a_node_serves_on_if_one_of_its_routers_refuses_it(many: ManyRouters, caplog: Any) -> None:
    await many.join()
    many.routers[1].refuses = "its name is taken"
    many.node._channels[1].session._hello_at -= 60
    many.routers[1].hub.send(b"n:1", HelloAgain(router_epoch="e1"))
    await until(lambda: many.look() and many.node.routers == ["e0"] and "its name is taken" in caplog.text)
    many.routers[1].refuses = None
    many.node._channels[1].session._hello_at -= 60
    await until(lambda: many.look() and many.node.routers == ["e0", "e1"])


async def test_the_only_router_that_answers_ends_a_node_by_its_refusal(many: ManyRouters) -> None:
    many.routers[1].refuses = "its name is taken"
    many.routers[0].hub.close()
    many.node.start()
    with pytest.raises(Refused, match="its name is taken"):
        await until(lambda: many.look() and False)


async def test_two_addresses_of_one_router_are_one_router(hello: Hello) -> None:
    """A host may have several addresses of one name. One of them is left, and the node stays joined."""
    router = Router(PROTOCOL_MAX, "e0", "tcp://0.0.0.0:*", KeyPair.generate())
    port = router.hub.address.rpartition(":")[2]
    addresses = f"tcp://127.0.0.1:{port},tcp://127.0.0.2:{port}"
    node = Membership(hello, addresses, lambda: None, router.keys, 1.0)  # type: ignore[arg-type,return-value]
    try:
        node.start()

        def look() -> bool:  # a router sends signs of life
            router.hub.send(b"n:1", RouterHeartbeat(router_epoch="e0"))
            return node.receive() is not None and len(node._channels) == 1 and node.routers == ["e0"]

        await until(look)
        num_hellos = sum(isinstance(message, Hello) for message in router.got)
        for _ in range(50):
            await asyncio.sleep(0.01)
            node.receive()
        assert len(node._channels) == 1 and node.routers == ["e0"]
        assert sum(isinstance(message, Hello) for message in router.got) <= num_hellos + 2
    finally:
        node.close()
        router.hub.close()


async def test_one_router_sends_the_canaries_and_the_others_hear_how_they_went(many: ManyRouters) -> None:
    await many.join()
    assert many.look() and many.node._service.canary_router == "e0"
    told = [CanaryOutcome("prompt", failure=words) for words in ("from e0", "from e1")]
    for router, outcome in zip(many.routers, told, strict=True):
        router.hub.send(b"n:1", TellCanary(router_epoch=router.epoch, outcome=outcome))
    heard = lambda router: [each.outcome for each in router.got if isinstance(each, CanaryTold)]  # noqa: E731
    await until(lambda: many.look() and [heard(router) for router in many.routers] == [told[1:], told[:1]])
    many.routers[0].hub.close()
    many.node._channels[0].session._heard_at -= 60
    await until(lambda: many.look() and many.node._service.canary_router == "e1")


async def test_every_next_router_hears_which_partners_any_router_found_right(many: ManyRouters) -> None:
    await many.join()
    many.routers[1].hub.send(b"n:1", Proven(router_epoch="e1", epochs=("x",)))
    await until(lambda: many.look() and many.node._proven == ("x",))
    for each in many.routers:
        each.got.clear()
    many.node._channels[0].session._hello_at -= 60
    many.routers[0].hub.send(b"n:1", HelloAgain(router_epoch="next"))
    third = Router(PROTOCOL_MAX, "e3")
    many.node._addresses._found = {"": (*(each.hub.address for each in many.routers), third.hub.address)}
    said = lambda router: {each.proven for each in router.got if isinstance(each, Hello) and each.protocol >= 8}  # noqa: E731
    await until(lambda: many.look() and said(third) == said(many.routers[0]) == {("x",)})
    third.hub.close()


async def test_a_new_address_of_a_name_gets_a_channel_and_an_old_one_goes_with_its_router(many: ManyRouters) -> None:
    await many.join()
    first, second = (router.hub.address for router in many.routers)
    many.node._addresses._found = {"name": (second,)}
    many.look()
    assert many.node.routers == ["e0", "e1"], "a router that is there is not left, whatever its name resolves to"
    many.routers[0].hub.close()
    many.node._channels[0].session._heard_at -= 60
    await until(lambda: many.look() and len(many.node._channels) == 1)
    many.routers[0] = Router(PROTOCOL_MAX, "e2", first)
    many.node._addresses._found = {"name": (second, first)}
    await until(lambda: many.look() and many.node.routers == ["e1", "e2"])


async def test_each_router_may_have_a_key_of_its_own(
    hello: Hello, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody says which of them is at an address. A router whose line is removed is left, with its work."""
    monkeypatch.setattr("baton.metadata.bus.router_addresses.CHECK_S", 0.02)
    listed = Listed(tmp_path / "list", "router", "router-a", "router-b", "n")
    routers = [Router(PROTOCOL_MAX, f"e{at}", keys=listed.of(f"router-{name}")) for at, name in enumerate("ba")]
    addresses = ",".join(router.hub.address for router in routers)
    node = Membership(hello, addresses, lambda: None, listed.of("n"), 1.0)  # type: ignore[arg-type,return-value]
    work: list[Any] = []
    try:
        node.start()
        await until(lambda: work.extend(node.receive()) is None and node.routers == ["e0", "e1"])
        assert work == []
        listed.write("router", "router-a", "n")
        await until(lambda: work.extend(node.receive()) is None and node.routers == ["e1"])
        assert [each.router for each in work if isinstance(each, RouterGone)] == ["e0"]
        await until(lambda: node.receive() is not None and node._channels[0].link.outlook == "refused")
        words = node._channels[0]._why_unwelcome()
        assert f"one of the keys of router, router-a in allow-list {listed.path}" in words
        listed.write("router", "router-a", "router-b", "n")
        await until(lambda: node.receive() is not None and node.routers == ["e0", "e1"])
    finally:
        node.close()
        for router in routers:
            router.hub.close()
