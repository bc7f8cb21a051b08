"""The life of tickets as a state machine: any order of claims, renewals, acks, lies, ends and clock jumps.

hypothesis looks for an order of steps that breaks one of three sentences: the owners of the pool sum to the pool; no
page of a live ticket is free; every ticket ends once, and for a reason that somebody gave.
"""

from __future__ import annotations

import contextlib

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.engine.pages import Owner, PagePool
from baton.metadata.errors import ProtocolError
from baton.metadata.handoff.tickets import Claimed, TicketBook, TicketEnded
from baton.metadata.wire.request import Unit

LEASE_S = 1.0
NODES = {b"link0": "e0", b"link1": "e1"}  # links and the epochs of their nodes
UNITS = [Unit("r", 0, attempt) for attempt in range(2)]

units = st.sampled_from(UNITS)
links = st.sampled_from(sorted(NODES))


class TicketLife(RuleBasedStateMachine):
    """A prefill node's pool and book, and what its peers may say."""

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
        """What the node does with the book's events."""
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
        """Silence ends everything within a lease and a quarter of the last look."""
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
