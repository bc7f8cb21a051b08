"""The life of a ticket, on a clock that only the test moves; at the end, as a state machine.

hypothesis looks for an order of claims, renewals, acks, lies, ends and clock jumps that breaks one of three invariants:
the owners of the pool sum to the pool; no page of a live ticket is free; every ticket ends once, for a reason that a
node gave.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.engine.state.pages import Owner, PagePool
from baton.metadata.errors import ProtocolError
from baton.metadata.handoff.tickets import (
    MAX_PARKED,
    MAX_PARKED_OF_ONE,
    Claimed,
    EndedTicket,
    Ticket,
    TicketBook,
    TicketEnded,
    UnitClaim,
)
from baton.metadata.wire.request import Unit

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


def watch(book: TicketBook, clock: Clock, seconds: float) -> tuple[list[UnitClaim], list[UnitClaim]]:
    """Call `expire` as often as a node does while that time passes. Return its results."""
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


def test_an_ack_before_the_row_is_refused(book):
    ticket = claimed(book)
    with pytest.raises(ProtocolError, match="before its final offer"):
        book.ack(U, LINK)
    assert book.units == [U] and not book.ack(U, OTHER)
    ticket.row = b"row"
    assert book.ack(U, LINK) and book.take_events() == [TicketEnded(U, "acked")]
    assert not book.ack(U, LINK)


def test_a_claimed_ticket_ends_with_its_ack(book):
    book.open(U, 4)
    assert book.take_events() == [] and book.units == [U]
    ticket = book.claim(U, LINK, 2)
    assert isinstance(ticket, Ticket) and (ticket.holder, ticket.num_cached_pages) == (LINK, 2)
    assert book.end(U, LINK, "acked")
    assert book.take_events() == [Claimed(U, 2), TicketEnded(U, "acked")]
    assert book.take_events() == [] and book.units == [] and book.get(U) is None


def test_the_end_of_a_ticket_is_reported_once(book, clock):
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
    assert book.claim(U, LINK, 0) == EndedTicket(False, "late")  # told again, and its lease is not renewed
    with pytest.raises(ProtocolError, match="claimed already"):
        book.claim(U, OTHER, 0)
    assert book.next_deadline() == pytest.approx(clock.now + 0.1)


def test_a_lease_ends_unless_it_is_renewed(book, clock):
    claimed(book)
    for _ in range(5):
        clock.now += 0.9
        assert book.renew([U], LINK) == []
        assert book.expire() == ([], [])
    assert book.next_deadline() == pytest.approx(clock.now + 1.0)
    assert watch(book, clock, 1.0) == ([], [UnitClaim(U, LINK)])
    (ended,) = book.take_events()
    assert ended.how == "lease" and "1 s" in ended.reason
    assert book.renew([U], LINK) == [U]


def test_leases_allow_for_the_round_trip(book, clock):
    book.allow_for(2.0)
    book.open(U, 4)
    assert watch(book, clock, 16.9) == ([], []) and book.take_events() == []
    assert watch(book, clock, 0.2) == ([], [])
    assert [event.reason for event in book.take_events()] == ["nobody claimed it within 17 s"]


def test_an_unclaimed_ticket_ends_and_a_late_claim_is_answered(book, clock):
    book.open(U, 4)
    assert watch(book, clock, 1.0) == ([], [])  # no holder to tell
    assert [event.how for event in book.take_events()] == ["lease"]
    answer = book.claim(U, LINK, 0)
    assert isinstance(answer, EndedTicket) and not answer.finished


def test_an_early_claim_is_parked_and_met_by_open(book, clock):
    assert book.claim(U, LINK, 3) is None
    assert book.renew([U], LINK) == []
    clock.now += 0.9
    ticket = book.open(U, 4)
    assert (ticket.holder, ticket.num_cached_pages) == (LINK, 3)
    assert book.take_events() == [Claimed(U, 3)]


def test_an_unknown_claim_is_given_up_after_a_second(book, clock):
    assert book.claim(U, LINK, 0) is None
    clock.now += 0.999
    assert book.expire() == ([], [])
    clock.now += 0.001
    assert book.expire() == ([UnitClaim(U, LINK)], [])
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
    with pytest.raises(ProtocolError, match="4 cached pages of 4"):
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
    assert book.open(U, 4).num_cached_pages == 0


def test_a_parked_claim_that_is_repeated_waits_on_and_no_longer(book, clock):
    book.claim(U, LINK, 0)
    clock.now += 0.9
    assert book.claim(U, LINK, 0) is None
    clock.now += 0.1
    assert book.expire() == ([UnitClaim(U, LINK)], [])


def test_revoking_an_unclaimed_ticket_ends_it_and_answers_the_late_claim(book, clock):
    book.open(U, 4)
    assert book.revoke(U, True, "stop") is None
    assert book.take_events() == [TicketEnded(U, "revoked", "stop")]
    assert book.claim(U, LINK, 0) == EndedTicket(True, "stop")
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
    """Renewals from that time may still lie in the socket when the loop continues."""
    claimed(book)
    clock.now += away_s
    assert book.expire() == ([], []) and book.units == [U]
    assert book.next_deadline() == pytest.approx(clock.now + 0.25)
    book.renew([U], LINK)
    assert watch(book, clock, 0.9) == ([], [])
    clock.now += away_s
    assert book.expire() == ([], [])
    assert watch(book, clock, 0.3) == ([], [UnitClaim(U, LINK)])  # it was not renewed this time


def test_a_node_that_is_always_away_ends_leases_all_the_same(book, clock):
    """Every step takes longer than a lease. The second look ends the lease."""
    claimed(book)
    looks = 0
    while book.units:
        clock.now += 2.0
        book.expire()
        looks += 1
    assert looks == 2


def test_messages_that_are_never_all_read_do_not_keep_leases_alive(book, clock):
    """Under a flood of junk, renewals still come through, and the pages of a dead node become free."""
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


def test_an_early_claim_of_another_node_does_not_block_the_right_one(book):
    """A claim by another node before the ticket opens does not get the ticket and does not block the right node."""
    assert book.claim(U, OTHER, 0, "e2") is None
    assert book.claim(U, LINK, 1, "e1") is None
    ticket = book.open(U, 4, "e1")
    assert (ticket.holder, ticket.num_cached_pages) == (LINK, 1)
    assert book.renew([U], OTHER) == [U]


def test_only_its_claimant_hears_the_end_of_an_unclaimed_ticket(book):
    book.open(U, 4, "e1")
    book.revoke(U, True, "stop")
    assert book.claim(U, OTHER, 0, "e2") is None
    assert book.claim(U, LINK, 0, "e1") == EndedTicket(True, "stop")


def test_a_ticket_is_found_until_it_ends(book):
    ticket = book.open(U, 4)
    assert book.get(U) is ticket and book.get(V) is None
    book.revoke(U, False, "stop")
    assert book.get(U) is None


@pytest.mark.parametrize("num_pages", [0, -1])
def test_a_ticket_has_pages(book, num_pages):
    with pytest.raises(AssertionError):
        book.open(U, num_pages)


def test_a_unit_has_one_ticket(book):
    book.open(U, 4)
    with pytest.raises(AssertionError):
        book.open(U, 4)
    assert book.units == [U]


def test_leases_last_a_second_by_default(clock):
    book = TicketBook(clock)
    book.open(U, 4)
    assert book.next_deadline() == clock.now + 1.0


@pytest.mark.parametrize("lease_s", [1.0, 8.0])
def test_a_lease_begins_when_it_is_opened_claimed_and_claimed_again(clock, lease_s):
    book = TicketBook(clock, lease_s)
    book.open(U, 4)
    assert book.next_deadline() == clock.now + lease_s
    for _ in range(2):
        clock.now += lease_s / 4
        book.claim(U, LINK, 0)
        assert book.next_deadline() == clock.now + lease_s
        assert book.expire() == ([], [])


def test_a_claim_again_counts_as_a_renewal_of_a_lease_that_was_found_over(book, clock):
    """The lease gets its second look once more."""
    claimed(book)
    clock.now += 2.0
    assert book.expire() == ([], [])
    book.claim(U, LINK, 0)
    clock.now += 2.0
    assert book.expire() == ([], []) and book.units == [U]


def test_each_lease_that_is_found_over_is_prolonged_by_itself(book, clock):
    claimed(book, U, LINK)
    clock.now += 0.9
    claimed(book, V, OTHER)
    clock.now += 0.9
    assert book.expire() == ([], [])  # U's, which is over once
    clock.now += 0.3
    assert book.expire(is_all_read=False) == ([], [UnitClaim(U, LINK)])  # while V's is over for the first time
    assert book.units == [V] and book.next_deadline() == pytest.approx(clock.now + 0.25)


def test_all_leases_that_are_over_are_judged_when_one_is_prolonged(book, clock):
    """V's lease was found over before. U's lease, opened earlier and claimed since, is found over only now."""
    book.open(U, 4)
    claimed(book, V, OTHER)
    clock.now += 0.9
    book.claim(U, LINK, 0)
    book.take_events()
    clock.now += 0.6
    assert book.expire() == ([], []) and book.next_deadline() == pytest.approx(clock.now + 0.25)
    clock.now += 0.6
    assert book.expire() == ([], [UnitClaim(V, OTHER)])
    assert book.units == [U]


@pytest.mark.parametrize(("since_s", "is_away"), [(0.5, False), (0.5001, True)])
def test_a_node_is_away_when_it_does_not_ask_for_half_a_lease(book, clock, since_s, is_away):
    claimed(book)
    clock.now += 1.0 - since_s
    book.expire()
    clock.now += since_s
    assert book.expire() == ([], [] if is_away else [UnitClaim(U, LINK)])


@pytest.mark.parametrize("claimant", [None, "e1"])
def test_a_late_claim_hears_the_reason_for_one_lease(book, clock, claimant):
    reason = "nobody claimed it within 1 s"
    for at, is_told in ((0.9, True), (1.0, False)):
        book.open(U, 4, claimant)
        watch(book, clock, 1.0)
        assert book.take_events() == [TicketEnded(U, "lease", reason)]
        watch(book, clock, at)
        assert book.claim(U, LINK, 0, "e1") == (EndedTicket(False, reason) if is_told else None)
        book.end(U, LINK, "dropped")


def test_a_claim_of_a_revoked_ticket_hears_the_reason_for_one_lease(book, clock):
    for at, is_told in ((0.9, True), (1.0, False)):
        book.open(U, 4)
        book.revoke(U, True, "stop")
        watch(book, clock, at)
        assert book.claim(U, LINK, 0) == (EndedTicket(True, "stop") if is_told else None)
        book.end(U, LINK, "dropped")


def test_a_unit_that_is_opened_again_has_no_end_to_tell(book):
    book.open(U, 4)
    book.revoke(U, True, "stop")
    book.open(U, 4)
    assert book.end(U, LINK, "dropped") is False
    book.claim(U, LINK, 0)
    book.end(U, LINK, "acked")
    assert book.claim(U, LINK, 0) is None


def test_a_claim_without_an_epoch_has_no_claimant(book):
    book.open(U, 4, "e1")
    with pytest.raises(ProtocolError, match=r"for decode epoch e1, not $"):
        book.claim(U, LINK, 0)


def test_claims_that_are_refused_name_their_request(book):
    claimed(book)
    book.open(V, 4, "e1")
    parked = Unit("parked", 0, 0)
    book.claim(parked, LINK, 0)
    for unit, holder, have in ((U, OTHER, 0), (V, LINK, 0), (parked, LINK, 1)):
        with pytest.raises(ProtocolError) as raised:
            book.claim(unit, holder, have)
        assert raised.value.rid == unit.rid
    with pytest.raises(ProtocolError) as raised:
        book.claim(V, LINK, 4, "e1")
    assert raised.value.rid == V.rid


@pytest.mark.parametrize("how", ["dropped", "given up", "closed", "opened"])
def test_a_parked_claim_that_is_over_leaves_nothing(book, clock, how):
    book.claim(U, LINK, 0)
    book.claim(U, OTHER, 0)
    for link in (LINK, OTHER):
        if how == "dropped":
            assert book.end(U, link, "dropped")
        elif how == "closed":
            book.close(link, "gone")
    if how == "given up":
        clock.now += 1.0
        assert book.expire() == ([UnitClaim(U, LINK), UnitClaim(U, OTHER)], [])
    elif how == "opened":
        book.open(U, 4)
    assert not book._parked


def test_one_parked_claim_ends_and_the_other_waits_on(book):
    book.claim(U, LINK, 0)
    book.claim(U, OTHER, 2)
    assert book.end(U, LINK, "dropped") and not book.end(U, LINK, "dropped")
    assert book.open(U, 4).holder == OTHER


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


LEASE_S = 1.0

NODES = {b"link0": "e0", b"link1": "e1"}  # links and the epochs of their nodes

UNITS = [Unit("r", 0, attempt) for attempt in range(2)]

units = st.sampled_from(UNITS)

links = st.sampled_from(sorted(NODES))


class TicketLife(RuleBasedStateMachine):
    """A prefill node's pool and ticket book, and the messages that its peers may send."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.pool = PagePool(9, 4)
        self.book = TicketBook(lambda: self.now, LEASE_S)
        self.pages: dict[Unit, list[int]] = {}  # of the tickets that have not ended
        self.claimants: dict[Unit, str | None] = {}
        self.holders: dict[Unit, bytes] = {}
        self.kept_until: dict[Unit, float] = {}  # no lease may end before
        self.asked: dict[Unit, set[str]] = {}  # how the ticket may end by what was said so far

    @rule(unit=units, num_pages=st.integers(1, 4), claimant=st.sampled_from(["e0", "e1", None]))
    def open(self, unit: Unit, num_pages: int, claimant: str | None) -> None:
        if unit in self.pages or num_pages > self.pool.num_free:
            return
        self.pages[unit] = self.pool.allocate(num_pages, Owner.TICKET)
        self.claimants[unit], self.kept_until[unit], self.asked[unit] = claimant, self.now + LEASE_S, set()
        ticket = self.book.open(unit, num_pages, claimant)
        ticket.offer(list(range(num_pages)), self.pages[unit], [1] * num_pages)
        self._look()

    @rule(unit=units, link=links, have=st.integers(0, 4))
    def claim(self, unit: Unit, link: bytes, have: int) -> None:
        with contextlib.suppress(ProtocolError):
            self.book.claim(unit, link, have, NODES[link])
        self._look()

    @rule(unit=units, link=links)
    def renew(self, unit: Unit, link: bytes) -> None:
        unknown = self.book.renew([unit], link)
        if self.holders.get(unit) == link:
            assert not unknown
            if "revoked" not in self.asked[unit]:
                self.kept_until[unit] = self.now + LEASE_S

    @rule(unit=units, link=links, how=st.sampled_from(["acked", "dropped", "revoked"]), times=st.integers(1, 2))
    def say_the_end(self, unit: Unit, link: bytes, how: str, times: int) -> None:
        if self.holders.get(unit) == link:
            self.asked[unit].add("revoked" if "revoked" in self.asked[unit] else how)
        for _ in range(times):
            self.book.end(unit, link, how)  # type: ignore[arg-type]
        self._look()

    @rule(unit=units, finished=st.booleans())
    def revoke(self, unit: Unit, finished: bool) -> None:
        if unit in self.pages:
            self.asked[unit].add("revoked")
        ticket = self.book.revoke(unit, finished, "cancelled")
        assert (ticket is not None) == (unit in self.holders)
        self._look()

    @rule(link=links)
    def close_epoch(self, link: bytes) -> None:
        for unit, holder in self.holders.items():
            if holder == link:
                self.asked[unit].add("closed")
        self.book.close(link, "gone")
        self._look()

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.4, 0.6, 1.0, 3600.0]), is_all_read=st.booleans())
    def time_passes(self, seconds: float, is_all_read: bool) -> None:
        self.now += seconds
        for unit in self.pages:
            if self.kept_until[unit] <= self.now:
                self.asked[unit].add("lease")
        self.book.expire(is_all_read=is_all_read)
        self._look()

    def _look(self) -> None:
        """Process the book's events as a node does."""
        for event in self.book.take_events():
            if isinstance(event, Claimed):
                ticket = self.book.get(event.unit)
                holder = ticket.holder if ticket is not None else None
                assert holder is not None and self.claimants[event.unit] in (None, NODES[holder])
                self.holders[event.unit], self.kept_until[event.unit] = holder, self.now + LEASE_S
                self.asked[event.unit].discard("lease")
                continue
            assert isinstance(event, TicketEnded) and event.how in self.asked[event.unit], event
            self.pool.release(self.pages.pop(event.unit), Owner.TICKET)  # fails for one that ends twice
            self.holders.pop(event.unit, None)

    @invariant()
    def owners_sum_to_the_pool(self) -> None:
        assert self.pool.ledger().ticket == sum(map(len, self.pages.values()))

    @invariant()
    def no_page_of_a_live_ticket_is_free(self) -> None:
        for unit in self.book.units:
            ticket = self.book.get(unit)
            assert ticket is not None
            assert all(self.pool.owner(page) == Owner.TICKET for page in ticket.pages.values())
        assert set(self.book.units) == set(self.pages)

    def teardown(self) -> None:
        """Without messages, every ticket ends within a lease and a quarter."""
        for _ in range(16):
            self.time_passes(0.1, is_all_read=True)
        assert not self.book.units and self.pool.ledger().ticket == 0


TicketLife.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

test_ticket_life = TicketLife.TestCase
