"""The life of a ticket on the prefill side. Pure logic: no socket, no memory, an injected clock.

    open --claim--> claimed --ack | drop--> ended
     |                 |----- revoke ------> revoked --revoke-ack--> ended
     |                 '----- lease end, closed epoch -----------> ended
     '-- revoke, lease end (nobody reads yet) --> ended, remembered for one lease

A ticket may name its claimant, the epoch of the one decode node that may hold it. Leases are judged on a monotonic
clock, and gently: one that is found over right after the node was away (a long step, a stopped process, a clock that
jumped), or while messages are unread, gets a quarter of a lease more, once, in which a renewal that waits can be read.

An open ticket owns its pages. They stay its own until `TicketEnded` is handed out, once per ticket, by
`TicketBook.take_events`: whoever opened the ticket frees its pages (or leaves them to the prefix cache) on that event
and at no other moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..errors import ProtocolError
from ..wire.request import Unit

How = Literal["acked", "dropped", "revoked", "lease", "closed"]
Holder = bytes  # the claiming link

MAX_PARKED = 4096
MAX_PARKED_OF_ONE = 1024  # of one link


class Claimed(NamedTuple):
    """A decode node holds the ticket now; it needs no page below `have`."""

    unit: Unit
    have: int


class TicketEnded(NamedTuple):
    """The ticket's pages are its opener's again. `reason` has words where the end is no success."""

    unit: Unit
    how: How
    reason: str = ""


class Refund(NamedTuple):
    """The answer to a claim of a revoked ticket."""

    finished: bool
    reason: str


class Parked(NamedTuple):
    """A claim that waits for its unit to become known."""

    unit: Unit
    holder: Holder


class _Wish(NamedTuple):
    """What a parked claim said, and when it is given up."""

    have: int
    claimant: str
    until: float


@dataclass(slots=True)
class Ticket:
    """One unit's pages on their way. `pages`, `generations`, `checksums` are by index in the ticket."""

    unit: Unit
    num_pages: int
    lease_end: float
    claimant: str | None = None
    holder: Holder | None = None
    have: int = 0
    revoked: Refund | None = None  # what the holder is told; its lease cannot be renewed
    is_overdue: bool = False  # its lease was found over once, and prolonged
    row: bytes | None = None
    pages: dict[int, int] = field(default_factory=dict[int, int])
    generations: dict[int, int] = field(default_factory=dict[int, int])
    checksums: dict[int, bytes] = field(default_factory=dict[int, bytes])

    @property
    def is_revoked(self) -> bool:
        return self.revoked is not None

    def offer(self, indices: Sequence[int], pages: Sequence[int], generations: Sequence[int]) -> None:
        """Records offered pages; each index is offered once."""
        assert len(indices) == len(pages) == len(generations), (self.unit, indices, pages, generations)
        for index, page, generation in zip(indices, pages, generations, strict=True):
            assert 0 <= index < self.num_pages and index not in self.pages, (self.unit, index, self.num_pages)
            self.pages[index], self.generations[index] = page, generation


class TicketBook:
    """All tickets of a prefill node. Leases are `lease_s` on `clock` (monotonic seconds)."""

    def __init__(self, clock: Callable[[], float], lease_s: float = 1.0) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._tickets: dict[Unit, Ticket] = {}
        self._parked: dict[Unit, dict[Holder, _Wish]] = {}
        self._refunds: dict[Unit, tuple[Refund, str | None, float]] = {}  # what to tell, whom, until when
        self._events: list[Claimed | TicketEnded] = []
        self._expired_at = clock()

    @property
    def units(self) -> list[Unit]:
        """Units of all tickets that have not ended."""
        return list(self._tickets)

    def get(self, unit: Unit) -> Ticket | None:
        """The unit's ticket; None when it is unknown or has ended."""
        return self._tickets.get(unit)

    def open(self, unit: Unit, num_pages: int, claimant: str | None = None) -> Ticket:
        """A new ticket, claimed at once where a claim that fits was parked (holders of those that do not learn of it
        when they renew). `claimant`: the epoch of the decode node that may claim it; None: any."""
        assert unit not in self._tickets and num_pages > 0, (unit, num_pages)
        self._refunds.pop(unit, None)
        ticket = self._tickets[unit] = Ticket(unit, num_pages, self._clock() + self._lease_s, claimant)
        for holder, wish in self._parked.pop(unit, {}).items():
            if ticket.holder is None and wish.have < num_pages and claimant in (None, wish.claimant):
                self._take(ticket, holder, wish.have, wish.claimant)
        return ticket

    def claim(self, unit: Unit, holder: Holder, have: int, claimant: str = "") -> Ticket | Refund | None:
        """The ticket, now `holder`'s, whose node's epoch is `claimant`; its Refund when it was taken back before; None:
        parked until the unit is known. A holder that claims again misses offers, and renews its lease.

        Raises ProtocolError when another link holds it or may, `have` is beyond it, or too many claims are parked.
        """
        ticket = self._tickets.get(unit)
        if ticket is not None and ticket.revoked is not None and ticket.holder == holder:
            return ticket.revoked  # its claim crossed the revoke, or that was lost
        if ticket is not None:
            self._take(ticket, holder, have, claimant)
            return ticket
        if unit in self._refunds and self._refunds[unit][1] in (None, claimant):
            return self._refunds.pop(unit)[0]
        held = [of for wishes in self._parked.values() for of in wishes]
        wishes = self._parked.get(unit, {})
        if len(held) >= MAX_PARKED or held.count(holder) >= MAX_PARKED_OF_ONE or holder in wishes:
            raise ProtocolError(f"claim of {unit} cannot be parked", rid=unit.rid)
        self._parked[unit] = wishes | {holder: _Wish(have, claimant, self._clock() + self._lease_s)}
        return None

    def renew(self, units: Iterable[Unit], holder: Holder) -> list[Unit]:
        """Prolongs the leases; returns the units of which `holder` has neither a ticket nor a parked claim."""
        lease_end = self._clock() + self._lease_s
        unknown: list[Unit] = []
        for unit in units:
            ticket = self._tickets.get(unit)
            if ticket is not None and ticket.holder == holder:
                if not ticket.is_revoked:
                    ticket.lease_end, ticket.is_overdue = lease_end, False
            elif holder not in self._parked.get(unit, ()):
                unknown.append(unit)
        return unknown

    def revoke(self, unit: Unit, finished: bool, reason: str) -> Ticket | None:
        """Takes the ticket back. Unclaimed: it ends now. Claimed: returned, and ends with the holder's revoke-ack or
        its lease, which can no longer be renewed."""
        ticket = self._tickets.get(unit)
        if ticket is None:
            return None
        if ticket.holder is None:
            self._end(ticket, "revoked", reason)
            self._refunds[unit] = (Refund(finished, reason), ticket.claimant, self._clock() + self._lease_s)
            return None
        ticket.revoked = Refund(finished, reason)
        return ticket

    def end(self, unit: Unit, holder: Holder, how: How, reason: str = "") -> bool:
        """Ends the holder's ticket or parked claim. False when it has none of that unit."""
        ticket = self._tickets.get(unit)
        if ticket is not None and ticket.holder == holder:
            if ticket.is_revoked:
                how = "revoked"  # the revoke crossed the ack or drop: the opener asked for this end
            self._end(ticket, how, reason)
            return True
        return self._unpark(unit, holder)

    def close(self, holder: Holder, reason: str) -> None:
        """The holder's epoch is over: all it claimed ends."""
        for ticket in [ticket for ticket in self._tickets.values() if ticket.holder == holder]:
            self._end(ticket, "closed", reason)
        for unit in [unit for unit, wishes in self._parked.items() if holder in wishes]:
            self._unpark(unit, holder)

    def expire(self, *, is_all_read: bool = True) -> tuple[list[Parked], list[Parked]]:
        """Ends what has outlived its lease. Returns the claims given up as unknown, and the lapsed tickets' holders.

        To be called several times in a lease; `is_all_read`: every message that has arrived is taken."""
        now = self._clock()
        is_sure = is_all_read and now - self._expired_at <= self._lease_s / 2
        self._expired_at = now
        unknown = [
            Parked(unit, holder)
            for unit, wishes in self._parked.items()
            for holder, wish in wishes.items()
            if wish.until <= now
        ]
        for unit, holder in unknown:
            self._unpark(unit, holder)
        self._refunds = {unit: entry for unit, entry in self._refunds.items() if entry[2] > now}
        lapsed: list[Parked] = []
        for ticket in [ticket for ticket in self._tickets.values() if ticket.lease_end <= now]:
            if not is_sure and not ticket.is_overdue:
                ticket.lease_end, ticket.is_overdue = now + self._lease_s / 4, True
                continue
            reason = f"lease of {self._lease_s:g} s ended"
            if ticket.holder is None:
                reason = f"nobody claimed it within {self._lease_s:g} s"
                self._refunds[ticket.unit] = (Refund(False, reason), ticket.claimant, now + self._lease_s)
            elif not ticket.is_revoked:
                lapsed.append(Parked(ticket.unit, ticket.holder))
            self._end(ticket, "lease", reason)
        return unknown, lapsed

    def next_deadline(self) -> float | None:
        """When `expire` next has something to do, on the clock."""
        deadlines = [ticket.lease_end for ticket in self._tickets.values()]
        deadlines += [wish.until for wishes in self._parked.values() for wish in wishes.values()]
        return min(deadlines, default=None)

    def take_events(self) -> list[Claimed | TicketEnded]:
        """What happened since the last call, each event once."""
        events, self._events = self._events, []
        return events

    def _take(self, ticket: Ticket, holder: Holder, have: int, claimant: str) -> None:
        if ticket.holder == holder:
            ticket.lease_end, ticket.is_overdue = self._clock() + self._lease_s, False
            return
        if ticket.holder is not None:
            raise ProtocolError(f"{ticket.unit} is claimed already", rid=ticket.unit.rid)
        if ticket.claimant not in (None, claimant):
            raise ProtocolError(
                f"{ticket.unit} is for decode epoch {ticket.claimant}, not {claimant}", rid=ticket.unit.rid
            )
        if have >= ticket.num_pages:
            raise ProtocolError(f"claim of {ticket.unit} has {have} pages of {ticket.num_pages}", rid=ticket.unit.rid)
        ticket.holder, ticket.have, ticket.is_overdue = holder, have, False
        ticket.lease_end = self._clock() + self._lease_s
        self._events.append(Claimed(ticket.unit, have))

    def _unpark(self, unit: Unit, holder: Holder) -> bool:
        wishes = self._parked.get(unit, {})
        if wishes.pop(holder, None) is None:
            return False
        if not wishes:
            del self._parked[unit]
        return True

    def _end(self, ticket: Ticket, how: How, reason: str) -> None:
        del self._tickets[ticket.unit]
        self._events.append(TicketEnded(ticket.unit, how, reason))
