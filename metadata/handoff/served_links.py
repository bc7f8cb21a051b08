"""The data links of one rank of a prefill node: its ROUTER socket, and the decode nodes and their ranks at the other
ends, which it has welcomed.

`HandoffServer` has one, for tickets and for the pages of rank 0. `PageServer` has one on every other rank.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import zmq

from ..bus.addresses import address_of_rank, any_port_of
from ..bus.connections import PortWatch, TcpConnection
from ..bus.descriptors import NodePort, limit_of_descriptors
from ..bus.sockets import DRAIN_LIMIT, DroppedFrames, Received, bound_address, has_input, receive_from, send_frames
from ..errors import ConfigError, ProtocolError, TransferError
from ..logs import Throttle
from ..wire.data_link import (
    LinkHello,
    LinkRefused,
    LinkWelcome,
    Pages,
    Pull,
    RankHello,
    RanksWelcome,
    ToDecode,
    ToPrefill,
    to_prefill_decoder,
)
from ..wire.frames import decode_frame, encode
from ..wire.protocol import PROTOCOL_MIN, known
from ..wire.request import MAX_TEXT
from .data_socket import bind_data_socket
from .descriptor_inbox import inbox_in_reach
from .endpoint import Endpoint, usable
from .page_port import PageGrant, PagePort
from .pages import OfferedPages
from .ranks.shards import PagePart, page_parts
from .schema.kv_layout import Shard
from .schema.schema import kv_layouts, page_bytes
from .tickets import Holder
from .transfer import unpack_column
from .transports.base import POLL_BYTES, PULL_BYTES, Transport
from .transports.local import LocalTransport
from .transports.ranks import RANKS
from .transports.registry import TRANSPORTS, transport_named

logger = logging.getLogger(__name__)

MAX_LINKS = 1024
MAX_UNSENT = 64  # messages of pages that wait for one decode node; our own client never asks for that many


@dataclass(slots=True)
class DecodePeer:
    """The decode node at the other end of an open link, or one of its ranks, which gets `part` of each page. `unsent`
    are messages of pages that ZeroMQ has not sent yet. `grant`: its right to pull at the page port."""

    node_id: str
    epoch: str
    protocol: int  # the node is addressed in it
    hello: LinkHello  # its last one
    welcome: LinkWelcome  # our answer
    transport: type[Transport]  # by which its pages travel
    part: PagePart | None = None  # of a link for pages alone; None: the link has tickets
    grant: PageGrant | None = None
    unsent: list[zmq.MessageTracker] = field(default_factory=list[zmq.MessageTracker])

    @property
    def num_unsent(self) -> int:
        """Number of messages of pages that wait to be sent."""
        self.unsent = [tracker for tracker in self.unsent if not tracker.done]
        return len(self.unsent)


class _Answer(NamedTuple):
    """The answer to a hello, and what the decode node may do at the page port."""

    message: LinkWelcome | LinkRefused
    grant: PageGrant | None = None


class DecodePeers:
    """The decode nodes that may claim tickets or pull pages of our `end`, by link.

    `lease_s` is how long a ticket's lease lasts. `addresses` are those of all ranks of this node, by rank. Only rank 0
    has tickets. `port` is the page port, if there is one.
    """

    def __init__(
        self, end: Endpoint, pages: OfferedPages, lease_s: float, addresses: Sequence[str], port: PagePort | None = None
    ) -> None:
        self._end, self._pages, self._lease_s, self._addresses = end, pages, lease_s, tuple(addresses)
        self._allow_list, self._port = end.allow_list, port
        without = {name for name, each in TRANSPORTS.items() if port is None and each.needs_page_port}
        served = [name for name in end.transports if name not in without and TRANSPORTS[name].can_serve(pages)]
        self._transports = [RANKS] if end.shard.size > 1 else [*served, RANKS]
        # a rank's link may open after an offer, when the pages of a GPU are not brought to the host any more
        self._rank_transports = [name for name in served if name != LocalTransport.name or pages.device is None]
        self._refusals = Throttle()
        self.by_link: dict[Holder, DecodePeer] = {}

    def meet(self, holder: Holder, hello: LinkHello, busy: Collection[Holder]) -> LinkWelcome | LinkRefused:
        """Return the answer to a hello. A decode node repeats its hello if it has not read the answer; it then gets the
        same one. If there are too many links, the oldest that is not `busy` is forgotten. Raises ProtocolError if the
        link is another node's."""
        peer = self.by_link.get(holder)
        if peer is not None and (peer.node_id, peer.epoch) != (hello.node_id, hello.epoch):
            raise ProtocolError(f"LinkHello of {hello.node_id}:{hello.epoch} on the link of {peer.node_id}")
        if peer is not None and peer.hello == hello:
            return peer.welcome
        answer, grant = self._answer(hello)
        if isinstance(answer, LinkRefused):
            self.by_link.pop(holder, None)
            return answer
        if peer is None or peer.welcome.transport != answer.transport:
            logger.info("node %s linked, pages travel by %s", hello.node_id, answer.transport)
        protocol, transport = known(hello.protocol), transport_named(answer.transport)
        if peer is None:
            self._prune(busy)
            self.by_link[holder] = DecodePeer(hello.node_id, hello.epoch, protocol, hello, answer, transport)
        else:
            peer.protocol, peer.hello, peer.welcome, peer.transport = protocol, hello, answer, transport
        self.by_link[holder].part = self._part_of(hello) if isinstance(hello, RankHello) else None
        self.by_link[holder].grant = grant
        if grant is not None:
            grant.holder = holder
        return answer

    def links_of(self, epoch: str) -> list[Holder]:
        """Return the links to this epoch of a decode node."""
        return [holder for holder, peer in self.by_link.items() if peer.epoch == epoch]

    def unlisted(self) -> list[Holder]:
        """Return the links to decode nodes that are not in the allow-list any more. Reads the list about once per
        second."""
        if self._allow_list is None or not self._allow_list.is_due():
            return []
        return [holder for holder, peer in self.by_link.items() if self._allow_list.key_of(peer.node_id) is None]

    def _answer(self, hello: LinkHello) -> _Answer:
        hello = msgspec.structs.replace(hello, inbox=inbox_in_reach(hello.inbox, self._end.shared_dir))
        transports = self._rank_transports if isinstance(hello, RankHello) else self._transports
        reasons = [*self._end.objections(hello, transports), *self._objections_to_rank(hello)]
        if reasons:
            reason = f"prefill node {self._end.node_id} and decode node {hello.node_id}: {'; '.join(reasons)}"
            if self._refusals.is_due():
                logger.warning("refused a decode node: %s", reason)
            return _Answer(LinkRefused(reason=reason[:MAX_TEXT]))
        for transport in usable(transports, hello, self._end.host):
            try:
                return self._welcome(transport, hello)
            except TransferError as error:
                if self._refusals.is_due():
                    logger.warning("decode node %s: transport %s failed: %s", hello.node_id, transport, error)
        reason = f"prefill node {self._end.node_id}: none of the transports {hello.transports} works"
        return _Answer(LinkRefused(reason=reason))

    def _welcome(self, transport: str, hello: LinkHello) -> _Answer:
        welcome = LinkWelcome(
            node_id=self._end.node_id,
            epoch=self._end.epoch,
            transport=transport,
            lease_s=self._lease_s,
            num_pages=self._end.memory[0].num_pages,
            num_tails=self._end.memory[0].num_counted - self._end.memory[0].num_pages,
        )
        if transport == RANKS:
            return _Answer(RanksWelcome(**msgspec.structs.asdict(welcome), addresses=self._addresses))
        kind = TRANSPORTS[transport]
        if self._port is None or not kind.needs_page_port:
            return _Answer(kind.welcome(welcome, self._pages, hello))
        grant = self._port.grant(is_plain=kind.is_readable)
        return _Answer(grant.welcome(welcome), grant)

    def _objections_to_rank(self, hello: LinkHello) -> list[str]:
        """Return why this rank has nothing for the rank or the node that said this hello, with both values."""
        rank, size = self._end.shard
        if not isinstance(hello, RankHello):
            return [f"tickets: this is rank {rank} of {size}, rank 0 has them"] if rank else []
        if (hello.source_rank, hello.source_size) != (rank, size):
            return [f"ranks: this is {rank} of {size}, the hello is for {hello.source_rank} of {hello.source_size}"]
        try:
            has_part = self._part_of(hello) is not None
        except ConfigError as error:
            return [f"ranks: {size} here, {hello.size} there: {error}"]
        whole = f"rank {rank} of {size} here, {hello.rank} of {hello.size} there"
        return [] if has_part else [f"heads: none in common, {whole}"]

    def _part_of(self, hello: RankHello) -> PagePart | None:
        """Return what this rank gives of each page to the rank that said this hello; None if it is nothing. Raises
        ConfigError if heads cannot be split over the decode node's ranks."""
        layouts, theirs = kv_layouts(self._end.schema), Shard(hello.rank, hello.size)
        return page_parts(layouts, self._end.shard.size, theirs).get(self._end.shard.rank)

    def _prune(self, busy: Collection[Holder]) -> None:
        """Keep the table of links bounded: remove the oldest that hold no ticket."""
        epochs = {self.by_link[holder].epoch for holder in busy if holder in self.by_link}
        for holder in list(self.by_link)[: max(0, len(self.by_link) - MAX_LINKS)]:
            if self.by_link[holder].epoch not in epochs:
                del self.by_link[holder]


class ServedLinks:
    """The links of our `end`. `on_closed` is called when a link is over, with the reason. Raises ConfigError as
    `bind_data_socket` does.

    `lease_s` and `rank_addresses` are what a welcome says: how long a ticket's lease lasts, and where ranks 1 and above
    of the node serve their pages.
    """

    def __init__(
        self,
        end: Endpoint,
        pages: OfferedPages,
        bind_host: str,
        on_closed: Callable[[Holder, str], None],
        *,
        lease_s: float = 1.0,
        rank_addresses: Sequence[str] = (),
    ) -> None:
        self._end, self._pages, self._on_closed = end, pages, on_closed
        self._allow_list = end.allow_list
        self.dropped = DroppedFrames(logger, "data link")
        self.socket = bind_data_socket(address_of_rank(bind_host, end.shard.rank), end.keys, end.context)
        self.address = pages.data_address = bound_address(self.socket)
        for name in end.transports:
            TRANSPORTS[name].begin_serving(pages)
        self._watch = PortWatch(self.socket, NodePort(limit_of_descriptors()))
        needs_port = end.keys is not None and any(TRANSPORTS[name].needs_page_port for name in end.transports)
        address = any_port_of(address_of_rank(bind_host, end.shard.rank))
        self._port = PagePort.beside(address, end.context) if needs_port else None
        self._connections: dict[Holder, TcpConnection] = {}  # of open links
        self.peers = DecodePeers(end, pages, lease_s, (self.address, *rank_addresses), self._port)
        self._closed: deque[Holder] = deque(maxlen=MAX_LINKS)  # what was under way on these still arrives

    @property
    def round_trip_s(self) -> float:
        """The longest round trip that the kernel measures on an open link, seconds."""
        return max((connection.round_trip_s for connection in self._connections.values()), default=0.0)

    def close_unlisted(self) -> None:
        """Close the links to decode nodes that are not in the allow-list any more."""
        for holder in self.peers.unlisted():
            reason = f"decode node {self.peers.by_link[holder].node_id} is not in the allow-list any more"
            self.send(holder, LinkRefused(reason=reason))  # it opens a new link once it is listed again
            self.forget(holder, reason)

    def close_peer(self, epoch: str) -> None:
        """Close the links to this epoch of a decode node."""
        for holder in self.peers.links_of(epoch):
            self.forget(holder, f"decode node {self.peers.by_link[holder].node_id} is gone")

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets that the loop polls for input."""
        return [self.socket, *(() if self._port is None else (self._port.socket,))]

    def drain(self, answer: Callable[[Holder, ToPrefill], int]) -> bool:
        """Read messages, bounded, and let `answer` handle each, which returns how many bytes of pages were copied.
        Return True if no message is left. Messages for which it raises ProtocolError are dropped."""
        is_drained = self._drain_links(answer)
        return (self._port is None or self._drain_port(self._port, answer)) and is_drained

    def _drain_port(self, port: PagePort, answer: Callable[[Holder, ToPrefill], int]) -> bool:
        """Do the work of `drain` for the page port."""
        if not has_input(port.socket):
            return True
        num_bytes = 0
        for _ in range(DRAIN_LIMIT):
            try:
                grant, pull = port.receive()
                if pull.indices:
                    num_bytes += answer(grant.holder, pull)
                else:  # an echo
                    self.send(grant.holder, Pages(unit=pull.unit, indices=b"", generations=b""), b"")
            except zmq.Again:
                return True
            except ProtocolError as error:
                self.dropped.add(b"the page port", error)
            if num_bytes > POLL_BYTES:
                break
        return False

    def _drain_links(self, answer: Callable[[Holder, ToPrefill], int]) -> bool:
        """Do the work of `drain` for the data links."""
        num_bytes = 0
        for _ in range(DRAIN_LIMIT):
            try:
                received = receive_from(self.socket, self._allow_list, with_descriptor=True)
            except zmq.Again:
                return True
            try:
                message = self._decode(received)
                if self._is_closed(received.sender) and not isinstance(message, LinkHello):
                    self._refuse(received.sender)
                else:
                    num_bytes += answer(received.sender, message)
                    if isinstance(message, LinkHello) and received.sender in self.peers.by_link:
                        self._know(received)
            except ProtocolError as error:
                self.dropped.add(received.sender, error)
            if num_bytes > POLL_BYTES:
                break
        return False

    def peer(self, holder: Holder, message: ToPrefill) -> DecodePeer:
        """Return the decode node that sent a message. If its link is not open, tell it so, and raise ProtocolError."""
        peer = self.peers.by_link.get(holder)
        if peer is None:  # it may be a link of an earlier epoch
            self._refuse(holder)
            raise ProtocolError(f"{type(message).__name__} before LinkHello")
        return peer

    def answer_pull(self, holder: Holder, pull: Pull, offered: Mapping[int, int], num_cached_pages: int = 0) -> int:
        """Send pages. `offered` has the page numbers of the ticket, by index; the peer may pull those from
        `num_cached_pages` on. Return how many bytes were copied. Raises ProtocolError, and OutOfMemory if the device
        has none for copying pages."""
        peer = self.peers.by_link[holder]
        if peer.grant is not None and peer.grant.route is None:
            raise ProtocolError("pull on a data link whose pages travel by the page port", rid=pull.unit.rid)
        schema = self._end.schema
        size = page_bytes(schema) + page_bytes(schema, of_tails=True) if peer.part is None else peer.part.page_bytes
        indices = unpack_column(pull.indices)
        num_bytes = len(indices) * size
        if not indices or len(set(indices)) < len(indices) or num_bytes > max(PULL_BYTES, size):
            asked, most = f"{len(indices)} pages, {len(set(indices))} of them different", max(1, PULL_BYTES // size)
            raise ProtocolError(f"pull of {asked}; ask for 1 to {most} different pages", rid=pull.unit.rid)
        if peer.num_unsent >= MAX_UNSENT:
            raise ProtocolError(
                f"pull while {MAX_UNSENT} earlier answers wait to be sent; receive them first", rid=pull.unit.rid
            )
        wrong = [index for index in indices if index not in offered or index < num_cached_pages]
        if wrong:
            raise ProtocolError(
                f"pull names pages {wrong[:4]}, which were not offered; ask for offered pages only", rid=pull.unit.rid
            )
        frame, generations = self._pages.pack([offered[index] for index in indices], peer.part)
        self.send(holder, Pages(unit=pull.unit, indices=pull.indices, generations=generations), frame)
        return frame.nbytes

    def send(self, holder: Holder, message: ToDecode, data: Any = None) -> None:
        """Send a message. If the socket does not take it, close the link: the peer is gone, or has left thousands of
        messages unread."""
        peer = self.peers.by_link.get(holder)
        protocol = PROTOCOL_MIN if peer is None else peer.protocol
        try:
            if data is None:
                send_frames(self.socket, holder, encode(message, protocol))
            else:
                assert peer is not None and isinstance(message, Pages), (holder, type(message))
                peer.unsent.append(self._send_pages(holder, peer, message, data))
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.forget(holder, f"its link is closed ({error.strerror})")

    def _send_pages(self, holder: Holder, peer: DecodePeer, message: Pages, data: Any) -> zmq.MessageTracker:
        if self._port is not None and peer.grant is not None:
            return self._port.send(peer.grant, message, data, peer.protocol)
        tracker = send_frames(self.socket, holder, encode(message, peer.protocol), data, track=True)
        assert tracker is not None, holder
        return tracker

    def forget(self, holder: Holder, reason: str) -> None:
        """Close the link of a decode node, and log the reason."""
        if self.peers.by_link.pop(holder, None) is not None:
            self._closed.append(holder)
        self._connections.pop(holder, None)
        self._on_closed(holder, reason)

    def close(self) -> None:
        """Close the sockets. No decode node is told, because this epoch is over."""
        if self._port is not None:
            self._port.close()
        self._watch.close()
        self.socket.close(linger=0)

    def _know(self, received: Received) -> None:
        """Take the connection of an open link for a decode node's."""
        if received.descriptor is not None:
            self._watch.know(received.descriptor)
            self._connections[received.sender] = TcpConnection(received.descriptor)

    def _is_closed(self, holder: Holder) -> bool:
        """Whether this link was open. The router may say that a node is gone before its last messages are read."""
        return holder not in self.peers.by_link and holder in self._closed

    def _refuse(self, holder: Holder) -> None:
        self.send(holder, LinkRefused(reason="this link was closed; open a new one"))

    def _decode(self, received: Received) -> ToPrefill:
        message = decode_frame(to_prefill_decoder, received.body)
        if self._allow_list is not None:
            speaker = message if isinstance(message, LinkHello) else self.peers.by_link.get(received.sender)
            self._allow_list.require(received.name, speaker.node_id if speaker else received.name or "a decode node")
        return message
