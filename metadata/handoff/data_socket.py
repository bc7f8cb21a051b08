"""Sockets of the data links: a prefill node binds one ROUTER, a decode node connects one DEALER per link."""

from __future__ import annotations

import zmq

from ..bus.addresses import any_port_of, parse_address, require_keys
from ..bus.curve import KeyPair, secure_client, secure_server
from ..bus.sockets import ZMTP_SILENCE_MS, configure_socket, connect_socket
from ..errors import ConfigError
from ..wire.node_info import Peer

# A cut network shows as bytes that the other host's kernel does not acknowledge. That is found soon, however slowly
# pages travel. ZeroMQ's own heartbeat notices a stopped process, but not a main loop that hangs. It waits behind pages
# on their way, so it is given time.
_UNACKNOWLEDGED_MS = 1500
_ZMTP_HEARTBEAT_MS = 200
_CONTROL_FRAME_BYTES = 8 << 20


def bind_data_socket(
    bind_host: str, keys: KeyPair | None, context: zmq.Context[zmq.Socket[bytes]]
) -> zmq.Socket[bytes]:
    """Return a ROUTER socket that listens on any free port of `bind_host`. The caller closes it.

    Raises ConfigError if this machine has no such host, or if other machines can reach it and there are no keys.
    """
    address = any_port_of(bind_host)
    require_keys(address, keys)
    parse_address(address)  # before there is a socket to close
    socket = context.socket(zmq.ROUTER)
    _configure(socket, address, _CONTROL_FRAME_BYTES)
    socket.router_mandatory = True
    if keys is not None:
        secure_server(socket, keys)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"cannot serve pages on {address}: {error.strerror}") from error
    return socket


def connect_data_socket(socket: zmq.Socket[bytes], peer: Peer, keys: KeyPair | None, *, max_frame: int) -> bytes:
    """Connect a DEALER socket to a prefill node. Return the public key that the node must prove, empty without keys.

    `max_frame` is the largest frame that the socket accepts, bytes. Raises ConfigError if the address is malformed, if
    it needs keys and there are none, or if the allow-list does not name the node; and zmq.ZMQError if ZeroMQ refuses
    the address.
    """
    require_keys(peer.data_address, keys)
    _configure(socket, peer.data_address, max_frame)
    server_key = b""
    if keys is not None:
        if keys.allow_list is not None:
            keys.allow_list.look()  # the peer's line may be new
        secure_client(socket, keys, peer.node_id)
        server_key = keys.server_key(peer.node_id)
    connect_socket(socket, peer.data_address)
    return server_key


def _configure(socket: zmq.Socket[bytes], address: str, max_frame: int) -> None:
    configure_socket(socket, address, max_frame=max_frame)
    socket.set(zmq.HEARTBEAT_IVL, _ZMTP_HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, ZMTP_SILENCE_MS)
    socket.set(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)
