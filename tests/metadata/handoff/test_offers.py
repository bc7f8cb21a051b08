"""Offers: what the prefill node writes, the decode node reads; what does not fit the claim is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from handoff_nodes import SCHEMA, make_row, unit

from baton.metadata.errors import ProtocolError
from baton.metadata.handoff import transfer
from baton.metadata.handoff.schema.schema import blocks_per_page
from baton.metadata.handoff.tickets import Ticket
from baton.metadata.handoff.transfer import OfferedPage, read_offer, unpack_column, write_offers
from baton.metadata.wire.data_link import Offer
from baton.metadata.wire.request import pack_ids

STRIDE = 8 * blocks_per_page(SCHEMA)
PAGES = [OfferedPage(index, 9 - index, 2**40 + index, bytes([index]) * STRIDE) for index in (1, 2, 3)]


@pytest.fixture
def ticket() -> Ticket:
    ticket = Ticket(unit(), num_pages=4, lease_end=0.0, num_cached_pages=1, row=make_row(SCHEMA))
    for page in PAGES:
        ticket.offer([page.index], [page.source], [page.generation])
        ticket.checksums[page.index] = page.checksums
    return ticket


def read(offer: Offer, num_pages: int = 4, num_cached_pages: int = 1, num_peer_pages: int = 10) -> list[OfferedPage]:
    return read_offer(offer, SCHEMA, num_pages, num_cached_pages, num_peer_pages)


@pytest.mark.parametrize("pages_per_offer", [1, 2, 3])
def test_split_offers_say_the_same_as_a_whole_one(
    ticket: Ticket, pages_per_offer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "OFFER_BYTES", pages_per_offer * STRIDE)
    written = list(write_offers(ticket, [1, 2, 3], SCHEMA))
    assert len(written) == -(-3 // pages_per_offer)
    assert [page for offer in written for page in read(offer)] == PAGES
    assert [offer.row for offer in written] == [None] * (len(written) - 1) + [ticket.row]


def test_the_row_goes_alone_when_all_pages_were_offered(ticket: Ticket) -> None:
    [offer] = write_offers(ticket, [], SCHEMA)
    assert offer.row == ticket.row and read(offer) == []


def test_an_offer_before_the_row_has_none(ticket: Ticket) -> None:
    ticket.row = None
    [offer] = write_offers(ticket, [2], SCHEMA)
    assert offer.row is None and [page.index for page in read(offer)] == [2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_pages": 5}, "4 pages here, 5 there"),
        ({"indices": pack_ids([0, 2, 3])}, r"indices \[0\] were not claimed; claimed are 4 pages without the first 1"),
        ({"indices": pack_ids([1, 2, 4])}, r"indices \[4\] were not claimed; claimed are 4 pages without the first 1"),
        ({"indices": pack_ids([1, 2, 2])}, r"indices \[2\] are there more than once"),
        ({"indices": pack_ids([1, 2])}, "offer of 2 indices has 12 bytes of pages, not 8"),
        ({"indices": b"abc"}, "3 bytes is not int32"),
        ({"pages": b"abc"}, "offer of 3 indices has 3 bytes of pages, not 12"),
        ({"pages": pack_ids([8, 7, 10])}, r"pages \[10\] are not in a pool of 10 pages"),
        ({"pages": pack_ids([8, 7, 0])}, r"pages \[0\] are not in a pool of 10 pages, whose page 0 is padding"),
        ({"pages": pack_ids([8, 7, 7])}, r"pages \[7\] are there more than once"),
        ({"generations": bytes(16)}, "offer of 3 indices has 16 bytes of generations, not 24"),
        ({"checksums": bytes(3 * STRIDE - 8)}, f"has {3 * STRIDE - 8} bytes of checksums, not {3 * STRIDE}"),
        ({"row": b"short"}, "a metadata row of 5 bytes, but the schema's row has"),
        ({"row_checksum": 1}, "has checksum 0x[0-9a-f]+, the offer says 0x1: the row was damaged on its way"),
    ],
)
def test_an_offer_that_does_not_fit_is_refused_with_the_value(
    ticket: Ticket, changes: dict[str, Any], words: str
) -> None:
    [offer] = write_offers(ticket, [1, 2, 3], SCHEMA)
    assert read(offer) == PAGES
    with pytest.raises(ProtocolError, match=words):
        read(msgspec.structs.replace(offer, **changes))


def test_an_offer_before_the_welcome_is_refused(ticket: Ticket) -> None:
    [offer] = write_offers(ticket, [1], SCHEMA)
    with pytest.raises(ProtocolError, match="not in a pool of 0 pages"):
        read(offer, num_peer_pages=0)


@pytest.mark.parametrize("source", [9, 10, 14, 10**6])
def test_tail_pages_that_the_peer_does_not_have_are_refused(ticket: Ticket, source: int) -> None:
    [offer] = write_offers(ticket, [1, 2, 3], SCHEMA)
    good = msgspec.structs.replace(offer, pages=pack_ids([8, 7, 13]))
    assert [page.source for page in read_offer(good, SCHEMA, 4, 1, 10, 1, 4)] == [8, 7, 13]
    wrong = msgspec.structs.replace(offer, pages=pack_ids([8, 7, source]))
    with pytest.raises(ProtocolError, match=rf"pages \[{source}\] are not among the peer's tail pages 11 to 13"):
        read_offer(wrong, SCHEMA, 4, 1, 10, 1, 4)


def test_a_ragged_column_is_refused() -> None:
    assert unpack_column(pack_ids([3, -1])) == [3, -1]
    with pytest.raises(ProtocolError, match="a column of 5 bytes is not int32"):
        unpack_column(bytes(5))
