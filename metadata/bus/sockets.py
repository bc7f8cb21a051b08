"""Names, limits and functions that all sockets of Baton share."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import zmq

from ..errors import ConfigError, ProtocolError, StaleMessage
from ..logs import Throttle
from .addresses import parse_address

if TYPE_CHECKING:
    from .allow_list import AllowList

DRAIN_LIMIT = 256  # messages read from a socket before other work gets its turn
QUEUE_LEN = 8192  # messages queued per peer and direction
HANDSHAKE_MS = 10_000  # greeting and keys take four round trips, each of which may take two seconds
ZMTP_HEARTBEAT_MS = 1000  # closes connections whose other end vanished; says nothing about the process
_KEEPALIVE_S = 10, 5, 2  # of TCP: first after so many seconds of silence, then every so many, until so many are lost
ZMTP_SILENCE_MS = 10_000  # cannot be changed while a connection stands, so it is long enough for slow networks
UNACKNOWLEDGED_S = 4.0  # a node that connects gives sent bytes so long to be acknowledged, longer on slow networks
HEARTBEAT_SUFFIX = b":beat"  # the end of the routing id of a node's heartbeat socket

_POLLIN, _FIRST = int(zmq.POLLIN), zmq.NOBLOCK | zmq.SNDMORE  # operators of these enumerations are slow
_MAX_ROUTING_ID = 255 - len(HEARTBEAT_SUFFIX)
_monitor_numbers = itertools.count()


def new_epoch() -> str:
    """Return a new epoch: 16 random hex digits."""
    return secrets.token_hex(8)


def routing_id(node_id: str, epoch: str) -> bytes:
    """Return the routing id of one epoch of a node, `node_id:epoch`. Raises ConfigError if it is longer than ZeroMQ
    allows."""
    name = f"{node_id}:{epoch}".encode()
    if len(name) > _MAX_ROUTING_ID:
        raise ConfigError(f"node id {node_id!r} is too long: with its epoch over {_MAX_ROUTING_ID} bytes")
    return name


class Wire:
    """All access of the product to its sockets: every connection that it opens, and every message that it sends or
    receives. Fault tests put a faulty one in its place (tests/chaos/faulty.py)."""

    def connect(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Do the work of `connect_socket`."""
        socket.connect(address)

    def send(self, socket: zmq.Socket[bytes], frames: Sequence[Any], *, track: bool) -> zmq.MessageTracker | None:
        """Do the work of `send_frames`."""
        for frame in frames[:-1]:
            socket.send(frame, _FIRST)
        if track:
            return cast(zmq.MessageTracker, socket.send(frames[-1], zmq.NOBLOCK, copy=False, track=True))
        socket.send(frames[-1], zmq.NOBLOCK)
        return None

    def receive(self, socket: zmq.Socket[bytes], most: int, *, least: int, copy: bool) -> list[Any]:
        """Do the work of `receive_frames`."""
        frames: list[Any] = [socket.recv(zmq.NOBLOCK, copy=copy)]
        while len(frames) < least or socket.get(zmq.RCVMORE):
            frame: Any = socket.recv(zmq.NOBLOCK, copy=copy)
            if len(frames) <= most:
                frames.append(frame)
        return frames


wire = Wire()


def connect_socket(socket: zmq.Socket[bytes], address: str) -> None:
    """Connect a socket, and again after every break. Raises zmq.ZMQError for an invalid address."""
    wire.connect(socket, address)


def send_frames(socket: zmq.Socket[bytes], *frames: Any, track: bool = False) -> zmq.MessageTracker | None:
    """Queue a message; never wait. With `track` the last frame is not copied, so it must not change before the returned
    tracker says that it was sent. Raises zmq.ZMQError if the peer is gone, and zmq.Again if its queue is full."""
    return wire.send(socket, frames, track=track)


def receive_frames(socket: zmq.Socket[bytes], most: int, *, least: int = 1, copy: bool = True) -> list[Any]:
    """Return the frames of the next message: bytes, or `zmq.Frame` objects if `copy` is False. If it has more than
    `most` frames, only the first `most + 1` are returned, and the caller refuses the message. Every message of the
    socket has `least` frames: to ask libzmq whether there are more takes as long as to receive one. Raises zmq.Again if
    no message waits."""
    return wire.receive(socket, most, least=least, copy=copy)


class Received(NamedTuple):
    """A message at a ROUTER socket. `name` is the allow-list's name of the sender's key; None if there is no list, or
    if the key is not listed (any more). `descriptor` is the file descriptor of the connection, if asked for."""

    sender: bytes
    bodies: list[bytes]
    name: str | None
    descriptor: int | None = None

    @property
    def body(self) -> bytes:
        """The only frame of the message. Raises ProtocolError if there is another number of frames."""
        return only_frame(self.bodies)


def only_frame(frames: list[bytes]) -> bytes:
    """Return the only frame of a message. Raises ProtocolError if there is another number of frames."""
    if len(frames) != 1:
        raise ProtocolError(f"a message of {len(frames)} frames, not 1")
    return frames[0]


def sender_key(frame: zmq.Frame) -> bytes:
    """Return the public key that the sender of a message proved. `frame` is any of its frames, received uncopied at a
    socket that `secure_server` in curve.py made."""
    return cast(str, frame.get("User-Id")).encode()


def receive_from(socket: zmq.Socket[bytes], allow_list: AllowList | None, *, with_descriptor: bool = False) -> Received:
    """Return the next message. A valid one has exactly one body. Raises zmq.Again if no message waits."""
    if allow_list is None and not with_descriptor:
        sender, *bodies = receive_frames(socket, 2, least=2)  # a ROUTER socket puts the sender before each message
        return Received(sender, bodies, None)
    frames = receive_frames(socket, 2, least=2, copy=False)
    name = None if allow_list is None else allow_list.newest_name_of(sender_key(frames[0]))
    descriptor = None
    if with_descriptor:
        with suppress(zmq.ZMQError):  # it came from this process
            descriptor = int(frames[0].get(zmq.SRCFD))
    sender, *bodies = (frame.bytes for frame in frames)
    return Received(sender, bodies, name, descriptor)


def configure_socket(socket: zmq.Socket[bytes], address: str, *, max_frame: int) -> None:
    """Set the options that every Baton socket needs before it binds or connects: no linger, finite queues, bounded
    frames, and an end of connections whose other end vanished. A socket that connects also needs `send_heartbeats`."""
    socket.linger = 0
    socket.sndhwm = QUEUE_LEN
    socket.rcvhwm = QUEUE_LEN
    socket.maxmsgsize = max_frame
    socket.handshake_ivl = HANDSHAKE_MS
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = _KEEPALIVE_S
    socket.ipv6 = parse_address(address).needs_ipv6


def send_heartbeats(
    socket: zmq.Socket[bytes], interval_ms: int = ZMTP_HEARTBEAT_MS, silence_ms: int = ZMTP_SILENCE_MS
) -> None:
    """Have a socket that connects send heartbeats of ZMTP. It closes a connection over which nothing has come for
    `silence_ms`, and the other end one over which nothing has come for ZMTP_SILENCE_MS.

    A socket that listens must send none: libzmq reads no more from a connection whose routing id has come again over
    another one, and if such a connection closes, its next heartbeat aborts the process (zeromq/libzmq#4364)."""
    socket.set(zmq.HEARTBEAT_IVL, interval_ms)
    socket.set(zmq.HEARTBEAT_TIMEOUT, silence_ms)
    socket.set(zmq.HEARTBEAT_TTL, ZMTP_SILENCE_MS)


def open_monitor(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Return a PAIR socket that receives these events of a socket. `socket.disable_monitor()` ends them.

    Raises zmq.ZMQError if the process may open no more sockets. The PAIR socket is opened before libzmq's own end: the
    thread that reports an event waits for a reader, so if there never is one, all sockets of the process stop. That is
    what a `get_monitor_socket` that fails can leave.
    """
    monitor = cast("zmq.Context[zmq.Socket[bytes]]", socket.context).socket(zmq.PAIR)
    try:
        address = f"inproc://monitor-{next(_monitor_numbers)}"
        socket.monitor(address, events)
        monitor.connect(address)
    except zmq.ZMQError:
        monitor.close(linger=0)
        raise
    return monitor


def bound_address(socket: zmq.Socket[bytes]) -> str:
    """Return the address at which a socket listens, with the port that was chosen."""
    return cast(bytes, socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def file_descriptor(socket: zmq.Socket[bytes]) -> int:
    """Return the file descriptor that an event loop watches. It is edge-triggered: readable means only that `has_input`
    may have changed."""
    return cast(int, socket.get(zmq.FD))


def has_input(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message waits. Processes libzmq's pending signals, so it re-arms the file descriptor."""
    return bool(cast(int, socket.get(zmq.EVENTS)) & _POLLIN)


class DroppedFrames:
    """Counts the frames that one socket refused, and logs them at most once per second. Messages about work that has
    ended are counted apart, because ordinary cancels cause them."""

    def __init__(self, logger: logging.Logger, where: str) -> None:
        self.count = 0
        self.num_stale = 0
        self._logger = logger
        self._where = where
        self._throttle = Throttle()
        self._stale_throttle = Throttle()

    def add(self, sender: bytes, error: ProtocolError) -> None:
        """Count one frame; `error` says what is wrong with it."""
        if isinstance(error, StaleMessage):
            self.num_stale += 1
            if self._logger.isEnabledFor(logging.DEBUG) and self._stale_throttle.is_due():
                words = "%s: late message of %.80r (%d so far): %s"
                self._logger.debug(words, self._where, sender, self.num_stale, error)
            return
        self.count += 1
        if self._throttle.is_due():
            self._logger.warning("%s dropped a frame of %.80r (%d so far): %s", self._where, sender, self.count, error)
