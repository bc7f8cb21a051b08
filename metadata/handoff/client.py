"""The side of the handoff that pulls: it claims tickets, pulls offered pages into its own pool, compares their
checksums (pages.py: ReceivedPages) and acknowledges. Decode nodes claim the pages of prompts that prefill nodes compute
for them. Nodes of both roles borrow pages of prefix caches (loans.py).

The client has no thread. The node's loop polls `sockets()` and calls `poll`. `poll` receives messages, copies a bounded
number of pages, checks them, renews leases, and returns events. A page is pulled as soon as it is offered, while the
prefill node still computes later chunks.

    claim(unit, peer, num_cached_pages, pages) -> Arrived | TransferFailed | Revoked
    borrow(unit, peer, num_cached_pages, pages, token_ids, cache_salt) -> LoanOver

Exactly one of the events follows each claim, unless `drop` comes first. The transfer owns the pages from `claim` or
`borrow` until that event or `drop`. After that no page of the unit is written, and the caller may use or free them.

If this node or the prefill node has several ranks, the client is on rank 0, and has the tickets. Each rank fetches its
own heads (ranks/puller.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import zmq

from ..bus.sockets import DroppedFrames
from ..errors import ConfigError, OutOfMemory, ProtocolError, StaleMessage, TransferError
from ..wire.data_link import (
    Ack,
    Borrow,
    Claim,
    Drop,
    LinkRefused,
    LinkWelcome,
    Offer,
    Pages,
    Revoke,
    RevokeAck,
    ToDecode,
    UnknownClaim,
)
from ..wire.node_info import Peer
from ..wire.request import MAX_TEXT, Unit, pack_ids
from .endpoint import Endpoint
from .pages import ReceivedPages
from .pull_link import ANSWER_S, PullLink, PullLinks
from .ranks.orders import PullLine
from .ranks.puller import RankTeam
from .transfer import Event, LoanOver, Revoked, Transfer, TransferFailed
from .transports.base import Landed
from .transports.nixl import num_quarantined, rings
from .transports.ranks import RanksTransport

logger = logging.getLogger(__name__)

MAX_PULLS = 3  # pulls of one page with a wrong checksum, before the transfer fails
MAX_ASKED = 3  # repeated claims for offers that do not arrive, if the peer says other things meanwhile
MAX_ASKED_SILENT = 40  # likewise if it says nothing, as in a long step


class HandoffClient:
    """Pulls pages of any number of prefill nodes into the pools of our `end`. `answer_s` is how long a peer may owe an
    answer. A node with several ranks gives the `line` to the others."""

    def __init__(self, end: Endpoint, *, answer_s: float = ANSWER_S, line: PullLine | None = None) -> None:
        num_ranks = 1 if line is None else line.size
        if end.shard != (0, num_ranks):
            raise ConfigError(f"the client of {num_ranks} ranks is on rank 0 of them, not {end.shard}")
        self.end = end
        self._pages = ReceivedPages(end.schema, end.memory, end.device)
        self._team = RankTeam(end, line, answer_s)
        self._links = PullLinks(end, answer_s, team=self._team)
        self._transfers: dict[Unit, Transfer] = {}
        self._events: list[Event] = []
        self._has_more = False
        self._transport_waits_s: list[float | None] = []  # as of the last poll
        self.num_checksum_failures = 0
        self.dropped = DroppedFrames(logger, "data link")

    # --- the node's side -------------------------------------------------------------------------------------------

    def claim(self, unit: Unit, peer: Peer, num_cached_pages: int, pages: Sequence[int]) -> None:
        """Claim the unit's ticket from `peer`.

        `pages` are our page numbers by index in the ticket, all of them, tail pages last. The first `num_cached_pages`
        hold their contents already and are not written. The transfer owns them all until an event or `drop`.
        """
        claim = Claim(unit=unit, num_cached_pages=num_cached_pages)
        try:
            link = self._link(peer)
        except TransferError as error:
            self._events.append(TransferFailed(unit, str(error)))
            return
        num_tails = sum(page >= self.end.memory[0].num_pages for page in pages)
        self._begin(link, Transfer(claim, peer.epoch, tuple(pages), num_tails))

    def borrow(
        self,
        unit: Unit,
        peer: Peer,
        num_cached_pages: int,
        pages: Sequence[int],
        tails: Sequence[int],
        token_ids: Sequence[int],
        cache_salt: str,
        until: float,
    ) -> None:
        """Borrow pages of a prompt that `peer` has in its prefix cache, also fewer than are asked for.

        `pages` are our page numbers for the first pages of the prompt. The first `num_cached_pages` hold their contents
        already. `tails` are as many tail pages of ours as work needs behind a page. `token_ids` are those of the pages
        and the next ones by which a page is keyed. A LoanOver follows, at `until` on the clock at the latest, unless
        `drop` comes first. So long the transfer owns the pages.
        """
        ids = pack_ids(token_ids)
        ask = Borrow(unit=unit, num_cached_pages=num_cached_pages, token_ids=ids, cache_salt=cache_salt)
        try:
            link = self._link(peer)
        except TransferError as error:
            self._events.append(LoanOver(unit, num_cached_pages, 0, 0.0, str(error)))
            return
        self._begin(link, Transfer(ask, peer.epoch, (*pages, *tails), len(tails), until))

    def drop(self, unit: Unit, reason: str) -> None:
        """Give up the claim. No event follows, and the caller owns the pages again at once. Unknown units are
        ignored."""
        transfer = self._transfers.get(unit)
        if transfer is not None:
            self._forget(transfer)
            self._links.by_epoch[transfer.epoch].send(Drop(unit=unit, reason=reason[:MAX_TEXT]))

    def ask_offers(self, unit: Unit) -> bool:
        """Claim the unit again, so that the prefill node repeats its offers, if offers or the row are missing. Return
        False if this has been done MAX_ASKED times without success, or if the unit is not claimed. A claim counts only
        if the peer has sent something since: a peer in a long step has not read it yet."""
        transfer = self._transfers.get(unit)
        if transfer is None or transfer.is_offered:
            return transfer is not None
        link = self._links.by_epoch[transfer.epoch]
        transfer.num_asked += 1
        transfer.num_passed_over += (
            transfer.asked_at is not None and link.last_message > transfer.asked_at + link.round_trip_s
        )
        transfer.asked_at = self.end.clock()
        link.send(transfer.claim)
        return transfer.num_passed_over < MAX_ASKED and transfer.num_asked <= MAX_ASKED_SILENT

    def poll(self) -> list[Event]:
        """Receive, copy, check and renew, bounded. Return what happened."""
        self._has_more = False
        self._transport_waits_s.clear()
        self._links.begin_poll()
        for rank, report in self._team.poll() if self._team.is_used else ():
            link = self._links.by_epoch.get(report.epoch)
            if link is not None and isinstance(link.transport, RanksTransport):
                link.transport.take(rank, report)
        for link in self._links:
            self._serve(link)
        for link in self._links:
            if link.lost is not None:
                self._close(link, link.lost)
        self._end_late_loans()
        events, self._events = self._events, []
        return events

    def sockets(self) -> list[zmq.Socket[bytes] | int]:
        """Return the sockets, or their file descriptors, that the loop polls for input. They change when links open and
        close."""
        return [*self._links.sockets(), *(self._team.sockets() if self._team.is_used else ())]

    def wait_s(self) -> float | None:
        """Return how many seconds the loop may wait on the sockets before it must poll; None: no limit."""
        if self._has_more or self._events or any(link.lost is not None for link in self._links):
            return 0.0
        waits = [link.renewal_at - self.end.clock() for link in self._links if self._transfers_of(link)]
        now = self.end.clock()
        waits += [transfer.until - now for transfer in self._transfers.values() if transfer.is_loan]
        of_others = (*self._transport_waits_s, self._team.wait_s() if self._team.is_used else None)
        waits += [wait_s for wait_s in of_others if wait_s is not None]
        return max(0.0, min(waits)) if waits else None

    def allow_for(self, round_trip_s: float) -> None:
        """Give new links more time, since a message to the router and back takes so long."""
        self._links.allow_for(round_trip_s)

    def tickets(self) -> list[Unit]:
        """Return the units whose pages have not all arrived."""
        return list(self._transfers)

    @property
    def num_quarantined(self) -> int:
        """Number of slots of staging rings whose reads were given up and are not over."""
        return num_quarantined() if rings else 0

    def close_peer(self, epoch: str) -> None:
        """Close the link to this epoch of a prefill node. Its memory is unmapped at once; its claims fail at the next
        poll."""
        link = self._links.by_epoch.get(epoch)
        if link is not None:
            self._close(link, f"node {link.peer.node_id} is gone")

    def close(self) -> None:
        """Drop all claims and close all links."""
        for unit in list(self._transfers):
            self.drop(unit, "the decode node leaves")
        self._links.close_all()
        self._team.close()

    def _link(self, peer: Peer) -> PullLink:
        """Return the link to a peer. Links to its earlier epochs are closed. Raises TransferError."""
        for link in self._links.other_epochs(peer):
            self._close(link, f"node {peer.node_id} was restarted")
        return self._links.open(peer)

    def _begin(self, link: PullLink, transfer: Transfer) -> None:
        """Ask for the pages of a transfer."""
        unit, pages, num_cached_pages = transfer.unit, transfer.pages, transfer.num_cached_pages
        assert unit not in self._transfers, unit
        assert 0 <= num_cached_pages < len(pages), (unit, num_cached_pages, len(pages))
        self._transfers[unit] = transfer
        self._pages.expect(pages[num_cached_pages:])
        if self._team.is_used:
            self._team.expect(pages[num_cached_pages:])
        link.send(transfer.claim)

    # --- the links' side -------------------------------------------------------------------------------------------

    def _serve(self, link: PullLink) -> None:
        self._has_more |= not link.drain(partial(self._handle, link), self.dropped)
        now = self.end.clock()
        link.expect_answer(now, is_used=bool(self._transfers_of(link)))
        self._step(link)
        link.check(now)  # after the drain: a refusal may precede the end of the connection
        if now >= link.renewal_at:
            link.renew(now, [transfer.unit for transfer in self._transfers_of(link)])

    def _step(self, link: PullLink) -> None:
        try:
            for landed in link.step():
                self._land(link, landed)
        except OutOfMemory as error:  # each time ends one transfer, so that the others get the memory
            assert link.transport is not None
            self._fail(link.transport.next_unit, str(error), tell=link, code=error.code)
        self._transport_waits_s += [] if link.transport is None else [link.transport.wait_s]

    def _handle(self, link: PullLink, message: ToDecode, data: memoryview | None) -> None:
        match message:
            case LinkWelcome():
                link.welcome(message)
                self._start_waiting(link)
            case LinkRefused(reason=reason):
                link.refuse(reason)
            case Offer():
                self._take_offer(link, message)
            case Pages():
                assert data is not None
                self._take_pages(link, message, data)
            case Revoke(unit=unit, finished=finished, reason=reason):
                transfer = self._transfer_of(link, unit)
                self._forget(transfer)
                link.send(RevokeAck(unit=unit))
                self._events.append(
                    self._loan_over(transfer, reason) if transfer.is_loan else Revoked(unit, finished, reason)
                )
            case UnknownClaim(unit=unit):
                self._transfer_of(link, unit)
                self._fail(unit, f"node {link.peer.node_id} does not know {unit}", tell=None)

    def _transfer_of(self, link: PullLink, unit: Unit) -> Transfer:
        """Return the transfer that a message of this link is about. Raises StaleMessage if the unit is not claimed (any
        more), and ProtocolError if it is claimed on another link."""
        transfer = self._transfers.get(unit)
        if transfer is None:
            raise StaleMessage(f"{unit} is not claimed any more", rid=unit.rid)
        if transfer.epoch != link.peer.epoch:
            raise ProtocolError(f"{unit} is not claimed on this link", rid=unit.rid)
        return transfer

    def _start_waiting(self, link: PullLink) -> None:
        """Claim the units that waited for the welcome, and queue pages that were offered before it."""
        for transfer in self._transfers_of(link):
            if link.transport is not None:  # a send may lose the link
                link.transport.fetch(transfer.missing())
                link.send(transfer.claim)

    def _take_offer(self, link: PullLink, offer: Offer) -> None:
        transfer = self._transfer_of(link, offer.unit)
        try:
            moves = transfer.take_offer(offer, self.end.schema, link.num_pages, link.num_tails)
        except ProtocolError as error:
            self._fail(offer.unit, f"node {link.peer.node_id}: {error}", tell=link)
            raise
        transfer.start_clock(self.end.clock())
        if link.transport is not None:
            link.transport.fetch(moves)
        self._finish_if_whole(link, transfer)

    def _take_pages(self, link: PullLink, pages: Pages, data: memoryview) -> None:
        if link.transport is None:
            raise ProtocolError(f"pages of {pages.unit} before the welcome", rid=pages.unit.rid)
        if pages.unit not in self._transfers:
            return  # the claim was given up while the pages were on the way
        for landed in link.transport.receive(pages, data):
            self._land(link, landed)
            if pages.unit not in self._transfers:
                return  # the transfer failed; it does not own the pages any more

    def _land(self, link: PullLink, landed: Landed) -> None:
        """Check a page where it lies now, in our own pool."""
        move = landed.move
        transfer = self._transfers.get(move.unit)
        if transfer is None or link.transport is None:
            return  # another page of the unit has failed meanwhile
        where = f"page {move.index} from node {link.peer.node_id}"
        if landed.generation != move.generation:
            reason = f"{where} was reused: generation {landed.generation} there, {move.generation} offered"
            self._fail(move.unit, reason, tell=link)
            return
        try:
            block = self._first_difference(landed)
        except OutOfMemory as error:
            self._fail(move.unit, f"{where}: {error}", tell=link, code=error.code)
            return
        if block is not None:
            self.num_checksum_failures += 1
            logger.warning("%s %s: checksum of block %d is wrong", move.unit, where, block)
            if transfer.count_pull(move.index) >= MAX_PULLS:
                self._fail(move.unit, f"{where}: checksum of block {block} wrong {MAX_PULLS} times", tell=link)
            else:
                link.transport.fetch([move])
            return
        transfer.land(move.index, self.end.clock())
        self._finish_if_whole(link, transfer)

    def _first_difference(self, landed: Landed) -> int | None:
        """Return the first block of a page whose checksum is wrong; None if all are right. Raises OutOfMemory."""
        if landed.checked is not None:
            return landed.checked.wrong_block
        move = landed.move
        return self._pages.first_difference(move.target, landed.checksums, move.checksums)

    def _finish_if_whole(self, link: PullLink, transfer: Transfer) -> None:
        if not transfer.is_whole:
            return
        del self._transfers[transfer.unit]
        link.send(Ack(unit=transfer.unit))
        if transfer.is_loan:
            self._events.append(self._loan_over(transfer))
            return
        name = link.transport.name if link.transport is not None else ""
        self._events.append(transfer.arrived(self.end.clock(), self.end.schema, name))

    def _transfers_of(self, link: PullLink) -> list[Transfer]:
        return [transfer for transfer in self._transfers.values() if transfer.epoch == link.peer.epoch]

    def _fail(
        self,
        unit: Unit,
        reason: str,
        tell: PullLink | None,
        *,
        is_refused: bool = False,
        code: str = TransferError.code,
    ) -> None:
        transfer = self._transfers[unit]
        self._forget(transfer)
        if tell is not None:
            tell.send(Drop(unit=unit, reason=reason[:MAX_TEXT]))
        failed = TransferFailed(unit, reason, is_refused, code)
        self._events.append(self._loan_over(transfer, reason) if transfer.is_loan else failed)

    def _end_late_loans(self) -> None:
        now = self.end.clock()
        for transfer in [each for each in self._transfers.values() if each.until <= now]:
            self._fail(transfer.unit, "its time is over", tell=self._links.by_epoch[transfer.epoch])

    def _loan_over(self, transfer: Transfer, reason: str = "") -> LoanOver:
        return transfer.loan_over(self.end.clock(), self.end.schema, reason)

    def _forget(self, transfer: Transfer) -> None:
        del self._transfers[transfer.unit]
        link = self._links.by_epoch.get(transfer.epoch)
        if link is not None and link.transport is not None:
            link.transport.forget(transfer.unit)

    def _close(self, link: PullLink, reason: str) -> None:
        self._links.close(link)
        for transfer in self._transfers_of(link):
            self._fail(transfer.unit, reason, tell=None, is_refused=link.is_refused)
