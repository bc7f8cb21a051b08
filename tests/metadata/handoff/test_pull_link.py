"""One data link of a decode node: hello until it is welcomed, and what ends the link. The peer is a bare socket."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from handoff_nodes import FINGERPRINTS, SCHEMA, make_client, make_memory, make_welcome, unit
from patience import Patience

from baton.metadata.bus.sockets import DroppedFrames
from baton.metadata.errors import ProtocolError, StaleMessage, TransferError
from baton.metadata.handoff.descriptor_inbox import new_token, send_descriptors
from baton.metadata.handoff.endpoint import Endpoint
from baton.metadata.handoff.pull_link import AWAY_S, BUSY_FACTOR, HANDSHAKE_FACTOR, HELLO_S, PullLink, PullLinks
from baton.metadata.handoff.transports.zmq import ZmqTransport
from baton.metadata.wire.data_link import LinkHello, LinkRefused, LinkWelcome, Renew, to_prefill_decoder
from baton.metadata.wire.frames import decode_frame, encode
from baton.metadata.wire.node_info import Peer
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN

MEMORY = make_memory(SCHEMA, 4)
HELLO = LinkHello("d0", "d1", SCHEMA, *FINGERPRINTS, ("local", "zmq"), "host", PROTOCOL_MAX)
RENEW = Renew((unit(),))


def endpoint(context: zmq.Context[zmq.Socket[bytes]], clock: Callable[[], float]) -> Endpoint:
    return Endpoint(
        node_id="d0",
        epoch="d1",
        schema=SCHEMA,
        fingerprints=FINGERPRINTS,
        memory=MEMORY,
        transports=HELLO.transports,
        clock=clock,
        context=context,
    )


class Line:
    """A data link, its clock, and the peer's end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], protocol: int = PROTOCOL_MAX) -> None:
        self.now = 100.0
        self.peer = context.socket(zmq.ROUTER)
        self.peer.rcvtimeo = 5000
        port = self.peer.bind_to_random_port("tcp://127.0.0.1")
        address = Peer(node_id="p", epoch="e", data_address=f"tcp://127.0.0.1:{port}", protocol=protocol)
        self.link = PullLink(address, HELLO, endpoint(context, lambda: self.now), None, answer_s=5.0)
        self.identity = b""

    def heard(self) -> Any:
        """Return the next message that the peer receives."""
        self.identity, frame = self.peer.recv_multipart()
        return decode_frame(to_prefill_decoder, frame)

    def hears_nothing(self) -> bool:
        return not self.peer.poll(30)

    def say(self, *frames: bytes) -> Any:
        """Send a message from the peer, and let the link receive it."""
        self.peer.send_multipart([self.identity, *frames])
        assert self.link.socket.poll(5000)
        return self.link.receive()

    def welcome(self, transport: str = "zmq", **more: Any) -> None:
        self.link.welcome(make_welcome(LinkWelcome, MEMORY, transport, **more))

    def close(self) -> None:
        self.link.close()
        self.peer.close(linger=0)


@pytest.fixture
def line() -> Iterator[Line]:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        line = Line(context)
        yield line
        line.close()


def test_hello_is_repeated_until_the_welcome(line: Line) -> None:
    assert line.heard() == HELLO and line.link.is_waiting
    line.link.greet_again(100.0 + HELLO_S - 0.01)
    assert line.hears_nothing()
    for now in (100.0 + HELLO_S, 100.0 + 2 * HELLO_S):
        line.link.greet_again(now)
        assert line.heard() == HELLO
        line.link.greet_again(now)
    line.welcome()
    line.link.greet_again(200.0)
    assert line.hears_nothing() and not line.link.is_waiting


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels tell no round trip")
def test_the_time_to_notice_a_cut_network_follows_the_measured_round_trip(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the handshake nobody knows the round trip: at a second each way, 1.5 s would end each new link."""
    opened = dict[str, int]()
    monkeypatch.setattr("baton.metadata.bus.connections.TcpConnection.round_trip_s", 2.0)
    monkeypatch.setattr("socket.socket.setsockopt", lambda *given: opened.update(limit=given[-1]))
    line.heard()
    line.link.check(100.0)
    assert line.link.socket.get(zmq.TCP_MAXRT) == 10_000
    assert line.link.round_trip_s == 2.0 and opened == {"limit": 8000}


def test_only_hello_is_sent_before_the_welcome(line: Line) -> None:
    line.heard()
    line.link.send(RENEW)
    assert line.hears_nothing()
    line.welcome(lease_s=3.0, num_pages=16)
    assert isinstance(line.link.transport, ZmqTransport) and (line.link.lease_s, line.link.num_pages) == (3.0, 16)
    line.link.send(RENEW)
    assert line.heard() == RENEW


def test_the_same_welcome_twice_is_stale_and_another_one_ends_the_link(line: Line) -> None:
    line.welcome()
    with pytest.raises(StaleMessage):
        line.welcome()
    assert line.link.lost is None and line.link.transport is not None
    line.welcome(lease_s=2.0)
    assert "out of turn" in (line.link.lost or "") and line.link.transport is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"node_id": "q"}, "it is q of epoch e, not p of e"),
        ({"epoch": "f"}, "it is p of epoch f, not p of e"),
        ({"transport": "cuda"}, "not among ours"),
    ],
)
def test_a_welcome_of_another_node_or_transport_ends_the_link(line: Line, change: dict[str, str], words: str) -> None:
    line.heard()
    line.welcome(**change)
    assert words in (line.link.lost or "") and line.link.lost is not None and line.link.transport is None
    line.link.greet_again(200.0)
    line.link.send(HELLO)
    assert line.hears_nothing(), "a lost link says nothing"


def test_a_transport_that_cannot_be_opened_is_left_out_of_the_next_hello(line: Line) -> None:
    line.heard()
    line.welcome("local", sizes=(1,))
    assert line.link.lost is None and line.link.transport is None
    assert line.heard() == msgspec.structs.replace(HELLO, transports=("zmq",))
    line.welcome("local", lease_s=2.0)
    assert "not among ours" in (line.link.lost or "")


def test_a_link_is_lost_when_its_last_transport_fails(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TransferError("no room")

    monkeypatch.setattr(ZmqTransport, "open", fail)
    line.heard()
    line.welcome("zmq")
    assert line.heard().transports == ("local",)
    line.welcome("local", sizes=(1,))
    assert line.link.lost is not None


def test_the_first_reason_is_kept(line: Line) -> None:
    line.welcome()
    line.link.lose("first")
    line.link.lose("second")
    assert line.link.lost == "node p: first" and line.link.transport is None and line.link.is_waiting


def test_only_the_awaited_answer_counts_as_a_sign_of_life(line: Line) -> None:
    line.heard()
    welcome = make_welcome(LinkWelcome, MEMORY, "zmq")
    line.now = 101.0
    assert line.say(encode(LinkRefused("no"), PROTOCOL_MAX)) == (LinkRefused("no"), None)
    assert line.link.last_heard == 100.0
    assert line.say(encode(welcome, PROTOCOL_MAX)) == (welcome, None)
    assert line.link.last_heard == 101.0
    assert line.link.receive() is None
    line.link.welcome(welcome)
    line.now = 102.0
    line.say(encode(welcome, PROTOCOL_MAX))
    assert line.link.last_heard == 102.0, "nothing is owed: any message counts"


def test_malformed_frames_are_protocol_errors(line: Line) -> None:
    line.heard()
    for frames in ([b"\xff"], [encode(make_welcome(LinkWelcome, MEMORY, "zmq"), PROTOCOL_MAX), b"data"]):
        with pytest.raises(ProtocolError):
            line.say(*frames)


def test_a_drain_is_bounded_and_counts_what_is_refused(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.metadata.handoff.pull_link.DRAIN_LIMIT", 2)
    line.heard()
    refusal = LinkRefused(reason="no")
    for frame in (encode(refusal, PROTOCOL_MIN), b"noise", encode(refusal, PROTOCOL_MIN)):
        line.peer.send_multipart([line.identity, frame])
    taken: list[Any] = []
    dropped = DroppedFrames(logging.getLogger("test"), "link")
    num_read: list[int] = []
    while sum(num_read) < 3:
        assert line.link.socket.poll(30_000)
        has_nothing_left = line.link.drain(lambda *each: taken.append(each), dropped)
        num_read.append(len(taken) + dropped.count - sum(num_read))
        assert num_read[-1] <= 2 and has_nothing_left == (num_read[-1] < 2), "a drain that reads two may have left some"
    assert taken == [(refusal, None)] * 2 and dropped.count == 1
    line.link.lose("it is over")
    assert line.link.drain(lambda *each: taken.append(each), dropped) and len(taken) == 2


def test_a_closed_connection_ends_the_link(line: Line) -> None:
    line.heard()
    line.link.check_connection()
    assert line.link.lost is None
    line.peer.close(linger=0)
    assert line.link.monitor.poll(5000)
    line.link.check_connection()
    assert line.link.lost is not None and line.link.lost.startswith("node p: ")


def test_a_peer_is_addressed_in_the_protocol_that_it_knows() -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        line = Line(context, PROTOCOL_MIN)
        assert line.link.protocol == PROTOCOL_MIN
        line.heard()
        line.welcome()
        assert line.link.protocol == max(PROTOCOL_MIN, LinkWelcome.since)
        line.close()


def test_an_address_that_cannot_be_used_is_refused() -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        peer = Peer(node_id="p", epoch="e", data_address="tcp://nowhere", protocol=PROTOCOL_MAX)
        with pytest.raises(TransferError, match="cannot open a link to 'tcp://nowhere'"):
            PullLink(peer, HELLO, endpoint(context, lambda: 0.0), None, answer_s=5.0)


def _open_soon(open_link: Callable[[], PullLink]) -> PullLink:
    """Open a link. A closed socket counts until the thread behind it has closed it, so try for a while."""
    patience = Patience(20)
    while True:
        try:
            return open_link()
        except TransferError:
            if patience.is_over():
                raise
            time.sleep(0.05)


@pytest.mark.parametrize("num_left", [0, 1, 2])
def test_a_process_that_may_open_no_more_sockets_loses_the_link_alone(num_left: int) -> None:
    """A link takes three: its own, and two of its monitor."""
    with zmq.Context[zmq.Socket[bytes]]() as context:
        context.set(zmq.MAX_SOCKETS, 8)
        others = [context.socket(zmq.DEALER) for _ in range(8 - num_left)]
        peer = Peer(node_id="p", epoch="e", data_address="tcp://127.0.0.1:9", protocol=PROTOCOL_MAX)
        try:
            with pytest.raises(TransferError, match="Too many open files"):
                PullLink(peer, HELLO, endpoint(context, lambda: 0.0), None, answer_s=5.0)
            while len(others) > 5:
                others.pop().close(linger=0)
            _open_soon(lambda: PullLink(peer, HELLO, endpoint(context, lambda: 0.0), None, answer_s=5.0)).close()
        finally:
            for each in others:
                each.close(linger=0)


@pytest.mark.parametrize("is_used", [True, False])
def test_a_connection_that_ends_while_pages_are_awaited_names_the_network(line: Line, is_used: bool) -> None:
    """The welcome is small and passes a network that drops large packets."""
    line.heard()
    line.welcome()
    line.link.expect_answer(line.now, is_used=is_used)
    line.peer.close(linger=0)
    assert line.link.monitor.poll(5000)
    while line.link.lost is None:
        line.link.check_connection()
    assert ("drops large packets (MTU)" in line.link.lost) == is_used


ANSWER_S = 5.0


class Links:
    """The links, their clock, and an address where a peer listens and says nothing."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], has_gpu: bool) -> None:
        self.now = 100.0
        self.peer = context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self.peer.bind_to_random_port('tcp://127.0.0.1')}"
        transports = ("cuda", "local", "zmq") if has_gpu else ("local", "zmq")
        client, self.memory = make_client(
            has_gpu=has_gpu, transports=transports, clock=lambda: self.now, context=context
        )
        self.all: PullLinks = client._links

    def open(self, node_id: str = "p0", epoch: str = "e0") -> Any:
        return self.all.open(Peer(node_id=node_id, epoch=epoch, data_address=self.address, protocol=PROTOCOL_MAX))

    def close(self) -> None:
        self.all.close_all()
        self.peer.close(linger=0)


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def links(request: pytest.FixtureRequest) -> Iterator[Links]:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        links = Links(context, request.param)
        yield links
        links.close()


def test_an_epoch_has_one_link(links: Links) -> None:
    link = links.open()
    assert links.open() is link and links.open(epoch="e1") is not link
    assert len(links.all.sockets()) == 4
    links.all.close(link)
    assert link.lost is not None and list(links.all) == [links.open(epoch="e1")]


def test_the_time_of_a_handshake_is_remembered_by_name(links: Links) -> None:
    link = links.open()
    link._advance(HANDSHAKE_FACTOR)
    links.now += 1.5
    link._advance(BUSY_FACTOR)
    links.all.close(link)
    assert links.open(epoch="e1").handshake_s == 1.5 and links.open("p1", "e2").handshake_s == 0.0


def test_other_epochs_of_the_same_node(links: Links) -> None:
    old, new = links.open(epoch="e0"), links.open(epoch="e1")
    links.open("p1", "e2")
    assert links.all.other_epochs(new.peer) == [old] and links.all.other_epochs(old.peer) == [new]


def test_an_address_that_cannot_be_used_leaves_no_link(links: Links) -> None:
    with pytest.raises(TransferError, match="cannot open a link"):
        links.all.open(Peer(node_id="p0", epoch="e0", data_address="tcp://nowhere", protocol=PROTOCOL_MAX))
    assert not list(links.all) and links.all.sockets() == []


@pytest.mark.parametrize(("away_s", "is_lost"), [(ANSWER_S, True), (1000.0, False)])
def test_a_peer_is_not_blamed_for_the_time_in_which_nobody_polled(links: Links, away_s: float, is_lost: bool) -> None:
    """Polls that follow each other blame the peer; one long pause does not."""
    link = links.open()
    num_polls = 1 if away_s > ANSWER_S else int((BUSY_FACTOR + 2 * HANDSHAKE_FACTOR) * ANSWER_S / AWAY_S)
    for _ in range(num_polls):
        links.now += away_s if num_polls == 1 else AWAY_S
        links.all.begin_poll()
        link.expect_answer(links.now, is_used=True)
        link.check(links.now)
    assert (link.lost is not None) == is_lost


def test_descriptors_that_nobody_took_are_closed_once_no_link_opens() -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        links = Links(context, has_gpu=True)
        link = links.open()  # still waits for its welcome, so for descriptors
        ours, theirs = os.pipe()
        send_descriptors(links.all.hello.inbox, new_token(), [theirs])
        os.close(theirs)
        os.set_blocking(ours, False)
        links.now += 10
        links.all.begin_poll()
        with pytest.raises(BlockingIOError):
            os.read(ours, 1)  # a copy of the other end is still open
        links.all.close(link)
        assert os.read(ours, 1) == b"", "the last copy of the other end is closed"
        os.close(ours)
        links.close()
