"""Connections of libzmq's sockets: who connects, how long a round trip takes, and which peers fail the handshake.

libzmq owns the connections. Its monitor and its messages tell the file descriptor of each (`TcpConnection`). The kernel
measures the round trip of every connection, so no message is needed for it.

Strangers are connections that libzmq has accepted at a port of ours, and over which no valid message has come yet.
libzmq accepts a connection before it knows the peer, and sets no bound. So a `Porter` says which strangers are closed.
A flood takes milliseconds to use all descriptors, and a loop may look at the events of a monitor only after seconds. So
a thread looks at them: `PortWatch`.

The router's socket has a `ConnectionMonitor`. A closed connection causes a monitor event within milliseconds, but the
event names no routing id. libzmq ends the pipe of the connection a moment later. Therefore `probe` is called a few
times after the event: it sends a message to every known node, and with ROUTER_MANDATORY the send fails for exactly the
node that is gone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..logs import Throttle
from .addresses import parse_address
from .sockets import bound_address, open_monitor

ROUND_TRIPS = 4  # so many may pass without a sign of life: a lost packet arrives one or two round trips late
MAX_ROUND_TRIP_S = 5.0
_ROUND_TRIP = struct.Struct("=I")  # tcpi_rtt, microseconds
_ROUND_TRIP_AT = 68  # of struct tcp_info (linux/tcp.h)
_T = TypeVar("_T")


def time_limit_s(least_s: float, round_trip_s: float) -> float:
    """Return how long the other end of a connection may be silent: `least_s` on a fast network, and longer if the
    measured round trip is long."""
    return max(least_s, ROUND_TRIPS * min(round_trip_s, MAX_ROUND_TRIP_S))


class TcpConnection:
    """The connection with this file descriptor, as long as it is open. `port` is the one that our end listens at; None:
    our end has connected. If the connection is closed or is not TCP, methods do nothing, and figures are empty."""

    def __init__(self, descriptor: int, port: int | None = None) -> None:
        self._descriptor, self._port = descriptor, port

    @property
    def address(self) -> str:
        """The host at the other end."""
        return self._use(lambda connection: str(connection.getpeername()[0]), "")

    @property
    def round_trip_s(self) -> float:
        """The round trip that the kernel has measured, seconds; 0 if it has measured none."""
        return self._use(_round_trip_s, 0.0) if sys.platform == "linux" else 0.0

    def follow_round_trip(self, least_s: float) -> float:
        """Let the kernel close the connection when sent bytes stay unacknowledged for longer than `time_limit_s`.
        Return the round trip."""
        round_trip_s = self.round_trip_s
        if sys.platform == "linux":
            limit_ms = round(1000 * time_limit_s(least_s, round_trip_s))
            self._use(lambda each: each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms), None)
        return round_trip_s

    def force_close(self) -> None:
        """Shut the connection down, so that libzmq closes it."""
        self._use(lambda connection: connection.shutdown(socket.SHUT_RDWR), None)

    def _use(self, function: Callable[[socket.socket], _T], otherwise: _T) -> _T:
        """Return what the function returns for the connection, which stays libzmq's, so it is detached. Return
        `otherwise` if the connection is closed, or if its descriptor is of another use by now."""
        try:
            connection = socket.socket(fileno=self._descriptor)
        except OSError:
            return otherwise
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return otherwise
            if self._port not in (None, connection.getsockname()[1]):
                return otherwise
            return function(connection)
        except OSError:
            return otherwise
        finally:
            connection.detach()


def _round_trip_s(connection: socket.socket) -> float:
    found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP_AT + _ROUND_TRIP.size)
    return _ROUND_TRIP.unpack_from(found, _ROUND_TRIP_AT)[0] / 1e6


logger = logging.getLogger(__name__)

PROBE_DELAYS_S = (0.002, 0.02, 0.05)
_HANDSHAKE_LOG_S = 5.0  # a node with wrong keys tries again every second
_HANDSHAKE_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_REFUSED_KEY = zmq.PROTOCOL_ERROR_ZAP_INVALID_STATUS_CODE  # by curve.py, which has logged which key it was


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

    Strangers are looked at with a `porter`, and at a TCP port. The thread calls `on_event` with each of these `events`
    and its value.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        porter: Porter | None,
        events: int = 0,
        on_event: Callable[[int, int], None] | None = None,
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

    def _take(self, event: int, value: int) -> None:
        if self._strangers is not None and event == zmq.EVENT_ACCEPTED:
            with self._lock:
                self._strangers.meet(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self.know(value)
        if event & self._events and self._on_event is not None:
            self._on_event(event, value)


class ConnectionMonitor:
    """Watches the connections of a ROUTER socket, which is bound, for the running event loop. The owner closes it
    before the socket. Strangers are looked at with a `porter`, and at a TCP port."""

    def __init__(self, socket: zmq.Socket[bytes], probe: Callable[[], None], porter: Porter | None = None) -> None:
        self._probe = probe
        self._loop = asyncio.get_running_loop()
        self._failed_handshakes = Throttle(_HANDSHAKE_LOG_S)
        self._is_told = False  # the loop knows of a closed connection, and has not begun to probe for it
        self._probe_delays: list[float] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._watch = PortWatch(socket, porter, zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILURES, self._on_event)

    @property
    def has_strangers(self) -> bool:
        """Whether `know` has anything to do."""
        return self._watch.has_strangers

    def know(self, descriptor: int) -> None:
        """Take the connection with this file descriptor for a node's: a valid message has come over it."""
        self._watch.know(descriptor)

    def close(self) -> None:
        """Stop watching."""
        self._is_closed = True
        self._watch.close()
        if self._timer is not None:
            self._timer.cancel()

    def _on_event(self, event: int, value: int) -> None:
        """Handle an event, in the thread of the watch."""
        if event == zmq.EVENT_DISCONNECTED:
            if not self._is_told:
                self._is_told = True
                with suppress(RuntimeError):  # the loop is over
                    self._loop.call_soon_threadsafe(self._begin_to_probe)
        elif value != _REFUSED_KEY and self._failed_handshakes.is_due():
            logger.warning(
                "hub: refused a peer at the handshake: it does not know the router's key, or is no node (%s)",
                zmq.Event(event).name,
            )

    def _begin_to_probe(self) -> None:
        self._is_told = False
        self._probe_delays = list(PROBE_DELAYS_S)
        if self._timer is None:
            self._wait_to_probe()

    def _wait_to_probe(self) -> None:
        if self._probe_delays and not self._is_closed:
            self._timer = self._loop.call_later(self._probe_delays.pop(0), self._run_probe)

    def _run_probe(self) -> None:
        self._timer = None
        self._probe()
        self._wait_to_probe()
