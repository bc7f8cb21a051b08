"""Which decode nodes a prefill node welcomes, and which links it forgets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from handoff_nodes import FINGERPRINTS, SCHEMA, make_memory

from baton.metadata.errors import ProtocolError, TransferError
from baton.metadata.handoff import decode_peers
from baton.metadata.handoff.decode_peers import DecodePeers
from baton.metadata.handoff.endpoint import Endpoint
from baton.metadata.handoff.pages import OfferedPages
from baton.metadata.handoff.transports.local import LocalTransport
from baton.metadata.wire.data_link import LinkHello, LinkRefused, LinkWelcome
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN
from baton.metadata.wire.request import MAX_TEXT

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
    monkeypatch.setattr(decode_peers, "MAX_LINKS", 1)
    for holder, busy, left in ((A, (), [A]), (B, (), [A, B]), (C, (), [B, C]), (A, (B,), [B, C, A])):
        peers.meet(holder, hello, busy)
        assert list(peers.by_link) == left


def test_the_links_of_an_epoch(peers: DecodePeers, hello: LinkHello) -> None:
    for holder, epoch in ((A, "d1"), (B, "d2"), (C, "d1")):
        peers.meet(holder, msgspec.structs.replace(hello, epoch=epoch), ())
    assert peers.links_of("d1") == [A, C] and peers.links_of("d3") == []
    assert peers.unlisted() == [], "without an allow-list nobody is shut out"
