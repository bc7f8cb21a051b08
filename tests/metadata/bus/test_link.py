"""A node's end of the bus against a bare ROUTER socket, from a blocking loop as in a node."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq

from baton.metadata.bus.curve import KeyPair
from baton.metadata.bus.link import Link
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
        assert poller.poll(5000), "timed out"
        messages += link.receive()
    return messages


def test_poll_wakes_for_a_message(router: BareRouter, link: Link) -> None:
    assert link.receive() == []
    router.socket.send_multipart([b"node:1", encode(BEAT)])
    assert receive(link, 1) == [BEAT]
    assert (link.sent, link.received, link.unsent, link.dropped_frames) == (1, 1, 0, 0)


def test_receive_is_bounded_and_keeps_order(router: BareRouter, link: Link) -> None:
    sent = [HelloAgain(router_epoch=str(i)) for i in range(300)]
    for message in sent:
        router.socket.send_multipart([b"node:1", encode(message)])
    time.sleep(0.2)
    first = link.receive()
    assert len(first) == 256
    second = link.receive(limit=10)
    assert len(second) == 10
    assert first + second + receive(link, 34) == sent


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
