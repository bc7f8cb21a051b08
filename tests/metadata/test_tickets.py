"""The life of a ticket, on a clock of the test's own."""

from __future__ import annotations

import pytest

from baton.metadata.errors import ProtocolError
from baton.metadata.request import Unit
from baton.metadata.tickets import (
    MAX_PARKED,
    MAX_PARKED_OF_ONE,
    Claimed,
    Parked,
    Refund,
    Ticket,
    TicketBook,
    TicketEnded,
)

U, V = Unit("r", 0, 0), Unit("r", 1, 0)
LINK, OTHER = b"link", b"other"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock) -> TicketBook:
    return TicketBook(clock, lease_s=1.0)


def watch(book: TicketBook, clock: Clock, seconds: float) -> tuple[list[Parked], list[Parked]]:
    """What `expire` returns while that time passes, asked as often as a node asks."""
    unknown, lapsed = [], []
    end = clock.now + seconds
    while clock.now < end:
        clock.now = min(clock.now + 0.1, end)
        more = book.expire()
        unknown += more[0]
        lapsed += more[1]
    return unknown, lapsed


def claimed(book: TicketBook, unit: Unit = U, holder: bytes = LINK) -> Ticket:
    book.open(unit, 4)
    ticket = book.claim(unit, holder, 1)
    assert isinstance(ticket, Ticket)
    book.take_events()
    return ticket


def test_claim_then_ack(book):
    book.open(U, 4)
    assert book.take_events() == [] and book.units == [U]
    ticket = book.claim(U, LINK, 2)
    assert isinstance(ticket, Ticket) and (ticket.holder, ticket.have) == (LINK, 2)
    assert book.end(U, LINK, "acked")
    assert book.take_events() == [Claimed(U, 2), TicketEnded(U, "acked")]
    assert book.take_events() == [] and book.units == [] and book.get(U) is None


def test_the_end_is_told_once(book, clock):
    claimed(book)
    assert book.end(U, LINK, "dropped", "cancelled")
    assert not book.end(U, LINK, "acked")
    assert book.revoke(U, False, "late") is None
    book.close(LINK, "gone")
    clock.now += 5
    assert book.expire() == ([], [])
    assert book.take_events() == [TicketEnded(U, "dropped", "cancelled")]


def test_only_the_holder_ends_or_renews_it(book, clock):
    claimed(book)
    assert not book.end(U, OTHER, "acked")
    assert book.renew([U], OTHER) == [U]
    with pytest.raises(ProtocolError, match="claimed already"):
        book.claim(U, OTHER, 0)
    assert book.take_events() == [] and book.units == [U]


def test_a_holder_that_claims_again_has_its_ticket_still(book, clock):
    claimed(book)
    book.take_events()
    clock.now += 0.9
    ticket = book.claim(U, LINK, 0)
    assert ticket.holder == LINK and book.take_events() == []
    clock.now += 0.9
    assert book.expire() == ([], []) and book.units == [U]
    book.revoke(U, False, "late")
    with pytest.raises(ProtocolError, match="claimed already"):
        book.claim(U, LINK, 0)


def test_a_lease_ends_unless_it_is_renewed(book, clock):
    claimed(book)
    for _ in range(5):
        clock.now += 0.9
        assert book.renew([U], LINK) == []
        assert book.expire() == ([], [])
    assert book.next_deadline() == pytest.approx(clock.now + 1.0)
    assert watch(book, clock, 1.0) == ([], [Parked(U, LINK)])
    (ended,) = book.take_events()
    assert ended.how == "lease" and "1 s" in ended.reason
    assert book.renew([U], LINK) == [U]


def test_a_ticket_nobody_claims_ends_and_a_late_claim_is_told(book, clock):
    book.open(U, 4)
    assert watch(book, clock, 1.0) == ([], [])  # no holder to tell
    assert [event.how for event in book.take_events()] == ["lease"]
    refund = book.claim(U, LINK, 0)
    assert isinstance(refund, Refund) and not refund.finished


def test_an_early_claim_is_parked_and_met_by_open(book, clock):
    assert book.claim(U, LINK, 3) is None
    assert book.renew([U], LINK) == []
    clock.now += 0.9
    ticket = book.open(U, 4)
    assert (ticket.holder, ticket.have) == (LINK, 3)
    assert book.take_events() == [Claimed(U, 3)]


def test_an_unknown_claim_is_given_up_after_a_second(book, clock):
    assert book.claim(U, LINK, 0) is None
    clock.now += 0.999
    assert book.expire() == ([], [])
    clock.now += 0.001
    assert book.expire() == ([Parked(U, LINK)], [])
    assert book.next_deadline() is None and book.take_events() == []


def test_a_parked_claim_can_be_dropped(book, clock):
    book.claim(U, LINK, 0)
    assert book.end(U, LINK, "dropped")
    assert book.open(U, 4).holder is None
    assert book.take_events() == []


def test_a_parked_claim_that_cannot_fit_is_not_taken(book):
    book.claim(U, LINK, 4)
    assert book.open(U, 4).holder is None
    assert book.renew([U], LINK) == [U]


def test_a_claim_of_the_last_page_is_refused(book):
    book.open(U, 4)
    with pytest.raises(ProtocolError, match="4 pages of 4"):
        book.claim(U, LINK, 4)


def test_parking_is_bounded(book):
    links = [bytes([number]) for number in range(MAX_PARKED // MAX_PARKED_OF_ONE)]
    for link in links:
        for n in range(MAX_PARKED_OF_ONE):
            assert book.claim(Unit(f"r{n}", 0, 0), link, 0) is None
        with pytest.raises(ProtocolError, match="parked"):
            book.claim(U, link, 0)  # it has as many as one link may have
    with pytest.raises(ProtocolError, match="parked"):
        book.claim(U, OTHER, 0)  # there are as many as there may be


def test_a_claim_is_parked_once(book):
    book.claim(U, LINK, 0)
    with pytest.raises(ProtocolError, match="parked"):
        book.claim(U, LINK, 1)
    assert book.open(U, 4).have == 0


def test_revoking_an_unclaimed_ticket_ends_it_and_answers_the_late_claim(book, clock):
    book.open(U, 4)
    assert book.revoke(U, True, "stop") is None
    assert book.take_events() == [TicketEnded(U, "revoked", "stop")]
    assert book.claim(U, LINK, 0) == Refund(True, "stop")
    assert book.claim(U, LINK, 0) is None  # told once, then unknown like any other


def test_a_refund_is_forgotten_after_a_lease(book, clock):
    book.open(U, 4)
    book.revoke(U, True, "stop")
    clock.now += 1.0
    book.expire()
    assert book.claim(U, LINK, 0) is None


@pytest.mark.parametrize("answer", ["revoked", "acked", "dropped"])
def test_revoking_a_claimed_ticket_waits_for_its_holder(book, answer):
    ticket = claimed(book)
    assert book.revoke(U, True, "stop") is ticket
    assert book.take_events() == [] and book.units == [U]
    assert book.end(U, LINK, answer)
    (ended,) = book.take_events()
    assert ended.how == "revoked"


def test_a_revoked_ticket_cannot_be_kept_alive(book, clock):
    claimed(book)
    book.revoke(U, False, "error")
    watch(book, clock, 0.9)
    assert book.renew([U], LINK) == []
    watch(book, clock, 0.1)
    assert [event.how for event in book.take_events()] == ["lease"]


@pytest.mark.parametrize("away_s", [1.0, 3600.0, 1e9], ids=["a long step", "an hour of suspend", "a clock gone mad"])
def test_a_lease_that_ended_while_the_node_was_away_gets_one_more_look(book, clock, away_s):
    """The renewals of that time may still be on their way up: they lie in the socket when the loop comes back."""
    claimed(book)
    clock.now += away_s
    assert book.expire() == ([], []) and book.units == [U]
    assert book.next_deadline() == pytest.approx(clock.now + 0.25)
    book.renew([U], LINK)
    assert watch(book, clock, 0.9) == ([], [])
    clock.now += away_s
    assert book.expire() == ([], [])
    assert watch(book, clock, 0.3) == ([], [Parked(U, LINK)])  # nobody renewed it this time


def test_a_node_that_is_always_away_ends_leases_all_the_same(book, clock):
    """Steps that are longer than a lease, one after the other: the second look is the last."""
    claimed(book)
    looks = 0
    while book.units:
        clock.now += 2.0
        book.expire()
        looks += 1
    assert looks == 2


def test_messages_that_are_never_all_read_do_not_keep_leases_alive(book, clock):
    """As under a flood of junk: fairly queued renewals come through it, and a dead node's pages come free."""
    claimed(book, U, LINK)
    claimed(book, V, OTHER)
    start = clock.now
    while U in book.units:
        clock.now += 0.1
        book.renew([V], OTHER)
        book.expire(is_all_read=False)
    assert clock.now - start == pytest.approx(1.3, abs=0.11) and book.units == [V]


def test_a_clock_that_stands_still_ends_nothing(book, clock):
    claimed(book)
    for _ in range(100):
        assert book.expire() == ([], [])
    assert book.units == [U]


def test_only_the_named_claimant_gets_a_ticket(book, clock):
    book.open(U, 4, "e1")
    with pytest.raises(ProtocolError, match="for decode epoch e1, not e2"):
        book.claim(U, OTHER, 0, "e2")
    assert book.take_events() == []
    ticket = book.claim(U, LINK, 0, "e1")
    assert isinstance(ticket, Ticket) and ticket.holder == LINK


def test_a_strangers_early_claim_is_not_in_the_way(book):
    """Who claims what is not his, before it is known, neither gets it nor keeps the right one out."""
    assert book.claim(U, OTHER, 0, "e2") is None
    assert book.claim(U, LINK, 1, "e1") is None
    ticket = book.open(U, 4, "e1")
    assert (ticket.holder, ticket.have) == (LINK, 1)
    assert book.renew([U], OTHER) == [U]


def test_the_end_of_an_unclaimed_ticket_is_told_to_its_claimant_alone(book):
    book.open(U, 4, "e1")
    book.revoke(U, True, "stop")
    assert book.claim(U, OTHER, 0, "e2") is None
    assert book.claim(U, LINK, 0, "e1") == Refund(True, "stop")


def test_a_closed_epoch_ends_its_own_tickets_only(book):
    claimed(book, U, LINK)
    claimed(book, V, OTHER)
    book.claim(Unit("parked", 0, 0), LINK, 0)
    book.close(LINK, "decode node d0 is gone")
    assert book.take_events() == [TicketEnded(U, "closed", "decode node d0 is gone")]
    assert book.units == [V] and book.open(Unit("parked", 0, 0), 1).holder is None


def test_pages_are_offered_once_and_within_the_ticket(book):
    ticket = book.open(U, 4)
    ticket.offer([0, 3], [7, 9], [1, 2])
    assert ticket.pages == {0: 7, 3: 9} and ticket.generations == {0: 1, 3: 2}
    for index in (3, 4, -1):
        with pytest.raises(AssertionError):
            ticket.offer([index], [5], [1])
