"""One claimed ticket on the decode side: what was offered, what is here. Believes nothing of the peer's offers."""

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
class Inbound:
    """A claim's state. `pages` are our page numbers by index in the ticket; the first `have` are never written."""

    unit: Unit
    epoch: str  # the peer's
    have: int
    pages: tuple[int, ...]
    row: bytes | None = None
    num_asked: int = 0  # how often offers that do not come were asked for
    moving_s: float = 0.0  # seconds with at least one page on its way
    checksums: dict[int, bytes] = field(default_factory=dict[int, bytes])
    _moves: dict[int, Move] = field(default_factory=dict[int, Move])  # offered, not here yet
    _offered: set[int] = field(default_factory=set[int])
    _num_pulls: dict[int, int] = field(default_factory=dict[int, int])
    _moving_since: float | None = None
    offered_at: float = 0.0  # when the last offer was taken

    @property
    def is_offered(self) -> bool:
        """Whether every page has been offered."""
        return len(self._offered) == len(self.pages) - self.have

    @property
    def is_whole(self) -> bool:
        """Whether every page is here and checked."""
        return not self._moves and self.is_offered

    def missing(self) -> list[Move]:
        """Moves of the pages that were offered and are not here."""
        return list(self._moves.values())

    def take_offer(self, offer: Offer, schema: HandoffSchema, num_peer_pages: int) -> list[Move]:
        """The offer's pages as moves; those offered before are left out. Raises ProtocolError for anything that does
        not fit the claim, the schema or the peer's pool of `num_peer_pages` (0: not known yet, the offer came too
        early)."""
        try:
            indices, sources = unpack_ids(offer.indices), unpack_ids(offer.pages)
        except ValueError as error:
            raise ProtocolError("an offer's column is no int32 column") from error
        stride = blocks_per_page(schema) * CHECKSUM_BYTES
        if offer.num_pages != len(self.pages):
            raise ProtocolError(f"ticket has {len(self.pages)} pages here, {offer.num_pages} there")
        sizes = (len(sources), len(offer.generations), len(offer.checksums))
        if sizes != (len(indices), 8 * len(indices), stride * len(indices)):
            raise ProtocolError(f"offer of {len(indices)} indices has columns of {sizes} pages and bytes")
        if any(not self.have <= index < len(self.pages) for index in indices):
            raise ProtocolError(f"offered indices {indices[:8]} are not within {self.have} and {len(self.pages)}")
        if len(set(indices)) != len(indices):
            raise ProtocolError(f"indices {indices[:8]} hold one twice")
        if any(not 0 < source < num_peer_pages for source in sources) or len(set(sources)) != len(sources):
            raise ProtocolError(f"offered pages {sources[:8]} are not in a pool of {num_peer_pages}, or twice")
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
        for place, index in enumerate(indices):
            if index in new:
                self.checksums[index] = offer.checksums[place * stride : (place + 1) * stride]
        self.row = self.row or offer.row
        return moves

    def land(self, index: int, now: float) -> None:
        """The page is here and checked."""
        del self._moves[index], self.checksums[index]
        if not self._moves:
            self.stop_clock(now)

    @property
    def num_repeated(self) -> int:
        """Pulls in vain."""
        return sum(self._num_pulls.values())

    def count_pull(self, index: int) -> int:
        """How often the page has been pulled in vain, this time included."""
        self._num_pulls[index] = self._num_pulls.get(index, 0) + 1
        return self._num_pulls[index]

    def start_clock(self, now: float) -> None:
        """A page is on its way from now on."""
        if self._moving_since is None and self._moves:
            self._moving_since = now

    def stop_clock(self, now: float) -> None:
        """No page is on its way any more."""
        if self._moving_since is not None:
            self.moving_s += now - self._moving_since
            self._moving_since = None
