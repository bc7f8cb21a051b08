"""Monitor of the router's socket: it notices connections that open and close, and peers that fail the handshake.

A closed connection causes a monitor event within milliseconds, but the event names no routing id. libzmq ends the pipe
of the connection a moment later. Therefore `probe` is called a few times after the event: it sends a message to every
known node, and with ROUTER_MANDATORY the send fails for exactly the node that is gone.

A peer that has not sent a valid message yet is a stranger, and a porter says which strangers are closed
(strangers.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from .addresses import parse_address
from .sockets import DRAIN_LIMIT, bound_address, file_descriptor, open_monitor
from .strangers import Porter, Strangers
from .throttle import Throttle

logger = logging.getLogger(__name__)

PROBE_DELAYS_S = (0.002, 0.02, 0.05)
_HANDSHAKE_LOG_S = 5.0  # a node with wrong keys tries again every second
_HANDSHAKE_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # _AUTH: see curve.py


class ConnectionMonitor:
    """Watches the connections of a ROUTER socket, which is bound, from the running event loop. The owner closes it
    before the socket. Strangers are looked at with a `porter`, and at a TCP port."""

    def __init__(self, socket: zmq.Socket[bytes], probe: Callable[[], None], porter: Porter | None = None) -> None:
        self._socket, self._probe = socket, probe
        port = parse_address(bound_address(socket)).port
        self._strangers = None if port is None or porter is None else Strangers(port, porter)
        self._loop = asyncio.get_running_loop()
        events = zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILURES | (0 if self._strangers is None else zmq.EVENT_ACCEPTED)
        self._monitor = open_monitor(socket, events)
        self._monitor.linger = 0
        self._failed_handshakes = Throttle(_HANDSHAKE_LOG_S)
        self._probe_delays: list[float] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(file_descriptor(self._monitor), self._drain)
        self._drain()

    @property
    def has_strangers(self) -> bool:
        """Whether `know` has anything to do."""
        return bool(self._strangers)

    def know(self, descriptor: int) -> None:
        """Take the connection with this file descriptor for a node's: a valid message has come over it."""
        if self._strangers is not None:
            self._strangers.know(descriptor)

    def close(self) -> None:
        """Stop watching."""
        self._loop.remove_reader(file_descriptor(self._monitor))
        self._socket.disable_monitor()
        self._monitor.close()
        if self._timer is not None:
            self._timer.cancel()

    def _drain(self) -> None:
        if self._monitor.closed:
            return
        with contextlib.suppress(zmq.Again):
            for _ in range(DRAIN_LIMIT):
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                if event["event"] == zmq.EVENT_ACCEPTED and self._strangers is not None:
                    self._strangers.meet(event["value"])
                elif event["event"] == zmq.EVENT_DISCONNECTED:
                    self.know(event["value"])
                    self._probe_delays = list(PROBE_DELAYS_S)
                elif self._failed_handshakes.is_due():
                    logger.warning(
                        "hub: refused a peer at the handshake: it does not know the router's key, or is no node (%s)",
                        zmq.Event(event["event"]).name,
                    )
            self._loop.call_soon(self._drain)
        if self._timer is None:
            self._wait_to_probe()

    def _wait_to_probe(self) -> None:
        if self._probe_delays:
            self._timer = self._loop.call_later(self._probe_delays.pop(0), self._run_probe)

    def _run_probe(self) -> None:
        self._timer = None
        self._probe()
        self._wait_to_probe()
