"""Sockets of the data links: a prefill node binds one ROUTER, a decode node connects one DEALER per link. Each end may
have another one, without CURVE, for sealed messages of pages (page_port.py)."""

from __future__ import annotations

import zmq

from ..bus.addresses import any_port_of, parse_address, require_keys
from ..bus.connections import MAX_ROUND_TRIP_S
from ..bus.curve import Guests, KeyPair, admit_guests, secure_client, secure_server
from ..bus.sockets import HANDSHAKE_MS, configure_socket, connect_socket, send_heartbeats
from ..errors import ConfigError
from ..wire.node_info import Peer

# A cut network shows as bytes that the other host's kernel does not acknowledge. That is found soon, however slowly
# pages travel. Until the handshake is done, nobody knows how long a round trip takes, so the limit is the handshake's.
# ZeroMQ's own heartbeat notices a stopped process too, but not a main loop that hangs.
UNACKNOWLEDGED_S = 1.5
_ZMTP_HEARTBEAT_MS = 200
SILENCE_S = 1.0  # of ZeroMQ's heartbeat, on the decode node's end
MAX_SILENCE_S = 6.0
_HANDSHAKES = 8  # of its time, a connection may be silent for
_ROUND_TRIPS = 10  # for which a new connection may be silent, while TCP finds out how fast a page may be sent
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


def connect_data_socket(
    socket: zmq.Socket[bytes], peer: Peer, keys: KeyPair | None, *, max_frame: int, silence_s: float = SILENCE_S
) -> bytes:
    """Connect a DEALER socket to a prefill node. Return the public key that the node must prove, empty without keys.

    `max_frame` is the largest frame that the socket accepts, bytes. If nothing comes for `silence_s`, ZeroMQ closes the
    connection. Raises ConfigError if the address is malformed, if
    it needs keys and there are none, or if the allow-list does not name the node; and zmq.ZMQError if ZeroMQ refuses
    the address.
    """
    require_keys(peer.data_address, keys)
    _configure(socket, peer.data_address, max_frame)
    send_heartbeats(socket, _ZMTP_HEARTBEAT_MS, round(1000 * silence_s))
    server_key = b""
    if keys is not None:
        if keys.allow_list is not None:
            keys.allow_list.look()  # the peer's line may be new
        server_key = keys.server_key(peer.node_id)
        secure_client(socket, keys, server_key)
    connect_socket(socket, peer.data_address)
    return server_key


def bind_page_socket(
    address: str, guests: Guests, max_frame: int, context: zmq.Context[zmq.Socket[bytes]]
) -> zmq.Socket[bytes]:
    """Return a ROUTER socket at `address` that only the guests may use; what they send must be sealed. The caller
    closes it. Raises zmq.ZMQError if the address cannot be bound."""
    socket = context.socket(zmq.ROUTER)
    try:
        _configure(socket, address, max_frame)
        socket.router_mandatory = True
        admit_guests(socket, guests)
        socket.bind(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def connect_page_socket(
    socket: zmq.Socket[bytes], address: str, guest: str, password: str, *, max_frame: int, silence_s: float
) -> None:
    """Connect a DEALER socket to a page port, once: a connection that breaks is not made again. `max_frame` and
    `silence_s` as for `connect_data_socket`. Raises zmq.ZMQError if ZeroMQ refuses the address."""
    _configure(socket, address, max_frame)
    send_heartbeats(socket, _ZMTP_HEARTBEAT_MS, round(1000 * silence_s))
    socket.set(zmq.RECONNECT_IVL, -1)
    socket.plain_username, socket.plain_password = guest.encode(), password.encode()
    connect_socket(socket, address)


def silence_s(handshake_s: float, round_trip_s: float = 0.0) -> float:
    """Return how long a connection may be silent if the handshake of the last one to the peer took so long, or a round
    trip does. On a slow network a heartbeat waits behind a message of pages, which takes several times as long as it
    would if it were small."""
    of_handshake_s = min(max(SILENCE_S, _HANDSHAKES * handshake_s), MAX_SILENCE_S)
    return max(of_handshake_s, _ROUND_TRIPS * min(round_trip_s, MAX_ROUND_TRIP_S))


def _configure(socket: zmq.Socket[bytes], address: str, max_frame: int) -> None:
    configure_socket(socket, address, max_frame=max_frame)
    socket.set(zmq.TCP_MAXRT, HANDSHAKE_MS)
