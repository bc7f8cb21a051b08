"""Transport `aes`, for any two hosts with keys: as `zmq`, but pulls and pages travel beside the CURVE link, encrypted
by AES-256-GCM, for which processors have instructions.

The welcome names the prefill node's page port and the keys of this link (page_port.py, sealing.py). A page whose tag is
wrong is not written, and counts as one with a wrong checksum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import ClassVar, Self

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from ...bus.addresses import parse_address
from ...bus.sockets import open_monitor, receive_frames, send_frames
from ...errors import ProtocolError, TransferError, Unreachable
from ...wire.data_link import LinkWelcome, PagePortWelcome, Pages, Pull
from ...wire.frames import decode_frame, encode
from ..data_socket import connect_page_socket, silence_s
from ..sealing import Opened, Opener, Sealer
from .base import Landed, PeerHost, PullEnd
from .zmq import MESSAGE_BYTES, ZmqTransport

CONNECT_S = 2.0  # for a connection to the page port, if the data link's handshake was quick
_HANDSHAKES = 4  # of its time otherwise
_MAX_ECHOES = 3  # echoes before pages on a link of a rank, which may not know yet who may pull
_SLACK_BYTES = 64 << 10
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_pages_decoder = msgspec.msgpack.Decoder(Pages)


class AesTransport(ZmqTransport):
    """Sends sealed pulls to the peer's page port, and opens the pages that come back."""

    name: ClassVar[str] = "aes"
    needs_page_port: ClassVar[bool] = True
    since: ClassVar[int] = PagePortWelcome.since

    def __init__(self, end: PullEnd, peer: PeerHost, welcome: PagePortWelcome) -> None:
        """Begin to connect. Raises zmq.ZMQError if there is no socket for it."""
        super().__init__(end.memory, self._send_sealed, end.part)
        self._sealer, self._opener = Sealer(welcome.pull_key), Opener(welcome.page_key, is_plain=self.is_readable)
        self._protocol, self._clock = end.protocol, peer.clock
        self._address = str(replace(parse_address(peer.data_address), port=welcome.port))
        self._connect_by: float | None = peer.clock() + max(CONNECT_S, _HANDSHAKES * peer.handshake_s)  # None: it is
        self._lost: str | None = None
        self._opened: Opened | None = None  # the header of the pages that `read` has returned
        self._most_echoes = 1 if end.part is None else _MAX_ECHOES
        self._num_echoes = 0
        self._is_asking = False  # for an echo, and no pages have come since
        self._closing = ExitStack()
        with ExitStack() as undo:
            self._socket = peer.context.socket(zmq.DEALER)
            undo.callback(self._socket.close, linger=0)
            self._monitor = open_monitor(self._socket, _GONE | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            undo.callback(self._monitor.close, linger=0)
            undo.callback(self._socket.disable_monitor)
            self._connect(peer, welcome)
            self._closing = undo.pop_all()

    @classmethod
    def open(cls, end: PullEnd, welcome: LinkWelcome) -> Self:
        """Begin to connect to the page port that the welcome names. Raises TransferError."""
        if not isinstance(welcome, PagePortWelcome) or end.peer is None or not end.peer.has_keys:
            raise TransferError(f"{type(welcome).__name__} does not say how to use transport {cls.name} with keys")
        try:
            return cls(end, end.peer, welcome)
        except zmq.ZMQError as error:
            raise TransferError(f"cannot connect to its page port {welcome.port}: {error.strerror}") from error

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [] if self._socket.closed else [self._socket, self._monitor]

    def step(self, max_bytes: int) -> Iterator[Landed]:
        """Send pulls as `zmq` does. Raises Unreachable if no connection comes about, and TransferError if it breaks."""
        self._check_connection()
        if self._lost is not None:
            raise TransferError(self._lost)
        return super().step(max_bytes)

    def read(self) -> tuple[Pages, memoryview] | None:
        while not self._socket.closed:
            try:
                frames = receive_frames(self._socket, 2, copy=False)
            except zmq.Again:
                return None
            if len(frames) != 2:
                raise ProtocolError(f"sealed pages of {len(frames)} frames, not 2")
            opened = self._opener.open(frames[0].bytes, has_data=True)
            pages = decode_frame(_pages_decoder, opened.header)
            if pages.indices:
                self._opened, self._num_echoes, self._is_asking = opened, 0, False
                return pages, frames[1].buffer
            self._take_echo()
        return None

    def ask(self) -> bool:
        self._is_asking = bool(self._in_flight)
        if self._is_asking:
            self._send_sealed(Pull(unit=next(iter(self._in_flight))[0], indices=b""))
        return True

    def close(self) -> None:
        super().close()
        self._closing.close()

    def _unsealed(self, data: memoryview) -> memoryview | None:
        opened, self._opened = self._opened, None
        if opened is None:
            raise ProtocolError(f"pages on a link whose pages travel by {self.name}")
        whole = self._opener.open_data(opened, data)
        return None if whole is None else memoryview(whole)

    def _send_sealed(self, pull: Pull) -> None:
        try:
            send_frames(self._socket, *self._sealer.seal(encode(pull, self._protocol)))
        except zmq.ZMQError as error:
            self._lost = f"the connection for pages takes no message ({error.strerror})"

    def _take_echo(self) -> None:
        """An echo comes behind the answers to earlier pulls, so pulls that it has overtaken were lost."""
        if not self._is_asking:
            return
        self._num_echoes += 1
        if self._num_echoes >= self._most_echoes:
            self._lost = "it answers small messages, but pages that were asked for have not come"
        else:
            self.ask()

    def _connect(self, peer: PeerHost, welcome: PagePortWelcome) -> None:
        connect_page_socket(
            self._socket,
            self._address,
            welcome.guest,
            welcome.password,
            max_frame=max(MESSAGE_BYTES, sum(pool.page_bytes for pool in self.memory)) + _SLACK_BYTES,
            silence_s=silence_s(peer.handshake_s, peer.round_trip_s),
        )

    def _check_connection(self) -> None:
        where = f"its port for pages, {self._address}"
        while True:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                break
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connect_by = None
            elif self._connect_by is not None:
                raise Unreachable(f"{where}, refuses the connection")
            else:
                raise TransferError(f"the connection to {where}, was closed")
        if self._connect_by is not None and self._clock() >= self._connect_by:
            raise Unreachable(f"{where}, does not answer; a firewall may close it")
