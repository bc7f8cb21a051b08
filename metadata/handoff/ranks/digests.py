"""The checksums of whole pages, which rank 0 of a prefill node collects from its ranks.

    offer --OfferPages to each rank--> waiting --OfferDigests of all ranks--> checksums of the whole pages

A rank digests pages after the work that computed them. So when its checksums are there, its heads are final.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...wire.node_info import HandoffSchema
from ...wire.request import Unit
from ..pages import CHECKSUM_BYTES
from ..schema.kv_layout import Shard
from ..schema.schema import blocks_per_page, kv_layouts
from ..tickets import Ticket
from .orders import CloseReader, DigestAhead, EndUnit, OfferDigests, OfferPages, ServeLine, ServeOrder, ServeUnit
from .shards import digest_columns


class Digested(NamedTuple):
    """Pages of a ticket that all ranks have digested: the checksums of each whole page, by index."""

    ticket: Ticket
    checksums: dict[int, bytes]


class _Columns(NamedTuple):
    """The checksums of a rank that count: those of heads that no lower rank has."""

    own: np.ndarray  # their places among the rank's own
    whole: np.ndarray  # their places among those of the whole page
    num_own: int


@dataclass(slots=True)
class _Waiting:
    ticket: Ticket
    indices: Sequence[int]
    ranks: set[int]  # that have not answered
    checksums: np.ndarray  # [len(indices), blocks_per_page] uint64


class RankDigests:
    """Asks ranks 1 and above, over `line`, to digest offered pages and to let a decode node pull them."""

    def __init__(self, line: ServeLine, schema: HandoffSchema) -> None:
        self._line = line
        self._num_blocks = blocks_per_page(schema)
        self._columns = _columns_by_rank(schema, line.size) if self._num_blocks else []
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._readers: dict[Unit, str] = {}  # the epochs of decode nodes, as the ranks know them

    def asked(self, ticket: Ticket) -> set[int]:
        """Return the indices of the ticket's pages that ranks are digesting."""
        return {index for waiting in self._waiting.values() if waiting.ticket is ticket for index in waiting.indices}

    def begin(self, pages: Sequence[int], generations: Sequence[int]) -> None:
        """Let the GPUs of the other ranks digest pages behind the work that was sent so far, and that completes
        them."""
        self._send(DigestAhead(pages, generations))

    def ask(self, ticket: Ticket, indices: Sequence[int], own: Sequence[bytes]) -> None:
        """Let the other ranks digest these pages of the ticket. `own` are rank 0's checksums of them."""
        number, others = next(self._numbers), range(1, self._line.size)
        checksums = np.zeros((len(indices), self._num_blocks), "<u8")
        self._waiting[number] = _Waiting(ticket, tuple(indices), set(others), checksums)
        self._fill(self._waiting[number], 0, b"".join(own))
        pages, generations = ([of[index] for index in indices] for of in (ticket.pages, ticket.generations))
        self._send(OfferPages(number, ticket.unit, tuple(indices), pages, generations))

    def take(self, rank: int, report: OfferDigests) -> Digested | None:
        """Take in the checksums of a rank. When it was the last one, return those of the whole pages."""
        waiting = self._waiting.get(report.number)
        if waiting is None:
            return None  # the ticket has ended
        self._fill(waiting, rank, report.checksums)
        waiting.ranks.remove(rank)
        if waiting.ranks:
            return None
        del self._waiting[report.number]
        rows = [row.tobytes() for row in waiting.checksums]
        return Digested(waiting.ticket, dict(zip(waiting.indices, rows, strict=True)))

    def serve(self, unit: Unit, epoch: str) -> None:
        """Let the decode node of this epoch pull the unit's pages from the ranks."""
        if self._readers.get(unit) != epoch:
            self._readers[unit] = epoch
            self._send(ServeUnit(unit, epoch))

    def end(self, unit: Unit) -> None:
        """End the unit's ticket on the ranks."""
        self._readers.pop(unit, None)
        self._waiting = {number: each for number, each in self._waiting.items() if each.ticket.unit != unit}
        self._send(EndUnit(unit))

    def close_reader(self, epoch: str) -> None:
        """Close the ranks' links to this epoch of a decode node."""
        self._send(CloseReader(epoch))

    def _send(self, order: ServeOrder) -> None:
        for rank in range(1, self._line.size):
            self._line.send(rank, order)

    def _fill(self, waiting: _Waiting, rank: int, checksums: bytes) -> None:
        if not self._num_blocks:
            return
        own, whole, num_own = self._columns[rank]
        assert len(checksums) == len(waiting.indices) * num_own * CHECKSUM_BYTES, (rank, len(checksums), num_own)
        waiting.checksums[:, whole] = np.frombuffer(checksums, "<u8").reshape(-1, num_own)[:, own]


def _columns_by_rank(schema: HandoffSchema, size: int) -> list[_Columns]:
    """Return for each rank which of its checksums count."""
    seen: set[int] = set()
    found: list[_Columns] = []
    for rank in range(size):
        columns = digest_columns(kv_layouts(schema), Shard(rank, size))
        own = np.array([place for place, column in enumerate(columns.tolist()) if column not in seen], np.int64)
        seen |= set(columns.tolist())
        found.append(_Columns(own, columns[own], len(columns)))
    return found
