"""A closed connection is followed by probes; a failed handshake by one line in the log. Real sockets on loopback."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
from patience import until, wait_until

from baton.metadata.bus.connections import (
    MAX_ROUND_TRIP_S,
    PROBE_DELAYS_S,
    ConnectionMonitor,
    Porter,
    PortWatch,
    Stranger,
    TcpConnection,
    time_limit_s,
)
from baton.metadata.bus.curve import KeyPair, secure_server
from baton.metadata.bus.descriptors import NodePort
from baton.metadata.bus.sockets import bound_address, receive_from
from baton.metadata.logs import Throttle


class Watched:
    """A ROUTER socket under watch, and the times of its probes."""

    def __init__(
        self, keys: KeyPair | None = None, porter: Porter | None = None, address: str = "tcp://127.0.0.1:*"
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        if keys is not None:
            secure_server(self.socket, keys)
        self.socket.bind(address)
        self.address = bound_address(self.socket)
        self.probes: list[float] = []
        self.monitor = ConnectionMonitor(
            self.socket, lambda: self.probes.append(asyncio.get_running_loop().time()), porter
        )

    def connect(self) -> zmq.Socket[bytes]:
        peer = self.context.socket(zmq.DEALER)
        peer.linger = 0
        peer.connect(self.address)
        return peer

    def close(self) -> None:
        self.monitor.close()
        self.socket.close(linger=0)
        self.context.destroy(linger=0)


class ListingPorter:
    def __init__(self) -> None:
        self.here: list[Stranger] = []

    def come(self, stranger: Stranger) -> None:
        self.here.append(stranger)

    def go(self, stranger: Stranger) -> None:
        self.here.remove(stranger)


async def arrive(watched: Watched, peer: zmq.Socket[bytes]) -> None:
    peer.send(b"hello")
    await until(lambda: watched.socket.poll(0))
    watched.socket.recv_multipart()


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    watched = Watched()
    yield watched
    watched.close()


async def test_a_closed_connection_is_probed_several_times(watched: Watched) -> None:
    peer = watched.connect()
    await arrive(watched, peer)
    assert not watched.probes
    peer.close()
    await until(lambda: len(watched.probes) == len(PROBE_DELAYS_S))
    gaps = [later - sooner for sooner, later in zip(watched.probes, watched.probes[1:], strict=False)]
    assert all(gap >= delay * 0.9 for gap, delay in zip(gaps, PROBE_DELAYS_S[1:], strict=True))
    await asyncio.sleep(2 * max(PROBE_DELAYS_S))
    assert len(watched.probes) == len(PROBE_DELAYS_S), "the probes end"


async def test_connections_that_close_together_share_their_probes() -> None:
    porter = ListingPorter()
    watched = Watched(porter=porter)
    peers = [watched.connect() for _ in range(20)]
    for peer in peers:
        await arrive(watched, peer)
    for peer in peers:
        peer.close()
    wait_until(lambda: not porter.here, "all are closed while the event loop is busy")
    await until(lambda: len(watched.probes) >= len(PROBE_DELAYS_S))
    await asyncio.sleep(2 * max(PROBE_DELAYS_S))
    assert len(watched.probes) <= 2 * len(PROBE_DELAYS_S)
    watched.close()


async def test_after_close_nothing_is_probed() -> None:
    watched = Watched()
    peer = watched.connect()
    await arrive(watched, peer)
    peer.close()
    await until(lambda: watched.probes)
    num_probes = len(watched.probes)
    watched.close()
    await asyncio.sleep(2 * sum(PROBE_DELAYS_S))
    assert len(watched.probes) == num_probes < len(PROBE_DELAYS_S)


async def test_failed_handshakes_are_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(KeyPair.generate())
    peers = [watched.connect() for _ in range(3)]  # without keys
    await until(lambda: "at the handshake" in caplog.text)
    await asyncio.sleep(0.1)
    assert caplog.text.count("at the handshake") == 1
    for peer in peers:
        peer.close()
    watched.close()


async def test_a_refused_key_is_logged_once_with_the_key(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.metadata.bus.curve._refusals", Throttle(60.0))
    keys, stranger = KeyPair.generate(), KeyPair.generate()
    watched = Watched(keys)
    peer = watched.context.socket(zmq.DEALER)
    peer.curve_serverkey, peer.curve_publickey = keys.public, stranger.public
    peer.curve_secretkey = stranger.secret
    peer.linger = 0
    peer.connect(watched.address)
    await until(lambda: watched.probes)
    assert caplog.text.count("at the handshake") == caplog.text.count(stranger.public.decode()) == 1
    peer.close()
    watched.close()


async def test_a_connection_is_a_stranger_until_a_message_has_come_over_it() -> None:
    porter = ListingPorter()
    watched = Watched(porter=porter)
    port = int(watched.address.rpartition(":")[2])
    silent, gone = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
    peer = watched.connect()
    await until(lambda: len(porter.here) == 3 and watched.monitor.has_strangers)
    assert {stranger.address for stranger in porter.here} == {"127.0.0.1"}
    gone.close()
    await until(lambda: len(porter.here) == 2)
    peer.send(b"hello")
    await until(lambda: watched.socket.poll(0))
    received = receive_from(watched.socket, None, with_descriptor=True)
    watched.monitor.know(received.descriptor)
    watched.monitor.know(received.descriptor)
    assert received.body == b"hello" and len(porter.here) == 1
    porter.here[0].force_close()
    await until(lambda: not porter.here)
    silent.settimeout(5)
    while silent.recv(64):  # the greeting, then the end
        pass
    silent.close()
    stranger = Stranger(watched.socket.get(zmq.FD), port)
    stranger.force_close()
    assert stranger.address == "" and not watched.monitor.has_strangers, "a descriptor of another use is left alone"
    peer.close()
    watched.close()


async def test_a_socket_without_a_port_has_no_strangers(tmp_path: Path) -> None:
    porter = ListingPorter()
    watched = Watched(porter=porter, address=f"ipc://{tmp_path}/nodes")
    peer = watched.connect()
    await arrive(watched, peer)
    await asyncio.sleep(0.02)
    assert not porter.here and not watched.monitor.has_strangers
    peer.close()
    watched.close()


def test_a_flood_leaves_a_spoken_connection_and_few_silent_ones() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    bound, node = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    node.linger = 0
    bound.bind("tcp://127.0.0.1:*")
    watch = PortWatch(bound, NodePort(80))  # 20 are of strangers, and from 16 on one is closed
    node.connect(bound_address(bound))
    node.send(b"hello")
    assert bound.poll(5000)
    watch.know(receive_from(bound, None, with_descriptor=True).descriptor)
    port = int(bound_address(bound).rpartition(":")[2])
    flood = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
    wait_until(lambda: sum(map(is_closed, flood)) >= 40, "most are closed")
    assert not all(map(is_closed, flood))
    node.send(b"still here")
    assert bound.poll(5000) and receive_from(bound, None).body == b"still here"
    for each in flood:
        each.close()
    node.close()
    watch.close()
    bound.close(linger=0)
    context.term()


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(64):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def test_a_socket_without_a_port_is_not_watched(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    bound = context.socket(zmq.ROUTER)
    bound.bind(f"ipc://{tmp_path}/pages")
    watch = PortWatch(bound, NodePort(80))
    watch.know(3)
    watch.close()
    bound.close(linger=0)
    context.term()


def test_a_long_round_trip_gives_a_peer_more_time_and_a_short_one_does_not() -> None:
    assert [time_limit_s(1.5, each) for each in (0.0, 0.04, 0.3, 2.0, 1e9)] == [1.5, 1.5, 1.5, 8.0, 20.0]
    assert MAX_ROUND_TRIP_S == 5.0


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels tell no round trip")
def test_a_connection_tells_its_round_trip_and_takes_its_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"hello")
            assert accepted.recv(9) == b"hello"
            assert 0 < TcpConnection(client.fileno()).round_trip_s < 1
            assert 0 < TcpConnection(client.fileno()).follow_round_trip(1.5) < 1
            assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1500
            port = server.getsockname()[1]
            assert TcpConnection(accepted.fileno(), port).address == "127.0.0.1"
            assert TcpConnection(client.fileno(), port).address == "", "its own port is another one"
            TcpConnection(accepted.fileno(), port).force_close()
            assert client.recv(9) == b""


def test_a_descriptor_of_another_use_is_left_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for each in (TcpConnection(ours.fileno()), TcpConnection(10_000)):
            each.force_close()
            assert (each.address, each.round_trip_s, each.follow_round_trip(1.0)) == ("", 0.0, 0.0)
        theirs.send(b"still open")
        assert ours.recv(20) == b"still open"
