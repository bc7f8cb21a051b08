"""Decode's end of one data link: a DEALER to one life of one prefill node, its monitor, and the transport agreed on.

A link is opened once and never mended: a lost connection, a refusal or a peer that is not who it was ends it, and the
client opens another when it has something to claim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from ..bus.addresses import require_keys
from ..bus.curve import KeyPair, secure_client
from ..bus.sockets import configure_socket, connect_socket, receive_frames, send_frames
from ..errors import ConfigError, ProtocolError, StaleMessage, TransferError
from ..wire.frames import decode_frame
from ..wire.messages import (
    DATA_FRAME_BYTES,
    CudaWelcome,
    LinkHello,
    LinkWelcome,
    Pages,
    ToDecode,
    ToPrefill,
    to_decode_decoder,
)
from ..wire.node_info import Peer
from ..wire.protocol import encode, known
from .descriptors import DescriptorInbox
from .device_pool import DevicePool
from .memory import PageMemory
from .peers import LINK_BEAT_MS, LINK_SILENCE_MS
from .transports.base import Transport
from .transports.cuda import CudaTransport
from .transports.local import LocalTransport
from .transports.zmq import ZmqTransport

logger = logging.getLogger(__name__)

FRAME_SLACK_BYTES = 1 << 20
HELLO_S = 0.5  # a hello without an answer is said again: within a lease of the tickets that wait to be claimed
_LOSSES = {
    zmq.EVENT_DISCONNECTED: "the connection was closed",
    zmq.EVENT_CLOSED: "it cannot be reached",
    zmq.EVENT_CONNECT_RETRIED: "it cannot be reached",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the handshake failed (protocol)",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the handshake failed (keys)",
}


class Link:
    """An open link. `lost` says why it is over, None while it lives; `transport` is None until the welcome."""

    def __init__(
        self,
        peer: Peer,
        hello: LinkHello,
        memory: Sequence[PageMemory],
        device: DevicePool | None,
        inbox: DescriptorInbox | None,
        keys: KeyPair | None,
        clock: Callable[[], float],
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        """Connects and says hello. Raises TransferError for an address that is none."""
        self.peer = peer
        self.protocol = known(peer.protocol)  # in which the peer is addressed
        self.transport: Transport | None = None
        self.lost: str | None = None
        self.is_refused = False
        self.num_pages = 0  # of the peer's pool
        self.lease_s = 1.0  # the peer's, once it has welcomed us
        self.last_heard = self.last_renewed = clock()
        self._hello = msgspec.structs.replace(hello, protocol=self.protocol)
        self._memory, self._device, self._inbox, self._clock = tuple(memory), device, inbox, clock
        self._keys = keys
        self._welcomed: LinkWelcome | None = None  # the last one
        self._greeted_at = clock()
        self.server_key = b""  # that the peer proves to hold, where there are keys
        self.socket = context.socket(zmq.DEALER)
        try:
            self._connect()
        except (zmq.ZMQError, ConfigError) as error:
            self.socket.close(linger=0)
            raise TransferError(f"cannot open a link to {peer.data_address!r}: {error}", node=peer.node_id) from error
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(sum(_LOSSES))
        self.send(self._hello)

    @property
    def is_waiting(self) -> bool:
        """Whether the peer owes an answer: a welcome, or pages."""
        return self.transport is None or self.transport.is_waiting

    def send(self, message: ToPrefill) -> None:
        """Sends; a link that cannot take it is lost. Before the welcome nothing is said but hello: where that was lost
        on its way, the peer refuses whatever follows, and this must not look like an answer to hello."""
        if self.lost is not None or (self.transport is None and not isinstance(message, LinkHello)):
            return
        try:
            send_frames(self.socket, encode(message, self.protocol))
        except zmq.ZMQError as error:
            self.lose(f"it does not take messages any more ({error.strerror})")

    def greet_again(self, now: float) -> None:
        """Says hello again to a peer that has not answered it for long: one of the two may have been lost."""
        if self.transport is None and now - self._greeted_at >= HELLO_S:
            self._greeted_at = now
            self.send(self._hello)

    def receive(self) -> tuple[ToDecode, memoryview | None] | None:
        """The next message, with its data frame for Pages; None when there is none now.

        Raises ProtocolError for what is no message of this protocol.
        """
        try:
            frames: Any = receive_frames(self.socket, 2, copy=False)
        except zmq.Again:
            return None
        message = decode_frame(to_decode_decoder, frames[0].bytes if len(frames[0]) <= DATA_FRAME_BYTES else b"")
        if len(frames) != (2 if isinstance(message, Pages) else 1):
            raise ProtocolError(f"{type(message).__name__} with {len(frames)} frames")
        answer = LinkWelcome if self.transport is None else Pages
        if isinstance(message, answer) or not self.is_waiting:  # other words are no answer, nor is junk
            self.last_heard = self._clock()
        return message, frames[1].buffer if len(frames) == 2 else None

    def welcome(self, message: LinkWelcome) -> None:
        """Takes the transport agreed on. If the peer's memory cannot be mapped, says hello again without it. Raises
        StaleMessage for a welcome that came before: hello was said again."""
        if message == self._welcomed:
            raise StaleMessage("a welcome that came before")
        self._welcomed = message
        if (message.node_id, message.epoch) != (self.peer.node_id, self.peer.epoch):
            self.lose(f"it is {message.node_id} of epoch {message.epoch}, not {self.peer.node_id} of {self.peer.epoch}")
        elif self.transport is not None or message.transport not in self._hello.transports:
            self.lose(f"it welcomed us with transport {message.transport!r}, out of turn or not among ours")
        else:
            self.protocol = max(self.protocol, message.since)
            self.lease_s, self.num_pages = message.lease_s, message.num_pages
            self._start(message)

    def check_connection(self) -> None:
        """Notices a closed connection in milliseconds, and an unreachable address."""
        while self.lost is None:
            try:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            self.lose(_LOSSES[zmq.Event(event["event"])] + self._doubt)

    @property
    def _doubt(self) -> str:
        is_listed = self._keys is not None and self._keys.allow_list is not None
        return (
            " before its welcome: does its --allow-list know this node?" if is_listed and self.transport is None else ""
        )

    def check_key(self) -> None:
        """Where the allow-list names another key of the peer now, or none, the link is over."""
        allow_list = None if self._keys is None else self._keys.allow_list
        if allow_list is not None and allow_list.key_of(self.peer.node_id) != self.server_key:
            self.lose(f"its key is not in allow-list {allow_list.path} any more")

    def lose(self, reason: str) -> None:
        """The link is over. What was mapped is unmapped at once."""
        if self.lost is None:
            self.lost = f"prefill node {self.peer.node_id}: {reason}"
            logger.info("data link lost: %s", self.lost)
        if self.transport is not None:
            self.transport.close()
            self.transport = None

    def close(self) -> None:
        """Closes the sockets and unmaps."""
        self.lose("closed")
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)

    def _connect(self) -> None:
        require_keys(self.peer.data_address, self._keys)
        page_bytes = sum(pool.num_layers * pool.page_layer_bytes for pool in self._memory)
        max_frame = max(DATA_FRAME_BYTES, page_bytes) + FRAME_SLACK_BYTES
        configure_socket(self.socket, self.peer.data_address, max_frame=max_frame)
        self.socket.set(zmq.HEARTBEAT_IVL, LINK_BEAT_MS)
        self.socket.set(zmq.HEARTBEAT_TIMEOUT, LINK_SILENCE_MS)
        if self._keys is not None:
            if self._keys.allow_list is not None:
                self._keys.allow_list.look()  # the peer's line may be new
            secure_client(self.socket, self._keys, self.peer.node_id)
            self.server_key = self._keys.server_key(self.peer.node_id)
        connect_socket(self.socket, self.peer.data_address)

    def _start(self, message: LinkWelcome) -> None:
        try:
            self.transport = self._open(message)
        except TransferError as error:
            self._retry_without(message.transport, str(error))
            return
        logger.info("linked to prefill node %s, pages travel by %s", self.peer.node_id, message.transport)

    def _open(self, message: LinkWelcome) -> Transport:
        match message:
            case CudaWelcome(transport=CudaTransport.name) if self._device is not None and self._inbox is not None:
                where = "this" if message.pools.device == self._device.device else "another"
                logger.info("prefill node %s is on %s GPU", self.peer.node_id, where)
                return CudaTransport.map(self._memory, self._device, self._inbox, message)
            case LinkWelcome(transport=LocalTransport.name):
                return LocalTransport.map(self._memory, message)
            case LinkWelcome(transport=ZmqTransport.name):
                return ZmqTransport(self._memory, self.send)
            case _:
                raise TransferError(f"{type(message).__name__} does not say how to use transport {message.transport}")

    def _retry_without(self, transport: str, reason: str) -> None:
        others = tuple(name for name in self._hello.transports if name != transport)
        if not others:
            self.lose(reason)
            return
        logger.warning("prefill node %s: %s; pages will travel by %s", self.peer.node_id, reason, others[0])
        self._hello = msgspec.structs.replace(self._hello, transports=others)
        self._greeted_at = self._clock()
        self.send(self._hello)
