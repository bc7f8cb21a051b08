"""Strangers: connections that libzmq has accepted at a port of ours, and over which no valid message has come yet.

libzmq accepts a connection before it knows the peer, and sets no bound. So a `Porter` says which strangers are closed.
An event of the monitor names the connection by its file descriptor, and so does each message that came over it.

A flood takes milliseconds to use all descriptors, and a loop may look at the events only after seconds. So a thread
looks at them: `PortWatch`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from .addresses import parse_address
from .sockets import bound_address, open_monitor
from .tcp_connection import TcpConnection


class Stranger(TcpConnection):
    """An accepted connection over which no valid message has come yet."""


class Porter(Protocol):
    """Decides which strangers are closed."""

    def come(self, stranger: Stranger) -> None:
        """A stranger has connected."""
        ...

    def go(self, stranger: Stranger) -> None:
        """A stranger is known now, or its connection is closed."""
        ...


class Strangers:
    """The strangers at a TCP port, whom the porter looks at."""

    def __init__(self, port: int, porter: Porter) -> None:
        self._port, self._porter = port, porter
        self._by_descriptor: dict[int, Stranger] = {}

    def __len__(self) -> int:
        return len(self._by_descriptor)

    def meet(self, descriptor: int) -> None:
        """Take a new connection."""
        self.know(descriptor)  # an earlier connection, if its end was not seen
        stranger = self._by_descriptor[descriptor] = Stranger(descriptor, self._port)
        self._porter.come(stranger)

    def know(self, descriptor: int) -> None:
        """Forget a connection: a valid message has come over it, or it is closed."""
        stranger = self._by_descriptor.pop(descriptor, None)
        if stranger is not None:
            self._porter.go(stranger)


class PortWatch:
    """A thread that watches the connections of a bound socket. The owner closes it before the socket.

    Strangers are looked at with a `porter`, and at a TCP port. The thread calls `on_event` with each of these `events`.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        porter: Porter | None,
        events: int = 0,
        on_event: Callable[[int], None] | None = None,
    ) -> None:
        self._socket, self._lock = socket, threading.Lock()
        self._events, self._on_event = events, on_event
        port = parse_address(bound_address(socket)).port
        self._strangers = None if port is None or porter is None else Strangers(port, porter)
        if self._strangers is not None:
            events |= zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        self._monitor = open_monitor(socket, events | zmq.EVENT_MONITOR_STOPPED)
        self._thread = threading.Thread(target=self._run, name="baton-port", daemon=True)
        self._thread.start()

    @property
    def has_strangers(self) -> bool:
        """Whether `know` has anything to do."""
        return bool(self._strangers)

    def know(self, descriptor: int) -> None:
        """Take the connection with this file descriptor for a node's: a valid message has come over it."""
        if self._strangers is not None:
            with self._lock:
                self._strangers.know(descriptor)

    def close(self) -> None:
        """Stop watching."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._thread.join()
        self._monitor.close(linger=0)

    def _run(self) -> None:
        with suppress(zmq.ZMQError):  # the context is over
            while (event := recv_monitor_message(self._monitor))["event"] != zmq.EVENT_MONITOR_STOPPED:
                self._take(event["event"], event["value"])

    def _take(self, event: int, descriptor: int) -> None:
        if self._strangers is not None and event == zmq.EVENT_ACCEPTED:
            with self._lock:
                self._strangers.meet(descriptor)
        elif event == zmq.EVENT_DISCONNECTED:
            self.know(descriptor)
        if event & self._events and self._on_event is not None:
            self._on_event(event)
