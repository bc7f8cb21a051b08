"""Detection of clients that are gone, on connections whose client has closed its sending side.

A client may close its sending side and wait for the answer (`shutdown(SHUT_WR)`, `nc -N`), or it may be gone. Both
send the same FIN. They differ when they receive bytes: a client that is gone replies with RST. So while the request
runs, the router sends bytes that a waiting client ignores, and checks whether the connection still stands. A client
that leaves later is found in the same way.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

FIRST_S = 0.025  # until the first probe; most such requests are answered before
MAX_LOOK_S = 0.25  # between two checks
MAX_PROBE_S = 2.0  # between two probes
BLIND_S = 0.1  # a client that cannot be probed is given up after this

_CLOSE_WAIT = 8  # the kernel's TCP_CLOSE_WAIT: the peer has sent FIN and no RST


def can_look() -> bool:
    """Return whether this system reports the state of a TCP connection."""
    return hasattr(socket, "TCP_INFO")


class HalfClosed:
    """Watches one connection until `end`, and aborts it when the client is gone.

    `probe` sends bytes that a waiting client ignores. It returns False if this client would not understand them.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, probe: Callable[[], bool]
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._probe = probe
        self._look_s = self._probe_s = FIRST_S
        self._probe_at = 0.0
        self._blind_since: float | None = None
        self._timer = loop.call_later(FIRST_S, self._look)

    def end(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        now = self._loop.time()
        if not self._stands() or (self._blind_since is not None and now - self._blind_since > BLIND_S):
            self._transport.abort()
            return
        if now >= self._probe_at and not self._transport.get_write_buffer_size():  # unsent bytes are a probe too
            if self._probe():
                self._blind_since = None
                self._probe_s = min(2 * self._probe_s, MAX_PROBE_S)
                self._probe_at = now + self._probe_s
            elif self._blind_since is None:
                self._blind_since = now
        self._look_s = min(2 * self._look_s, MAX_LOOK_S)
        self._timer = self._loop.call_later(self._look_s, self._look)

    def _stands(self) -> bool:
        connection = self._transport.get_extra_info("socket")
        try:
            return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSE_WAIT
        except OSError:
            return False
