"""Monitor of the router's socket: it notices connections that close, and peers that fail the handshake.

A closed connection causes a monitor event within milliseconds, but the event names no routing id. libzmq ends the pipe
of the connection a moment later. Therefore `probe` is called a few times after the event: it sends a message to every
known node, and with ROUTER_MANDATORY the send fails for exactly the node that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from .sockets import DRAIN_LIMIT, file_descriptor, open_monitor
from .throttle import Throttle

logger = logging.getLogger(__name__)

PROBE_DELAYS_S = (0.002, 0.02, 0.05)
_HANDSHAKE_LOG_S = 5.0  # a node with wrong keys tries again every second
_HANDSHAKE_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # _AUTH: see curve.py


class ConnectionMonitor:
    """Watches the connections of a ROUTER socket from the running event loop. The owner closes it before the socket."""

    def __init__(self, socket: zmq.Socket[bytes], probe: Callable[[], None]) -> None:
        self._socket, self._probe = socket, probe
        self._loop = asyncio.get_running_loop()
        self._monitor = open_monitor(socket, zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILURES)
        self._monitor.linger = 0
        self._failed_handshakes = Throttle(_HANDSHAKE_LOG_S)
        self._probe_delays: list[float] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(file_descriptor(self._monitor), self._drain)
        self._drain()

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
                if event["event"] == zmq.EVENT_DISCONNECTED:
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
