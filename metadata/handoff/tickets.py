"""The life of a ticket on the prefill side: an automaton without sockets or memory, with an injected clock.

    open --claim--> claimed --ack | drop--> ended
     |                 |----- revoke ------> revoked --revoke-ack--> ended
     |                 '----- lease end, closed epoch -----------> ended
     '-- revoke, lease end (no reader yet) --> ended; the book remembers the answer for one lease

A ticket may name its claimant: the epoch of the one decode node that may hold it. Leases are measured on a monotonic
clock. A lease can run out while this node does not read messages: in a long step, in a stopped process, or when its
clock jumps. Such a lease is prolonged once by a quarter, so that the node can still read a waiting renewal.

Owner of a page at each stage (the page pool is engine/state/pages.py, the prefix cache is
engine/state/prefix_cache.py):

    prefill node   request --HandoffServer.open--> ticket --TicketEnded--> the opener: it frees the page, or caches it
    decode node    request --HandoffClient.claim--> transfer --Arrived, Revoked, TransferFailed, or drop--> request

A ticket owns the pages of its unit from `open` until `TicketBook.take_events` hands out its `TicketEnded`, exactly once
per ticket. The opener frees the pages, or leaves them to the prefix cache, on that event and at no other moment. Until
then nobody writes an offered page. On the decode node a transfer (transfer.py) owns the copies in the same way.
The bytes of the pages lie in the pools of memory.py, which only stores them and owns no page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..bus.connections import MAX_ROUND_TRIP_S
from ..errors import ProtocolError
from ..wire.request import Unit

How = Literal["acked", "dropped", "revoked", "lease", "closed"]
Holder = bytes  # the claiming link

MAX_PARKED = 4096
MAX_PARKED_OF_ONE = 1024  # per link
LINK_ROUND_TRIPS = 8  # until a claim arrives on a link that is opened for it: six, and two for a lost packet


class Claimed(NamedTuple):
    """A decode node has claimed the ticket. It needs none of the first `num_cached_pages` pages."""

    unit: Unit
    num_cached_pages: int


class TicketEnded(NamedTuple):
    """The ticket is over and its pages belong to its opener again. `reason` is empty if the handoff succeeded."""

    unit: Unit
    how: How
    reason: str = ""


class TicketFailed(NamedTuple):
    """The device has no memory for handing over the ticket's pages. Its opener revokes the ticket."""

    unit: Unit
    reason: str


class EndedTicket(NamedTuple):
    """The answer to a claim of a ticket that is over: `finished` if the first token ended the request, else an
    error."""

    finished: bool
    reason: str


class UnitClaim(NamedTuple):
    """A unit, and the link that claims it."""

    unit: Unit
    holder: Holder


class ParkedClaim(NamedTuple):
    """A claim of a unit that is not known yet. It is given up at `until`."""

    num_cached_pages: int
    claimant: str
    until: float


@dataclass(slots=True)
class Ticket:
    """The pages of one unit that are being handed over. `pages`, `generations` and `checksums` are by index in the
    ticket."""

    unit: Unit
    num_pages: int
    lease_end: float
    claimant: str | None = None
    holder: Holder | None = None
    num_cached_pages: int = 0  # pages below this index are at the decode node already
    revoked: EndedTicket | None = None  # the answer for its holder; the lease cannot be renewed
    is_overdue: bool = False  # its lease was found over and has been prolonged
    row: bytes | None = None
    pages: dict[int, int] = field(default_factory=dict[int, int])
    generations: dict[int, int] = field(default_factory=dict[int, int])
    checksums: dict[int, bytes] = field(default_factory=dict[int, bytes])

    @property
    def is_revoked(self) -> bool:
        return self.revoked is not None

    def offer(self, indices: Sequence[int], pages: Sequence[int], generations: Sequence[int]) -> None:
        """Record offered pages. Each index is offered once."""
        assert len(indices) == len(pages) == len(generations), (self.unit, indices, pages, generations)
        for index, page, generation in zip(indices, pages, generations, strict=True):
            assert 0 <= index < self.num_pages and index not in self.pages, (self.unit, index, self.num_pages)
            self.pages[index], self.generations[index] = page, generation


class TicketBook:
    """All tickets of a prefill node. A lease lasts `lease_s` seconds on `clock` (monotonic)."""

    def __init__(self, clock: Callable[[], float], lease_s: float = 1.0) -> None:
        self._clock = clock
        self._lease_s = self._term_s = lease_s
        self._tickets: dict[Unit, Ticket] = {}
        self._parked: dict[Unit, dict[Holder, ParkedClaim]] = {}
        # the answer, for which claimant (None: any), until when
        self._ended: dict[Unit, tuple[EndedTicket, str | None, float]] = {}
        self._events: list[Claimed | TicketEnded] = []
        self._expired_at = clock()

    def allow_for(self, round_trip_s: float) -> None:
        """Let new and renewed leases last longer, since a message to a peer and back takes so long."""
        self._term_s = self._lease_s + LINK_ROUND_TRIPS * min(round_trip_s, MAX_ROUND_TRIP_S)

    @property
    def units(self) -> list[Unit]:
        """The units of all tickets that have not ended."""
        return list(self._tickets)

    @property
    def holders(self) -> set[Holder]:
        """The links that hold tickets."""
        return {ticket.holder for ticket in self._tickets.values() if ticket.holder is not None}

    def __iter__(self) -> Iterator[Ticket]:
        """Iterate over the tickets as they are now. Tickets may end meanwhile."""
        return iter(list(self._tickets.values()))

    def get(self, unit: Unit) -> Ticket | None:
        """Return the unit's ticket; None if it is unknown or has ended."""
        return self._tickets.get(unit)

    def open(self, unit: Unit, num_pages: int, claimant: str | None = None) -> Ticket:
        """Open a ticket for `num_pages` pages. `claimant` is the epoch of the decode node that may claim it; None: any.

        If a claim that fits is parked, the ticket is claimed at once. Holders of parked claims that do not fit learn of
        it when they renew.
        """
        assert unit not in self._tickets and num_pages > 0, (unit, num_pages)
        self._ended.pop(unit, None)
        ticket = self._tickets[unit] = Ticket(unit, num_pages, self._clock() + self._term_s, claimant)
        for holder, parked in self._parked.pop(unit, {}).items():
            if ticket.holder is None and parked.num_cached_pages < num_pages and claimant in (None, parked.claimant):
                self._take(ticket, holder, parked.num_cached_pages, parked.claimant)
        return ticket

    def lend(self, unit: Unit, holder: Holder, num_pages: int, num_cached_pages: int) -> Ticket:
        """Open a ticket that this link holds already, for pages that stay with the prefix cache (loans.py). Raises
        ProtocolError if the unit has a ticket."""
        if unit in self._tickets:
            raise ProtocolError(f"pages are lent for {unit} already", rid=unit.rid)
        ticket = self._tickets[unit] = Ticket(unit, num_pages, self._clock() + self._term_s)
        ticket.holder, ticket.num_cached_pages = holder, num_cached_pages
        return ticket

    def claim(
        self, unit: Unit, holder: Holder, num_cached_pages: int, claimant: str = ""
    ) -> Ticket | EndedTicket | None:
        """Return the ticket, now held by `holder`, whose node has the epoch `claimant`.

        Return an EndedTicket if the ticket is over, and None if the claim was parked because the unit is unknown. A
        holder that claims again has missed offers; its lease is renewed. Raises ProtocolError if another link holds the
        ticket or may hold it, if `num_cached_pages` is beyond the ticket, or if too many claims are parked.
        """
        ticket = self._tickets.get(unit)
        if ticket is not None and ticket.revoked is not None and ticket.holder == holder:
            return ticket.revoked  # the claim crossed the revoke, or the revoke was lost
        if ticket is not None:
            self._take(ticket, holder, num_cached_pages, claimant)
            return ticket
        if unit in self._ended and self._ended[unit][1] in (None, claimant):
            return self._ended.pop(unit)[0]
        held = [of for claims in self._parked.values() for of in claims]
        claims = self._parked.get(unit, {})
        if holder in claims and claims[holder].num_cached_pages == num_cached_pages:
            return None  # a decode node that was held up asks again
        if len(held) >= MAX_PARKED or held.count(holder) >= MAX_PARKED_OF_ONE or holder in claims:
            raise ProtocolError(f"claim of {unit} cannot be parked", rid=unit.rid)
        self._parked[unit] = claims | {holder: ParkedClaim(num_cached_pages, claimant, self._clock() + self._term_s)}
        return None

    def renew(self, units: Iterable[Unit], holder: Holder) -> list[Unit]:
        """Prolong the leases. Return the units of which `holder` has neither a ticket nor a parked claim."""
        lease_end = self._clock() + self._term_s
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
        """Take the ticket back. An unclaimed ticket ends now. A claimed one is returned; it ends with the revoke-ack of
        its holder, or with its lease, which cannot be renewed any more."""
        ticket = self._tickets.get(unit)
        if ticket is None:
            return None
        if ticket.holder is None:
            self._end(ticket, "revoked", reason)
            self._ended[unit] = (EndedTicket(finished, reason), ticket.claimant, self._clock() + self._term_s)
            return None
        ticket.revoked = EndedTicket(finished, reason)
        return ticket

    def ack(self, unit: Unit, holder: Holder) -> bool:
        """End the holder's ticket, because the handoff succeeded. Return False if it has none of that unit. Raises
        ProtocolError if the final offer, with the row, has not been made."""
        ticket = self._tickets.get(unit)
        if ticket is not None and ticket.holder == holder and ticket.row is None:
            raise ProtocolError(f"ack of {unit} before its final offer", rid=unit.rid)
        return self.end(unit, holder, "acked")

    def end(self, unit: Unit, holder: Holder, how: How, reason: str = "") -> bool:
        """End the holder's ticket or parked claim. Return False if the holder has none of that unit."""
        ticket = self._tickets.get(unit)
        if ticket is not None and ticket.holder == holder:
            if ticket.is_revoked:
                how = "revoked"  # the revoke crossed the ack or drop; the opener asked for this end
            self._end(ticket, how, reason)
            return True
        return self._unpark(unit, holder)

    def close(self, holder: Holder, reason: str) -> None:
        """End all that the holder claimed, because its epoch is over."""
        for ticket in [ticket for ticket in self._tickets.values() if ticket.holder == holder]:
            self._end(ticket, "closed", reason)
        for unit in [unit for unit, claims in self._parked.items() if holder in claims]:
            self._unpark(unit, holder)

    def expire(self, *, is_all_read: bool = True) -> tuple[list[UnitClaim], list[UnitClaim]]:
        """End the tickets and the parked claims whose lease is over. Call it several times per lease.

        Args:
            is_all_read: whether the caller has taken every message that has arrived.

        Returns the parked claims that have ended, and unit and holder of each claimed ticket that has, revoked ones
        left out.
        """
        now = self._clock()
        is_sure = is_all_read and now - self._expired_at <= self._lease_s / 2
        self._expired_at = now
        unknown = [
            UnitClaim(unit, holder)
            for unit, claims in self._parked.items()
            for holder, parked in claims.items()
            if parked.until <= now
        ]
        for unit, holder in unknown:
            self._unpark(unit, holder)
        self._ended = {unit: entry for unit, entry in self._ended.items() if entry[2] > now}
        lapsed: list[UnitClaim] = []
        for ticket in [ticket for ticket in self._tickets.values() if ticket.lease_end <= now]:
            if not is_sure and not ticket.is_overdue:
                ticket.lease_end, ticket.is_overdue = now + self._lease_s / 4, True
                continue
            reason = f"lease of {self._term_s:g} s ended"
            if ticket.holder is None:
                reason = f"nobody claimed it within {self._term_s:g} s"
                self._ended[ticket.unit] = (EndedTicket(False, reason), ticket.claimant, now + self._term_s)
            elif not ticket.is_revoked:
                lapsed.append(UnitClaim(ticket.unit, ticket.holder))
            self._end(ticket, "lease", reason)
        return unknown, lapsed

    def next_deadline(self) -> float | None:
        """Return when `expire` has something to do next, on the clock; None if there is no deadline."""
        deadlines = [ticket.lease_end for ticket in self._tickets.values()]
        deadlines += [parked.until for claims in self._parked.values() for parked in claims.values()]
        return min(deadlines, default=None)

    def take_events(self) -> list[Claimed | TicketEnded]:
        """Return the events since the last call, each once."""
        events, self._events = self._events, []
        return events

    def _take(self, ticket: Ticket, holder: Holder, num_cached_pages: int, claimant: str) -> None:
        if ticket.holder == holder:
            ticket.lease_end, ticket.is_overdue = self._clock() + self._term_s, False
            return
        if ticket.holder is not None:
            raise ProtocolError(f"{ticket.unit} is claimed already", rid=ticket.unit.rid)
        if ticket.claimant not in (None, claimant):
            raise ProtocolError(
                f"{ticket.unit} is for decode epoch {ticket.claimant}, not {claimant}", rid=ticket.unit.rid
            )
        if num_cached_pages >= ticket.num_pages:
            raise ProtocolError(
                f"claim of {ticket.unit} has {num_cached_pages} cached pages of {ticket.num_pages}, so none is missing",
                rid=ticket.unit.rid,
            )
        ticket.holder, ticket.num_cached_pages, ticket.is_overdue = holder, num_cached_pages, False
        ticket.lease_end = self._clock() + self._term_s
        self._events.append(Claimed(ticket.unit, num_cached_pages))

    def _unpark(self, unit: Unit, holder: Holder) -> bool:
        claims = self._parked.get(unit, {})
        if claims.pop(holder, None) is None:
            return False
        if not claims:
            del self._parked[unit]
        return True

    def _end(self, ticket: Ticket, how: How, reason: str) -> None:
        del self._tickets[ticket.unit]
        self._events.append(TicketEnded(ticket.unit, how, reason))
