"""A node's end of the bus against a bare ROUTER socket, from a blocking loop as in a node."""

from __future__ import annotations

import socket as stdlib_socket
from collections.abc import Iterator

import pytest
import zmq
from patience import wait_until

from baton.metadata.bus import link as link_module
from baton.metadata.bus import sockets
from baton.metadata.bus.curve import KeyPair, secure_server
from baton.metadata.bus.link import Approach, Link
from baton.metadata.bus.sockets import QUEUE_LEN, bound_address
from baton.metadata.errors import ConfigError
from baton.metadata.wire.frames import encode, seal
from baton.metadata.wire.membership import Drain, HelloAgain, RouterHeartbeat
from baton.metadata.wire.messages import Cancelled, ToNode

DONE = Cancelled(rid="r", attempt=0)
BEAT = RouterHeartbeat(router_epoch="e")


class BareRouter:
    def __init__(self, address: str = "tcp://127.0.0.1:*") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 5000
        self.socket.bind(address)
        self.address = bound_address(self.socket)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def router() -> Iterator[BareRouter]:
    router = BareRouter()
    yield router
    router.close()


@pytest.fixture
def link(router: BareRouter) -> Iterator[Link]:
    link = Link(router.address, "node", "1", None)
    link.send(DONE)
    assert router.socket.recv_multipart() == [b"node:1", encode(DONE)]
    yield link
    link.close()


def receive(link: Link, count: int) -> list[ToNode]:
    messages: list[ToNode] = []
    poller = zmq.Poller()
    poller.register(link.socket, zmq.POLLIN)
    while len(messages) < count:
        assert poller.poll(30_000), "timed out"
        messages += link.receive()
    return messages


def test_poll_wakes_for_a_message(router: BareRouter, link: Link) -> None:
    assert link.receive() == []
    router.socket.send_multipart([b"node:1", encode(BEAT)])
    assert receive(link, 1) == [BEAT]
    assert (link.sent, link.received, link.unsent, link.dropped_frames) == (1, 1, 0, 0)


def test_receive_is_bounded_and_keeps_order(router: BareRouter, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [HelloAgain(router_epoch=str(i)) for i in range(300)]
    for message in sent:
        router.socket.send_multipart([b"node:1", encode(message)])
    got: list[ToNode] = []
    for limit in (256, 10):
        assert link.socket.poll(30_000)
        got += (some := link.receive(limit))
        assert len(some) <= limit
    assert got + receive(link, len(sent) - len(got)) == sent
    monkeypatch.setattr(link_module, "receive_frames", lambda *_: [encode(BEAT)])  # without end
    assert len(link.receive()) == 256
    assert len(link.receive(limit=10)) == 10


def test_bad_frames_are_counted_and_left_out(router: BareRouter, link: Link) -> None:
    good = encode(BEAT)
    for frames in (
        [b""],
        [b"\xc1"],
        [good[:-1]],
        [good + b"\0"],
        [good, good],
        [encode(DONE)],
        [seal(b"\x91" * 100_000)],
    ):
        router.socket.send_multipart([b"node:1", *frames])
    router.socket.send_multipart([b"node:1", encode(Drain(router_epoch="e"))])
    assert receive(link, 1) == [Drain(router_epoch="e")]
    assert link.dropped_frames == 7


def test_a_link_reconnects_by_itself(router: BareRouter, link: Link) -> None:
    address = router.address
    router.close()
    assert link.send(DONE)  # waits for the next router
    again = BareRouter(address)
    assert again.socket.recv_multipart() == [b"node:1", encode(DONE)]
    again.close()


def test_sends_to_a_full_queue_fail_and_are_counted() -> None:
    nobody = BareRouter()
    nobody.close()
    link = Link(nobody.address, "node", "1", None)
    while link.send(DONE):
        assert link.sent <= QUEUE_LEN
    assert link.sent == QUEUE_LEN
    assert link.unsent == 1
    assert link.receive() == []
    link.close()
    link.close()


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1", "127.0.0.1:1", "udp://127.0.0.1:1", "tcp://127.0.0.1:99999", ""]
)
def test_malformed_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        Link(address, "node", "1", None)


def test_an_address_that_cannot_be_connected_to_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot connect to tcp://\*:5700"):
        Link("tcp://*:5700", "node", "e", KeyPair.generate())


KEYS, OTHER_KEYS = KeyPair.generate(), KeyPair.generate()


@pytest.mark.parametrize(
    ("router_keys", "node_keys", "outlook"),
    [
        (None, None, "connected"),
        (KEYS, KEYS, "connected"),
        (KEYS, OTHER_KEYS, "refused"),
        (KEYS, None, "refused"),
        (None, KEYS, "refused"),
        ("mute", None, "too slow"),
        ("nobody", KEYS, "unreachable"),
    ],
)
def test_a_node_knows_why_it_is_not_connected(
    router_keys: KeyPair | str | None, node_keys: KeyPair | None, outlook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys are to blame only if something answers and refuses them."""
    for module in (sockets, link_module):
        monkeypatch.setattr(module, "HANDSHAKE_MS", 300 if router_keys == "mute" else 10_000)
    mute = stdlib_socket.create_server(("127.0.0.1", 0))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    if isinstance(router_keys, KeyPair):
        secure_server(router, router_keys)
    if router_keys == "nobody":
        mute.close()
        address = "tcp://127.0.0.1:1"
    elif router_keys == "mute":
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
    else:
        address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    link = Link(address, "node", "1", node_keys)
    seen: list[str] = []

    def is_known() -> bool:
        link.receive()
        seen.append(link.outlook)
        return outlook in seen[20 * (outlook == "unreachable") :]

    wait_until(is_known, lambda: seen[-1])
    assert set(seen) <= {"unreachable", outlook} | ({"too slow"} if outlook != "unreachable" else set())
    link.close()
    mute.close()
    router.close(linger=0)
    context.term()


@pytest.mark.parametrize(
    ("events", "outlook"),
    [
        ([(zmq.EVENT_CONNECTED, 0.0)], "too slow"),  # so far: something answers
        ([(zmq.EVENT_CONNECTED, 0.0), (zmq.EVENT_DISCONNECTED, 0.1)], "refused"),
        ([(zmq.EVENT_CONNECTED, 0.0), (zmq.EVENT_DISCONNECTED, 10.0)], "too slow"),
        ([(zmq.EVENT_CONNECTED, 0.0), (zmq.EVENT_HANDSHAKE_SUCCEEDED, 8.0)], "connected"),
        ([(zmq.EVENT_HANDSHAKE_SUCCEEDED, 8.0), (zmq.EVENT_DISCONNECTED, 9.0)], "unreachable"),
        ([(zmq.EVENT_HANDSHAKE_FAILED_AUTH, 0.1), (zmq.EVENT_DISCONNECTED, 0.1)], "refused"),
        ([(zmq.EVENT_HANDSHAKE_FAILED_AUTH, 0.1), (zmq.EVENT_CLOSED, 0.5)], "unreachable"),
    ],
)
def test_the_last_attempt_to_connect_counts(events: list[tuple[int, float]], outlook: str) -> None:
    approach = Approach()
    for event, now in events:
        approach.take(event, now)
    assert approach.outlook == outlook
