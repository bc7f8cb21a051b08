"""Nodes that introduce themselves under a name that another one has, which may be dead for all the router knows.

A process may be started again within milliseconds after its kill, before a closed connection or silence tells of that.
So who comes under a taken name is not answered before the other one has beaten once more, or has not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..metadata.messages import Hello

SILENCE_S = 1.0  # a node that has not beaten for so long does not keep its name from others
PROOF_S = 0.5  # a beat that is read so long after a Hello was sent by a node that lives beside the newcomer
MAX_WAITING = 64


class Newcomer(NamedTuple):
    """Who waits for a name."""

    peer: bytes
    hello: Hello
    since: float


class Newcomers:
    """Belongs to the registry, which decides."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, Newcomer] = {}

    def add(self, peer: bytes, hello: Hello, now: float) -> bool:
        """The peer waits, from its first Hello on. False when too many do."""
        since = self._waiting[peer].since if peer in self._waiting else now
        if peer not in self._waiting and len(self._waiting) >= MAX_WAITING:
            return False
        self._waiting[peer] = Newcomer(peer, hello, since)
        return True

    def remove(self, peer: bytes) -> None:
        """It has its answer, or is gone."""
        self._waiting.pop(peer, None)

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._waiting

    def __iter__(self) -> Iterator[Newcomer]:
        return iter(list(self._waiting.values()))


def taken(hello: Hello) -> str:
    """What it is told when the other one lives."""
    return f"a node called {hello.node_id!r} is already here; give this one another --node-id"
