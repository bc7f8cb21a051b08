"""The ends of a node's data links, as its loop sees them: one that serves pages, one that pulls pages, or both."""

from __future__ import annotations

import zmq

from ..bus.membership import DataLink


class DataLinks:
    """Both ends of a node, in the interface of one. None: the node has no such end."""

    def __init__(self, *ends: DataLink | None) -> None:
        self._ends = [end for end in ends if end is not None]

    def wait_s(self) -> float | None:
        """Return the shortest of the ends' waits."""
        return min((wait for wait in (end.wait_s() for end in self._ends) if wait is not None), default=None)

    def sockets(self) -> list[zmq.Socket[bytes] | int]:
        """Return the sockets of all ends."""
        return [socket for end in self._ends for socket in end.sockets()]

    def allow_for(self, round_trip_s: float) -> None:
        """Give the peers of all ends more time."""
        for end in self._ends:
            end.allow_for(round_trip_s)

    def close(self) -> None:
        """Close all ends."""
        for end in self._ends:
            end.close()
