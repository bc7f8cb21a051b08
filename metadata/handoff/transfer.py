"""A transfer: the decode node's side of one claimed ticket.

It knows which pages were offered and which have arrived. It checks every field of the peer's offers before it uses it.
From the claim until its end (Arrived, Revoked, TransferFailed, or `drop`) the transfer owns our target pages;
tickets.py says who owns them before and after.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..errors import ProtocolError
from ..wire.messages import Offer
from ..wire.node_info import HandoffSchema
from ..wire.request import Unit, unpack_ids
from .checksums import CHECKSUM_BYTES
from .schema import blocks_per_page, row_bytes
from .transports.base import Move


@dataclass(slots=True)
class Transfer:
    """The state of one claim. `pages` are our page numbers by index in the ticket. The first `num_cached_pages` hold
    their contents already and are never written."""

    unit: Unit
    epoch: str  # the peer's
    num_cached_pages: int
    pages: tuple[int, ...]
    row: bytes | None = None
    num_asked: int = 0  # how often missing offers were asked for
    moving_s: float = 0.0  # seconds with at least one page on its way
    checksums: dict[int, bytes] = field(default_factory=dict[int, bytes])
    _moves: dict[int, Move] = field(default_factory=dict[int, Move])  # offered, not arrived yet
    _offered: set[int] = field(default_factory=set[int])
    _num_pulls: dict[int, int] = field(default_factory=dict[int, int])
    _moving_since: float | None = None
    offered_at: float = 0.0  # when the last offer was taken

    @property
    def is_offered(self) -> bool:
        """Whether every page has been offered."""
        return len(self._offered) == len(self.pages) - self.num_cached_pages

    @property
    def is_whole(self) -> bool:
        """Whether every page has arrived and been checked."""
        return not self._moves and self.is_offered

    def missing(self) -> list[Move]:
        """Return the moves of pages that were offered and have not arrived."""
        return list(self._moves.values())

    def take_offer(self, offer: Offer, schema: HandoffSchema, num_peer_pages: int) -> list[Move]:
        """Return the offer's pages as moves, without those offered before.

        `num_peer_pages` is the size of the peer's pool; 0 means not known yet, so the offer came too early. Raises
        ProtocolError for anything that does not fit the claim, the schema or the peer's pool.
        """
        try:
            indices, sources = unpack_ids(offer.indices), unpack_ids(offer.pages)
        except ValueError as error:
            raise ProtocolError(f"an offer's columns are not int32: {error}") from error
        stride = blocks_per_page(schema) * CHECKSUM_BYTES
        if offer.num_pages != len(self.pages):
            raise ProtocolError(f"the ticket has {len(self.pages)} pages here, {offer.num_pages} there")
        sizes = (len(sources), len(offer.generations), len(offer.checksums))
        if sizes != (len(indices), 8 * len(indices), stride * len(indices)):
            raise ProtocolError(f"offer of {len(indices)} indices has columns of {sizes} pages and bytes")
        if any(not self.num_cached_pages <= index < len(self.pages) for index in indices):
            raise ProtocolError(
                f"offered indices {indices[:8]} are not within {self.num_cached_pages} and {len(self.pages)}"
            )
        if len(set(indices)) != len(indices):
            raise ProtocolError(f"offered indices {indices[:8]} name an index twice")
        if any(not 0 < source < num_peer_pages for source in sources) or len(set(sources)) != len(sources):
            raise ProtocolError(
                f"offered pages {sources[:8]} are not in a pool of {num_peer_pages} pages, or name a page twice"
            )
        if offer.row is not None and len(offer.row) != row_bytes(schema):
            raise ProtocolError(f"a metadata row of {len(offer.row)} bytes, not {row_bytes(schema)}")
        generations: list[int] = np.frombuffer(offer.generations, "<i8").tolist()
        moves = [
            Move(self.unit, index, source, self.pages[index], generation)
            for index, source, generation in zip(indices, sources, generations, strict=True)
            if index not in self._offered
        ]
        self._offered.update(indices)
        self._moves |= {move.index: move for move in moves}
        new = {move.index for move in moves}
        for position, index in enumerate(indices):
            if index in new:
                self.checksums[index] = offer.checksums[position * stride : (position + 1) * stride]
        self.row = self.row or offer.row
        return moves

    def land(self, index: int, now: float) -> None:
        """Record that the page has arrived and been checked."""
        del self._moves[index], self.checksums[index]
        if not self._moves:
            self.stop_clock(now)

    @property
    def num_repeated(self) -> int:
        """How many pulls brought a page with a wrong checksum."""
        return sum(self._num_pulls.values())

    def count_pull(self, index: int) -> int:
        """Count one more pull of this page that brought a wrong checksum. Return how many there were."""
        self._num_pulls[index] = self._num_pulls.get(index, 0) + 1
        return self._num_pulls[index]

    def start_clock(self, now: float) -> None:
        """Start counting time, if a page is on its way."""
        if self._moving_since is None and self._moves:
            self._moving_since = now

    def stop_clock(self, now: float) -> None:
        """Stop counting time: no page is on its way."""
        if self._moving_since is not None:
            self.moving_s += now - self._moving_since
            self._moving_since = None
