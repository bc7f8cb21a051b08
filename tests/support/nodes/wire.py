"""ZeroMQ sockets in memory, for tests that decide when each message arrives.

The ROUTER and DEALER sockets of a context share one process and one thread. They have only what Baton's sockets use.
Nothing moves by itself, and nothing waits.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

Frames = list[bytes]
Tamper = Callable[[bytes, Frames], list[Frames]]


class Wire:
    """A replacement of zmq.Context. `tamper(holder, frames)` returns the messages that arrive in place of a message of
    a DEALER (holder) on its way to a ROUTER."""

    def __init__(self) -> None:
        self.routers: dict[str, WireSocket] = {}
        self.monitored: dict[str, WireSocket] = {}
        self.tamper: Tamper = lambda _, frames: [frames]
        self.numbers = itertools.count(1)

    def socket(self, kind: int) -> Any:
        return Monitor(self) if kind == zmq.PAIR else WireSocket(self, kind)

    def dealer(self, address: str) -> WireSocket:
        """Return a peer that the test drives itself."""
        socket = WireSocket(self, zmq.DEALER)
        socket.connect(address)
        return socket


class Sent:
    """A tracker of a message that is already on the wire."""

    done = True


class Monitor:
    """A monitor that reports the begin and the end of a connection."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.events: deque[list[bytes]] = deque()

    def connect(self, address: str) -> None:
        self.events = self.wire.monitored[address].events

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        if not self.events:
            raise zmq.Again
        return self.events.popleft()

    def close(self, linger: int = 0) -> None: ...


class WireSocket:
    """A ROUTER (bind) or a DEALER (connect)."""

    linger = sndhwm = rcvhwm = maxmsgsize = handshake_ivl = ipv6 = router_mandatory = None

    def __init__(self, wire: Wire, kind: int) -> None:
        self.wire, self.context, self.kind = wire, wire, kind
        self.inbox: deque[list[bytes]] = deque()
        self.peers: dict[bytes, WireSocket] = {}  # of a ROUTER
        self.router: WireSocket | None = None  # of a DEALER
        self.holder = b""
        self.sent: list[Frames] = []
        self.closed = False
        self.events: deque[list[bytes]] = deque()  # that a monitor reports
        self._rest: deque[Any] = deque()  # frames of a message that is received
        self._first: list[Any] = []  # frames of a message that is sent

    def bind(self, address: str) -> None:
        self.address = address.replace("*", str(next(self.wire.numbers)))
        self.wire.routers[self.address] = self

    def connect(self, address: str) -> None:
        self.holder = b"\0%08d" % next(self.wire.numbers)
        self.router = self.wire.routers.get(address)
        if self.router is None:
            self._lose()
        else:
            self.router.peers[self.holder] = self
            self._report(zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def set(self, option: int, value: Any) -> None: ...

    def get(self, option: int) -> Any:
        if option == zmq.RCVMORE:
            return bool(self._rest)
        return self.address.encode() if option == zmq.LAST_ENDPOINT else 0

    def recv(self, flags: int = 0, copy: bool = True) -> Any:
        if not self._rest:
            if not self.inbox:
                raise zmq.Again
            self._rest.extend(self.inbox.popleft())
        frame = self._rest.popleft()
        return frame if copy else zmq.Frame(frame)

    def send(self, frame: Any, flags: int = 0, copy: bool = True, track: bool = False) -> Sent | None:
        self._first.append(frame)
        if flags & zmq.SNDMORE:
            return None
        frames, self._first = self._first, []
        return self.send_multipart(frames)

    def send_multipart(self, frames: list[Any], flags: int = 0, copy: bool = True, track: bool = False) -> Sent:
        frames = [bytes(memoryview(frame).cast("B")) for frame in frames] or [b""]
        if self.kind == zmq.ROUTER:
            peer = self.peers.get(frames[0])
            if peer is None:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
            peer.inbox.append(frames[1:] or [b""])
        elif self.router is not None:
            self.sent.append(frames)
            for each in self.wire.tamper(self.holder, frames):
                self.router.inbox.append([self.holder, *each])
        return Sent()

    def monitor(self, address: str, events: int) -> None:
        self.wire.monitored[address] = self

    def disable_monitor(self) -> None: ...

    def close(self, linger: int | None = None) -> None:
        self.closed = True
        if self.router is not None:
            self.router.peers.pop(self.holder, None)
        for peer in self.peers.values():
            peer._lose()
        self.peers.clear()

    def _lose(self) -> None:
        self.router = None
        self._report(zmq.EVENT_DISCONNECTED)

    def _report(self, event: int) -> None:
        self.events.append([struct.pack("=Hi", event, 0), b""])
