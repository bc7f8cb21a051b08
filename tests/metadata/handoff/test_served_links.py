"""The links of a rank of a prefill node: who gets what, and what ends a link."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from handoff_nodes import SCHEMA, make_client, make_server, peer_of, spin, unit

from baton.metadata.errors import ProtocolError
from baton.metadata.handoff.served_links import ServedLinks
from baton.metadata.wire.messages import Revoke


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
    monkeypatch.setattr("baton.metadata.bus.tcp_connection.TcpConnection.round_trip_s", 2.0)
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
