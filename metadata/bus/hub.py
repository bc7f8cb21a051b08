"""The router's end of the bus: one ROUTER socket, served inside the router's event loop.

Nodes connect (link.py) with the routing id `node_id:epoch`. The heartbeat thread of each node (liveness.py) connects
with `node_id:epoch:beat`. The hub reports messages of both under `node_id:epoch`. libzmq's file descriptor is
edge-triggered: it tells only that something changed. A send may consume such a change, so the hub checks EVENTS after
every send.

The hub sends a RouterHeartbeat to every known node, regularly and after a connection has closed
(connections.py). The send fails for a node that is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from ..errors import ConfigError, ProtocolError
from ..logs import Throttle
from ..wire.frames import HelloRefused, decode_to_router, encode
from ..wire.membership import HUB_FRAME_BYTES, Heartbeat, Hello, Refusal, RouterHeartbeat
from ..wire.messages import ToNode, ToRouter
from ..wire.protocol import PROTOCOL_MIN
from .addresses import parse_address, require_keys
from .connections import ConnectionMonitor, Porter
from .curve import KeyPair, secure_server
from .sockets import (
    DRAIN_LIMIT,
    HEARTBEAT_SUFFIX,
    DroppedFrames,
    Received,
    bound_address,
    configure_socket,
    file_descriptor,
    has_input,
    receive_from,
    send_frames,
)

logger = logging.getLogger(__name__)

ROUTER_HEARTBEAT_S = 1.0


class Hub:
    """Sends to and receives from all nodes. All methods run on the event loop's thread.

    `on_message(routing_id, message)` is called for every valid message. `on_lost(routing_id)` is called for every node
    whose connection closed; the node may come back under the same id. Neither may block. `porter` bounds how many
    connections there are over which no valid message has come. Raises ConfigError if the address is malformed or taken,
    or if other machines can reach it and there are no keys.
    """

    def __init__(
        self,
        address: str,
        epoch: str,
        keys: KeyPair | None,
        on_message: Callable[[bytes, ToRouter], None],
        on_lost: Callable[[bytes], None],
        porter: Porter | None = None,
    ) -> None:
        require_keys(address, keys)
        self.epoch = epoch
        self._allow_list = None if keys is None else keys.allow_list
        self.received = 0
        self.sent = 0
        self._on_message = on_message
        self._on_lost = on_lost
        self._porter = porter
        self._heartbeat_frame = encode(RouterHeartbeat(router_epoch=epoch), PROTOCOL_MIN)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            _bind(self._socket, address, keys)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.address = bound_address(self._socket)
        self._dropped = DroppedFrames(logger, "hub")
        self._failures = Throttle()
        self._peers: set[bytes] = set()
        self._is_drain_scheduled = False
        self._heartbeat_timer: asyncio.TimerHandle | None = None

    @property
    def dropped_frames(self) -> int:
        """Number of malformed frames dropped so far."""
        return self._dropped.count

    def start(self) -> None:
        """Start serving, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(file_descriptor(self._socket), self._recheck)
        self._schedule_drain()
        self._monitor = ConnectionMonitor(self._socket, self._probe, self._porter)
        self._send_heartbeats()

    def send(self, peer: bytes, message: ToNode, protocol: int | None = None) -> bool:
        """Queue a message for the node with this routing id, in `protocol` (None: the newest). Return False, and never
        raise, if the node is gone or its queue is full."""
        return self._send_frame(peer, encode(message, protocol))

    def close(self) -> None:
        """Stop serving and free the address. Queued messages are lost. May be called twice."""
        if self._socket.closed:
            return
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
            self._loop.remove_reader(file_descriptor(self._socket))
            self._monitor.close()
        self._socket.close()
        self._context.term()

    def _send_frame(self, peer: bytes, frame: bytes) -> bool:
        if self._socket.closed:
            return False
        try:
            send_frames(self._socket, peer, frame)
            self.sent += 1
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self._lose(peer)
            elif error.errno != zmq.EAGAIN:
                raise
            return False
        finally:
            self._recheck()
        return True

    def _recheck(self) -> None:
        if not self._is_drain_scheduled and has_input(self._socket):
            self._schedule_drain()

    def _schedule_drain(self) -> None:
        self._is_drain_scheduled = True
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_drain_scheduled = True  # sends from the callbacks need not check EVENTS
        has_strangers = self._monitor.has_strangers
        for _ in range(DRAIN_LIMIT):
            if self._socket.closed:
                return
            try:
                received = receive_from(self._socket, self._allow_list, with_descriptor=has_strangers)
            except zmq.Again:
                self._is_drain_scheduled = False  # this recv checked for every change that sends may have consumed
                return
            self._take(received)
        if not self._socket.closed:
            self._schedule_drain()

    def _take(self, received: Received) -> None:
        sender = received.sender
        try:
            if self._allow_list is not None:
                if received.name is None:  # the list has logged this once; the node's heartbeats may go on for days
                    self._dropped.count += 1
                    return
                self._allow_list.require(received.name, _node_id(sender.removesuffix(HEARTBEAT_SUFFIX)))
            message = self._decode(sender, received.body)
        except HelloRefused as refusal:
            self._dropped.add(sender, refusal)
            if refusal.peer == sender:
                self.send(sender, Refusal(router_epoch=self.epoch, reason=refusal.reason))
            return
        except ProtocolError as error:
            self._dropped.add(sender, error)
            return
        self.received += 1
        if received.descriptor is not None:
            self._monitor.know(received.descriptor)
        peer = sender.removesuffix(HEARTBEAT_SUFFIX)
        if peer == sender:
            self._peers.add(peer)
        try:
            self._on_message(peer, message)
        except ProtocolError as error:
            self._dropped.add(sender, error)
        except Exception as error:  # the other messages must still be served
            if self._failures.is_due():
                words = f"hub: {error!r} while handling {type(message).__name__} of {peer!r}"
                self._loop.call_exception_handler({"message": words, "exception": error})

    @staticmethod
    def _decode(sender: bytes, body: bytes) -> ToRouter:
        message = decode_to_router(body)
        if sender.endswith(HEARTBEAT_SUFFIX) and not isinstance(message, Heartbeat):
            raise ProtocolError(f"{type(message).__name__} from a heartbeat socket, which may send Heartbeat only")
        if isinstance(message, Hello) and f"{message.node_id}:{message.epoch}".encode() != sender:
            raise ProtocolError(f"Hello of {message.node_id}:{message.epoch} under another routing id")
        return message

    def _lose(self, peer: bytes) -> None:
        if peer in self._peers:
            self._peers.discard(peer)
            self._loop.call_soon(self._tell_lost, peer)

    def _tell_lost(self, peer: bytes) -> None:
        if not self._socket.closed:
            self._on_lost(peer)

    def _send_heartbeats(self) -> None:
        self._shut_out()
        self._probe()
        self._heartbeat_timer = self._loop.call_later(ROUTER_HEARTBEAT_S, self._send_heartbeats)

    def _shut_out(self) -> None:
        """Report nodes as lost that are not in the allow-list any more. Their connections stay open, but their messages
        are dropped."""
        if self._allow_list is None:
            return
        self._allow_list.look()
        for peer in tuple(self._peers):
            if self._allow_list.key_of(_node_id(peer)) is None:
                self._lose(peer)

    def _probe(self) -> None:
        for peer in tuple(self._peers):
            self._send_frame(peer, self._heartbeat_frame)


def _node_id(peer: bytes) -> str:
    return peer.rpartition(b":")[0].decode(errors="replace")


def _bind(socket: zmq.Socket[bytes], address: str, keys: KeyPair | None) -> None:
    configure_socket(socket, address, max_frame=HUB_FRAME_BYTES)
    socket.router_mandatory = 1
    # A node may reconnect before its old connection is known to be dead. Nobody can steal an identity by this: routing
    # ids hold a random epoch, CURVE admits only the cluster off loopback, and with an allow-list a sender is heard only
    # under the name of its key.
    socket.router_handover = 1
    if keys is not None:
        secure_server(socket, keys)
    try:
        socket.bind(str(parse_address(address)))
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}; give another --node-address") from error
