"""Strangers: connections that libzmq has accepted at a port of ours, and over which no valid message has come yet.

libzmq accepts a connection before it knows the peer, and sets no bound. So a `Porter` says which strangers are closed.
An event of the monitor names the connection by its file descriptor, and so does each message that came over it.

The router looks at the events in its event loop (connection_monitor.py). A node computes for seconds between two looks,
and a flood takes less to use all descriptors. So a thread looks at the port of its data links: `PortWatch`.
"""

from __future__ import annotations

import threading
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
    """A thread that watches the strangers at a bound socket, if it listens at a TCP port. The owner closes it before
    the socket."""

    def __init__(self, socket: zmq.Socket[bytes], porter: Porter) -> None:
        self._socket, self._lock = socket, threading.Lock()
        port = parse_address(bound_address(socket)).port
        self._strangers = None if port is None else Strangers(port, porter)
        if self._strangers is None:
            return
        self._monitor = open_monitor(socket, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)
        self._thread = threading.Thread(target=self._run, args=(self._strangers,), name="baton-port", daemon=True)
        self._thread.start()

    def know(self, descriptor: int) -> None:
        """Take the connection with this file descriptor for a node's: a valid message has come over it."""
        if self._strangers is not None:
            with self._lock:
                self._strangers.know(descriptor)

    def close(self) -> None:
        """Stop watching."""
        if self._strangers is not None:
            if not self._socket.closed:
                self._socket.disable_monitor()
            self._thread.join()
            self._monitor.close(linger=0)

    def _run(self, strangers: Strangers) -> None:
        with suppress(zmq.ZMQError):  # the context is over
            while (event := recv_monitor_message(self._monitor))["event"] != zmq.EVENT_MONITOR_STOPPED:
                with self._lock:
                    (strangers.meet if event["event"] == zmq.EVENT_ACCEPTED else strangers.know)(event["value"])
