"""The prefill node's end of the data links: it opens tickets, offers pages, and answers claims and pulls.

The server has no thread. The node's loop polls `sockets()` and calls `poll`. `poll` drains the socket, ends leases, and
returns events. While the loop is busy with a step, answers wait. That alone ends no lease, because `poll` reads the
messages that arrived meanwhile before it ends leases.

    open(unit) -> offer(unit, pages) ... -> finish(unit, row) -> TicketEnded(unit, "acked")

The ticket owns the unit's pages from `open` until `poll` returns its TicketEnded (tickets.py).
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from ..bus.addresses import host_identity
from ..bus.curve import KeyPair
from ..bus.sockets import DroppedFrames, Received, bound_address, receive_from, send_frames
from ..bus.throttle import Throttle
from ..errors import ProtocolError, TransferError
from ..wire.data_link import LinkHello, LinkRefused, LinkWelcome
from ..wire.frames import decode_frame, encode
from ..wire.messages import (
    Ack,
    Claim,
    Drop,
    Offer,
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
from ..wire.node_info import HandoffSchema
from ..wire.protocol import PROTOCOL_MIN, known
from ..wire.request import MAX_TEXT, Unit, pack_ids, unpack_ids
from .checksums import CHECKSUM_BYTES, row_checksum
from .data_socket import bind_data_socket
from .memory import PageMemory
from .pages import DevicePool, OfferedPages
from .schema import blocks_per_page, differences, page_bytes, row_bytes
from .tickets import Claimed, EndedTicket, Holder, Ticket, TicketBook, TicketEnded
from .transports.base import PULL_BYTES
from .transports.registry import TRANSPORTS

logger = logging.getLogger(__name__)

DRAIN_MESSAGES = 256
DRAIN_BYTES = 64 << 20  # most bytes of pages copied in one poll
OFFER_BYTES = 256 << 10  # of checksums in an offer: the decode node starts on the first pages while later are offered
MAX_LINKS = 1024
MAX_UNSENT = 16  # messages of pages that wait for one decode node; our own client never asks for that many


@dataclass(slots=True)
class DecodePeer:
    """The decode node at the other end of an open link. `unsent` are messages of pages that ZeroMQ has not sent yet."""

    node_id: str
    epoch: str
    transport: str
    protocol: int  # the node is addressed in it
    greeting: tuple[LinkHello, LinkWelcome] | None = None  # its last hello, and our answer
    unsent: list[zmq.MessageTracker] = field(default_factory=list[zmq.MessageTracker])

    @property
    def num_unsent(self) -> int:
        """How many messages of pages wait to be sent."""
        self.unsent = [tracker for tracker in self.unsent if not tracker.done]
        return len(self.unsent)


class HandoffServer:
    """Serves pages of `memory` (target pool, then draft) to any number of decode nodes. If `device` is given, the pages
    lie in its pools, and `memory` is their host mirror.

    `fingerprints` are the digests of target and draft weights. `bind_host` is a host name or address, or `ipc://PATH`.
    `transports` are names from transports/registry.py. Raises ConfigError as `bind_data_socket` does.
    """

    def __init__(
        self,
        bind_host: str,
        schema: HandoffSchema,
        fingerprints: tuple[str, str | None],
        memory: Sequence[PageMemory],
        *,
        node_id: str,
        epoch: str,
        keys: KeyPair | None = None,
        transports: Sequence[str] = ("cuda", "local", "zmq"),
        device: DevicePool | None = None,
        lease_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.node_id, self.epoch = node_id, epoch
        self._schema, self._fingerprints = schema, fingerprints
        self._memory, self._device = tuple(memory), device
        self._pages = OfferedPages(schema, memory, device)
        self._transports = [name for name in transports if TRANSPORTS[name].can_serve(self._pages)]
        self._host = host_identity()
        self._lease_s, self._clock = lease_s, clock
        self._book = TicketBook(clock, lease_s)
        self._links: dict[Holder, DecodePeer] = {}
        self._has_more = False
        self.dropped = DroppedFrames(logger, "data link")
        self._refusals = Throttle()
        self._allow_list = None if keys is None else keys.allow_list
        self.socket = bind_data_socket(bind_host, keys, context)
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
        offer, as from `finish`. A unit whose ticket has ended is ignored: `poll` returns its TicketEnded.
        """
        ticket = self._book.get(unit)
        if ticket is None:
            return
        ticket.offer(indices, pages, generations)
        self._memory[0].generations[list(pages)] = generations
        self._digest(ticket, indices)
        if row is not None:
            self._keep_row(ticket, row)
        self._send_offer(ticket, indices)

    def digest(self, pages: Sequence[int], generations: Sequence[int]) -> None:
        """Compute the checksums of these computed pages, if they are on a GPU, in one launch. Several offers will need
        them."""
        if self._device is not None:
            self._pages.checksums(pages, generations)

    def finish(self, unit: Unit, row: bytes) -> None:
        """Send the final offer, with the metadata row. All pages were offered before."""
        ticket = self._book.get(unit)
        if ticket is None:
            return
        self._keep_row(ticket, row)
        self._send_offer(ticket, ())

    def revoke(self, unit: Unit, finished: bool, reason: str = "") -> None:
        """Take the ticket back: `finished` if the first token ended the request, else because of an error. TicketEnded
        follows when the decode node acknowledges, or when the lease ends."""
        ticket = self._book.revoke(unit, finished, reason)
        if ticket is not None and ticket.holder is not None:
            self._send(ticket.holder, Revoke(unit=unit, finished=finished, reason=reason[:MAX_TEXT]))

    def poll(self) -> list[TicketEnded | Claimed]:
        """Drain the socket (bounded), end leases, and return what happened. After a TicketEnded the ticket's opener
        frees the pages."""
        self._shut_out()
        self._has_more = not self._drain()
        self._expire()
        return self._book.take_events()

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets that the loop polls for input."""
        return [self.socket]

    def wait_s(self) -> float | None:
        """Return how many seconds the loop may wait on the socket before it must poll; None: no limit."""
        deadline = self._book.next_deadline()
        if self._has_more:
            return 0.0
        return None if deadline is None else max(0.0, deadline - self._clock())

    def tickets(self) -> list[Unit]:
        """Return the units of the tickets that have not ended."""
        return self._book.units

    def close_peer(self, epoch: str) -> None:
        """End what a decode node of this epoch holds: its tickets end now, its parked claims are forgotten, its links
        are closed."""
        for holder in [holder for holder, link in self._links.items() if link.epoch == epoch]:
            self._forget_link(holder, f"decode node {self._links[holder].node_id} is gone")

    def close(self) -> None:
        """Close the socket. No decode node is told, because this epoch is over."""
        self.socket.close(linger=0)

    # --- the links' side -------------------------------------------------------------------------------------------

    def _drain(self) -> bool:
        """Read and answer messages, bounded. Return True if none is left."""
        num_bytes = 0
        for _ in range(DRAIN_MESSAGES):
            try:
                received = receive_from(self.socket, self._allow_list)
            except zmq.Again:
                return True
            try:
                num_bytes += self._handle(received.sender, self._decode(received))
            except ProtocolError as error:
                self.dropped.add(received.sender, error)
            if num_bytes > DRAIN_BYTES:
                break
        return False

    def _decode(self, received: Received) -> ToPrefill:
        if len(received.bodies) != 1:
            raise ProtocolError(f"{len(received.bodies)} frames instead of 1")
        message = decode_frame(to_prefill_decoder, received.bodies[0])
        if self._allow_list is not None:
            speaker = message if isinstance(message, LinkHello) else self._links.get(received.sender)
            self._allow_list.require(received.name, speaker.node_id if speaker else received.name or "a decode node")
        return message

    def _shut_out(self) -> None:
        """About once per second, end the tickets of decode nodes that are not in the allow-list any more."""
        if self._allow_list is None or not self._allow_list.is_due():
            return
        for holder, link in list(self._links.items()):
            if self._allow_list.key_of(link.node_id) is None:
                reason = f"decode node {link.node_id} is not in the allow-list any more"
                self._send(holder, LinkRefused(reason=reason))  # it opens a new link once it is listed again
                self._forget_link(holder, reason)

    def _handle(self, holder: Holder, message: ToPrefill) -> int:
        """Answer one message. Return how many bytes of pages were copied. Raises ProtocolError."""
        if isinstance(message, LinkHello):
            self._meet(holder, message)
            return 0
        if holder not in self._links:
            self._send(
                holder, LinkRefused(reason="this link was closed; open a new one")
            )  # it may be a link of an earlier epoch
            raise ProtocolError(f"{type(message).__name__} before LinkHello")
        match message:
            case Claim(unit=unit, num_cached_pages=num_cached_pages):
                self._claim(holder, unit, num_cached_pages)
            case Pull():
                return self._answer_pull(holder, message)
            case Renew(units=units):
                for unit in self._book.renew(units, holder):
                    self._send(holder, Revoke(unit=unit, finished=False, reason="prefill has no such ticket any more"))
            case Ack(unit=unit):
                self._end_acked(holder, unit)
            case Drop(unit=unit, reason=reason):
                self._book.end(unit, holder, "dropped", reason)
            case RevokeAck(unit=unit):
                self._book.end(unit, holder, "revoked")
        return 0

    def _meet(self, holder: Holder, hello: LinkHello) -> None:
        peer = self._links.get(holder)
        if peer is not None and (peer.node_id, peer.epoch) != (hello.node_id, hello.epoch):
            raise ProtocolError(f"LinkHello of {hello.node_id}:{hello.epoch} on the link of {peer.node_id}")
        if peer is not None and peer.greeting is not None and peer.greeting[0] == hello:
            self._send(holder, peer.greeting[1])  # it repeated its hello before it read the answer
            return
        reasons = self._objections(hello)
        if reasons:
            reason = f"prefill node {self.node_id} and decode node {hello.node_id}: {'; '.join(reasons)}"
            if self._refusals.is_due():
                logger.warning("refused a decode node: %s", reason)
            self._links.pop(holder, None)
            self._send(holder, LinkRefused(reason=reason[:MAX_TEXT]))
            return
        welcome = self._welcome(hello)
        if welcome is None:
            self._links.pop(holder, None)
            self._send(
                holder,
                LinkRefused(reason=f"prefill node {self.node_id}: none of the transports {hello.transports} works"),
            )
            return
        if peer is None:
            self._prune_links()
            peer = self._links[holder] = DecodePeer(hello.node_id, hello.epoch, "", PROTOCOL_MIN)
        peer.protocol = known(hello.protocol)
        if peer.transport != welcome.transport:
            logger.info("decode node %s linked, pages travel by %s", hello.node_id, welcome.transport)
            peer.transport = welcome.transport
        peer.greeting = hello, welcome
        self._send(holder, welcome)

    def _welcome(self, hello: LinkHello) -> LinkWelcome | None:
        """Return the welcome for the first transport that works; None if none does."""
        for transport in dict.fromkeys(hello.transports):
            if can_use(transport, self._transports, hello, self._host):
                try:
                    return self._welcome_by(transport, hello)
                except TransferError as error:
                    if self._refusals.is_due():
                        logger.warning("decode node %s: transport %s failed: %s", hello.node_id, transport, error)
        return None

    def _welcome_by(self, transport: str, hello: LinkHello) -> LinkWelcome:
        welcome = LinkWelcome(
            node_id=self.node_id,
            epoch=self.epoch,
            transport=transport,
            lease_s=self._lease_s,
            num_pages=self._memory[0].num_pages,
        )
        return TRANSPORTS[transport].welcome(welcome, self._pages, hello)

    def _objections(self, hello: LinkHello) -> list[str]:
        """Return why the two nodes cannot hand over, with both values ("here" is this prefill node); empty if they
        can."""
        reasons = differences(self._schema, hello.layout)
        theirs = (hello.target_fingerprint, hello.draft_fingerprint)
        for name, here, there in zip(("target", "draft"), self._fingerprints, theirs, strict=True):
            if here != there:
                reasons.append(f"{name} weights: {here} here, {there} there")
        if not any(can_use(name, self._transports, hello, self._host) for name in hello.transports):
            hosts = "same host" if hello.host == self._host else "another host"
            here, there = ", ".join(self._transports), ", ".join(hello.transports)
            reasons.append(f"transports: {here} here, {there} there ({hosts})")
        return reasons

    def _claim(self, holder: Holder, unit: Unit, num_cached_pages: int) -> None:
        match self._book.claim(unit, holder, num_cached_pages, self._links[holder].epoch):
            case EndedTicket(finished=finished, reason=reason):
                self._send(holder, Revoke(unit=unit, finished=finished, reason=reason[:MAX_TEXT]))
            case Ticket() as ticket:
                self._send_offer(ticket, sorted(ticket.pages))
            case None:
                logger.debug("%s claim parked", unit)

    def _end_acked(self, holder: Holder, unit: Unit) -> None:
        ticket = self._book.get(unit)
        if ticket is not None and ticket.holder == holder and ticket.row is None:
            raise ProtocolError(f"ack of {unit} before its final offer", rid=unit.rid)
        self._book.end(unit, holder, "acked")

    def _answer_pull(self, holder: Holder, pull: Pull) -> int:
        ticket = self._book.get(pull.unit)
        if ticket is None or ticket.holder != holder or ticket.is_revoked:
            return 0  # the ticket ended while the pull was on the way; its holder has been told
        indices = _unpack(pull.indices)
        num_bytes = len(indices) * page_bytes(self._schema)
        if not indices or len(set(indices)) < len(indices) or num_bytes > max(PULL_BYTES, page_bytes(self._schema)):
            raise ProtocolError(f"pull of {len(indices)} pages of {pull.unit}", rid=pull.unit.rid)
        if self._links[holder].num_unsent >= MAX_UNSENT:
            raise ProtocolError(f"pull of {pull.unit}, but {MAX_UNSENT} earlier answers are unsent", rid=pull.unit.rid)
        wrong = [index for index in indices if index not in ticket.pages or index < ticket.num_cached_pages]
        if wrong:
            raise ProtocolError(f"pull of {pull.unit} names pages {wrong[:4]} that were not offered", rid=pull.unit.rid)
        frame, generations = self._pages.pack([ticket.pages[index] for index in indices])
        self._send(holder, Pages(unit=pull.unit, indices=pull.indices, generations=generations), frame)
        return num_bytes

    def _send_offer(self, ticket: Ticket, indices: Sequence[int]) -> None:
        """Send the ticket's holder, if there is one, an offer of these pages, and of the row, if it is known."""
        if ticket.holder is None or ticket.is_revoked:
            return
        indices = [index for index in indices if index >= ticket.num_cached_pages]
        if not indices and ticket.row is None:
            return
        self._digest(ticket, indices)
        link = self._links.get(ticket.holder)  # None: a later hello was refused; the ticket ends with its lease
        if link is not None:
            TRANSPORTS[link.transport].prepare(self._pages, [ticket.pages[index] for index in indices])
        most = max(1, OFFER_BYTES // max(1, CHECKSUM_BYTES * blocks_per_page(self._schema)))
        chunks = [indices[start : start + most] for start in range(0, len(indices), most)] or [indices]
        for number, chunk in enumerate(chunks, 1):
            self._send(ticket.holder, _offer_of(ticket, chunk, ticket.row if number == len(chunks) else None))

    def _keep_row(self, ticket: Ticket, row: bytes) -> None:
        assert len(row) == row_bytes(self._schema), (ticket.unit, len(row), row_bytes(self._schema))
        assert len(ticket.pages) == ticket.num_pages, (ticket.unit, len(ticket.pages), ticket.num_pages)
        ticket.row = row

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
            self._send(holder, Revoke(unit=unit, finished=False, reason=f"the lease of {self._lease_s:g} s ended"))

    def _prune_links(self) -> None:
        """Keep the table of links bounded: remove the oldest that hold no ticket."""
        holding = {ticket.holder for unit in self._book.units if (ticket := self._book.get(unit))}
        for holder in list(self._links)[: max(0, len(self._links) - MAX_LINKS)]:
            if holder not in holding:
                del self._links[holder]

    def _forget_link(self, holder: Holder, reason: str) -> None:
        self._links.pop(holder, None)
        self._book.close(holder, reason)

    def _send(self, holder: Holder, message: ToDecode, data: Any = None) -> None:
        """Send a message. If the socket does not take it, close the link: the peer is gone, or has left thousands of
        messages unread."""
        link = self._links.get(holder)
        frames = [holder, encode(message, PROTOCOL_MIN if link is None else link.protocol)]
        try:
            if data is None:
                send_frames(self.socket, *frames)
            else:
                tracker = send_frames(self.socket, *frames, data, track=True)
                assert tracker is not None
                self._links[holder].unsent.append(tracker)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._forget_link(holder, f"its link is closed ({error.strerror})")


def can_use(transport: str, ours: Collection[str], hello: LinkHello, host: str) -> bool:
    """Return whether pages can travel by `transport`, if it is one of ours, from this host (`host_identity`) to the
    decode node that said this hello."""
    return transport in ours and TRANSPORTS[transport].can_reach(hello, host)


def _offer_of(ticket: Ticket, indices: Sequence[int], row: bytes | None) -> Offer:
    return Offer(
        unit=ticket.unit,
        num_pages=ticket.num_pages,
        indices=pack_ids(indices),
        pages=pack_ids(ticket.pages[index] for index in indices),
        generations=array("q", [ticket.generations[index] for index in indices]).tobytes(),
        checksums=b"".join(ticket.checksums[index] for index in indices),
        row=row,
        row_checksum=0 if row is None else row_checksum(row),
    )


def _unpack(ids: bytes) -> list[int]:
    try:
        return unpack_ids(ids)
    except ValueError as error:
        raise ProtocolError(f"a column of {len(ids)} bytes is not int32: its length is no multiple of 4") from error
