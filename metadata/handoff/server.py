"""The prefill node's end of the data links: it opens tickets, offers pages, and answers claims and pulls.

The server has no thread. The node's loop polls `sockets()` and calls `poll`. `poll` drains the socket, ends leases, and
returns events. While the loop is busy with a step, answers wait. That alone ends no lease, because `poll` reads the
messages that arrived meanwhile before it ends leases.

    open(unit) -> offer(unit, pages) ... -> finish(unit, row) -> TicketEnded(unit, "acked")

The ticket owns the unit's pages from `open` until `poll` returns its TicketEnded (tickets.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq

from ..bus.sockets import DRAIN_LIMIT, DroppedFrames, Received, bound_address, receive_from, send_frames
from ..errors import OutOfMemory, ProtocolError
from ..wire.data_link import LinkHello, LinkRefused
from ..wire.frames import decode_frame, encode
from ..wire.messages import (
    Ack,
    Claim,
    Drop,
    Pages,
    Pull,
    Renew,
    Revoke,
    RevokeAck,
    ToDecode,
    ToPrefill,
    UnknownClaim,
    to_prefill_decoder,
)
from ..wire.protocol import PROTOCOL_MIN
from ..wire.request import MAX_TEXT, Unit
from .data_socket import bind_data_socket
from .decode_peers import DecodePeers
from .endpoint import Endpoint
from .offers import unpack_column, write_offers
from .pages import OfferedPages
from .schema import page_bytes, row_bytes
from .tickets import Claimed, EndedTicket, Holder, Ticket, TicketBook, TicketEnded, TicketFailed
from .transports.base import POLL_BYTES, PULL_BYTES
from .transports.registry import TRANSPORTS

logger = logging.getLogger(__name__)

MAX_UNSENT = 16  # messages of pages that wait for one decode node; our own client never asks for that many


class HandoffServer:
    """Serves the pages of our `end` to any number of decode nodes.

    `bind_host` is a host name or address, or `ipc://PATH`. `lease_s` is how long a ticket's lease lasts. Raises
    ConfigError as `bind_data_socket` does.
    """

    def __init__(self, end: Endpoint, bind_host: str, *, lease_s: float = 1.0) -> None:
        self.end, self._lease_s = end, lease_s
        self._pages = OfferedPages(end.schema, end.memory, end.device)
        self._book = TicketBook(end.clock, lease_s)
        self._peers = DecodePeers(end, self._pages, lease_s)
        self._has_more = False
        self._failed: dict[Unit, TicketFailed] = {}  # since the last poll
        self.dropped = DroppedFrames(logger, "data link")
        self.socket = bind_data_socket(bind_host, end.keys, end.context)
        self.address = bound_address(self.socket)

    # --- the node's side -------------------------------------------------------------------------------------------

    def open(self, unit: Unit, num_pages: int, claimant: str | None = None) -> None:
        """Open the unit's ticket, for the decode node of epoch `claimant` (None: any). The ticket owns the unit's pages
        until its TicketEnded, which comes exactly once. A ticket that nobody claims within a lease ends too."""
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
            self._fail(ticket, error)
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
        for holder in self._peers.unlisted():
            reason = f"decode node {self._peers.by_link[holder].node_id} is not in the allow-list any more"
            self._send(holder, LinkRefused(reason=reason))  # it opens a new link once it is listed again
            self._forget_link(holder, reason)
        self._has_more = not self._drain()
        self._expire()
        failed, self._failed = self._failed, {}
        return [*failed.values(), *self._book.take_events()]

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets that the loop polls for input."""
        return [self.socket]

    def wait_s(self) -> float | None:
        """Return how many seconds the loop may wait on the socket before it must poll; None: no limit."""
        deadline = self._book.next_deadline()
        if self._has_more or self._failed:
            return 0.0
        return None if deadline is None else max(0.0, deadline - self.end.clock())

    def tickets(self) -> list[Unit]:
        """Return the units of the tickets that have not ended."""
        return self._book.units

    def close_peer(self, epoch: str) -> None:
        """End what a decode node of this epoch holds: its tickets end now, its parked claims are forgotten, its links
        are closed."""
        for holder in self._peers.links_of(epoch):
            self._forget_link(holder, f"decode node {self._peers.by_link[holder].node_id} is gone")

    def close(self) -> None:
        """Close the socket. No decode node is told, because this epoch is over."""
        self.socket.close(linger=0)

    # --- the links' side -------------------------------------------------------------------------------------------

    def _drain(self) -> bool:
        """Read and answer messages, bounded. Return True if none is left."""
        num_bytes = 0
        for _ in range(DRAIN_LIMIT):
            try:
                received = receive_from(self.socket, self.end.allow_list)
            except zmq.Again:
                return True
            try:
                num_bytes += self._handle(received.sender, self._decode(received))
            except ProtocolError as error:
                self.dropped.add(received.sender, error)
            if num_bytes > POLL_BYTES:
                break
        return False

    def _decode(self, received: Received) -> ToPrefill:
        message = decode_frame(to_prefill_decoder, received.body)
        allow_list = self.end.allow_list
        if allow_list is not None:
            speaker = message if isinstance(message, LinkHello) else self._peers.by_link.get(received.sender)
            allow_list.require(received.name, speaker.node_id if speaker else received.name or "a decode node")
        return message

    def _handle(self, holder: Holder, message: ToPrefill) -> int:
        """Answer one message. Return how many bytes of pages were copied. Raises ProtocolError."""
        if isinstance(message, LinkHello):
            self._send(holder, self._peers.meet(holder, message, self._book.holders))
            return 0
        if holder not in self._peers.by_link:  # it may be a link of an earlier epoch
            self._send(holder, LinkRefused(reason="this link was closed; open a new one"))
            raise ProtocolError(f"{type(message).__name__} before LinkHello")
        match message:
            case Claim(unit=unit, num_cached_pages=num_cached_pages):
                self._claim(holder, unit, num_cached_pages)
            case Pull():
                return self._answer_pull(holder, message)
            case Renew(units=units):
                for unit in self._book.renew(units, holder):
                    self._send_revoke(holder, unit, "prefill has no such ticket any more")
            case Ack(unit=unit):
                self._book.ack(unit, holder)
            case Drop(unit=unit, reason=reason):
                self._book.end(unit, holder, "dropped", reason)
            case RevokeAck(unit=unit):
                self._book.end(unit, holder, "revoked")
        return 0

    def _claim(self, holder: Holder, unit: Unit, num_cached_pages: int) -> None:
        match self._book.claim(unit, holder, num_cached_pages, self._peers.by_link[holder].epoch):
            case EndedTicket(finished=finished, reason=reason):
                self._send_revoke(holder, unit, reason, finished=finished)
            case Ticket() as ticket:
                self._send_offer(ticket, sorted(ticket.pages))
            case None:
                logger.debug("%s claim parked", unit)

    def _answer_pull(self, holder: Holder, pull: Pull) -> int:
        ticket = self._book.get(pull.unit)
        if ticket is None or ticket.holder != holder or ticket.is_revoked:
            return 0  # the ticket ended while the pull was on the way; its holder has been told
        indices, size = unpack_column(pull.indices), page_bytes(self.end.schema)
        num_bytes = len(indices) * size
        if not indices or len(set(indices)) < len(indices) or num_bytes > max(PULL_BYTES, size):
            asked, most = f"{len(indices)} pages, {len(set(indices))} of them different", max(1, PULL_BYTES // size)
            raise ProtocolError(f"pull of {asked}; ask for 1 to {most} different pages", rid=pull.unit.rid)
        if self._peers.by_link[holder].num_unsent >= MAX_UNSENT:
            raise ProtocolError(
                f"pull while {MAX_UNSENT} earlier answers wait to be sent; receive them first", rid=pull.unit.rid
            )
        wrong = [index for index in indices if index not in ticket.pages or index < ticket.num_cached_pages]
        if wrong:
            raise ProtocolError(
                f"pull names pages {wrong[:4]}, which were not offered; ask for offered pages only", rid=pull.unit.rid
            )
        try:
            frame, generations = self._pages.pack([ticket.pages[index] for index in indices])
        except OutOfMemory as error:
            self._fail(ticket, error)
            return 0
        self._send(holder, Pages(unit=pull.unit, indices=pull.indices, generations=generations), frame)
        return num_bytes

    def _send_offer(self, ticket: Ticket, indices: Sequence[int]) -> None:
        """Send the ticket's holder, if there is one, an offer of these pages, and of the row, if it is known."""
        if ticket.holder is None or ticket.is_revoked:
            return
        indices = [index for index in indices if index >= ticket.num_cached_pages]
        if not indices and ticket.row is None:
            return
        peer = self._peers.by_link.get(ticket.holder)  # None: a later hello was refused; the ticket ends with its lease
        try:
            self._digest(ticket, indices)
            if peer is not None:
                transport = TRANSPORTS[peer.welcome.transport]
                transport.prepare(self._pages, [ticket.pages[index] for index in indices])
        except OutOfMemory as error:
            self._fail(ticket, error)
            return
        for offer in write_offers(ticket, indices, self.end.schema):
            self._send(ticket.holder, offer)

    def _fail(self, ticket: Ticket, error: OutOfMemory) -> None:
        self._failed[ticket.unit] = TicketFailed(ticket.unit, str(error))

    def _digest(self, ticket: Ticket, indices: Sequence[int]) -> None:
        """Give the ticket the checksums of these pages, except of those that its holder has."""
        new = [index for index in indices if index >= ticket.num_cached_pages and index not in ticket.checksums]
        pages, generations = [ticket.pages[index] for index in new], [ticket.generations[index] for index in new]
        ticket.checksums |= zip(new, self._pages.checksums(pages, generations), strict=True)

    def _expire(self) -> None:
        unknown, lapsed = self._book.expire(is_all_read=not self._has_more)
        for unit, holder in unknown:
            self._send(holder, UnknownClaim(unit=unit))
        for unit, holder in lapsed:
            self._send_revoke(holder, unit, f"the lease of {self._lease_s:g} s ended")

    def _forget_link(self, holder: Holder, reason: str) -> None:
        self._peers.by_link.pop(holder, None)
        self._book.close(holder, reason)

    def _send_revoke(self, holder: Holder, unit: Unit, reason: str, *, finished: bool = False) -> None:
        self._send(holder, Revoke(unit=unit, finished=finished, reason=reason[:MAX_TEXT]))

    def _send(self, holder: Holder, message: ToDecode, data: Any = None) -> None:
        """Send a message. If the socket does not take it, close the link: the peer is gone, or has left thousands of
        messages unread."""
        peer = self._peers.by_link.get(holder)
        frames = [holder, encode(message, PROTOCOL_MIN if peer is None else peer.protocol)]
        try:
            if data is None:
                send_frames(self.socket, *frames)
            else:
                tracker = send_frames(self.socket, *frames, data, track=True)
                assert tracker is not None and peer is not None, holder
                peer.unsent.append(tracker)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._forget_link(holder, f"its link is closed ({error.strerror})")
