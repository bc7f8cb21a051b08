"""The state of one claim: which pages are missing, and how long pages were on their way."""

from __future__ import annotations

import pytest
from handoff_nodes import SCHEMA, make_row, unit

from baton.metadata.errors import ProtocolError
from baton.metadata.handoff.pages import row_checksum
from baton.metadata.handoff.schema.schema import blocks_per_page
from baton.metadata.handoff.transfer import Transfer
from baton.metadata.handoff.transports.base import Move
from baton.metadata.wire.data_link import Claim, Offer
from baton.metadata.wire.request import pack_ids

STRIDE = 8 * blocks_per_page(SCHEMA)


def offer(indices, row: bytes | None = None) -> Offer:
    return Offer(
        unit=unit(),
        num_pages=4,
        indices=pack_ids(indices),
        pages=pack_ids([index + 10 for index in indices]),
        generations=b"".join((index + 1).to_bytes(8, "little") for index in indices),
        checksums=b"".join(bytes([index]) * STRIDE for index in indices),
        row=row,
        row_checksum=0 if row is None else row_checksum(row),
    )


@pytest.fixture
def transfer() -> Transfer:
    return Transfer(Claim(unit=unit(), num_cached_pages=1), "e", pages=(5, 6, 7, 8))


def test_offers_become_moves_with_checksums(transfer):
    moves = transfer.take_offer(offer([1, 3]), SCHEMA, 20)
    ones, threes = (bytes([index]) * STRIDE for index in (1, 3))
    assert moves == [Move(unit(), 1, 11, 6, 2, ones), Move(unit(), 3, 13, 8, 4, threes)] == transfer.missing()


def test_a_transfer_is_complete_when_every_missing_page_is_here(transfer):
    transfer.take_offer(offer([1, 2]), SCHEMA, 20)
    transfer.land(1, 0.0)
    transfer.land(2, 0.0)
    assert not transfer.missing() and not transfer.is_whole  # page 3 was not offered yet
    transfer.take_offer(offer([3], make_row(SCHEMA)), SCHEMA, 20)
    assert not transfer.is_whole
    transfer.land(3, 0.0)
    assert transfer.is_whole and transfer.row == make_row(SCHEMA)


def test_time_counts_while_pages_are_on_their_way(transfer):
    transfer.start_clock(0.0)  # nothing is
    transfer.take_offer(offer([1, 2]), SCHEMA, 20)
    transfer.start_clock(10.0)
    transfer.start_clock(11.0)
    transfer.land(1, 12.0)
    transfer.land(2, 13.0)
    transfer.take_offer(offer([3]), SCHEMA, 20)
    transfer.start_clock(20.0)
    transfer.land(3, 20.5)
    transfer.stop_clock(30.0)
    assert transfer.moving_s == pytest.approx(3.5)


def test_pages_offered_before_are_left_out(transfer):
    """Offers are repeated if some may have been lost."""
    transfer.take_offer(offer([1, 2], make_row(SCHEMA)), SCHEMA, 20)
    transfer.land(1, 0.0)
    [third] = transfer.take_offer(offer([1, 2, 3], make_row(SCHEMA, seed=8)), SCHEMA, 20)
    assert third == Move(unit(), 3, 13, 8, 4, b"\3" * STRIDE)
    assert [move.index for move in transfer.missing()] == [2, 3]
    assert transfer.row == make_row(SCHEMA)
    with pytest.raises(ProtocolError, match="more than once"):
        transfer.take_offer(offer([3, 3]), SCHEMA, 20)


def test_cached_pages_cannot_be_offered(transfer):
    with pytest.raises(ProtocolError, match="claimed are 4 pages without the first 1"):
        transfer.take_offer(offer([0]), SCHEMA, 20)


def test_pulls_are_counted_by_page(transfer):
    assert [transfer.count_pull(1), transfer.count_pull(2), transfer.count_pull(1)] == [1, 1, 2]
