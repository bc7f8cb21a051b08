"""The rank of a new sequence, if every rank of a node has sequences of its own. Pure functions.

The rank whose prefix cache holds most of the prompt comes first, for fewer pages must be pulled or computed. But all
ranks run their rounds together, in the bucket of the largest batch. So a rank that has many more sequences than another
gets the next one only if no other rank has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_SLACK = 2  # sequences that a rank may have beyond the emptiest one and a quarter more


class RankRoom(NamedTuple):
    """The room and the cached pages of one rank, for a new sequence."""

    num_cached: int  # pages of its tokens that the rank's prefix cache holds
    num_sequences: int  # that run there or hold pages
    num_available: int  # pages that are free or can be


def preferred_ranks(rooms: Sequence[RankRoom]) -> list[int]:
    """Return all ranks, the best one for the sequence first. The first of them whose pool has room takes it."""
    most = _most_sequences(min(room.num_sequences for room in rooms))

    def key(rank: int) -> tuple[bool, int, int, int]:
        room = rooms[rank]
        is_crowded = room.num_sequences > most
        return is_crowded, 0 if is_crowded else -room.num_cached, room.num_sequences, -room.num_available

    return sorted(range(len(rooms)), key=key)


def _most_sequences(least: int) -> int:
    """Return how many sequences a rank may have before it counts as crowded, if the emptiest one has `least`."""
    return least + least // 4 + _SLACK
