"""A port of data links: connections over which nobody speaks are closed while the node's own thread computes."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import zmq

from baton.metadata.bus.descriptors import NodePort
from baton.metadata.bus.sockets import bound_address, receive_from
from baton.metadata.bus.strangers import PortWatch


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
    deadline = time.monotonic() + 10
    while len(left := [each for each in flood if not is_closed(each)]) > 20:
        assert time.monotonic() < deadline, len(left)
        time.sleep(0.01)
    assert left
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
