"""A TCP connection of libzmq: how long its round trip takes, and which time limits follow from that.

libzmq owns the connection. Its monitor and its messages tell the file descriptor. The kernel measures the round trip of
every connection, so no message is needed for it.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable
from typing import TypeVar

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
