"""Offers: the prefill node writes them from a ticket, and the decode node reads and checks them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from ..errors import ProtocolError
from ..wire.messages import Offer
from ..wire.node_info import HandoffSchema
from ..wire.request import pack_ids, unpack_ids
from .checksums import CHECKSUM_BYTES, row_checksum
from .schema import blocks_per_page, row_bytes
from .tickets import Ticket

OFFER_BYTES = 256 << 10  # of checksums in an offer: the decode node starts on the first pages while later are offered


class OfferedPage(Struct, frozen=True):
    """One page of an offer."""

    index: int  # in the ticket
    source: int  # its number in the prefill node's pools
    generation: int
    checksums: bytes


def write_offers(ticket: Ticket, indices: Sequence[int], schema: HandoffSchema) -> Iterator[Offer]:
    """Yield offers of these pages of the ticket. The last one carries the row, if it is known."""
    most = max(1, OFFER_BYTES // max(1, CHECKSUM_BYTES * blocks_per_page(schema)))
    for start in range(0, max(1, len(indices)), most):
        chunk = indices[start : start + most]
        row = ticket.row if start + most >= len(indices) else None
        yield Offer(
            unit=ticket.unit,
            num_pages=ticket.num_pages,
            indices=pack_ids(chunk),
            pages=pack_ids(ticket.pages[index] for index in chunk),
            generations=array("q", [ticket.generations[index] for index in chunk]).tobytes(),
            checksums=b"".join(ticket.checksums[index] for index in chunk),
            row=row,
            row_checksum=0 if row is None else row_checksum(row),
        )


def read_offer(
    offer: Offer, schema: HandoffSchema, num_pages: int, num_cached_pages: int, num_peer_pages: int
) -> list[OfferedPage]:
    """Return the offer's pages.

    The claim is for `num_pages` pages without the first `num_cached_pages`. `num_peer_pages` is the size of the peer's
    pool; 0 means not known yet, so the offer came too early. Raises ProtocolError for anything that does not fit the
    claim, the schema or the peer's pool.
    """
    indices, sources = unpack_column(offer.indices), unpack_column(offer.pages)
    stride = blocks_per_page(schema) * CHECKSUM_BYTES
    if offer.num_pages != num_pages:
        raise ProtocolError(f"the ticket has {num_pages} pages here, {offer.num_pages} there")
    sizes = (len(sources), len(offer.generations), len(offer.checksums))
    if sizes != (len(indices), 8 * len(indices), stride * len(indices)):
        raise ProtocolError(f"offer of {len(indices)} indices has columns of {sizes} pages and bytes")
    if any(not num_cached_pages <= index < num_pages for index in indices):
        raise ProtocolError(f"offered indices {indices[:8]} are not within {num_cached_pages} and {num_pages}")
    if len(set(indices)) != len(indices):
        raise ProtocolError(f"offered indices {indices[:8]} name an index twice")
    if any(not 0 < source < num_peer_pages for source in sources) or len(set(sources)) != len(sources):
        raise ProtocolError(
            f"offered pages {sources[:8]} are not in a pool of {num_peer_pages} pages, or name a page twice"
        )
    if offer.row is not None and len(offer.row) != row_bytes(schema):
        raise ProtocolError(f"a metadata row of {len(offer.row)} bytes, not {row_bytes(schema)}")
    if offer.row is not None and schema.checksum != "none" and row_checksum(offer.row) != offer.row_checksum:
        raise ProtocolError(f"the metadata row of {offer.unit} does not fit its checksum", rid=offer.unit.rid)
    generations: list[int] = np.frombuffer(offer.generations, "<i8").tolist()
    checksums = [offer.checksums[place * stride : (place + 1) * stride] for place in range(len(indices))]
    return list(map(OfferedPage, indices, sources, generations, checksums))


def unpack_column(ids: bytes) -> list[int]:
    """Return the ids in a column of a message. Raises ProtocolError if they are not int32."""
    try:
        return unpack_ids(ids)
    except ValueError as error:
        raise ProtocolError(f"a column of {len(ids)} bytes is not int32: its length is no multiple of 4") from error
