"""Room for the bytes of bodies that are being received, shared by callers.

Only bytes that have come count, and the first SMALL_BODY bytes of each body do not: so there is always room for small
bodies. One caller alone may take all the room. When it is full, the caller that holds most gives way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ....metadata.errors import Overloaded

SMALL_BODY = 64 << 10


class ReceivedBody:
    """One body that is being received. `give_way` is called once if its room is needed for another caller."""

    __slots__ = ("give_way", "is_displaced", "num_bytes", "share")

    def __init__(self, share: Hashable, give_way: Callable[[], None]) -> None:
        self.share = share
        self.give_way = give_way
        self.num_bytes = 0
        self.is_displaced = False

    @property
    def num_counted(self) -> int:
        return max(0, self.num_bytes - SMALL_BODY)


class BodyRoom:
    """Room for `num_bytes`."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._num_taken = 0
        self._bodies: dict[Hashable, set[ReceivedBody]] = {}

    def add(self, body: ReceivedBody, num_bytes: int) -> None:
        """Count bytes of a body that have come. Raises Overloaded if the room is full and no other caller has more, or
        if the body has given way."""
        if body.is_displaced:
            raise Overloaded("too many bodies are being received")
        before = body.num_counted
        body.num_bytes += num_bytes
        self._bodies.setdefault(body.share, set()).add(body)
        self._num_taken += body.num_counted - before
        while self._num_taken > self._num_bytes:
            most = max(self._bodies, key=self._taken_by)
            if most == body.share or self._taken_by(most) <= self._taken_by(body.share):
                raise Overloaded("too many bodies are being received")
            largest = max(self._bodies[most], key=lambda each: each.num_bytes)
            self.remove(largest)
            largest.is_displaced = True
            largest.give_way()

    def remove(self, body: ReceivedBody) -> None:
        """Free the room of a body. A second call does nothing."""
        bodies = self._bodies.get(body.share, set())
        if body in bodies:
            self._num_taken -= body.num_counted
            bodies.remove(body)
            if not bodies:
                del self._bodies[body.share]

    def _taken_by(self, share: Hashable) -> int:
        return sum(body.num_counted for body in self._bodies[share])
