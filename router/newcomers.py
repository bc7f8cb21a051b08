"""Nodes that introduce themselves while others stand in their way that may be dead for all the router knows.

A process may be started again within milliseconds after its kill, before a closed connection or silence tells of that:
under the name that its former life still has, or with another configuration than nodes that died with it. So who
comes under a taken name, or fits none of the nodes that serve its model, is not answered before one of those has beaten
once more, or all of them are gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..metadata.wire.messages import Hello

SILENCE_S = 1.0  # a node that has not beaten for so long does not keep its name from others
PROOF_S = 0.5  # a beat that is read so long after a Hello was sent by a node that lives beside the newcomer
MAX_WAITING = 64


class Obstacle(NamedTuple):
    """Why a newcomer cannot be let in, and when the last of those who stand in its way was heard (never: inf)."""

    reason: str
    heard_at: float


class Newcomer(NamedTuple):
    """Who waits."""

    peer: bytes
    hello: Hello
    since: float


class Newcomers:
    """Belongs to the registry, which decides."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, Newcomer] = {}

    def waits(self, peer: bytes, hello: Hello, heard_at: float, now: float) -> bool:
        """Whether the peer waits on, from its first Hello on. False when somebody in its way, heard last at `heard_at`,
        has proved to live, or when too many wait."""
        since = self._waiting[peer].since if peer in self._waiting else now
        if heard_at - since > PROOF_S or (peer not in self._waiting and len(self._waiting) >= MAX_WAITING):
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
