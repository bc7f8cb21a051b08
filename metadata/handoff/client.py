"""The decode node's side of the handoff: it claims tickets, pulls offered pages into its own pool, checks and
acknowledges.

The client has no thread. The node's loop polls `sockets()` and calls `poll`. `poll` receives messages, copies a bounded
number of pages, checks them, renews leases, and returns events. A page is pulled as soon as it is offered, while the
prefill node still computes later chunks.

    claim(unit, peer, num_cached_pages, pages) -> Arrived | TransferFailed | Revoked

Exactly one of the three events follows each claim, unless `drop` comes first. The transfer owns the pages from `claim`
until that event or `drop`. After that no page of the unit is written, and the caller may use or free them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

from ..bus.addresses import host_identity
from ..bus.curve import KeyPair
from ..bus.sockets import DroppedFrames
from ..bus.throttle import Throttle
from ..errors import ProtocolError, StaleMessage, TransferError
from ..wire.data_link import LinkHello, LinkRefused, LinkWelcome
from ..wire.messages import Ack, Claim, Drop, Offer, Pages, Renew, Revoke, RevokeAck, ToDecode, UnknownClaim
from ..wire.node_info import HandoffSchema, Peer
from ..wire.request import MAX_BATCH, MAX_TEXT, Unit
from ..wire.times import PullTimes
from .checksums import row_checksum
from .descriptors import DescriptorInbox
from .memory import PageMemory
from .pages import DevicePool, ReceivedPages
from .pull_link import PullLink
from .schema import page_bytes
from .transfer import Transfer
from .transports.base import Landed
from .transports.registry import TRANSPORTS

logger = logging.getLogger(__name__)

DRAIN_MESSAGES = 256
POLL_BYTES = 64 << 20  # most bytes of pages copied in one poll
MAX_PULLS = 3  # pulls of one page with a wrong checksum, before the transfer fails
MAX_ASKED = 3  # repeated claims for offers that do not arrive
AWAY_S = 0.5  # if two polls lie further apart, the peers are not blamed for the time beyond
ANSWER_S = 5.0  # how long a connected peer may owe an answer; its loop may be in a long step


class Arrived(NamedTuple):
    """All pages are in our pool and checked, and the row has arrived. `transfer_s` counts the seconds in which at least
    one page was offered and had not arrived."""

    unit: Unit
    row: bytes
    transfer_s: float
    num_pages: int  # pulled, cached ones not counted
    num_bytes: int
    times: PullTimes = PullTimes()


class TransferFailed(NamedTuple):
    """The pages will not arrive. `is_refused`: the two nodes can never hand over."""

    unit: Unit
    reason: str
    is_refused: bool = False


class Revoked(NamedTuple):
    """The prefill node took the ticket back: `finished` if the first token ended the request, else because of an
    error."""

    unit: Unit
    finished: bool
    reason: str


Event = Arrived | TransferFailed | Revoked


class HandoffClient:
    """Pulls pages of any number of prefill nodes into `memory` (target pool, then draft). If `device` is given, pages
    go into its pools, and `memory` is their host mirror.

    `fingerprints` are the digests of target and draft weights. `transports` are names from transports/registry.py, best
    first. `answer_s` is how long a peer may owe an answer.
    """

    def __init__(
        self,
        node_id: str,
        epoch: str,
        schema: HandoffSchema,
        fingerprints: tuple[str, str | None],
        memory: Sequence[PageMemory],
        *,
        keys: KeyPair | None = None,
        transports: Sequence[str] = ("local", "zmq"),
        device: DevicePool | None = None,
        answer_s: float = ANSWER_S,
        clock: Callable[[], float] = time.monotonic,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._schema, self._memory, self._keys, self._device = schema, tuple(memory), keys, device
        self._allow_list = None if keys is None else keys.allow_list
        self._pages = ReceivedPages(schema, memory, device)
        self._answer_s, self._clock = answer_s, clock
        self._context = zmq.Context[zmq.Socket[bytes]].instance() if context is None else context
        needs_inbox = device is not None and any(TRANSPORTS[name].needs_inbox for name in transports)
        self._inbox = _inbox() if needs_inbox else None
        self._inbox_looks = Throttle(clock=clock)
        self._hello = LinkHello(
            node_id=node_id,
            epoch=epoch,
            layout=schema,
            target_fingerprint=fingerprints[0],
            draft_fingerprint=fingerprints[1],
            transports=tuple(transports),
            host=host_identity(),
            inbox="" if self._inbox is None else self._inbox.address,
        )
        self._links: dict[str, PullLink] = {}  # by the peer's epoch
        self._transfers: dict[Unit, Transfer] = {}
        self._events: list[Event] = []
        self._has_more = False
        self._polled_at = clock()
        self.num_checksum_failures = 0
        self.dropped = DroppedFrames(logger, "data link")

    # --- the node's side -------------------------------------------------------------------------------------------

    def claim(self, unit: Unit, peer: Peer, num_cached_pages: int, pages: Sequence[int]) -> None:
        """Claim the unit's ticket from `peer`.

        `pages` are our page numbers by index in the ticket, all of them. The first `num_cached_pages` hold their
        contents already and are not written. The transfer owns them all until an event or `drop`.
        """
        assert unit not in self._transfers, unit
        assert 0 <= num_cached_pages < len(pages), (unit, num_cached_pages, len(pages))
        try:
            link = self._link(peer)
        except TransferError as error:
            self._events.append(TransferFailed(unit, str(error)))
            return
        self._transfers[unit] = Transfer(unit, peer.epoch, num_cached_pages, tuple(pages))
        self._pages.expect(pages[num_cached_pages:])
        link.send(Claim(unit=unit, num_cached_pages=num_cached_pages))

    def drop(self, unit: Unit, reason: str) -> None:
        """Give up the claim. No event follows, and the caller owns the pages again at once. Unknown units are
        ignored."""
        transfer = self._transfers.get(unit)
        if transfer is not None:
            self._forget(transfer)
            self._links[transfer.epoch].send(Drop(unit=unit, reason=reason[:MAX_TEXT]))

    def ask_offers(self, unit: Unit) -> bool:
        """Claim the unit again, so that the prefill node repeats its offers, if offers or the row are missing. Return
        False if this has been done MAX_ASKED times without success, or if the unit is not claimed."""
        transfer = self._transfers.get(unit)
        if transfer is None or (transfer.row is not None and transfer.is_offered):
            return transfer is not None
        transfer.num_asked += 1
        self._links[transfer.epoch].send(Claim(unit=unit, num_cached_pages=transfer.num_cached_pages))
        return transfer.num_asked <= MAX_ASKED

    def poll(self) -> list[Event]:
        """Receive, copy, check and renew, bounded. Return what happened."""
        self._has_more = False
        now = self._clock()
        away_s, self._polled_at = max(0.0, now - self._polled_at - AWAY_S), now
        is_check_due = self._allow_list is not None and self._allow_list.is_due()
        for link in list(self._links.values()):
            if is_check_due:
                link.check_key()
            link.last_heard += away_s  # our own long step, or a clock that jumped
            self._serve(link)
        for epoch, link in list(self._links.items()):
            if link.lost is not None:
                self._close(epoch, link.lost, link.is_refused)
        if self._inbox_looks.is_due():
            self._tidy_inbox()
        events, self._events = self._events, []
        return events

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets that the loop polls for input. They change when links open and close."""
        return [socket for link in self._links.values() for socket in (link.socket, link.monitor)]

    def wait_s(self) -> float | None:
        """Return how many seconds the loop may wait on the sockets before it must poll; None: no limit."""
        if self._has_more or self._events or any(link.lost is not None for link in self._links.values()):
            return 0.0
        now = self._clock()
        epochs = {transfer.epoch for transfer in self._transfers.values()}
        waits = [link.last_renewed + link.lease_s / 4 - now for epoch, link in self._links.items() if epoch in epochs]
        return max(0.0, min(waits)) if waits else None

    def tickets(self) -> list[Unit]:
        """Return the units whose pages have not all arrived."""
        return list(self._transfers)

    def close_peer(self, epoch: str) -> None:
        """Close the link to this epoch of a prefill node. Its memory is unmapped at once; its claims fail at the next
        poll."""
        link = self._links.get(epoch)
        if link is not None:
            self._close(epoch, f"prefill node {link.peer.node_id} is gone", is_refused=False)

    def close(self) -> None:
        """Drop all claims and close all links."""
        for unit in list(self._transfers):
            self.drop(unit, "the decode node leaves")
        for epoch in list(self._links):
            self._links.pop(epoch).close()
        if self._inbox is not None:
            self._inbox.close()

    # --- the links' side -------------------------------------------------------------------------------------------

    def _link(self, peer: Peer) -> PullLink:
        """Return the link to this epoch of the peer, opened if need be. Links to earlier epochs of the node are
        closed."""
        for epoch, link in list(self._links.items()):
            if link.peer.node_id == peer.node_id and epoch != peer.epoch:
                self._close(epoch, f"prefill node {peer.node_id} was restarted", is_refused=False)
        link = self._links.get(peer.epoch)
        if link is None:
            link = PullLink(
                peer, self._hello, self._memory, self._device, self._inbox, self._keys, self._clock, self._context
            )
            self._links[peer.epoch] = link
        return link

    def _serve(self, link: PullLink) -> None:
        self._drain(link)
        now = self._clock()
        if not (link.is_waiting and self._uses(link)):
            link.last_heard = now  # it owes no answer
        if self._uses(link):
            link.greet_again(now)
        self._step(link)
        link.check_connection()  # after the drain: a refusal may precede the end of the connection
        if now - link.last_heard > self._answer_s:
            link.lose(f"it has not answered for {self._answer_s:g} s")
        if link.lost is None and now - link.last_renewed >= link.lease_s / 4:
            self._renew(link, now)

    def _drain(self, link: PullLink) -> None:
        num_bytes = 0
        for _ in range(DRAIN_MESSAGES):
            try:
                received = link.receive() if link.lost is None else None
                if received is None:
                    return
                message, data = received
                num_bytes += 0 if data is None else data.nbytes
                self._handle(link, message, data)
            except ProtocolError as error:
                self.dropped.add(link.peer.node_id.encode(), error)
            if num_bytes > POLL_BYTES:
                break
        self._has_more = True

    def _step(self, link: PullLink) -> None:
        transport = link.transport
        if transport is None:
            return
        for landed in transport.step(POLL_BYTES):
            self._land(link, landed)
        self._has_more |= transport.is_busy

    def _handle(self, link: PullLink, message: ToDecode, data: memoryview | None) -> None:
        match message:
            case LinkWelcome():
                link.welcome(message)
                self._start_waiting(link)
            case LinkRefused(reason=reason):
                link.is_refused = link.transport is None
                link.lose(reason)
            case Offer():
                self._take_offer(link, message)
            case Pages():
                assert data is not None
                self._take_pages(link, message, data)
            case Revoke(unit=unit, finished=finished, reason=reason):
                transfer = self._transfer_of(link, unit)
                self._forget(transfer)
                link.send(RevokeAck(unit=unit))
                self._events.append(Revoked(unit, finished, reason))
            case UnknownClaim(unit=unit):
                self._transfer_of(link, unit)
                self._fail(unit, f"prefill node {link.peer.node_id} does not know {unit}", tell=None)

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
        for transfer in self._transfers.values():
            if transfer.epoch == link.peer.epoch and link.transport is not None:  # a send may lose the link
                link.transport.fetch(transfer.missing())
                link.send(Claim(unit=transfer.unit, num_cached_pages=transfer.num_cached_pages))

    def _take_offer(self, link: PullLink, offer: Offer) -> None:
        transfer = self._transfer_of(link, offer.unit)
        try:
            moves = transfer.take_offer(offer, self._schema, link.num_pages)
            if (
                offer.row is not None
                and self._schema.checksum != "none"
                and row_checksum(offer.row) != offer.row_checksum
            ):
                raise ProtocolError(f"the metadata row of {offer.unit} does not fit its checksum", rid=offer.unit.rid)
        except ProtocolError as error:
            self._fail(offer.unit, f"prefill node {link.peer.node_id}: {error}", tell=link)
            raise
        transfer.offered_at = self._clock()
        transfer.start_clock(transfer.offered_at)
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
        if landed.generation != move.generation:
            where = f"page {move.index} from prefill node {link.peer.node_id}"
            reason = f"{where} was reused: generation {landed.generation} there, {move.generation} offered"
            self._fail(move.unit, reason, tell=link)
            return
        block = self._pages.first_difference(move.target, landed.checksums, transfer.checksums[move.index])
        if block is not None:
            where = f"page {move.index} from prefill node {link.peer.node_id}"
            self.num_checksum_failures += 1
            logger.warning("%s %s: checksum of block %d is wrong", move.unit, where, block)
            if transfer.count_pull(move.index) >= MAX_PULLS:
                self._fail(move.unit, f"{where}: checksum of block {block} wrong {MAX_PULLS} times", tell=link)
            else:
                link.transport.fetch([move])
            return
        transfer.land(move.index, self._clock())
        self._finish_if_whole(link, transfer)

    def _finish_if_whole(self, link: PullLink, transfer: Transfer) -> None:
        if transfer.row is None or not transfer.is_whole:
            return
        now = self._clock()
        transfer.stop_clock(now)
        del self._transfers[transfer.unit]
        link.send(Ack(unit=transfer.unit))
        num_pages = len(transfer.pages) - transfer.num_cached_pages
        num_bytes = num_pages * page_bytes(self._schema)
        name = link.transport.name if link.transport is not None else ""
        times = PullTimes(name, max(0.0, now - transfer.offered_at), num_repeated=transfer.num_repeated)
        self._events.append(Arrived(transfer.unit, transfer.row, transfer.moving_s, num_pages, num_bytes, times))

    def _renew(self, link: PullLink, now: float) -> None:
        units = [transfer.unit for transfer in self._transfers.values() if transfer.epoch == link.peer.epoch]
        for start in range(0, len(units), MAX_BATCH):
            link.send(Renew(units=tuple(units[start : start + MAX_BATCH])))
        link.last_renewed = now

    def _uses(self, link: PullLink) -> bool:
        return any(transfer.epoch == link.peer.epoch for transfer in self._transfers.values())

    def _fail(self, unit: Unit, reason: str, tell: PullLink | None, *, is_refused: bool = False) -> None:
        self._forget(self._transfers[unit])
        if tell is not None:
            tell.send(Drop(unit=unit, reason=reason[:MAX_TEXT]))
        self._events.append(TransferFailed(unit, reason, is_refused))

    def _forget(self, transfer: Transfer) -> None:
        del self._transfers[transfer.unit]
        link = self._links.get(transfer.epoch)
        if link is not None and link.transport is not None:
            link.transport.forget(transfer.unit)

    def _close(self, epoch: str, reason: str, is_refused: bool) -> None:
        link = self._links.pop(epoch)
        link.close()
        for unit in [unit for unit, transfer in self._transfers.items() if transfer.epoch == epoch]:
            self._fail(unit, reason, tell=None, is_refused=is_refused)
        self._tidy_inbox()

    def _tidy_inbox(self) -> None:
        """Close descriptors that arrived for a link that is over. A link that is still opening may wait for its
        descriptors."""
        if self._inbox is not None and all(link.transport is not None for link in self._links.values()):
            self._inbox.discard()


def _inbox() -> DescriptorInbox | None:
    """Return an inbox for the descriptors of peers' pools; None if the system has no such sockets."""
    try:
        return DescriptorInbox()
    except OSError as error:
        logger.warning("no Unix socket for descriptors (%s): pages travel by way of the host", error.strerror)
        return None
