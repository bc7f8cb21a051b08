"""File descriptors of a process: as many as the system allows, and always some left for nodes and for /health.

The kernel gives a new connection the lowest free descriptor. So its number tells, without counting, how many are in
use. From CROWDED of the limit on, each new connection closes another one: of the address that has most connections
without a complete request, the one that has been so for longest. A connection whose request is being answered is never
closed. From RESERVED of the limit on, a connection is served only if it asks for the router's status.

A port to which nodes connect has a share of its own for connections over which no node has spoken yet: `NodePort`.
"""

from __future__ import annotations

import logging
import resource
import time
from ipaddress import IPv6Address, ip_address
from typing import Protocol

from ..logs import Throttle
from .connections import Stranger

CROWDED = 0.8
RESERVED = 0.9
FULL = 0.95  # from here on, a new connection is closed if no other one may be
NODE_SHARE = 0.25  # of all, for connections at a port of nodes over which no node has spoken yet
YOUNG_S = 1.0  # a connection this young is closed only from RESERVED on: its request may be under way
_MOST = 1 << 20  # descriptors

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """A connection that can be closed at once."""

    def force_close(self) -> None: ...


def raise_limit() -> int:
    """Raise the soft limit of open descriptors to the hard one, log both, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    limit = most if soft == resource.RLIM_INFINITY else max(soft, most)
    if soft not in (limit, resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    logger.info("this process may open %d files and connections (the soft limit was %d)", limit, soft)
    return limit


def limit_of_descriptors() -> int:
    """Return how many descriptors this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft


def group_of(address: str) -> str:
    """Return whom an address belongs to: itself, or the network of 64 bits of IPv6, of which one host may use all."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address):
        return address
    return str(parsed.ipv4_mapped or IPv6Address(int(parsed) >> 64 << 64))


class Descriptors:
    """The HTTP connections that wait for a complete request, by address. `limit` bounds the process's descriptors.
    `what` names the connections in the log."""

    def __init__(self, limit: int, what: str = "without a complete request") -> None:
        self._limit, self._what = limit, what
        self._waiting: dict[str, dict[Closable, float]] = {}  # since when; the longest first
        self._address_of: dict[Closable, str] = {}
        self._by_count: dict[int, dict[str, None]] = {}  # addresses by their number of waiting connections
        self._most = 0  # the highest number with an address
        self._throttle = Throttle(10.0)
        self._num_closed = 0
        self.accepts_per_round = max(1, min(64, limit // 64))  # new connections before room is made for them

    @property
    def num_waiting(self) -> int:
        """Number of connections that wait for a complete request."""
        return len(self._address_of)

    def is_reserved(self, descriptor: int) -> bool:
        """Return whether a connection with this descriptor may only ask for the router's status."""
        return descriptor >= RESERVED * self._limit

    def take(self, descriptor: int) -> bool:
        """Make room for a new connection with this descriptor if they are scarce. Return False if it must be closed."""
        if descriptor < CROWDED * self._limit:
            return True
        if not self._most:
            return descriptor < FULL * self._limit
        connection, since = self._longest()
        if descriptor >= RESERVED * self._limit or time.monotonic() - since >= YOUNG_S:
            self._close(connection, descriptor)
        return True

    def make_room(self) -> bool:
        """Close connections that wait for a request, since no descriptor is free. Return whether any is closed.

        As many are closed as are reserved: a descriptor that becomes free has a low number, so `take` does not see any
        more how many are in use."""
        is_any = self._most > 0
        for _ in range(max(self.accepts_per_round, int((1 - RESERVED) * self._limit))):
            if self._most:
                self._close(self._longest()[0], self._limit)
        return is_any

    def remove(self, connection: Closable) -> None:
        """Forget a connection that is closed or that has a complete request. A second call does nothing."""
        address = self._address_of.pop(connection, None)
        if address is not None:
            waiting = self._waiting[address]
            del waiting[connection]
            self._count(address, len(waiting) + 1, len(waiting))
            if not waiting:
                del self._waiting[address]

    def wait(self, connection: Closable, group: str) -> None:
        """Take a connection that waits for its next request. One that waits already goes on, under this address, which
        `group_of` has returned."""
        before = self._address_of.get(connection)
        if before is None:
            self._wait(connection, group, time.monotonic())
        elif before != group:
            since = self._waiting[before][connection]
            self.remove(connection)
            self._wait(connection, group, since)

    def _wait(self, connection: Closable, group: str, since: float) -> None:
        waiting = self._waiting.setdefault(group, {})
        waiting[connection] = since
        self._address_of[connection] = group
        self._count(group, len(waiting) - 1, len(waiting))

    def _count(self, group: str, before: int, now: int) -> None:
        if before:
            del self._by_count[before][group]
        if now:
            self._by_count.setdefault(now, {})[group] = None
        self._most = max(self._most, now)
        while self._most and not self._by_count.get(self._most):
            self._by_count.pop(self._most, None)
            self._most -= 1

    def _longest(self) -> tuple[Closable, float]:
        address = next(iter(self._by_count[self._most]))
        return next(iter(self._waiting[address].items()))

    def _close(self, connection: Closable, descriptor: int) -> None:
        self._num_closed += 1
        if self._throttle.is_due():
            logger.warning(
                "%d of %d descriptors are in use: closing connections %s (%d so far); %s has most of them, %d. Raise "
                "the hard limit (ulimit -Hn) if they are wanted",
                descriptor,
                self._limit,
                self._what,
                self._num_closed,
                self._address_of[connection],
                self._most,
            )
        self.remove(connection)
        connection.force_close()


class NodePort:
    """Closes connections at a port of nodes over which no node has spoken yet, by the rules of `Descriptors`, when they
    take most of NODE_SHARE of the `limit` of the process."""

    def __init__(self, limit: int) -> None:
        self._table = Descriptors(int(NODE_SHARE * limit), "at the port of nodes over which no node has spoken yet")

    def come(self, stranger: Stranger) -> None:
        """Make room for a new connection, and take it."""
        self._table.take(self._table.num_waiting)
        self._table.wait(stranger, group_of(stranger.address))

    def go(self, stranger: Stranger) -> None:
        """Forget a connection that is a node's or is closed."""
        self._table.remove(stranger)
