"""A node's end of the bus: one DEALER socket, which the node's own loop polls together with its other sockets."""

from __future__ import annotations

import logging
import time
from typing import Literal

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import ConfigError, ProtocolError
from ..logs import Throttle
from ..wire.frames import decode_frame, encode
from ..wire.membership import HUB_FRAME_BYTES
from ..wire.messages import ToNode, ToRouter, to_node_decoder
from .addresses import parse_address, require_keys
from .connections import TcpConnection
from .curve import KeyPair, secure_client
from .router_addresses import RouterKey
from .sockets import (
    DRAIN_LIMIT,
    HANDSHAKE_MS,
    UNACKNOWLEDGED_S,
    DroppedFrames,
    configure_socket,
    connect_socket,
    only_frame,
    open_monitor,
    receive_frames,
    routing_id,
    send_frames,
    send_heartbeats,
)

logger = logging.getLogger(__name__)

Outlook = Literal["unreachable", "refused", "too slow", "connected"]
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED | _REFUSALS | _ENDS
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 1000


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    identity: bytes,
    keys: KeyPair | None,
    router_key: bytes | None,
    *,
    max_frame: int,
    is_immediate: bool = False,
) -> zmq.Socket[bytes]:
    """Return a DEALER socket that connects to `address`, and again whenever the connection breaks. The caller closes
    it.

    `router_key`: the public key that the other end must have; None: there are no keys. With `is_immediate` it queues
    nothing while there is no connection. Raises ConfigError if the address is invalid, or if other machines can reach
    it and there are no keys.
    """
    require_keys(address, keys)
    socket = context.socket(zmq.DEALER)
    try:
        configure_socket(socket, address, max_frame=max_frame)
        send_heartbeats(socket)
        socket.routing_id = identity
        socket.reconnect_ivl = _RECONNECT_MS
        socket.reconnect_ivl_max = _RECONNECT_MAX_MS
        socket.immediate = is_immediate
        if keys is not None and router_key is not None:
            secure_client(socket, keys, router_key)
        connect_socket(socket, str(parse_address(address)))
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"cannot connect to {address}: {error.strerror}") from error
    except BaseException:
        socket.close()
        raise
    return socket


class Approach:
    """How far the last attempt to connect has come. `outlook`:

    unreachable   nobody answers at the address, or no attempt has begun yet
    refused       the other end closed the connection during the handshake, or speaks another kind of it: keys
    too slow      the handshake was not done within HANDSHAKE_MS, or it is the first one and under way
    connected     the handshake is done
    """

    def __init__(self) -> None:
        self.outlook: Outlook = "unreachable"
        self.cut_at: float | None = None  # when the last connection ended; None: it stands, or there was none
        self.num_failed = 0  # handshakes
        self._connected_at: float | None = None  # of a handshake under way

    def take(self, event: int, now: float) -> None:
        """Record an event of the socket's monitor."""
        if event == zmq.EVENT_CONNECTED:
            self._connected_at = now
            if self.outlook == "unreachable":
                self.outlook = "too slow"
            return
        begun, self._connected_at = self._connected_at, None
        self.num_failed += begun is not None and event != zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self.outlook == "connected" and event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.cut_at = now
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.outlook, self.cut_at = "connected", None
        elif event & _REFUSALS:
            self.outlook = "refused"
        elif event == zmq.EVENT_CLOSED or self.outlook == "connected":
            self.outlook = "unreachable"
        elif begun is not None:
            self.outlook = "too slow" if now - begun > 0.9 * HANDSHAKE_MS / 1000 else "refused"


class Link:
    """The connection to the router; used by one thread. `socket` may be polled together with others. It is replaced
    when another key is expected of the router.

    The link connects by itself, whether the router runs already or not, and again after every break. session.py decides
    what that means for the node. Raises ConfigError as `connect_dealer` does.
    """

    def __init__(self, router_address: str, node_id: str, epoch: str, keys: KeyPair | None) -> None:
        self._address, self._identity, self._keys = router_address, routing_id(node_id, epoch), keys
        self.router_key = RouterKey(keys)
        self.is_anew = False  # the last `receive` connected with another key: what was queued is lost
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._approach = Approach()
        self._connection: TcpConnection | None = None
        self._looks = Throttle()
        try:
            self.socket, self._monitor = self._connect()
        except BaseException:
            self._context.term()
            raise
        self.sent = 0
        self.received = 0
        self.unsent = 0  # messages lost because the queue was full
        self._dropped = DroppedFrames(logger, "link")

    @property
    def dropped_frames(self) -> int:
        """Number of malformed frames dropped so far."""
        return self._dropped.count

    def receive(self, limit: int = DRAIN_LIMIT) -> list[ToNode]:
        """Return the messages that have arrived, at most `limit`; never wait. Malformed ones are counted and left
        out."""
        self._watch()
        self.is_anew = self.router_key.current != self._expected
        if self.is_anew:
            self._close_sockets()
            self.socket, self._monitor = self._connect()
            self._connection = None
        messages: list[ToNode] = []
        for _ in range(limit):
            try:
                frames = receive_frames(self.socket, 1)
            except zmq.Again:
                break
            try:
                messages.append(decode_frame(to_node_decoder, only_frame(frames)))
            except ProtocolError as error:
                self._dropped.add(b"router", error)
        self.received += len(messages)
        return messages

    def send(self, message: ToRouter, protocol: int | None = None) -> bool:
        """Queue a message for the router in `protocol` (None: the newest); never wait. Return False, and count it in
        `unsent`, if the queue is full."""
        try:
            send_frames(self.socket, encode(message, protocol))
        except zmq.Again:
            self.unsent += 1
            return False
        self.sent += 1
        return True

    def close(self) -> None:
        """Close the connection; queued messages are lost. May be called twice."""
        self._close_sockets()
        self._context.term()

    @property
    def outlook(self) -> Outlook:
        """How far the last attempt to connect had come at the last `receive`. While there is another router whose key
        could be the right one, no attempt counts as refused."""
        outlook = self._approach.outlook
        return "too slow" if outlook == "refused" and self.router_key.has_untried else outlook

    @property
    def cut_s(self) -> float:
        """For how long there has been no connection, after one had stood; 0 otherwise. As of the last `receive`."""
        cut_at = self._approach.cut_at
        return 0.0 if cut_at is None else time.monotonic() - cut_at

    def _watch(self) -> None:
        """Take the events of the connection. While it stands, once per second: to ask for events takes 10 us."""
        is_due = self._looks.is_due()
        if self._approach.outlook == "connected" and not is_due:
            return
        num_failed = self._approach.num_failed
        try:
            for _ in range(DRAIN_LIMIT):
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                self._approach.take(event["event"], time.monotonic())
                if event["event"] == zmq.EVENT_CONNECTED:
                    self._connection = TcpConnection(event["value"])
                elif event["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._connection = None
        except zmq.Again:
            pass
        if self._approach.outlook == "connected":
            self.router_key.succeed()
        elif self._approach.num_failed > num_failed:
            self.router_key.fail()
        if self._connection is not None and is_due:
            self._connection.follow_round_trip(UNACKNOWLEDGED_S)

    def _connect(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Return the socket and its monitor."""
        self._expected = self.router_key.current
        socket = connect_dealer(
            self._context, self._address, self._identity, self._keys, self._expected, max_frame=HUB_FRAME_BYTES
        )
        try:
            return socket, open_monitor(socket, _EVENTS)
        except BaseException:
            socket.close()
            raise

    def _close_sockets(self) -> None:
        if not self.socket.closed:
            self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close()
