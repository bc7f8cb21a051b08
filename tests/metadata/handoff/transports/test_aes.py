"""Pages beside the CURVE link: sealed, readable only if both operators say so, and never taken from anybody else."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq
from handoff_nodes import SCHEMA, make_client, make_row, make_server, named, peer_of, same_pages, spin, unit
from zmq.utils.monitor import recv_monitor_message

from baton.metadata.bus import sockets as bus
from baton.metadata.bus.curve import KeyPair
from baton.metadata.handoff.page_port import PagePort
from baton.metadata.handoff.tickets import TicketEnded
from baton.metadata.handoff.transfer import Arrived, TransferFailed
from baton.metadata.handoff.transports import aes
from baton.metadata.wire.data_link import Pull
from baton.metadata.wire.protocol import PROTOCOL_MAX

ALL = ("plain", "aes", "zmq")
NUM_PAGES = 20


@dataclass
class Nodes:
    """A prefill and a decode node with keys, and what goes over the page port between them."""

    context: zmq.Context[Any] = field(default_factory=zmq.Context)
    keys: KeyPair = field(default_factory=KeyPair.generate)
    nodes: list[Any] = field(default_factory=list)
    protocol: int = PROTOCOL_MAX  # of the router

    def start(self, ours: tuple[str, ...] = ALL, theirs: tuple[str, ...] = ALL, **more: Any) -> None:
        shared = {"keys": self.keys, "context": self.context}
        self.server, self.source = make_server(transports=ours, **shared, **more)
        self.client, self.target = make_client(transports=theirs, **shared)
        self.nodes += [self.client, self.server, *self.source, *self.target]

    def claim(self, rid: str = "r") -> None:
        """Offer pages 1 to NUM_PAGES of the prefill node, and claim them."""
        self.server.open(unit(rid), NUM_PAGES)
        self.server.offer(unit(rid), range(NUM_PAGES), range(1, NUM_PAGES + 1), [1] * NUM_PAGES, make_row(SCHEMA))
        peer = msgspec.structs.replace(peer_of(self.server), protocol=self.protocol)
        self.client.claim(unit(rid), peer, 0, range(10, 10 + NUM_PAGES))

    def pull(self, rid: str = "r") -> str:
        """Return the transport by which all pages have come."""
        for pool in self.target:
            pool.pages[:] = 0
        self.claim(rid)
        ends = Arrived, TicketEnded
        events = spin([self.server, self.client], lambda events: all(named(events, kind) for kind in ends))
        assert same_pages(self.target, range(10, 10 + NUM_PAGES), self.source, range(1, NUM_PAGES + 1))
        return named(events, Arrived)[0].times.transport

    @property
    def link(self) -> Any:
        return self.client._links.by_epoch[self.server.end.epoch]

    @property
    def port(self) -> PagePort:
        port = self.server._links._port
        assert port is not None
        return port

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        self.context.destroy(linger=0)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


@pytest.fixture
def small_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.metadata.handoff.transports.zmq.MESSAGE_BYTES", 4096)


class Tap(bus.Wire):
    """Records messages of pages as the network sees them, and changes them."""

    def __init__(self) -> None:
        self.seen: list[list[bytes]] = []
        self.change: Any = lambda frames, number: [frames]
        self._waiting: list[list[Any]] = []

    def receive(self, socket: zmq.Socket[bytes], most: int, *, least: int, copy: bool) -> list[Any]:
        if socket.type != zmq.DEALER or socket.get(zmq.MECHANISM) != zmq.PLAIN:
            return super().receive(socket, most, least=least, copy=copy)
        while not self._waiting:
            frames = [frame.bytes for frame in super().receive(socket, most, least=least, copy=copy)]
            self.seen.append(frames)
            self._waiting += self.change(frames, len(self.seen) - 1)
        return [zmq.Frame(frame) for frame in self._waiting.pop(0)]


@pytest.fixture
def tap(monkeypatch: pytest.MonkeyPatch) -> Tap:
    made = Tap()
    monkeypatch.setattr(bus, "wire", made)
    return made


def flipped(frames: list[bytes], at: int) -> list[bytes]:
    spoilt = bytearray(frames[at])
    spoilt[len(spoilt) // 2] ^= 1
    return [*frames[:at], bytes(spoilt), *frames[at + 1 :]]


@pytest.mark.parametrize(
    ("ours", "theirs", "chosen"),
    [
        (("aes", "zmq"), ("aes", "zmq"), "aes"),
        (ALL, ALL, "plain"),
        (("aes", "zmq"), ALL, "aes"),  # one operator's word is not enough
        (ALL, ("aes", "zmq"), "aes"),
        (("zmq",), ALL, "zmq"),  # an older release, or one without the package
        (ALL, ("zmq",), "zmq"),
    ],
)
def test_nodes_with_keys_send_readable_pages_only_if_both_operators_say_so(
    nodes: Nodes, ours: tuple[str, ...], theirs: tuple[str, ...], chosen: str
) -> None:
    nodes.start(ours, theirs)
    assert nodes.pull() == chosen
    assert nodes.pull("again") == chosen


@pytest.mark.parametrize(("protocol", "chosen"), [(7, "zmq"), (8, "plain")])
def test_a_link_of_an_older_protocol_stays_under_curve(nodes: Nodes, protocol: int, chosen: str) -> None:
    nodes.start()
    nodes.protocol = protocol
    assert nodes.pull() == chosen


@pytest.mark.parametrize("transport", ["aes", "plain"])
def test_the_network_sees_a_page_only_if_it_is_plain(nodes: Nodes, tap: Tap, transport: str) -> None:
    nodes.start((transport,), (transport,))
    nodes.pull("a-name")
    on_wire = b"".join(frame for frames in tap.seen for frame in frames)
    page = nodes.source[0].pages[0, 1].tobytes()
    assert (page in on_wire) == (transport == "plain")
    assert len(on_wire) > NUM_PAGES * len(page) and b"a-name" not in on_wire


def test_without_keys_no_page_travels_beside_the_link(nodes: Nodes) -> None:
    server, source = make_server(transports=ALL, context=nodes.context)
    client, target = make_client(transports=ALL, context=nodes.context)
    nodes.nodes += [client, server, *source, *target]
    server.open(unit(), 1)
    server.offer(unit(), [0], [1], [1], make_row(SCHEMA))
    client.claim(unit(), peer_of(server), 0, [3])
    (arrived,) = named(spin([server, client], lambda events: named(events, Arrived)), Arrived)
    assert arrived.times.transport == "zmq" and server._links._port is None


@pytest.mark.usefixtures("small_pulls")
@pytest.mark.parametrize("transport", ["aes", "plain"])
def test_a_page_that_was_changed_is_not_written_and_pulled_again(nodes: Nodes, tap: Tap, transport: str) -> None:
    nodes.start((transport,), (transport,))
    tap.change = lambda frames, number: [flipped(frames, 1) if number == 1 else frames]
    assert nodes.pull() == transport
    assert nodes.client.num_checksum_failures > 0


@pytest.mark.usefixtures("small_pulls")
def test_without_checksums_a_changed_page_is_noticed_too(nodes: Nodes, tap: Tap) -> None:
    schema = msgspec.structs.replace(SCHEMA, checksum="none")
    shared = {"keys": nodes.keys, "context": nodes.context, "transports": ("aes",)}
    nodes.server, nodes.source = make_server(schema, **shared)
    nodes.client, nodes.target = make_client(schema, **shared)
    nodes.nodes += [nodes.client, nodes.server, *nodes.source, *nodes.target]
    tap.change = lambda frames, number: [flipped(frames, 1) if number == 0 else frames]
    assert nodes.pull() == "aes"
    tap.change = lambda frames, number: [flipped(frames, 1)]
    nodes.claim("never")
    (failed,) = named(spin([nodes.server, nodes.client], lambda events: named(events, TransferFailed)), TransferFailed)
    assert "wrong 3 times" in failed.reason


@pytest.mark.usefixtures("small_pulls")
@pytest.mark.parametrize("kind", ["damaged header", "repeated", "other data", "cut"])
def test_messages_that_are_not_the_next_of_the_peer_change_nothing(nodes: Nodes, tap: Tap, kind: str) -> None:
    nodes.start(("aes",), ("aes",))

    def change(frames: list[bytes], number: int) -> list[list[bytes]]:
        if number != 2:
            return [frames]
        match kind:
            case "damaged header":
                return [flipped(frames, 0)]
            case "repeated":
                return [frames, tap.seen[0], frames]
            case "other data":
                return [[frames[0], tap.seen[0][1]]]
            case _:
                return [frames[:1]]

    tap.change = change
    assert nodes.pull() == "aes"
    assert nodes.client.dropped.count + nodes.client.num_checksum_failures >= 1


@pytest.mark.usefixtures("small_pulls")
def test_pages_that_are_lost_at_the_end_are_noticed_by_an_echo(nodes: Nodes, tap: Tap) -> None:
    """Nothing follows them that would show it, except the echo."""
    nodes.start(("aes",), ("aes",))
    nodes.pull("first")
    nodes.link._answer_s = 0.05
    tap.change = lambda frames, number: [] if len(frames[1]) > 16 else [frames]
    nodes.claim("second")
    (failed,) = named(spin([nodes.server, nodes.client], lambda events: named(events, TransferFailed)), TransferFailed)
    assert "answers small messages" in failed.reason
    tap.change = lambda frames, number: [frames]
    assert nodes.pull("third") == "aes"


def test_an_echo_behind_pages_loses_no_link(nodes: Nodes) -> None:
    nodes.start(("aes",), ("aes",))
    nodes.pull()
    link = nodes.link
    nodes.claim("s")
    spin([nodes.server, nodes.client], lambda _: link.transport.is_waiting)
    link.transport.ask()
    spin([nodes.server, nodes.client], lambda events: named(events, Arrived))
    assert nodes.pull("t") == "aes"  # behind the echo
    assert nodes.link is link and link.lost is None


@pytest.mark.parametrize("way", ["refused", "silent"])
def test_a_closed_page_port_leaves_the_way_under_curve(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A firewall may let only the data link through."""
    monkeypatch.setattr(aes, "CONNECT_S", 0.2)
    nodes.start()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        if way == "silent":
            closed.listen(1)
        monkeypatch.setattr(nodes.port, "number", closed.getsockname()[1])
        assert nodes.pull() == "zmq"
    assert nodes.pull("again") == "zmq"


def test_a_connection_for_pages_that_breaks_ends_the_link_and_the_next_works(nodes: Nodes) -> None:
    nodes.start(("aes",), ("aes",))
    nodes.pull()
    old = nodes.link
    nodes.port.close()
    nodes.claim("s")
    (failed,) = named(spin([nodes.client], lambda events: named(events, TransferFailed)), TransferFailed)
    assert "was closed" in failed.reason and nodes.client._links.by_epoch == {} and old.lost


def test_strangers_and_spent_passwords_are_not_let_in(nodes: Nodes) -> None:
    nodes.start(("aes",), ("aes",))
    nodes.pull()
    grant = next(iter(nodes.server._links.peers.by_link.values())).grant
    for guest, password in ((grant.guest, grant.password), (grant.guest, "\xe9"), ("nobody", "x"), (None, None)):
        stranger = nodes.context.socket(zmq.DEALER)
        stranger.linger = 0
        if guest is not None:
            stranger.plain_username, stranger.plain_password = guest.encode(), password.encode()
        monitor = bus.open_monitor(stranger, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        stranger.connect(f"tcp://127.0.0.1:{nodes.port.number}")
        stranger.send(b"junk")
        assert recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
        stranger.disable_monitor()
        monitor.close(linger=0)
        stranger.close()
    assert nodes.pull("again") == "aes" and nodes.server.dropped.count == 0


def test_a_pull_on_the_data_link_is_refused_if_pages_travel_beside_it(nodes: Nodes) -> None:
    nodes.start(("aes",), ("aes",))
    nodes.pull("first")
    (peer,) = nodes.server._links.peers.by_link.values()
    peer.grant.route = None
    nodes.claim("s")
    nodes.link.send(Pull(unit=unit("s"), indices=b"\0\0\0\0"))
    spin([nodes.server, nodes.client], lambda events: named(events, Arrived))
    assert nodes.server.dropped.count == 1


def test_a_told_port_has_its_page_port_at_a_fixed_distance(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    if number + 500 > 65535:
        number -= 1000
    port = PagePort.beside(f"tcp://127.0.0.1:{number}", nodes.context)
    assert port is not None and port.number == number + 500
    assert PagePort.beside(f"tcp://127.0.0.1:{number}", nodes.context) is None
    assert "pages go under CURVE" in caplog.text
    assert PagePort.beside("tcp://127.0.0.1:65300", nodes.context) is None
    assert PagePort.beside("ipc:///tmp/x", nodes.context) is None
    port.close()
