"""The links of a rank of a prefill node: who gets what, and what ends a link."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from handoff_nodes import FINGERPRINTS, SCHEMA, make_client, make_memory, make_server, peer_of, spin, unit

from baton.metadata.errors import ProtocolError, TransferError
from baton.metadata.handoff import served_links
from baton.metadata.handoff.descriptor_inbox import DescriptorInbox
from baton.metadata.handoff.endpoint import Endpoint
from baton.metadata.handoff.pages import OfferedPages
from baton.metadata.handoff.served_links import DecodePeers, ServedLinks
from baton.metadata.handoff.transports.base import INBOX_SINCE
from baton.metadata.handoff.transports.local import LocalTransport
from baton.metadata.wire.data_link import LinkHello, LinkRefused, LinkWelcome, Revoke
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN
from baton.metadata.wire.request import MAX_TEXT


class Links:
    def __init__(self) -> None:
        self.server, self.source = make_server()
        self.client, self.target = make_client(transports=("zmq",))
        self.closed: list[tuple[bytes, str]] = []
        links = ServedLinks(
            self.server.end, self.server._pages, "127.0.0.1", lambda *end: self.closed.append(end), lease_s=2.0
        )
        self.server.close()
        self.server._links = self.links = links
        self.client.claim(unit(), peer_of(self.server), 0, [3])
        spin([self.server, self.client], lambda _: links.peers.by_link)
        [self.holder] = links.peers.by_link

    def close(self) -> None:
        for each in (self.client, self.links, *self.source, *self.target):
            each.close()


@pytest.fixture
def of() -> Iterator[Links]:
    links = Links()
    yield links
    links.close()


def test_a_closed_peer_is_forgotten_with_a_reason(of: Links) -> None:
    of.links.close_peer("another epoch")
    assert of.closed == []
    of.links.close_peer(of.client.end.epoch)
    assert of.closed == [(of.holder, "decode node d0 is gone")] and not of.links.peers.by_link


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels tell no round trip")
def test_an_open_link_is_no_stranger_and_leases_allow_for_its_round_trip(
    of: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not of.links._watch.has_strangers
    assert 0 < of.links.round_trip_s < 1
    monkeypatch.setattr("baton.metadata.bus.connections.TcpConnection.round_trip_s", 2.0)
    of.server.allow_for(0.1)
    of.server.open(unit("late"), 4)
    assert of.server._book.next_deadline() == pytest.approx(of.server.end.clock() + 16 + 2.0, abs=1.5)
    of.links.close_peer(of.client.end.epoch)
    assert of.links.round_trip_s == 0


def test_new_links_allow_for_the_round_trip_to_the_router(of: Links) -> None:
    of.client.allow_for(2.0)
    of.client.close_peer(of.server.end.epoch)
    of.client.claim(unit("later"), peer_of(of.server), 0, [3])
    [link] = of.client._links.by_epoch.values()
    assert link.round_trip_s == 2.0 and link.socket.get(zmq.HEARTBEAT_TIMEOUT) == 20_000


def test_a_link_whose_socket_takes_no_message_is_closed(of: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise zmq.ZMQError(zmq.EAGAIN)

    monkeypatch.setattr("baton.metadata.handoff.served_links.send_frames", full)
    of.links.send(of.holder, Revoke(unit=unit(), finished=False, reason=""))
    [(holder, reason)] = of.closed
    assert holder == of.holder and "its link is closed" in reason


def test_a_welcome_says_the_lease_and_the_pool(of: Links) -> None:
    [peer] = of.links.peers.by_link.values()
    assert (peer.welcome.lease_s, peer.welcome.num_pages, peer.part) == (2.0, 32, None)
    assert peer.hello.layout == SCHEMA


def test_a_handler_that_refuses_messages_costs_nothing_but_them(of: Links) -> None:
    def refuse(holder: bytes, message: Any) -> int:
        raise ProtocolError("no")

    spin([of.client], lambda _: of.client._links.by_epoch[of.server.end.epoch].transport)
    assert of.client.ask_offers(unit())
    spin([], lambda _: of.links.drain(refuse) and of.links.dropped.count >= 1)
    assert of.links.peers.by_link and of.closed == []


def test_what_was_under_way_on_a_closed_link_is_not_malformed(of: Links) -> None:
    """A decode node that leaves drops its tickets, and the router may say that it is gone before that is read."""
    spin([of.client], lambda _: of.client._links.by_epoch[of.server.end.epoch].transport)
    [link] = of.client._links.by_epoch.values()
    of.links.close_peer(of.client.end.epoch)
    answered: list[Any] = []
    assert of.client.ask_offers(unit())
    spin([of.client], lambda _: of.links.drain(lambda _, message: answered.append(message) or 0) and not link.transport)
    assert answered == [] and of.links.dropped.count == 0


A, B, C = b"link a", b"link b", b"link c"


@pytest.fixture
def end() -> Iterator[Endpoint]:
    memory = make_memory(SCHEMA, 8)
    yield Endpoint(
        node_id="p0",
        epoch="e0",
        schema=SCHEMA,
        fingerprints=FINGERPRINTS,
        memory=memory,
        transports=("cuda", "local", "zmq"),
    )
    for pool in memory:
        pool.close()


@pytest.fixture
def peers(end: Endpoint) -> DecodePeers:
    return DecodePeers(end, OfferedPages(end.schema, end.memory, end.device), lease_s=2.0, addresses=("tcp://a:1",))


@pytest.fixture
def hello(end: Endpoint) -> LinkHello:
    theirs: Any = {"node_id": "d0", "epoch": "d1", "transports": ("local", "zmq"), "protocol": PROTOCOL_MAX}
    return msgspec.structs.replace(end.hello(""), **theirs)


def test_a_welcome_names_the_first_transport_of_the_decode_node_that_works(
    peers: DecodePeers, hello: LinkHello
) -> None:
    welcome = peers.meet(A, hello, ())
    assert isinstance(welcome, LinkWelcome)
    assert (welcome.transport, welcome.lease_s, welcome.num_pages) == ("local", 2.0, 8)
    for transports, host, expected in ((("zmq", "local"), hello.host, "zmq"), (("local", "zmq"), "elsewhere", "zmq")):
        other = peers.meet(B, msgspec.structs.replace(hello, transports=transports, host=host), ())
        assert isinstance(other, LinkWelcome) and other.transport == expected


def test_an_inbox_in_reach_makes_nodes_of_unlike_namespaces_share_memory(peers: DecodePeers, hello: LinkHello) -> None:
    inbox = DescriptorInbox()
    elsewhere = msgspec.structs.replace(hello, host="elsewhere", inbox=inbox.address)
    welcome = peers.meet(A, elsewhere, ())
    assert isinstance(welcome, LinkWelcome) and welcome.transport == "local"
    for descriptor in inbox.take(welcome.token):
        os.close(descriptor)
    older = peers.meet(B, msgspec.structs.replace(elsewhere, protocol=INBOX_SINCE - 1), ())
    inbox.close()
    out_of_reach = peers.meet(C, elsewhere, ())
    for other in (older, out_of_reach):
        assert isinstance(other, LinkWelcome) and (other.transport, other.token) == ("zmq", b"")


def test_a_transport_that_fails_gives_way_to_the_next(
    peers: DecodePeers, hello: LinkHello, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise TransferError("no descriptor left")

    monkeypatch.setattr(LocalTransport, "welcome", fail)
    welcome = peers.meet(A, hello, ())
    assert isinstance(welcome, LinkWelcome) and welcome.transport == "zmq"
    refused = peers.meet(A, msgspec.structs.replace(hello, transports=("local",)), ())
    assert isinstance(refused, LinkRefused) and "none of the transports ('local',) works" in refused.reason


def test_a_repeated_hello_gets_the_same_answer(peers: DecodePeers, hello: LinkHello) -> None:
    assert peers.meet(A, hello, ()) is peers.meet(A, hello, ())


def test_a_changed_hello_changes_how_the_node_is_addressed(peers: DecodePeers, hello: LinkHello) -> None:
    peers.meet(A, hello, ())
    assert peers.by_link[A].protocol == PROTOCOL_MAX
    unsent = peers.by_link[A].unsent
    peers.meet(A, msgspec.structs.replace(hello, protocol=0, transports=("zmq",)), ())
    assert (peers.by_link[A].protocol, peers.by_link[A].welcome.transport) == (PROTOCOL_MIN, "zmq")
    assert peers.by_link[A].unsent is unsent


def test_a_link_belongs_to_one_epoch_of_one_node(peers: DecodePeers, hello: LinkHello) -> None:
    peers.meet(A, hello, ())
    for changes in ({"node_id": "d9"}, {"epoch": "d9"}):
        with pytest.raises(ProtocolError, match="on the link of d0"):
            peers.meet(A, msgspec.structs.replace(hello, **changes), ())
    assert (peers.by_link[A].node_id, peers.by_link[A].epoch) == ("d0", "d1")


def test_a_refused_node_has_no_link_and_reads_both_values(peers: DecodePeers, hello: LinkHello) -> None:
    peers.meet(A, hello, ())
    refused = peers.meet(A, msgspec.structs.replace(hello, target_fingerprint="0" * 16), ())
    assert isinstance(refused, LinkRefused) and not peers.by_link
    assert "prefill node p0 and decode node d0" in refused.reason
    assert f"target weights: {FINGERPRINTS[0]} here, {'0' * 16} there" in refused.reason
    many = msgspec.structs.replace(hello, transports=("t" * 128,) * 8, node_id="n" * 5000)
    refused = peers.meet(A, many, ())
    assert isinstance(refused, LinkRefused) and len(refused.reason) == MAX_TEXT


def test_the_oldest_links_that_hold_no_ticket_are_forgotten(
    peers: DecodePeers, hello: LinkHello, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_links, "MAX_LINKS", 1)
    for holder, busy, left in ((A, (), [A]), (B, (), [A, B]), (C, (), [B, C]), (A, (B,), [B, C, A])):
        peers.meet(holder, hello, busy)
        assert list(peers.by_link) == left


def test_the_links_of_an_epoch(peers: DecodePeers, hello: LinkHello) -> None:
    for holder, epoch in ((A, "d1"), (B, "d2"), (C, "d1")):
        peers.meet(holder, msgspec.structs.replace(hello, epoch=epoch), ())
    assert peers.links_of("d1") == [A, C] and peers.links_of("d3") == []
    assert peers.unlisted() == [], "without an allow-list nobody is shut out"
