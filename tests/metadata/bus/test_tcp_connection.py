"""Time limits follow the round trip that the kernel measures, and a descriptor of another use is left alone."""

from __future__ import annotations

import socket
import sys

import pytest

from baton.metadata.bus.tcp_connection import MAX_ROUND_TRIP_S, TcpConnection, time_limit_s


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
