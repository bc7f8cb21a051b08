"""The sockets of a data link: on which addresses they may listen, and when a connection needs keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from baton.metadata.bus.curve import KeyPair
from baton.metadata.bus.sockets import bound_address, receive_frames, send_frames
from baton.metadata.errors import ConfigError
from baton.metadata.handoff.data_socket import bind_data_socket, connect_data_socket, silence_s
from baton.metadata.wire.node_info import Peer

Context = zmq.Context["zmq.Socket[bytes]"]


@pytest.fixture
def context() -> Iterator[Context]:
    made: Context = zmq.Context()
    yield made
    made.term()


@pytest.mark.parametrize("has_keys", [False, True])
def test_both_ends_of_a_link_connect(context: Context, has_keys: bool) -> None:
    keys = KeyPair.generate() if has_keys else None
    server = bind_data_socket("127.0.0.1", keys, context)
    client = context.socket(zmq.DEALER)
    client.linger = 0
    peer = Peer(node_id="p0", epoch="e", data_address=bound_address(server))
    proved = connect_data_socket(client, peer, keys, max_frame=1000)
    assert proved == (b"" if keys is None else keys.public)
    send_frames(client, b"hello")
    assert server.poll(5000) and receive_frames(server, 2)[1] == b"hello"
    client.close()
    server.close()


def test_a_slow_handshake_gives_the_next_connection_time() -> None:
    """A page of 1 MiB keeps heartbeats waiting for seconds if a message takes 300 ms each way."""
    assert [silence_s(each) for each in (0.0, 0.1, 0.5, 2.0)] == [1.0, 1.0, 4.0, 6.0]
    assert [silence_s(0.1, each) for each in (0.0, 0.04, 2.0)] == [1.0, 1.0, 20.0], "the router is as far away"


def test_without_keys_no_socket_is_opened_to_other_machines(context: Context) -> None:
    with pytest.raises(ConfigError, match="CURVE keys"):
        bind_data_socket("10.1.2.3", None, context)
    peer = Peer(node_id="p0", epoch="e", data_address="tcp://10.1.2.3:5")
    with context.socket(zmq.DEALER) as client, pytest.raises(ConfigError, match="CURVE keys"):
        connect_data_socket(client, peer, None, max_frame=1000)


def test_a_host_of_another_machine_is_refused_by_its_address(context: Context) -> None:
    with pytest.raises(ConfigError, match=r"cannot serve pages on tcp://192\.0\.2\.1:\*"):
        bind_data_socket("192.0.2.1", KeyPair.generate(), context)
