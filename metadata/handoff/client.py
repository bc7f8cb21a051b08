"""Decode's side of the handoff: tickets are claimed, offered pages pulled into our own pool, checked, acknowledged.

No threads: the node's loop polls `sockets()` and calls `poll`, which receives, copies (bounded), checks, renews leases
and returns what happened. Each offered page is pulled as soon as it is offered, while later chunks are computed.

    claim(unit, peer, have, pages) -> Arrived | TransferFailed | Revoked

Exactly one of the three follows each claim, unless `drop` comes first. After it, and after `drop`, no page of the unit
is written any more: the pages are the caller's to use or to free.
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
from ..wire.messages import (
    MAX_BATCH,
    MAX_REASON,
    Ack,
    Claim,
    Drop,
    LinkHello,
    LinkRefused,
    LinkWelcome,
    Offer,
    Pages,
    Renew,
    Revoke,
    RevokeAck,
    ToDecode,
    UnknownClaim,
)
from ..wire.node_info import HandoffSchema, Peer
from ..wire.request import Unit
from ..wire.times import PullTimes
from .checksums import row_checksum
from .descriptors import DescriptorInbox
from .device_pool import DevicePool
from .memory import PageMemory
from .pages import ReceivedPages
from .pull_link import Link
from .schema import page_bytes
from .transfer import Inbound
from .transports.base import Landed

logger = logging.getLogger(__name__)

DRAIN_MESSAGES = 256
POLL_BYTES = 64 << 20  # of pages copied in one poll
MAX_PULLS = 3  # of one page, before a wrong checksum fails the transfer
MAX_ASKED = 3  # for offers that do not come
AWAY_S = 0.5  # a longer time between two polls was not the peers'
ANSWER_S = 5.0  # how long a peer whose connection lives may owe an answer: its loop may be in a long step


class Arrived(NamedTuple):
    """All pages are in our pool, checked, and the row has come. `transfer_s`: seconds in which at least one page was
    offered and not yet here."""

    unit: Unit
    row: bytes
    transfer_s: float
    num_pages: int  # pulled, without those had
    num_bytes: int
    times: PullTimes = PullTimes()


class TransferFailed(NamedTuple):
    """The pages will not come. `is_refused`: the two nodes can never hand over."""

    unit: Unit
    reason: str
    is_refused: bool = False


class Revoked(NamedTuple):
    """Prefill took the ticket back: `finished` when the first token ended the request, else an error."""

    unit: Unit
    finished: bool
    reason: str


Event = Arrived | TransferFailed | Revoked


class HandoffClient:
    """Pulls pages of any number of prefill nodes into `memory` (target pool, then draft), or into the pools of `device`
    whose mirror that is.

    `fingerprints` are the digests of target and draft weights; `transports` those to use, best first.
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
        self._inbox = _inbox() if device is not None and "cuda" in transports else None
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
        self._links: dict[str, Link] = {}  # by the peer's epoch
        self._inbound: dict[Unit, Inbound] = {}
        self._events: list[Event] = []
        self._has_more = False
        self._polled_at = clock()
        self.num_checksum_failures = 0
        self.dropped = DroppedFrames(logger, "data link")

    # --- the node's side -------------------------------------------------------------------------------------------

    def claim(self, unit: Unit, peer: Peer, have: int, pages: Sequence[int]) -> None:
        """Claims the unit's ticket from `peer`. `pages` are our page numbers by index in the ticket, all of them; the
        first `have` hold their contents already and are not written. They are the transfer's until an event or `drop`.
        """
        assert unit not in self._inbound, unit
        assert 0 <= have < len(pages), (unit, have, len(pages))
        try:
            link = self._link(peer)
        except TransferError as error:
            self._events.append(TransferFailed(unit, str(error)))
            return
        self._inbound[unit] = Inbound(unit, peer.epoch, have, tuple(pages))
        self._pages.expect(pages[have:])
        link.send(Claim(unit=unit, have=have))

    def drop(self, unit: Unit, reason: str) -> None:
        """Gives the claim up. No event follows; the pages are the caller's at once. Unknown units are ignored."""
        inbound = self._inbound.get(unit)
        if inbound is not None:
            self._forget(inbound)
            self._links[inbound.epoch].send(Drop(unit=unit, reason=reason[:MAX_REASON]))

    def ask_offers(self, unit: Unit) -> bool:
        """Asks prefill again for what it should have offered of a claimed unit by now and is not here, if anything is.
        False when that was in vain often enough."""
        inbound = self._inbound.get(unit)
        if inbound is None or (inbound.row is not None and inbound.is_offered):
            return inbound is not None
        inbound.num_asked += 1
        self._links[inbound.epoch].send(Claim(unit=unit, have=inbound.have))
        return inbound.num_asked <= MAX_ASKED

    def poll(self) -> list[Event]:
        """Goes on with everything, bounded, and returns what happened."""
        self._has_more = False
        now = self._clock()
        away_s, self._polled_at = max(0.0, now - self._polled_at - AWAY_S), now
        is_check_due = self._allow_list is not None and self._allow_list.is_due()
        for link in list(self._links.values()):
            if is_check_due:
                link.check_key()
            link.last_heard += away_s  # a long step of ours, or a clock that jumped
            self._serve(link)
        for epoch, link in list(self._links.items()):
            if link.lost is not None:
                self._close(epoch, link.lost, link.is_refused)
        if self._inbox_looks.is_due():
            self._tidy_inbox()
        events, self._events = self._events, []
        return events

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What the loop polls for input. Changes when links open and close."""
        return [socket for link in self._links.values() for socket in (link.socket, link.monitor)]

    def wait_s(self) -> float | None:
        """How long the loop may wait on the sockets before it must poll; None: for ever."""
        if self._has_more or self._events or any(link.lost is not None for link in self._links.values()):
            return 0.0
        now = self._clock()
        epochs = {inbound.epoch for inbound in self._inbound.values()}
        waits = [link.last_renewed + link.lease_s / 4 - now for epoch, link in self._links.items() if epoch in epochs]
        return max(0.0, min(waits)) if waits else None

    def tickets(self) -> list[Unit]:
        """Units whose pages are still on their way."""
        return list(self._inbound)

    def close_peer(self, epoch: str) -> None:
        """A prefill node's life is over: its mapping is gone at once, its claims fail by the next poll."""
        link = self._links.get(epoch)
        if link is not None:
            self._close(epoch, f"prefill node {link.peer.node_id} is gone", is_refused=False)

    def close(self) -> None:
        """Drops everything and closes all links."""
        for unit in list(self._inbound):
            self.drop(unit, "decode node leaves")
        for epoch in list(self._links):
            self._links.pop(epoch).close()
        if self._inbox is not None:
            self._inbox.close()

    # --- the links' side -------------------------------------------------------------------------------------------

    def _link(self, peer: Peer) -> Link:
        """The link to this life of the peer. Links to earlier lives of the same node are closed."""
        for epoch, link in list(self._links.items()):
            if link.peer.node_id == peer.node_id and epoch != peer.epoch:
                self._close(epoch, f"prefill node {peer.node_id} was restarted", is_refused=False)
        link = self._links.get(peer.epoch)
        if link is None:
            link = Link(
                peer, self._hello, self._memory, self._device, self._inbox, self._keys, self._clock, self._context
            )
            self._links[peer.epoch] = link
        return link

    def _serve(self, link: Link) -> None:
        self._drain(link)
        now = self._clock()
        if not (link.is_waiting and self._uses(link)):
            link.last_heard = now  # it owes nothing
        if self._uses(link):
            link.greet_again(now)
        self._step(link)
        link.check_connection()  # after the drain: a refusal may lie before the end of the connection
        if now - link.last_heard > self._answer_s:
            link.lose(f"it has not answered for {self._answer_s:g} s")
        if link.lost is None and now - link.last_renewed >= link.lease_s / 4:
            self._renew(link, now)

    def _drain(self, link: Link) -> None:
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

    def _step(self, link: Link) -> None:
        transport = link.transport
        if transport is None:
            return
        for landed in transport.step(POLL_BYTES):
            self._land(link, landed)
        self._has_more |= transport.is_busy

    def _handle(self, link: Link, message: ToDecode, data: memoryview | None) -> None:
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
                inbound = self._of(link, unit)
                self._forget(inbound)
                link.send(RevokeAck(unit=unit))
                self._events.append(Revoked(unit, finished, reason))
            case UnknownClaim(unit=unit):
                self._of(link, unit)
                self._fail(unit, f"prefill node {link.peer.node_id} does not know it", tell=None)

    def _of(self, link: Link, unit: Unit) -> Inbound:
        """The claim that a message of this link is about. Raises StaleMessage for a unit that has ended here, or never
        was, and ProtocolError for one that is claimed on another link."""
        inbound = self._inbound.get(unit)
        if inbound is None:
            raise StaleMessage(f"{unit} is not claimed any more", rid=unit.rid)
        if inbound.epoch != link.peer.epoch:
            raise ProtocolError(f"{unit} is not claimed on this link", rid=unit.rid)
        return inbound

    def _start_waiting(self, link: Link) -> None:
        """Claims what waited for the welcome, and queues what was offered in spite of that."""
        for inbound in self._inbound.values():
            if inbound.epoch == link.peer.epoch and link.transport is not None:  # a send may lose the link
                link.transport.fetch(inbound.missing())
                link.send(Claim(unit=inbound.unit, have=inbound.have))

    def _take_offer(self, link: Link, offer: Offer) -> None:
        inbound = self._of(link, offer.unit)
        try:
            moves = inbound.take_offer(offer, self._schema, link.num_pages)
            if (
                offer.row is not None
                and self._schema.checksum != "none"
                and row_checksum(offer.row) != offer.row_checksum
            ):
                raise ProtocolError("the metadata row does not fit its checksum", rid=offer.unit.rid)
        except ProtocolError as error:
            self._fail(offer.unit, f"prefill node {link.peer.node_id}: {error}", tell=link)
            raise
        inbound.offered_at = self._clock()
        inbound.start_clock(inbound.offered_at)
        if link.transport is not None:
            link.transport.fetch(moves)
        self._finish_if_whole(link, inbound)

    def _take_pages(self, link: Link, pages: Pages, data: memoryview) -> None:
        if link.transport is None:
            raise ProtocolError("pages before the welcome")
        if pages.unit not in self._inbound:
            return  # given up while they were on the way
        for landed in link.transport.receive(pages, data):
            self._land(link, landed)
            if pages.unit not in self._inbound:
                return  # it failed: the pages are its owner's again

    def _land(self, link: Link, landed: Landed) -> None:
        """Checks a page where it lies now, in our own pool."""
        move = landed.move
        inbound = self._inbound.get(move.unit)
        if inbound is None or link.transport is None:
            return  # another page of it has failed meanwhile
        if landed.generation != move.generation:
            where = f"page {move.index} from prefill node {link.peer.node_id}"
            reason = f"{where} was reused: generation {landed.generation} there, {move.generation} offered"
            self._fail(move.unit, reason, tell=link)
            return
        block = self._pages.first_difference(landed, inbound.checksums[move.index])
        if block is not None:
            where = f"page {move.index} from prefill node {link.peer.node_id}"
            self.num_checksum_failures += 1
            logger.warning("%s %s: checksum of block %d is wrong", move.unit, where, block)
            if inbound.count_pull(move.index) >= MAX_PULLS:
                self._fail(move.unit, f"{where}: checksum of block {block} wrong {MAX_PULLS} times", tell=link)
            else:
                link.transport.fetch([move])
            return
        inbound.land(move.index, self._clock())
        self._finish_if_whole(link, inbound)

    def _finish_if_whole(self, link: Link, inbound: Inbound) -> None:
        if inbound.row is None or not inbound.is_whole:
            return
        now = self._clock()
        inbound.stop_clock(now)
        del self._inbound[inbound.unit]
        link.send(Ack(unit=inbound.unit))
        num_pages = len(inbound.pages) - inbound.have
        num_bytes = num_pages * page_bytes(self._schema)
        name = link.transport.name if link.transport is not None else ""
        times = PullTimes(name, max(0.0, now - inbound.offered_at), num_repeated=inbound.num_repeated)
        self._events.append(Arrived(inbound.unit, inbound.row, inbound.moving_s, num_pages, num_bytes, times))

    def _renew(self, link: Link, now: float) -> None:
        units = [inbound.unit for inbound in self._inbound.values() if inbound.epoch == link.peer.epoch]
        for start in range(0, len(units), MAX_BATCH):
            link.send(Renew(units=tuple(units[start : start + MAX_BATCH])))
        link.last_renewed = now

    def _uses(self, link: Link) -> bool:
        return any(inbound.epoch == link.peer.epoch for inbound in self._inbound.values())

    def _fail(self, unit: Unit, reason: str, tell: Link | None, *, is_refused: bool = False) -> None:
        self._forget(self._inbound[unit])
        if tell is not None:
            tell.send(Drop(unit=unit, reason=reason[:MAX_REASON]))
        self._events.append(TransferFailed(unit, reason, is_refused))

    def _forget(self, inbound: Inbound) -> None:
        del self._inbound[inbound.unit]
        link = self._links.get(inbound.epoch)
        if link is not None and link.transport is not None:
            link.transport.forget(inbound.unit)

    def _close(self, epoch: str, reason: str, is_refused: bool) -> None:
        link = self._links.pop(epoch)
        link.close()
        for unit in [unit for unit, inbound in self._inbound.items() if inbound.epoch == epoch]:
            self._fail(unit, reason, tell=None, is_refused=is_refused)
        self._tidy_inbox()

    def _tidy_inbox(self) -> None:
        """Descriptors that came for a link that is over must not stay open; those of a link that opens are awaited."""
        if self._inbox is not None and all(link.transport is not None for link in self._links.values()):
            self._inbox.discard()


def _inbox() -> DescriptorInbox | None:
    """Return an inbox for the descriptors of peers' pools; None if the system has none to give."""
    try:
        return DescriptorInbox()
    except OSError as error:
        logger.warning("no Unix socket for descriptors (%s): pages travel by way of the host", error.strerror)
        return None
