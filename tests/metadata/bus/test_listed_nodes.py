"""Allow-lists at the router's hub and on data links: who is not in the list is not heard, also where its connection
stands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from handoff_nodes import SCHEMA, make_client, make_row, make_server, named, peer_of, spin, unit
from key_files import Listed

from baton.metadata.bus.allow_list import AllowList
from baton.metadata.bus.curve import KeyPair
from baton.metadata.bus.hub import Hub
from baton.metadata.bus.link import Link
from baton.metadata.bus.liveness import HeartbeatThread
from baton.metadata.errors import ConfigError
from baton.metadata.handoff.tickets import Claimed, TicketEnded
from baton.metadata.handoff.transfer import Arrived, TransferFailed
from baton.metadata.wire.membership import Heartbeat, HelloAgain
from baton.metadata.wire.messages import Cancelled, Claim, ToRouter
from baton.metadata.wire.node_info import Load

DONE = Cancelled(rid="r", attempt=0)
LOAD = Load(free_pages=1, running=0, waiting=0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.metadata.bus.hub.ROUTER_HEARTBEAT_S", 0.02)
    monkeypatch.setattr("baton.metadata.bus.allow_list.CHECK_S", 0.02)


@pytest.fixture
def listed(tmp_path: Path) -> Listed:
    return Listed(tmp_path / "allow-list", "router", "p0", "d0", "d1")


# --- the hub --------------------------------------------------------------------------------------------------------


class Router:
    """A hub that keeps what it gets."""

    def __init__(self, keys: KeyPair, address: str = "tcp://127.0.0.1:*") -> None:
        self.messages: list[tuple[bytes, ToRouter]] = []
        self.lost: list[bytes] = []
        self.hub = Hub(address, "e0", keys, lambda *each: self.messages.append(each), self.lost.append)
        self.hub.start()


@pytest.fixture
async def router(listed: Listed) -> AsyncIterator[Router]:
    router = Router(listed.of("router"))
    yield router
    router.hub.close()


@pytest.fixture
def links(router: Router, listed: Listed) -> Iterator[dict[str, Link]]:
    """Nodes d0 and d1."""
    links = {name: Link(router.hub.address, name, "1", listed.of(name)) for name in ("d0", "d1")}
    yield links
    for link in links.values():
        link.close()


async def until(condition: Any, within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


async def test_listed_nodes_are_heard_both_ways(router: Router, links: dict[str, Link]) -> None:
    for link in links.values():
        link.send(DONE)
    await until(lambda: len(router.messages) == 2)
    assert {peer for peer, _ in router.messages} == {b"d0:1", b"d1:1"}
    router.hub.send(b"d0:1", HelloAgain(router_epoch="e0"))
    await until(lambda: any(isinstance(message, HelloAgain) for message in links["d0"].receive()))


async def test_a_node_that_is_taken_out_is_lost_and_not_heard(
    router: Router, links: dict[str, Link], listed: Listed, caplog: pytest.LogCaptureFixture
) -> None:
    for link in links.values():
        link.send(DONE)
    await until(lambda: len(router.messages) == 2)
    listed.write("router", "p0", "d1")
    await until(lambda: router.lost)
    assert router.lost == [b"d0:1"]
    links["d0"].send(DONE)  # its connection stands
    await until(lambda: router.hub.dropped_frames)
    assert len(router.messages) == 2
    assert "shut out d0" in caplog.text and "dropped a frame" not in caplog.text  # told once, not with every heartbeat
    links["d1"].send(DONE)
    await until(lambda: len(router.messages) == 3)
    listed.write("router", "p0", "d0", "d1")  # back again: it needs no new connection
    await asyncio.sleep(0.05)
    links["d0"].send(DONE)
    await until(lambda: len(router.messages) == 4)


async def test_a_key_that_was_replaced_is_not_heard(router: Router, links: dict[str, Link], listed: Listed) -> None:
    links["d0"].send(DONE)
    await until(lambda: router.messages)
    listed.pairs["d0"] = KeyPair.generate()
    listed.write("router", "p0", "d0", "d1")
    await asyncio.sleep(0.05)
    links["d0"].send(DONE)
    await until(lambda: router.hub.dropped_frames)
    assert len(router.messages) == 1


async def test_nobody_speaks_under_anothers_name(router: Router, listed: Listed) -> None:
    posing = Link(router.hub.address, "d1", "1", listed.of("d0"))
    posing.send(DONE)
    await until(lambda: router.hub.dropped_frames)
    assert router.messages == []
    posing.close()


async def test_a_node_that_is_let_in_again_is_heard_at_once(
    router: Router, links: dict[str, Link], listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection stands, so there is no handshake at which the hub would look at the list."""
    links["d0"].send(DONE)
    await until(lambda: router.messages)
    listed.write("router", "p0", "d1")
    await until(lambda: router.lost)
    monkeypatch.setattr(router.hub, "_shut_out", lambda: None)  # the next look of its own is far off
    listed.write("router", "p0", "d0", "d1")
    links["d0"].send(DONE)
    await until(lambda: len(router.messages) == 2)


async def test_nodes_find_a_router_that_has_another_key_now(router: Router, listed: Listed) -> None:
    """First comes the new line, then the router with the key; the nodes run on."""
    keys = listed.of("d0")
    link = Link(router.hub.address, "d0", "1", keys)
    pulse = HeartbeatThread(router.hub.address, "d0", "1", keys, load=LOAD, interval_s=0.02)
    pulse.start()
    try:
        link.send(DONE)
        await until(lambda: {type(message) for _, message in router.messages} == {Cancelled, Heartbeat})
        listed.pairs["router"] = KeyPair.generate()
        listed.write("router", "p0", "d0", "d1")
        await until(lambda: link.receive() == [] and router.lost)  # nobody trusts the old key any more
        router.hub.close()
        other = await bind_again(router.hub.address, listed.of("router"))
        try:
            heard = lambda: {type(message) for _, message in other.messages}  # noqa: E731
            await until(lambda: link.receive() == [] and link.send(DONE) and heard() == {Cancelled, Heartbeat}, 10)
            other.hub.send(b"d0:1", HelloAgain(router_epoch="e0"))
            await until(lambda: any(isinstance(message, HelloAgain) for message in link.receive()))
        finally:
            other.hub.close()
    finally:
        pulse.close()
        link.close()


async def bind_again(address: str, keys: KeyPair) -> Router:
    for _ in range(100):
        try:
            return Router(keys, address)
        except ConfigError:  # the old listener's port is free a moment later
            await asyncio.sleep(0.01)
    raise AssertionError(f"{address} stays taken")


# --- data links -----------------------------------------------------------------------------------------------------


class Pair:
    """Prefill node p0 and decode node d0, pages by ZeroMQ."""

    def __init__(self, prefill: KeyPair, decode: KeyPair, **more: Any) -> None:
        self.server, source = make_server(keys=prefill, **more)
        self.client, target = make_client(keys=decode, transports=("zmq",))
        self.nodes = [self.server, self.client]
        self.held = [*source, *target, *self.nodes]

    def begin(self, rid: str) -> None:
        """A ticket of one page that is offered; its row is not."""
        self.server.open(unit(rid), 1)
        self.server.offer(unit(rid), [0], [5], [1])
        self.client.claim(unit(rid), peer_of(self.server), 0, [9])

    def spin(self, *kinds: type) -> list[Any]:
        return spin(self.nodes, lambda events: all(named(events, kind) for kind in kinds))


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        for each in reversed(pair.held):
            each.close()


@pytest.fixture
def pair(listed: Listed, pairs: list[Pair]) -> Pair:
    pairs.append(Pair(listed.of("p0"), listed.of("d0")))
    return pairs[0]


def test_listed_nodes_hand_over(pair: Pair) -> None:
    pair.begin("r")
    pair.server.finish(unit("r"), make_row(SCHEMA))
    pair.spin(Arrived, TicketEnded)


def test_prefill_shuts_out_who_is_not_in_its_list(listed: Listed, pairs: list[Pair]) -> None:
    decode = listed.of("d0")
    listed.write("router", "p0", "d1")
    pairs.append(Pair(listed.of("p0"), decode))
    pairs[0].begin("r")
    (failed,) = named(pairs[0].spin(TransferFailed), TransferFailed)
    assert "prefill node p0" in failed.reason and not failed.is_refused


def test_decode_knows_no_prefill_node_that_is_not_in_its_list(listed: Listed, pairs: list[Pair]) -> None:
    prefill = listed.of("p0")
    listed.write("router", "d0")
    pairs.append(Pair(prefill, listed.of("d0")))
    pairs[0].begin("r")
    (failed,) = named(pairs[0].spin(TransferFailed), TransferFailed)
    assert "names no key of 'p0'" in failed.reason


def test_decode_takes_nothing_from_who_holds_another_key(listed: Listed, pairs: list[Pair], tmp_path: Path) -> None:
    """The list of its own host says which key prefill must prove."""
    (tmp_path / "own").write_text(listed.path.read_text())
    real = listed.pairs["d0"].listed(AllowList(tmp_path / "own"))
    listed.pairs["p0"] = KeyPair.generate()
    listed.write("router", "p0", "d0")
    pairs.append(Pair(listed.of("p0"), real))
    pairs[0].begin("r")
    pairs[0].spin(TransferFailed)


def test_a_decode_node_cannot_pose_as_another(listed: Listed, pairs: list[Pair]) -> None:
    pairs.append(Pair(listed.of("p0"), listed.of("d1")))  # the client calls itself d0
    pairs[0].begin("r")
    spin(pairs[0].nodes, lambda _: pairs[0].server.dropped.count)
    assert not pairs[0].server._peers.by_link


def test_tickets_of_a_decode_node_that_is_taken_out_end(pair: Pair, listed: Listed) -> None:
    pair.begin("r")
    pair.spin(Claimed)
    before = pair.server.dropped.count
    listed.write("router", "p0", "d1")
    ended = named(spin([pair.server], lambda events: named(events, TicketEnded)), TicketEnded)
    assert [each.unit for each in ended] == [unit("r")]
    pair.server.open(unit("later"), 1)
    link = pair.client._links.by_epoch[pair.server.end.epoch]
    link.send(Claim(unit=unit("later"), num_cached_pages=0))  # its connection stands
    spin([pair.server], lambda _: pair.server.dropped.count > before)
    assert not pair.server._peers.by_link and pair.server.tickets() == [unit("later")]


def test_links_to_a_prefill_node_that_is_taken_out_end(pair: Pair, listed: Listed) -> None:
    pair.begin("r")
    pair.spin(Claimed)
    listed.write("router", "d0", "d1")
    (failed,) = named(pair.spin(TransferFailed), TransferFailed)
    assert "not in allow-list" in failed.reason
    assert not pair.client.sockets()


def hand_over(pair: Pair, rid: str) -> None:
    """All of a page's way; nothing of it fails."""
    pair.begin(rid)
    pair.server.finish(unit(rid), make_row(SCHEMA))
    events = spin(pair.nodes, lambda events: named(events, TransferFailed) or named(events, Arrived))
    assert not named(events, TransferFailed), events
    spin(pair.nodes, lambda _: not pair.server.tickets())


def let_nobody_look(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on neither node is due to look at its list."""
    for node in pair.nodes:
        monkeypatch.setattr(node.end.allow_list, "is_due", lambda: False)


def test_the_first_handoff_of_a_decode_node_that_is_let_in_again(
    pair: Pair, listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.begin("r")
    pair.spin(Claimed)
    listed.write("router", "p0", "d1")
    (failed,) = named(pair.spin(TicketEnded, TransferFailed), TransferFailed)  # decode is told, and waits for nothing
    assert "d0 is not in the allow-list any more" in failed.reason and not failed.is_refused
    let_nobody_look(pair, monkeypatch)
    listed.write("router", "p0", "d0", "d1")
    hand_over(pair, "again")


def test_the_first_handoff_of_a_decode_node_that_was_out_for_a_moment(
    pair: Pair, listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has noticed nothing and keeps its link; prefill has read the list without it."""
    hand_over(pair, "r")
    let_nobody_look(pair, monkeypatch)
    listed.write("router", "p0", "d1")
    pair.server.end.allow_list.look()
    listed.write("router", "p0", "d0", "d1")
    hand_over(pair, "again")


def test_the_first_handoff_of_a_prefill_node_that_is_let_in_again(
    pair: Pair, listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.begin("r")
    pair.spin(Claimed)
    listed.write("router", "d0", "d1")
    pair.spin(TransferFailed)
    let_nobody_look(pair, monkeypatch)
    listed.write("router", "p0", "d0", "d1")
    hand_over(pair, "again")


def test_the_first_handoff_of_a_prefill_node_with_a_new_key(
    pair: Pair, pairs: list[Pair], listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is replaced and the node started again; the decode node runs on."""
    pair.begin("r")
    pair.spin(Claimed)
    listed.pairs["p0"] = KeyPair.generate()
    listed.write("router", "p0", "d0", "d1")
    pair.spin(TransferFailed)  # nobody trusts the old key any more
    let_nobody_look(pair, monkeypatch)
    pairs.append(Pair(listed.of("p0"), listed.of("d1"), epoch="another" * 2))
    pairs[1].nodes = [pairs[1].server, pair.client]
    pairs[1].client = pair.client
    hand_over(pairs[1], "again")


def test_the_first_handoff_of_a_prefill_node_that_is_new(
    listed: Listed, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode node has not looked at the list since the line came."""
    prefill = listed.of("p0")
    listed.write("router", "d0")
    decode = listed.of("d0")
    pairs.append(Pair(prefill, decode))
    let_nobody_look(pairs[0], monkeypatch)
    listed.write("router", "p0", "d0")
    hand_over(pairs[0], "r")
