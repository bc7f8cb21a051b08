"""The end of the data links that serves pages: it opens tickets, offers pages, and answers claims and pulls. A prefill
node hands prompts over by it, and nodes of both roles lend pages of their prefix caches (loans.py).

The server has no thread. The node's loop polls `sockets()` and calls `poll`. `poll` drains the socket, ends leases, and
returns events. While the loop is busy with a step, answers wait. That alone ends no lease, because `poll` reads the
messages that arrived meanwhile before it ends leases.

    open(unit) -> offer(unit, pages) ... -> finish(unit, row) -> TicketEnded(unit, "acked")

The ticket owns the unit's pages from `open` until `poll` returns its TicketEnded (tickets.py).

If the node has several ranks, the server is on rank 0, and each other rank has a PageServer (page_server.py). An offer
is sent when all ranks have digested its pages.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import zmq

from ..bus.sockets import DroppedFrames
from ..errors import ConfigError, OutOfMemory, ProtocolError
from ..logs import Throttle
from ..wire.data_link import (
    Ack,
    Borrow,
    Claim,
    Drop,
    LinkHello,
    Pull,
    Renew,
    Revoke,
    RevokeAck,
    ToPrefill,
    UnknownClaim,
)
from ..wire.request import MAX_TEXT, Unit
from .endpoint import Endpoint
from .loans import LendingCache, Loans, NoCache
from .pages import OfferedPages
from .ranks.digests import RankDigests
from .ranks.orders import OfferDigests, OfferFailed, ServeLine
from .schema.schema import row_bytes, tail_pages
from .served_links import DecodePeer, ServedLinks
from .tickets import Claimed, EndedTicket, Holder, How, Ticket, TicketBook, TicketEnded, TicketFailed
from .transfer import unpack_column, write_offers

logger = logging.getLogger(__name__)


class HandoffServer:
    """Serves the pages of our `end` to any number of decode nodes.

    `bind_host` is a host name or address, or `ipc://PATH`. `lease_s` is how long a ticket's lease lasts. A node with
    several ranks gives the `line` to the others, and the addresses of their page servers. `cache` is the prefix cache
    whose pages are lent; None: the node lends none. Raises ConfigError as `bind_data_socket` does.
    """

    def __init__(
        self,
        end: Endpoint,
        bind_host: str,
        *,
        lease_s: float = 1.0,
        line: ServeLine | None = None,
        rank_addresses: Sequence[str] = (),
        cache: LendingCache | None = None,
    ) -> None:
        num_ranks = 1 if line is None else line.size
        if end.shard != (0, num_ranks) or len(rank_addresses) != num_ranks - 1:
            raise ConfigError(
                f"the server of {num_ranks} ranks is on rank 0 of them, and names {num_ranks - 1} addresses of others: "
                f"this is rank {end.shard.rank} of {end.shard.size} with {len(rank_addresses)}"
            )
        self.end, self._lease_s, self._line = end, lease_s, line
        self._pages = OfferedPages(end.schema, end.memory, end.device)
        self._book = TicketBook(end.clock, lease_s)
        self._links = ServedLinks(
            end, self._pages, bind_host, self._close_holder, lease_s=lease_s, rank_addresses=rank_addresses
        )
        self._ranks = RankDigests(line, end.schema) if line is not None else None
        self._loans = Loans(end, self._pages, NoCache() if cache is None else cache, lease_s, self.digest_ahead)
        self._has_more = False
        self._looks = Throttle(clock=end.clock)
        self._failed: dict[Unit, TicketFailed] = {}  # since the last poll

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket of all links."""
        return self._links.socket

    @property
    def address(self) -> str:
        """Return the address at which decode nodes open their links."""
        return self._links.address

    @property
    def dropped(self) -> DroppedFrames:
        """The frames that were refused."""
        return self._links.dropped

    # --- the node's side -------------------------------------------------------------------------------------------

    def tail_pages(self, num_tokens: int) -> range:
        """Return the pages of tokens whose tail pages a prompt hands over, behind its other pages."""
        return tail_pages(self.end.schema, num_tokens)

    def open(self, unit: Unit, num_pages: int, claimant: str | None = None) -> None:
        """Open the unit's ticket, for the decode node of epoch `claimant` (None: any). The ticket owns the unit's pages
        until its TicketEnded, which comes exactly once. A ticket that nobody claims within a lease ends too."""
        loan = None if self._ranks is None else self._loans.book.get(unit)
        if loan is not None:  # other ranks know a unit's pages by its name alone
            self._end_loan(loan, "the node computes a prompt for the same request")
            self._take_ended_loans()
        ticket = self._book.open(unit, num_pages, claimant)
        logger.debug("%s ticket opened, %d pages%s", unit, num_pages, ", claimed" if ticket.holder else "")

    def offer(
        self,
        unit: Unit,
        indices: Sequence[int],
        pages: Sequence[int],
        generations: Sequence[int],
        row: bytes | None = None,
    ) -> None:
        """Offer pages: their indices in the ticket, their numbers in the pool, and their generations (allocation
        counts).

        The device has finished the pages, and nobody writes them again while the ticket lives. Each index is offered
        once. The offer is sent at once if the ticket is claimed, else after the claim. With `row` it is the final
        offer, as from `finish`. A unit whose ticket has ended is ignored: `poll` returns its TicketEnded. If the device
        has no memory for it, `poll` returns a TicketFailed.
        """
        ticket = self._book.get(unit)
        if ticket is None:
            return
        ticket.offer(indices, pages, generations)
        self.end.memory[0].generations[list(pages)] = generations
        try:
            self._digest(ticket, indices)
        except OutOfMemory as error:
            self._fail(ticket, str(error))
            return
        if row is not None:
            size = row_bytes(self.end.schema)
            assert len(row) == size, (unit, len(row), size)
            assert len(ticket.pages) == ticket.num_pages, (unit, len(ticket.pages), ticket.num_pages)
            ticket.row = row
        self._send_offer(ticket, indices)

    def digest(self, pages: Sequence[int], generations: Sequence[int]) -> None:
        """Compute the checksums of these computed pages, if they are on a GPU, in one launch. Several offers will need
        them. Without memory for all, each offer computes its own."""
        if self.end.device is not None:
            with suppress(OutOfMemory):
                self._pages.checksums(pages, generations)

    def digest_ahead(self, pages: Sequence[int], generations: Sequence[int]) -> None:
        """Begin to compute the checksums of pages that the work submitted to the device so far completes. Nobody writes
        them after that work."""
        self._pages.digest_ahead(pages, generations)
        if self._ranks is not None and self.end.device is not None and pages:
            self._ranks.begin(pages, generations)

    def finish(self, unit: Unit, row: bytes) -> None:
        """Send the final offer, with the metadata row. All pages were offered before."""
        self.offer(unit, (), (), (), row)

    def revoke(self, unit: Unit, finished: bool, reason: str = "") -> None:
        """Take the ticket back: `finished` if the first token ended the request, else because of an error. TicketEnded
        follows when the decode node acknowledges, or when the lease ends."""
        ticket = self._book.revoke(unit, finished, reason)
        if ticket is not None and ticket.holder is not None:
            self._send_revoke(ticket.holder, unit, reason, finished=finished)

    def poll(self) -> list[TicketEnded | Claimed | TicketFailed]:
        """Drain the socket (bounded), end leases, and return what happened. After a TicketEnded the ticket's opener
        frees the pages. After a TicketFailed it revokes the ticket."""
        self._links.close_unlisted()
        self._has_more = not self._links.drain(self._handle)
        self._take_reports()
        self._expire()
        failed, self._failed = self._failed, {}
        events = self._book.take_events()
        if self._ranks is not None:
            for ended in [event for event in events if isinstance(event, TicketEnded)]:
                self._ranks.end(ended.unit)  # before its pages may be written again
        self._take_ended_loans()
        self._offer_loans()
        return [*failed.values(), *events]

    def sockets(self) -> list[zmq.Socket[bytes] | int]:
        """Return the sockets, or their file descriptors, that the loop polls for input."""
        return [*self._links.sockets, *(() if self._line is None else self._line.descriptors())]

    def wait_s(self) -> float | None:
        """Return how many seconds the loop may wait on the socket before it must poll; None: no limit."""
        has_reports = self._line is not None and self._line.has_reports
        if self._has_more or self._failed or (self._loans.book.units and self._loans.has_due) or has_reports:
            return 0.0
        deadlines = (book.next_deadline() for book in (self._book, self._loans.book))
        deadline = min((each for each in deadlines if each is not None), default=None)
        return None if deadline is None else max(0.0, deadline - self.end.clock())

    def allow_for(self, round_trip_s: float) -> None:
        """Let leases last longer, since a message to the router and back takes so long, or one to a decode node."""
        if self._looks.is_due():
            for book in (self._book, self._loans.book):
                book.allow_for(max(round_trip_s, self._links.round_trip_s))

    def tickets(self) -> list[Unit]:
        """Return the units of the tickets that have not ended."""
        return self._book.units

    def loans(self) -> list[Unit]:
        """Return the units for which pages are lent."""
        return self._loans.book.units

    def close_peer(self, epoch: str) -> None:
        """End what a decode node of this epoch holds: its tickets end now, its parked claims are forgotten, its links
        are closed."""
        self._links.close_peer(epoch)
        if self._ranks is not None:
            self._ranks.close_reader(epoch)

    def close(self) -> None:
        """Close the socket. No decode node is told, because this epoch is over."""
        self._links.close()
        self._pages.close()

    # --- the links' side -------------------------------------------------------------------------------------------

    def _handle(self, holder: Holder, message: ToPrefill) -> int:
        """Answer one message. Return how many bytes of pages were copied. Raises ProtocolError."""
        if isinstance(message, LinkHello):
            busy = self._book.holders | self._loans.book.holders
            self._links.send(holder, self._links.peers.meet(holder, message, busy))
            return 0
        peer = self._links.peer(holder, message)
        if peer.part is not None and not isinstance(message, Pull):
            raise ProtocolError(f"{type(message).__name__} on a link for pages alone")
        match message:
            case Borrow():
                self._lend(holder, message)
            case Claim(unit=unit, num_cached_pages=num_cached_pages):
                self._claim(holder, unit, num_cached_pages)
            case Pull():
                return self._answer_pull(holder, peer, message)
            case Renew(units=units):
                for unit in self._loans.book.renew(self._book.renew(units, holder), holder):
                    self._send_revoke(holder, unit, "prefill has no such ticket any more")
            case Ack(unit=unit):
                if not self._book.ack(unit, holder):
                    self._loans.book.ack(unit, holder)
            case Drop(unit=unit, reason=reason):
                self._end(unit, holder, "dropped", reason)
            case RevokeAck(unit=unit):
                self._end(unit, holder, "revoked")
        return 0

    def _claim(self, holder: Holder, unit: Unit, num_cached_pages: int) -> None:
        match self._book.claim(unit, holder, num_cached_pages, self._links.peers.by_link[holder].epoch):
            case EndedTicket(finished=finished, reason=reason):
                self._send_revoke(holder, unit, reason, finished=finished)
            case Ticket() as ticket:
                self._send_offer(ticket, sorted(ticket.pages))
            case None:
                logger.debug("%s claim parked", unit)

    def _end(self, unit: Unit, holder: Holder, how: How, reason: str = "") -> None:
        """End the holder's ticket, loan or parked claim."""
        if not self._book.end(unit, holder, how, reason):
            self._loans.book.end(unit, holder, how, reason)

    def _close_holder(self, holder: Holder, reason: str) -> None:
        for book in (self._book, self._loans.book):
            book.close(holder, reason)

    def _lend(self, holder: Holder, ask: Borrow) -> None:
        is_taken = self._ranks is not None and self._book.get(ask.unit) is not None
        if is_taken or self._loans.begin(holder, ask) is None:
            self._send_revoke(holder, ask.unit, "it has no more of these pages, or none that it can lend now")

    def _offer_loans(self) -> None:
        """Offer pages on loan, bounded, and end the loans of which a page was needed for something else."""
        if not self._loans.book.units:
            return
        for ticket in self._loans.stale():
            self._end_loan(ticket, "a lent page was needed for something else")
        for ticket, indices in self._loans.due():
            self._send_offer(ticket, indices)

    def _end_loan(self, ticket: Ticket, reason: str) -> None:
        assert ticket.holder is not None, ticket.unit
        self._loans.book.end(ticket.unit, ticket.holder, "revoked", reason)
        self._send_revoke(ticket.holder, ticket.unit, reason)

    def _take_ended_loans(self) -> None:
        """Let other ranks forget the loans that have ended. A loan owns no page."""
        for event in self._loans.book.take_events():
            if self._ranks is not None and isinstance(event, TicketEnded):
                self._ranks.end(event.unit)

    def _answer_pull(self, holder: Holder, peer: DecodePeer, pull: Pull) -> int:
        ticket = self._book.get(pull.unit)
        if ticket is None or not self._may_pull(holder, peer, ticket):
            ticket = self._loans.book.get(pull.unit)
        if ticket is None or ticket.is_revoked or not self._may_pull(holder, peer, ticket):
            return 0  # the ticket ended while the pull was on the way; its holder has been told
        if self._is_loan(ticket) and not self._loans.is_intact(ticket, unpack_column(pull.indices)):
            return 0  # the loan ends in this poll; the page may be another tenant's now
        try:
            return self._links.answer_pull(holder, pull, ticket.pages, ticket.num_cached_pages)
        except OutOfMemory as error:
            self._fail(ticket, str(error))
            return 0

    def _may_pull(self, holder: Holder, peer: DecodePeer, ticket: Ticket) -> bool:
        """Return whether the link is the ticket's holder, or a link of a rank of the same decode node."""
        if peer.part is None or ticket.holder is None:
            return ticket.holder == holder
        reader = self._links.peers.by_link.get(ticket.holder)
        return reader is not None and reader.epoch == peer.epoch

    def _send_offer(self, ticket: Ticket, indices: Sequence[int]) -> None:
        """Send the ticket's holder, if there is one, an offer of these pages, and of the row, if it is known."""
        if ticket.holder is None or ticket.is_revoked:
            return
        indices = [index for index in indices if index >= ticket.num_cached_pages]
        if not indices and ticket.row is None:
            return
        # None: a later hello was refused; the ticket ends with its lease
        peer = self._links.peers.by_link.get(ticket.holder)
        try:
            self._digest(ticket, indices)
            if peer is not None:
                peer.transport.prepare(self._pages, [ticket.pages[index] for index in indices])
        except OutOfMemory as error:
            self._fail(ticket, str(error))
            return
        if self._ranks is not None:
            num_wanted, indices = len(indices), [index for index in indices if index in ticket.checksums]
            if peer is not None:
                self._ranks.serve(ticket.unit, peer.epoch)
            if num_wanted and not indices:
                return  # the ranks are digesting the pages; then this method is called again
        for offer in write_offers(ticket, indices, self.end.schema):
            self._links.send(ticket.holder, offer)

    def _is_loan(self, ticket: Ticket) -> bool:
        return self._loans.book.get(ticket.unit) is ticket

    def _fail(self, ticket: Ticket, reason: str) -> None:
        if self._is_loan(ticket):
            self._end_loan(ticket, reason)
            return
        self._failed[ticket.unit] = TicketFailed(ticket.unit, reason)

    def _digest(self, ticket: Ticket, indices: Sequence[int]) -> None:
        """Give the ticket the checksums of these pages, except of those that its holder has. If there are several
        ranks, ask them for theirs; the ticket gets the checksums when all have answered."""
        new = [index for index in indices if index >= ticket.num_cached_pages and index not in ticket.checksums]
        if self._ranks is not None:
            asked = self._ranks.asked(ticket)
            new = [index for index in new if index not in asked]
        pages, generations = [ticket.pages[index] for index in new], [ticket.generations[index] for index in new]
        checksums = self._pages.checksums(pages, generations)
        if self._ranks is None:
            ticket.checksums |= zip(new, checksums, strict=True)
        elif new:
            self._ranks.ask(ticket, new, checksums)

    def _take_reports(self) -> None:
        """Take in what the other ranks have reported, and send the offers that are whole now."""
        if self._line is None or self._ranks is None:
            return
        for rank, report in self._line.receive():
            match report:
                case OfferDigests():
                    digested = self._ranks.take(rank, report)
                    if digested is not None and self._ticket_of(digested.ticket.unit) is digested.ticket:
                        digested.ticket.checksums |= digested.checksums
                        self._send_offer(digested.ticket, sorted(digested.checksums))
                case OfferFailed(unit=unit, reason=reason):
                    ticket = self._ticket_of(unit)
                    if ticket is not None:
                        self._fail(ticket, f"rank {rank}: {reason}")

    def _ticket_of(self, unit: Unit) -> Ticket | None:
        """Return the ticket or the loan of a unit. A node with several ranks has not both."""
        return self._book.get(unit) or self._loans.book.get(unit)

    def _expire(self) -> None:
        for book in (self._book, self._loans.book):
            unknown, lapsed = book.expire(is_all_read=not self._has_more)
            for unit, holder in unknown:
                self._links.send(holder, UnknownClaim(unit=unit))
            for unit, holder in lapsed:
                self._send_revoke(holder, unit, f"the lease of {self._lease_s:g} s ended")

    def _send_revoke(self, holder: Holder, unit: Unit, reason: str, *, finished: bool = False) -> None:
        self._links.send(holder, Revoke(unit=unit, finished=finished, reason=reason[:MAX_TEXT]))
