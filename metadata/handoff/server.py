"""Prefill's end of the data links: tickets are opened, pages offered, claims and pulls answered.

No threads: the node's loop polls `socket` and calls `poll`, which drains it, ends leases and returns what happened.
A loop that is busy computing delays nothing but answers: what has arrived meanwhile is drained before leases end.

    open(unit) -> offer(unit, pages) ... -> finish(unit, row) -> TicketEnded(unit, "acked")
"""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from ..bus.curve import KeyPair
from ..bus.sockets import DroppedFrames, Received, bound_address, receive_from, send_frames
from ..bus.throttle import Throttle
from ..errors import ProtocolError, TransferError
from ..wire.frames import decode_frame
from ..wire.messages import (
    MAX_REASON,
    Ack,
    Claim,
    CudaWelcome,
    Drop,
    LinkHello,
    LinkRefused,
    LinkWelcome,
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
from ..wire.node_info import DevicePools, HandoffSchema
from ..wire.protocol import known
from ..wire.request import Unit, pack_ids, unpack_ids
from .checksums import CHECKSUM_BYTES, row_checksum
from .descriptors import new_token, send_descriptors
from .device_pool import DevicePool
from .memory import PageMemory
from .pages import OfferedPages
from .peers import DecodePeer, bind_data_socket, can_use, frame_for, objections
from .schema import blocks_per_page, page_bytes, row_bytes
from .tickets import Claimed, Holder, Refund, Ticket, TicketBook, TicketEnded
from .transports.zmq import MESSAGE_BYTES

logger = logging.getLogger(__name__)

DRAIN_MESSAGES = 256
DRAIN_BYTES = 64 << 20  # of pages copied out in one poll
OFFER_BYTES = 256 << 10  # of checksums in a message: decode begins with some pages while the next are told of
MAX_LINKS = 1024
MAX_UNSENT = 16  # messages of pages that wait for one decode node; ours never asks for that many


class HandoffServer:
    """Serves pages of `memory` (target pool, then draft), or of the GPU whose mirror that is, to any number of decode
    nodes.

    `fingerprints` are the digests of target and draft weights. `bind_host` is a host name or address, or `ipc://PATH`.
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
        impossible: set[str] = set() if all(pool.is_shared for pool in memory) else {"local", "cuda"}
        if device is None or not device.shared:
            impossible.add("cuda")
        self._transports = [name for name in transports if name not in impossible]
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
        """Opens the unit's ticket, for the decode node of epoch `claimant` (None: any). From here on its pages are the
        ticket's, until TicketEnded: it comes for every ticket, exactly once. A ticket that nobody claims within a lease
        ends too."""
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
        """Offers computed pages, which the device has done and which will not be written again while the ticket lives:
        their indices in the ticket, numbers in the pool and allocation counts. Sent at once when claimed, else with the
        claim. Each index once. With `row` it is the final offer, as `finish` makes. A unit whose ticket has ended is
        ignored: its end is on the way in `poll`."""
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
        """These computed pages will be offered, by several offers: a GPU computes the checksums of all at once."""
        if self._device is not None:
            self._pages.checksums(pages, generations)

    def finish(self, unit: Unit, row: bytes) -> None:
        """The final offer: the metadata row, by value. All pages were offered before."""
        ticket = self._book.get(unit)
        if ticket is None:
            return
        self._keep_row(ticket, row)
        self._send_offer(ticket, ())

    def revoke(self, unit: Unit, finished: bool, reason: str = "") -> None:
        """Takes the ticket back: `finished` when the first token ended the request, else an error. TicketEnded follows
        when decode reads it no more: with its acknowledgement, or its lease."""
        ticket = self._book.revoke(unit, finished, reason)
        if ticket is not None and ticket.holder is not None:
            self._send(ticket.holder, Revoke(unit=unit, finished=finished, reason=reason[:MAX_REASON]))

    def poll(self) -> list[TicketEnded | Claimed]:
        """Drains the socket (bounded), ends leases, and returns what happened. The owner of a TicketEnded's pages
        frees them now."""
        self._shut_out()
        self._has_more = not self._drain()
        self._expire()
        return self._book.take_events()

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What the loop polls for input."""
        return [self.socket]

    def wait_s(self) -> float | None:
        """How long the loop may wait on the socket before it must poll; None: for ever."""
        deadline = self._book.next_deadline()
        if self._has_more:
            return 0.0
        return None if deadline is None else max(0.0, deadline - self._clock())

    def tickets(self) -> list[Unit]:
        """Units of the tickets that have not ended."""
        return self._book.units

    def close_peer(self, epoch: str) -> None:
        """A decode node's life is over: its tickets end now, its parked claims are forgotten, its links closed."""
        for holder in [holder for holder, link in self._links.items() if link.epoch == epoch]:
            self._forget_link(holder, f"decode node {self._links[holder].node_id} is gone")

    def close(self) -> None:
        """Closes the socket. Tickets are not told: this epoch is over."""
        self.socket.close(linger=0)

    # --- the links' side -------------------------------------------------------------------------------------------

    def _drain(self) -> bool:
        """True when nothing was left to read."""
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
        """About once a second: the tickets of decode nodes that are not in the allow-list any more end."""
        if self._allow_list is None or not self._allow_list.is_due():
            return
        for holder, link in list(self._links.items()):
            if self._allow_list.key_of(link.node_id) is None:
                reason = f"decode node {link.node_id} is not in the allow-list any more"
                self._send(holder, LinkRefused(reason=reason))  # it opens another link once it is let in again
                self._forget_link(holder, reason)

    def _handle(self, holder: Holder, message: ToPrefill) -> int:
        """Answers one message. Returns the bytes of pages copied out. Raises ProtocolError."""
        if isinstance(message, LinkHello):
            self._meet(holder, message)
            return 0
        if holder not in self._links:
            self._send(holder, LinkRefused(reason="this link was closed; open a new one"))  # it may be an older life's
            raise ProtocolError(f"{type(message).__name__} before LinkHello")
        match message:
            case Claim(unit=unit, have=have):
                self._claim(holder, unit, have)
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
            self._send(holder, peer.greeting[1])  # it has said hello again before it heard the answer
            return
        reasons = objections(self._schema, self._fingerprints, self._transports, hello)
        if reasons:
            reason = f"prefill node {self.node_id} and decode node {hello.node_id}: {'; '.join(reasons)}"
            if self._refusals.is_due():
                logger.warning("refused a decode node: %s", reason)
            self._links.pop(holder, None)
            self._send(holder, LinkRefused(reason=reason[:MAX_REASON]))
            return
        welcome = self._welcome(hello)
        if welcome is None:
            self._links.pop(holder, None)
            self._send(holder, LinkRefused(reason=f"prefill node {self.node_id}: none of {hello.transports} works"))
            return
        if peer is None:
            self._prune_links()
            peer = self._links[holder] = DecodePeer(hello.node_id, hello.epoch, "", known(hello.protocol))
        peer.protocol = known(hello.protocol)
        if peer.transport != welcome.transport:
            logger.info("decode node %s linked, pages travel by %s", hello.node_id, welcome.transport)
            peer.transport = welcome.transport
        peer.greeting = hello, welcome
        self._send(holder, welcome)

    def _welcome(self, hello: LinkHello) -> LinkWelcome | None:
        """Return the answer for the first transport that works; None if none does."""
        for transport in dict.fromkeys(hello.transports):
            if can_use(transport, self._transports, hello):
                try:
                    return self._welcome_by(transport, hello.inbox)
                except TransferError as error:
                    if self._refusals.is_due():
                        logger.warning("decode node %s: %s; not by %s", hello.node_id, error, transport)
        return None

    def _welcome_by(self, transport: str, inbox: str) -> LinkWelcome:
        shared = {"cuda": self._memory[:1], "local": self._memory}.get(transport, ())
        welcome = LinkWelcome(
            node_id=self.node_id,
            epoch=self.epoch,
            transport=transport,
            lease_s=self._lease_s,
            num_pages=self._memory[0].num_pages,
            pid=os.getpid() if shared else 0,
            fds=tuple(pool.fd for pool in shared if pool.fd is not None),
            sizes=tuple(pool.size for pool in shared),
        )
        if transport != "cuda" or self._device is None:
            return welcome
        sizes, token = tuple(pool.size for pool in self._device.shared), new_token()
        pools = DevicePools(device=self._device.device, sizes=sizes, token=token)
        send_descriptors(inbox, token, [pool.descriptor for pool in self._device.shared])
        return CudaWelcome(**msgspec.structs.asdict(welcome), pools=pools)

    def _claim(self, holder: Holder, unit: Unit, have: int) -> None:
        match self._book.claim(unit, holder, have, self._links[holder].epoch):
            case Refund(finished=finished, reason=reason):
                self._send(holder, Revoke(unit=unit, finished=finished, reason=reason[:MAX_REASON]))
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
            return 0  # it ended while the pull was on the way; the holder has been told
        indices = _unpack(pull.indices)
        num_bytes = len(indices) * page_bytes(self._schema)
        if not indices or len(set(indices)) < len(indices) or num_bytes > max(MESSAGE_BYTES, page_bytes(self._schema)):
            raise ProtocolError(f"pull of {len(indices)} pages of {pull.unit}", rid=pull.unit.rid)
        if self._links[holder].num_unsent >= MAX_UNSENT:
            raise ProtocolError(f"pull of {pull.unit}, but {MAX_UNSENT} are not taken yet", rid=pull.unit.rid)
        wrong = [index for index in indices if index not in ticket.pages or index < ticket.have]
        if wrong:
            raise ProtocolError(f"pull of {pull.unit} names pages {wrong[:4]} that were not offered", rid=pull.unit.rid)
        frame, generations = self._pages.pack([ticket.pages[index] for index in indices])
        self._send(holder, Pages(unit=pull.unit, indices=pull.indices, generations=generations), frame)
        return num_bytes

    def _send_offer(self, ticket: Ticket, indices: Sequence[int]) -> None:
        """Tells the holder of these pages, where there is one, and of the row, where it is there."""
        if ticket.holder is None or ticket.is_revoked:
            return
        indices = [index for index in indices if index >= ticket.have]
        if not indices and ticket.row is None:
            return
        self._digest(ticket, indices)
        link = self._links.get(ticket.holder)  # None: a later hello was refused, and the ticket ends with its lease
        if link is not None and link.transport == "local":
            self._pages.bring([ticket.pages[index] for index in indices])
        most = max(1, OFFER_BYTES // max(1, CHECKSUM_BYTES * blocks_per_page(self._schema)))
        pieces = [indices[start : start + most] for start in range(0, len(indices), most)] or [indices]
        for number, piece in enumerate(pieces, 1):
            self._send(ticket.holder, _offer_of(ticket, piece, ticket.row if number == len(pieces) else None))

    def _keep_row(self, ticket: Ticket, row: bytes) -> None:
        assert len(row) == row_bytes(self._schema), (ticket.unit, len(row), row_bytes(self._schema))
        assert len(ticket.pages) == ticket.num_pages, (ticket.unit, len(ticket.pages), ticket.num_pages)
        ticket.row = row

    def _digest(self, ticket: Ticket, indices: Sequence[int]) -> None:
        """The ticket has checksums of these pages, less those that its holder has."""
        new = [index for index in indices if index >= ticket.have and index not in ticket.checksums]
        pages, generations = [ticket.pages[index] for index in new], [ticket.generations[index] for index in new]
        ticket.checksums |= zip(new, self._pages.checksums(pages, generations), strict=True)

    def _expire(self) -> None:
        unknown, lapsed = self._book.expire(is_all_read=not self._has_more)
        for unit, holder in unknown:
            self._send(holder, UnknownClaim(unit=unit))
        for unit, holder in lapsed:
            self._send(holder, Revoke(unit=unit, finished=False, reason=f"the lease of {self._lease_s:g} s ended"))

    def _prune_links(self) -> None:
        """Keeps the table of links bounded: the oldest without a ticket go."""
        holding = {ticket.holder for unit in self._book.units if (ticket := self._book.get(unit))}
        for holder in list(self._links)[: max(0, len(self._links) - MAX_LINKS)]:
            if holder not in holding:
                del self._links[holder]

    def _forget_link(self, holder: Holder, reason: str) -> None:
        self._links.pop(holder, None)
        self._book.close(holder, reason)

    def _send(self, holder: Holder, message: ToDecode, data: Any = None) -> None:
        """Sends, or closes a link that cannot take it: the peer is gone, or has not read for thousands of messages."""
        frames = [holder, frame_for(self._links.get(holder), message)]
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
        raise ProtocolError(f"a column of {len(ids)} bytes is no int32 column") from error
