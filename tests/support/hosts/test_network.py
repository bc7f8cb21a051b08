"""The switch does to TCP what it is told, in one direction alone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from network import Network, reason_against
from patience import wait_until
from switch import Conditions

PORT = 7000


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    if reason := reason_against():
        pytest.skip(reason)
    with Network(tmp_path, ("a", "b", "c")) as made:
        yield made


@contextmanager
def connected(network: Network, host: str = "b") -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return the ends of a connection from host a to another one."""
    with network.inside(host):
        listener = socket.create_server((network.address(host), PORT))
    with listener:
        with network.inside("a"):
            near = socket.create_connection((network.address(host), PORT), timeout=10)
        far, _ = listener.accept()
    far.settimeout(10)
    with near, far:
        yield near, far


def is_silent(end: socket.socket) -> bool:
    """Return whether nothing arrives for a while."""
    end.settimeout(0.3)
    try:
        return not end.recv(1)
    except TimeoutError:
        return True
    finally:
        end.settimeout(10)


def received(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += end.recv(size - len(data))
    return data


def test_a_cut_direction_carries_nothing_until_it_is_mended(network: Network) -> None:
    with connected(network) as (near, far), connected(network, "c") as (other, _):
        network.set("a", "b", Conditions(is_cut=True))
        near.sendall(b"x")
        far.sendall(b"y")
        assert near.recv(1) == b"y"
        assert is_silent(far)
        assert network.num_dropped("a", "b") > 0
        assert network.num_dropped("b", "a") == 0
        other.sendall(b"z")
        network.set("a", "b", Conditions())
        assert far.recv(1) == b"x"


def test_a_hole_takes_large_packets_alone(network: Network) -> None:
    with connected(network) as (near, far):
        network.set("a", "b", Conditions(mtu=600))
        near.sendall(b"x" * 400)
        assert received(far, 400) == b"x" * 400
        near.sendall(b"x" * 1000)
        assert is_silent(far)


def test_delay_and_rate_take_time(network: Network) -> None:
    with connected(network) as (near, far):
        network.set("a", "b", Conditions(delay_s=0.1, rate=1e6))
        begun = time.monotonic()
        near.sendall(bytes(10_000))
        received(far, 10_000)
        assert time.monotonic() - begun >= 0.1 + 0.01


def test_lost_and_late_packets_reach_tcp_which_mends_them(network: Network) -> None:
    sent = bytes(range(256)) * 2000
    with connected(network) as (near, far):
        network.set("a", "b", Conditions(loss=0.05, reorder=0.1))
        thread = threading.Thread(target=near.sendall, args=(sent,))
        thread.start()
        assert received(far, len(sent)) == sent
        thread.join()
        assert network.num_dropped("a", "b") > 0


def test_a_host_that_moves_is_found_by_its_name(network: Network) -> None:
    old = network.address("b")
    network.move("b")
    assert network.address("b") != old
    with connected(network) as (near, far):
        near.sendall(b"x")
        assert far.recv(1) == b"x"
    with network.inside("a"), pytest.raises(OSError, match=r"No route|timed out"):
        socket.create_connection((old, PORT), timeout=4)


def test_nothing_is_left_of_a_network_that_is_closed(tmp_path: Path) -> None:
    if reason := reason_against():
        pytest.skip(reason)
    with Network(tmp_path, ("a", "b")) as network:
        files = network.namespaces_of("a")
        network.run("a", "grep", "-q", network.address("b"), "/etc/hosts")
    wait_until(lambda: not Path(files[0]).exists(), "the switch has ended")
    assert network.address("b") not in Path("/etc/hosts").read_text()
