"""The protocol in which the two ends of a data link address each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from handoff_nodes import SCHEMA, make_client, make_row, make_server, named, peer_of, spin, unit

from baton.metadata.bus.addresses import host_identity
from baton.metadata.handoff.endpoint import usable
from baton.metadata.handoff.transfer import Arrived
from baton.metadata.wire.data_link import CudaWelcome, LinkHello
from baton.metadata.wire.frames import unseal
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN

ALL = ("cuda", "local", "zmq")


class Spy:
    """A replacement of `encode` that records each message as the peer sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from baton.metadata.handoff import pull_link, served_links
        from baton.metadata.wire.frames import encode

        self.said: list[dict[str, Any]] = []

        def spy(message: Any, protocol: int) -> bytes:
            frame = encode(message, protocol)
            self.said.append(msgspec.msgpack.decode(unseal(frame) or b""))
            return frame

        monkeypatch.setattr(pull_link, "encode", spy)
        monkeypatch.setattr(served_links, "encode", spy)

    def first(self, kind: str) -> dict[str, Any]:
        return next(each for each in self.said if each["type"] == kind)


@pytest.fixture
def pair() -> Iterator[Any]:
    server, source = make_server(has_gpu=True)
    client, target = make_client(has_gpu=True, transports=ALL)
    yield server, client, source, target
    source[0].device.run()
    target[0].device.run()
    for node in (client, server, *source, *target):
        node.close()


@pytest.mark.parametrize(
    ("told", "ours", "theirs"),
    [
        (PROTOCOL_MAX, PROTOCOL_MAX, PROTOCOL_MAX),
        (PROTOCOL_MAX + 1, PROTOCOL_MAX, PROTOCOL_MAX),
        (5, 5, PROTOCOL_MIN),  # LinkHello had no protocol then
        (0, PROTOCOL_MIN, PROTOCOL_MIN),  # an older router does not tell
    ],
)
def test_both_ends_use_the_protocol_they_agreed_on(
    pair: Any, told: int, ours: int, theirs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client, *_ = pair
    spy = Spy(monkeypatch)
    server.open(unit(), 1)
    server.offer(unit(), [0], [5], [1], make_row(SCHEMA))
    client.claim(unit(), msgspec.structs.replace(peer_of(server), protocol=told), 0, [9])
    events = spin([server, client], lambda events: named(events, Arrived))
    assert named(events, Arrived)[0].times.transport == ("cuda" if ours >= CudaWelcome.since else "local")
    assert client._links.by_epoch[server.end.epoch].protocol == ours
    assert [peer.protocol for peer in server._links.peers.by_link.values()] == [theirs]
    assert spy.first("link_hello").get("protocol") == (min(told, PROTOCOL_MAX) if told >= 6 else None)
    assert ("inbox" in spy.first("link_hello")) == (ours >= CudaWelcome.since)
    assert spy.first("cuda_welcome" if ours >= CudaWelcome.since else "link_welcome")


@pytest.fixture
def hello(sample: Any) -> LinkHello:
    return sample(LinkHello, host=host_identity(), transports=ALL, protocol=0)


def test_an_older_decode_node_maps_no_pool_on_a_gpu(hello: LinkHello) -> None:
    """The older node has no inbox and does not know the welcome of that transport."""
    newer = msgspec.structs.replace(hello, inbox="baton-" + "0" * 32, protocol=PROTOCOL_MAX)
    assert usable(ALL, newer, host_identity()) == list(ALL)
    older = msgspec.structs.replace(hello, inbox="")
    assert usable(ALL, older, host_identity()) == ["local", "zmq"]
