"""Monitor of the router's socket: it notices connections that open and close, and peers that fail the handshake.

A closed connection causes a monitor event within milliseconds, but the event names no routing id. libzmq ends the pipe
of the connection a moment later. Therefore `probe` is called a few times after the event: it sends a message to every
known node, and with ROUTER_MANDATORY the send fails for exactly the node that is gone.

A peer that has not sent a valid message yet is a stranger, and a porter says which strangers are closed. A thread looks
at the events (strangers.py), and calls the event loop if a connection has closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import zmq

from .strangers import Porter, PortWatch
from .throttle import Throttle

logger = logging.getLogger(__name__)

PROBE_DELAYS_S = (0.002, 0.02, 0.05)
_HANDSHAKE_LOG_S = 5.0  # a node with wrong keys tries again every second
_HANDSHAKE_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # _AUTH: see curve.py


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

    def _on_event(self, event: int) -> None:
        """Handle an event, in the thread of the watch."""
        if event == zmq.EVENT_DISCONNECTED:
            if not self._is_told:
                self._is_told = True
                with contextlib.suppress(RuntimeError):  # the loop is over
                    self._loop.call_soon_threadsafe(self._begin_to_probe)
        elif self._failed_handshakes.is_due():
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
