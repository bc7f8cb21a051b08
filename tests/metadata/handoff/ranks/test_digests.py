"""The checksums of whole pages, made of those of the ranks."""

from __future__ import annotations

import numpy as np
import pytest
from handoff_nodes import make_memory, unit
from rank_nodes import NUM_PAGES, SEED, LocalLine, heads_schema, rank_end

from baton.metadata.handoff.pages import page_checksums
from baton.metadata.handoff.ranks.digests import RankDigests
from baton.metadata.handoff.ranks.orders import CloseReader, EndUnit, OfferDigests, OfferPages, ServeUnit
from baton.metadata.handoff.schema.kv_layout import Shard
from baton.metadata.handoff.tickets import Ticket


class Rank:
    """A rank that does nothing: the test says what it reports."""

    def do(self, order: object) -> None: ...

    def poll(self) -> list[object]:
        return []


def ticket_of(*pages: int) -> Ticket:
    ticket = Ticket(unit(), len(pages), 0.0)
    ticket.offer(range(len(pages)), pages, [7] * len(pages))
    return ticket


def digests_of(size: int, target: int, draft: int, page: int) -> list[bytes]:
    """Return what each rank computes of its own heads."""
    found: list[bytes] = []
    for rank in range(size):
        end = rank_end(heads_schema(target, draft), Shard(rank, size), "prefill")
        found.append(page_checksums(end.memory, page))
        for pool in end.memory:
            pool.close()
    return found


@pytest.mark.parametrize(("size", "target", "draft"), [(2, 4, 2), (3, 6, 1), (4, 2, 4)])
def test_the_ranks_checksums_make_those_of_the_whole_page(size: int, target: int, draft: int) -> None:
    """Equal to those of a node with one rank. Of heads that several ranks have, the first rank's count."""
    schema = heads_schema(target, draft)
    whole = make_memory(schema, NUM_PAGES, SEED)
    line = LocalLine([Rank() for _ in range(size - 1)])
    digests, ticket = RankDigests(line, schema), ticket_of(3, 5)
    own = [digests_of(size, target, draft, page) for page in (3, 5)]
    digests.ask(ticket, [0, 1], [own[0][0], own[1][0]])
    assert digests.asked(ticket) == {0, 1} and digests.asked(ticket_of(3)) == set()
    assert [rank for rank, order in line.sent if isinstance(order, OfferPages)] == list(range(1, size))
    for rank in range(size - 1, 0, -1):
        answer = own[0][rank] + own[1][rank]
        if target < size and rank % 2:
            per_page = len(own[0][rank])  # a rank whose heads of the target the rank before has
            spoilt = bytearray(answer)
            spoilt[0], spoilt[per_page] = spoilt[0] ^ 1, spoilt[per_page] ^ 1
            answer = bytes(spoilt)
        found = digests.take(rank, OfferDigests(1, answer))
        assert (found is None) == (rank > 1)
    assert found is not None and found.ticket is ticket
    assert found.checksums == {index: page_checksums(whole, page) for index, page in ((0, 3), (1, 5))}
    assert digests.asked(ticket) == set()
    for pool in whole:
        pool.close()


def test_answers_for_a_ticket_that_ended_are_ignored() -> None:
    line = LocalLine([Rank()])
    digests, ticket = RankDigests(line, heads_schema(4, 2)), ticket_of(3)
    mine, other = digests_of(2, 4, 2, 3)
    digests.ask(ticket, [0], [mine])
    digests.end(ticket.unit)
    assert digests.asked(ticket) == set() and digests.take(1, OfferDigests(1, other)) is None
    assert line.sent[-1] == (1, EndUnit(unit()))


def test_a_reader_is_told_once_and_again_when_it_changes() -> None:
    line = LocalLine([Rank(), Rank()])
    digests = RankDigests(line, heads_schema(6))
    for epoch in ("a", "a", "b"):
        digests.serve(unit(), epoch)
    digests.close_reader("b")
    digests.end(unit())
    digests.serve(unit(), "b")
    orders = [ServeUnit(unit(), "a"), ServeUnit(unit(), "b"), CloseReader("b"), EndUnit(unit()), ServeUnit(unit(), "b")]
    assert line.sent == [(rank, order) for order in orders for rank in (1, 2)]


def test_without_checksums_the_ranks_still_say_that_their_pages_are_final() -> None:
    digests, ticket = RankDigests(LocalLine([Rank()]), heads_schema(4, checksums=False)), ticket_of(3, 5)
    digests.ask(ticket, [0, 1], [b"", b""])
    found = digests.take(1, OfferDigests(1, b""))
    assert found is not None and found.checksums == {0: b"", 1: b""}


def test_checksums_of_another_length_are_a_defect() -> None:
    digests, ticket = RankDigests(LocalLine([Rank()]), heads_schema(4)), ticket_of(3)
    with pytest.raises(AssertionError):
        digests.ask(ticket, [0], [np.zeros(3, "<u8").tobytes()])
