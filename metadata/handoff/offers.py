"""Offers: the prefill node writes them from a ticket, and the decode node reads and checks them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from ..errors import ProtocolError
from ..wire.messages import Offer
from ..wire.node_info import HandoffSchema
from ..wire.request import pack_ids, unpack_ids
from .pages import CHECKSUM_BYTES, row_checksum
from .schema.schema import blocks_per_page, row_bytes
from .tickets import Ticket

OFFER_BYTES = 64 << 10  # of checksums in an offer: the decode node copies the first pages while later ones are offered


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
    _check_columns(offer, schema)
    indices, sources = unpack_column(offer.indices), unpack_column(offer.pages)
    rid = offer.unit.rid
    if offer.num_pages != num_pages:
        raise ProtocolError(f"the ticket has {num_pages} pages here, {offer.num_pages} there", rid=rid)
    wrong = [index for index in indices if not num_cached_pages <= index < num_pages]
    if wrong:
        raise ProtocolError(
            f"offered indices {wrong[:8]} were not claimed; claimed are {num_pages} pages without the first"
            f" {num_cached_pages}",
            rid=rid,
        )
    _check_unlike("indices", indices, rid)
    wrong = [source for source in sources if not 0 < source < num_peer_pages]
    if wrong:
        raise ProtocolError(
            f"offered pages {wrong[:8]} are not in a pool of {num_peer_pages} pages, whose page 0 is padding", rid=rid
        )
    _check_unlike("pages", sources, rid)
    if offer.row is not None and schema.checksum != "none" and row_checksum(offer.row) != offer.row_checksum:
        raise ProtocolError(
            f"the metadata row has checksum {row_checksum(offer.row):#x}, the offer says {offer.row_checksum:#x}: the"
            " row was damaged on its way",
            rid=rid,
        )
    generations: list[int] = np.frombuffer(offer.generations, "<i8").tolist()
    stride = blocks_per_page(schema) * CHECKSUM_BYTES
    checksums = [offer.checksums[place * stride : (place + 1) * stride] for place in range(len(indices))]
    return list(map(OfferedPage, indices, sources, generations, checksums))


def unpack_column(ids: bytes) -> list[int]:
    """Return the ids in a column of a message. Raises ProtocolError if they are not int32."""
    try:
        return unpack_ids(ids)
    except ValueError as error:
        raise ProtocolError(f"a column of {len(ids)} bytes is not int32: its length is no multiple of 4") from error


def _check_columns(offer: Offer, schema: HandoffSchema) -> None:
    """Raise ProtocolError if the columns are not of one length, or the row is not of the schema's."""
    num_pages = len(unpack_column(offer.indices))
    wanted = {"pages": 4, "generations": 8, "checksums": blocks_per_page(schema) * CHECKSUM_BYTES}
    for name, item_bytes in wanted.items():
        size = len(getattr(offer, name))
        if size != item_bytes * num_pages:
            raise ProtocolError(
                f"offer of {num_pages} indices has {size} bytes of {name}, not {item_bytes * num_pages}",
                rid=offer.unit.rid,
            )
    if offer.row is not None and len(offer.row) != row_bytes(schema):
        raise ProtocolError(
            f"a metadata row of {len(offer.row)} bytes, but the schema's row has {row_bytes(schema)}",
            rid=offer.unit.rid,
        )


def _check_unlike(name: str, numbers: Sequence[int], rid: str) -> None:
    """Raise ProtocolError if a number of this column of an offer stands there twice."""
    if len(set(numbers)) < len(numbers):
        twice = sorted(number for number, count in Counter(numbers).items() if count > 1)
        raise ProtocolError(f"offered {name} {twice[:8]} are there more than once; offer each page once", rid=rid)
