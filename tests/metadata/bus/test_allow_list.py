"""The list of keys that may connect: its file, and its effect on the router's hub and on data links.

A node that is not in the list is not heard, even if its connection stands.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from handoff_nodes import SCHEMA, make_client, make_row, make_server, named, peer_of, spin, unit
from key_files import Listed
from patience import until
from ports import bind_again

from baton.metadata.bus.allow_list import KEY_LEN, AllowList, add_line, line_of
from baton.metadata.bus.curve import KeyPair
from baton.metadata.bus.hub import Hub
from baton.metadata.bus.link import Link
from baton.metadata.bus.liveness import HeartbeatThread
from baton.metadata.errors import ConfigError, ProtocolError
from baton.metadata.handoff.tickets import Claimed, TicketEnded
from baton.metadata.handoff.transfer import Arrived, TransferFailed
from baton.metadata.wire.data_link import Claim
from baton.metadata.wire.membership import Heartbeat, HelloAgain
from baton.metadata.wire.messages import Cancelled, ToRouter
from baton.metadata.wire.node_info import Load

KEYS = [digit * KEY_LEN for digit in "123"]
ROUTER = f"router {KEYS[0]}\n"


def test_names_keys_and_remarks(tmp_path: Path) -> None:
    hashed = "0####" * 8  # a key may hold what begins a remark
    path = tmp_path / "list"
    lines = (
        "# who may come",
        "",
        ROUTER,
        f"  p0\t{KEYS[1]}   # {KEYS[2]}",
        f"#gone {KEYS[2]}",
        f"d {hashed} #",
    )
    path.write_text("\n".join(lines))
    read = AllowList(path)
    assert read.key_of("p0") == KEYS[1].encode()
    assert read.name_of(KEYS[0].encode()) == "router"
    assert read.key_of("d") == hashed.encode()
    assert read.name_of(KEYS[2].encode()) is None and read.key_of("#gone") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no line of a router's key"),
        (f"prefill-0 {KEYS[1]}\nrouters {KEYS[0]}", "no line of a router's key.*`router KEY`, or `router-NAME KEY`"),
        (f"{ROUTER}decode-0", r"list, line 2: 'decode-0' is not `NAME KEY"),
        (f"{ROUTER}{KEYS[1]}", "line 2: .* is not `NAME KEY"),
        (f"{ROUTER}decode-0 {KEYS[1][:39]}", "line 2: .* is not `NAME KEY"),
        (f"{ROUTER}decode-0 {'~' * 40}", "line 2: .* is not `NAME KEY"),
        (f"{ROUTER}decode-0 {'#' * 40}", "line 2: .* is not `NAME KEY"),  # above 32 bits
        (f"{ROUTER}decode-0 {KEYS[1]} and more", "line 2: .*and more' is not `NAME KEY"),
        (f"{ROUTER}# x\nrouter {KEYS[1]}", "line 3: 'router' or its key stands in line 1"),
        (f"{ROUTER}other {KEYS[0]}", "line 2: 'other' or its key stands in line 1"),
        (f"{ROUTER}{'n' * 129} {KEYS[1]}", "line 2: the name .* longer than 128"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"#" * (1 << 20) + b"##", "longer than"),
    ],
)
def test_the_error_for_a_bad_list_names_the_line(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = tmp_path / "list"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=words):
        AllowList(path)


def test_a_missing_or_world_writable_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list"
    with pytest.raises(ConfigError, match=r"cannot be read: No such file.*baton keys"):
        AllowList(path)
    path.write_text(ROUTER)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="written by anybody: `chmod o-w"):
        AllowList(path)


def test_a_line_is_added_once(tmp_path: Path) -> None:
    path = tmp_path / "list"
    add_line(path, ROUTER)
    path.write_text(path.read_text().rstrip("\n"))  # as some editors leave it
    add_line(path, line_of("decode-0", KEYS[1].encode()))
    assert AllowList(path).name_of(KEYS[1].encode()) == "decode-0"
    before = path.read_text()
    assert before.startswith("# ")
    for line in (line_of("decode-0", KEYS[2].encode()), line_of("other", KEYS[1].encode()), "two words " + KEYS[2]):
        with pytest.raises(ConfigError, match="line 4"):
            add_line(path, line)
    assert path.read_text() == before
    with pytest.raises(ConfigError, match="cannot be written"):
        add_line(tmp_path / "no" / "folder", ROUTER)


def test_a_changed_list_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    listed = Listed(tmp_path / "list", "router", "d0", "d1")
    read = AllowList(listed.path, lambda: now)
    assert read.is_due() and not read.is_due()
    listed.write("router", "d1")
    assert not read.is_due()
    assert read.key_of("d0") is not None
    now = 1.0
    with caplog.at_level(logging.WARNING):
        assert read.is_due()
        read.look()
    assert read.key_of("d0") is None and read.name_of(listed.pairs["d0"].public) is None
    assert read.key_of("d1") == listed.pairs["d1"].public
    assert [record.getMessage() for record in caplog.records] == [
        f"allow-list {listed.path}: shut out d0; let in nobody"
    ]


def test_a_file_that_breaks_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listed = Listed(tmp_path / "list", "router", "d0")
    read = AllowList(listed.path)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            listed.replace("")
            read.look()
        listed.replace("router x")
        read.look()
        listed.path.unlink()
        read.look()
        read.look()
    assert read.key_of("d0") is not None
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3 and "line 1" in said[1], said
    assert all("stays in force" in line for line in said)
    listed.write("router")
    read.look()
    assert read.key_of("d0") is None


def test_a_node_must_use_the_name_of_its_key(tmp_path: Path) -> None:
    read = AllowList(Listed(tmp_path / "list", "router").path)
    read.require("d0", "d0")
    with pytest.raises(ProtocolError, match=r"the key of d0 is not in allow-list .*list any more"):
        read.require(None, "d0")
    with pytest.raises(ProtocolError, match=r"d0 has the key that allow-list .*list calls 'd1'"):
        read.require("d1", "d0")
    with pytest.raises(ConfigError, match="names no key of 'p0': add its line, `p0 KEY`"):
        read.server_key("p0")


DONE = Cancelled(rid="r", attempt=0)

LOAD = Load(free_pages=1, running=0, waiting=0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.metadata.bus.hub.ROUTER_HEARTBEAT_S", 0.02)
    monkeypatch.setattr("baton.metadata.bus.allow_list.CHECK_S", 0.02)


@pytest.fixture
def listed(quick: None, tmp_path: Path) -> Listed:
    return Listed(tmp_path / "allow-list", "router", "p0", "d0", "d1")


# --- the hub --------------------------------------------------------------------------------------------------------


class Router:
    """A hub that records its messages."""

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
    links["d0"].send(DONE)  # its connection is still open
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


async def test_a_node_cannot_use_the_name_of_another_node(router: Router, listed: Listed) -> None:
    posing = Link(router.hub.address, "d1", "1", listed.of("d0"))
    posing.send(DONE)
    await until(lambda: router.hub.dropped_frames)
    assert router.messages == []
    posing.close()


async def test_a_node_that_is_let_in_again_is_heard_at_once(
    router: Router, links: dict[str, Link], listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection has stayed open, so no handshake makes the hub look at the list."""
    links["d0"].send(DONE)
    await until(lambda: router.messages)
    listed.write("router", "p0", "d1")
    await until(lambda: router.lost)
    monkeypatch.setattr(router.hub, "_shut_out", lambda: None)  # the next look of its own is far off
    listed.write("router", "p0", "d0", "d1")
    links["d0"].send(DONE)
    await until(lambda: len(router.messages) == 2)


async def test_nodes_find_a_router_that_has_another_key_now(router: Router, listed: Listed) -> None:
    """The line in the list changes first, then the router starts with the new key. The nodes keep running."""
    keys = listed.of("d0")
    link = Link(router.hub.address, "d0", "1", keys)
    pulse = HeartbeatThread(router.hub.address, "d0", "1", keys, load=LOAD, interval_s=0.02)
    pulse.start()
    try:
        link.send(DONE)
        await until(lambda: {type(message) for _, message in router.messages} == {Cancelled, Heartbeat})
        listed.pairs["router"] = KeyPair.generate()
        listed.write("router", "p0", "d0", "d1")
        await until(lambda: link.receive() == [] and router.lost)  # neither node trusts the old key any more
        router.hub.close()
        other = await bind_again(partial(Router, listed.of("router"), router.hub.address))
        try:
            heard = lambda: {type(message) for _, message in other.messages}  # noqa: E731
            await until(lambda: link.receive() == [] and link.send(DONE) and heard() == {Cancelled, Heartbeat})
            other.hub.send(b"d0:1", HelloAgain(router_epoch="e0"))
            await until(lambda: any(isinstance(message, HelloAgain) for message in link.receive()))
        finally:
            other.hub.close()
    finally:
        pulse.close()
        link.close()


# --- data links -----------------------------------------------------------------------------------------------------


class Pair:
    """Prefill node p0 and decode node d0, pages by ZeroMQ."""

    def __init__(self, prefill: KeyPair, decode: KeyPair, **more: Any) -> None:
        self.server, source = make_server(keys=prefill, **more)
        self.client, target = make_client(keys=decode, transports=("zmq",))
        self.nodes = [self.server, self.client]
        self.held = [*source, *target, *self.nodes]

    def begin(self, rid: str) -> None:
        """Open a ticket, offer its only page and claim it. The row is not offered."""
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


def test_a_prefill_node_shuts_out_unlisted_decode_nodes(listed: Listed, pairs: list[Pair]) -> None:
    decode = listed.of("d0")
    listed.write("router", "p0", "d1")
    pairs.append(Pair(listed.of("p0"), decode))
    pairs[0].begin("r")
    (failed,) = named(pairs[0].spin(TransferFailed), TransferFailed)
    assert "node p0" in failed.reason and not failed.is_refused


def test_a_decode_node_refuses_unlisted_prefill_nodes(listed: Listed, pairs: list[Pair]) -> None:
    prefill = listed.of("p0")
    listed.write("router", "d0")
    pairs.append(Pair(prefill, listed.of("d0")))
    pairs[0].begin("r")
    (failed,) = named(pairs[0].spin(TransferFailed), TransferFailed)
    assert "names no key of 'p0'" in failed.reason


def test_a_decode_node_takes_nothing_from_a_prefill_node_with_another_key(
    listed: Listed, pairs: list[Pair], tmp_path: Path
) -> None:
    """The list on the decode node's own host says which key a prefill node must prove."""
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
    assert not pairs[0].server._links.peers.by_link


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
    assert not pair.server._links.peers.by_link and pair.server.tickets() == [unit("later")]


def test_links_to_a_prefill_node_that_is_taken_out_end(pair: Pair, listed: Listed) -> None:
    pair.begin("r")
    pair.spin(Claimed)
    listed.write("router", "d0", "d1")
    (failed,) = named(pair.spin(TransferFailed), TransferFailed)
    assert "not in allow-list" in failed.reason
    assert not pair.client.sockets()


def hand_over(pair: Pair, rid: str) -> None:
    """Hand over one page, from offer to ack. Nothing may fail."""
    pair.begin(rid)
    pair.server.finish(unit(rid), make_row(SCHEMA))
    events = spin(pair.nodes, lambda events: named(events, TransferFailed) or named(events, Arrived))
    assert not named(events, TransferFailed), events
    spin(pair.nodes, lambda _: not pair.server.tickets())


def let_nobody_look(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep both nodes from looking at their lists by themselves from now on."""
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
    """The decode node noticed nothing and keeps its link, but the prefill node has read the list without it."""
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
    """The line is replaced and the prefill node restarts. The decode node keeps running."""
    pair.begin("r")
    pair.spin(Claimed)
    listed.pairs["p0"] = KeyPair.generate()
    listed.write("router", "p0", "d0", "d1")
    pair.spin(TransferFailed)  # neither node trusts the old key any more
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
