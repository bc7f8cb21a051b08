"""The decode node's end of one data link: a DEALER socket to one epoch of one prefill node, its monitor, and a
transport.

A link is opened once and never repaired. A lost connection, a refusal, or a peer with another identity ends it. The
client opens a new link when it has something to claim.

The peer answers in the loop that computes, so a connected peer is silent during a long step. That is no fault: ZeroMQ's
heartbeat shows that the process runs and can be reached, and the router ends a loop that hangs, by the node's own
heartbeat. If answers stay away, the link says hello again. The peer reads messages in their order, so the welcome that
comes back proves that it has read the earlier ones: what it has not answered by then was lost.

A decode node, and each of its ranks, has one link per epoch of a prefill node (`PullLinks`). They share an inbox for
file descriptors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from ..bus.connections import TcpConnection
from ..bus.sockets import DRAIN_LIMIT, DroppedFrames, open_monitor, receive_frames, send_frames
from ..errors import ConfigError, ProtocolError, Refused, StaleMessage, TransferError, Unreachable
from ..logs import Throttle
from ..wire.data_link import (
    DATA_FRAME_BYTES,
    LinkHello,
    LinkWelcome,
    Pages,
    Renew,
    ToDecode,
    ToPrefill,
    to_decode_decoder,
)
from ..wire.frames import decode_frame, encode
from ..wire.node_info import Peer
from ..wire.protocol import known
from ..wire.request import MAX_BATCH, Unit
from .data_socket import UNACKNOWLEDGED_S, connect_data_socket, silence_s
from .descriptor_inbox import DescriptorInbox
from .endpoint import Endpoint
from .ranks.shards import PagePart
from .schema.kv_layout import Shard
from .transports.base import POLL_BYTES, Landed, PeerHost, PullEnd, PullTeam, Transport
from .transports.ranks import RANKS
from .transports.registry import TRANSPORTS, transport_named

logger = logging.getLogger(__name__)

FRAME_SLACK_BYTES = 1 << 20
ANSWER_S = 5.0  # how long an unreachable peer may owe an answer; a connected one is asked whether it runs then
HANDSHAKE_FACTOR = 2  # of ANSWER_S: how long the handshake may take
BUSY_FACTOR = 15  # of ANSWER_S: how long a connected peer may owe an answer. Longer than a step may take
MAX_PASSED_OVER = 3  # hellos that a rank answers before pages. It may not know yet who may pull them
MAX_NAMES = 1024  # nodes whose handshakes are remembered
AWAY_S = 0.5  # if two polls lie further apart, the peers are not blamed for the time beyond
HELLO_S = 0.5  # an unanswered hello is repeated, well within the lease of the tickets that wait for their claim
_LOSSES = {
    zmq.EVENT_DISCONNECTED: "the connection was closed",
    zmq.EVENT_CLOSED: "it cannot be reached",
    zmq.EVENT_CONNECT_RETRIED: "it cannot be reached",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the handshake failed (protocol)",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the handshake failed (keys)",
}
_STEPS = {zmq.EVENT_CONNECTED: HANDSHAKE_FACTOR, zmq.EVENT_HANDSHAKE_SUCCEEDED: BUSY_FACTOR}


class PullLink:
    """An open link of our `end`. `lost` says why it is over; None while it lives. `transport` is None until the
    welcome. `answer_s` is ANSWER_S, or another bound for tests. A link for tickets has the `team` of this node's ranks.
    The link of a rank is for a `part` of each page alone."""

    def __init__(
        self,
        peer: Peer,
        hello: LinkHello,
        end: Endpoint,
        inbox: DescriptorInbox | None,
        answer_s: float,
        *,
        team: PullTeam | None = None,
        part: PagePart | None = None,
        handshake_s: float = 0.0,
        round_trip_s: float = 0.0,
    ) -> None:
        """Connect and say hello. `handshake_s`: how long the handshake of the last link to the peer took.
        `round_trip_s`: of the connection to the router, until this one is measured. Raises TransferError if the address
        cannot be used."""
        self.peer = peer
        self.protocol = known(peer.protocol)  # the peer is addressed in it
        self.transport: Transport | None = None
        self.lost: str | None = None
        self.is_refused = False
        self.num_pages = self.num_tails = 0  # in the peer's pools
        self.lease_s = 1.0  # told by the welcome
        self.last_heard = self.last_message = self._last_renewed = self._greeted_at = end.clock()
        self.handshake_s, self.round_trip_s = handshake_s, round_trip_s
        self._connection: TcpConnection | None = None
        self._reached_at: float | None = None  # when the handshake began
        self._is_used = False
        self._factor = 1  # of ANSWER_S: how long the peer may owe an answer, by how far the connection has come
        self._has_asked = False  # hello was said again because answers stay away
        self._num_passed_over = 0  # such hellos that were answered while earlier messages were not
        self._most_passed_over = 1 if part is None else MAX_PASSED_OVER
        self._hello = msgspec.structs.replace(hello, protocol=self.protocol)
        self._end = PullEnd(tuple(end.memory), self.send, end.device, inbox, part, team, self.protocol)
        self._host = PeerHost(peer.data_address, end.keys is not None, end.context, end.clock)
        self._clock, self._allow_list, self._answer_s = end.clock, end.allow_list, answer_s
        self._welcomed: LinkWelcome | None = None  # the last one
        self.socket, self.monitor, self.server_key = self._open(peer, end)
        self.send(self._hello)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets that the loop polls for input."""
        return [self.socket, self.monitor, *(() if self.transport is None else self.transport.sockets)]

    @property
    def is_waiting(self) -> bool:
        """Whether the peer owes an answer: a welcome, or pages."""
        return self.transport is None or self.transport.is_waiting

    def send(self, message: ToPrefill) -> None:
        """Send a message. If the socket does not take it, the link is lost.

        Before the welcome only hello is sent. If hello was lost, the peer refuses everything that follows, and that
        refusal must not look like an answer to hello.
        """
        if self.lost is not None or (self.transport is None and not isinstance(message, LinkHello)):
            return
        try:
            send_frames(self.socket, encode(message, self.protocol))
        except zmq.ZMQError as error:
            self.lose(f"its queue takes no message ({error.strerror})")

    def greet_again(self, now: float) -> None:
        """Say hello again if the peer has not answered for HELLO_S seconds: the hello or its answer may have been
        lost."""
        if self.transport is None and now - self._greeted_at >= HELLO_S:
            self._greeted_at = now
            self.send(self._hello)

    def expect_answer(self, now: float, *, is_used: bool) -> None:
        """If claims use this link and wait for its welcome, say hello again. If the peer owes no answer, its time to
        answer starts anew."""
        self._is_used = is_used
        if not (is_used and self.is_waiting):
            self.last_heard, self._has_asked, self._num_passed_over = now, False, 0
        if is_used:
            self.greet_again(now)

    def excuse(self, away_s: float) -> None:
        """Give the peer more time to answer, because this node was away."""
        self.last_heard += away_s

    @property
    def renewal_at(self) -> float:
        """When the leases are renewed next, on the clock."""
        return self._last_renewed + self.lease_s / 4

    def renew(self, now: float, units: Sequence[Unit]) -> None:
        """Renew the leases of these units."""
        for start in range(0, len(units), MAX_BATCH):
            self.send(Renew(units=tuple(units[start : start + MAX_BATCH])))
        self._last_renewed = now
        self._measure()

    def receive(self) -> tuple[ToDecode, memoryview | None] | None:
        """Return the next message, and the data frame of a Pages message; None if no message has arrived.

        Raises ProtocolError if the frames are not a message of this protocol.
        """
        received = self._read()
        if received is None and self.transport is not None:
            received = self.transport.read()
        if received is None:
            return None
        message, data = received
        self.last_message = self._clock()
        answer = LinkWelcome if self.transport is None else Pages
        if isinstance(message, answer) or not self.is_waiting:  # only the awaited answer counts as one
            self.last_heard, self._has_asked, self._num_passed_over = self.last_message, False, 0
        return message, data

    def drain(self, handle: Callable[[ToDecode, memoryview | None], None], dropped: DroppedFrames) -> bool:
        """Receive messages, bounded, and let `handle` take each, with its data frame. Return True if no message is
        left, or if the link is lost. Messages that are malformed, or for which `handle` raises ProtocolError, are
        counted in `dropped`."""
        num_bytes = 0
        for _ in range(DRAIN_LIMIT):
            try:
                received = self.receive() if self.lost is None else None
                if received is None:
                    return True
                message, data = received
                num_bytes += 0 if data is None else data.nbytes
                handle(message, data)
            except ProtocolError as error:
                dropped.add(self.peer.node_id.encode(), error)
            if num_bytes > POLL_BYTES:
                break
        return False

    def step(self) -> Iterator[Landed]:
        """Let the transport move pages, a bounded number, and yield those that have landed. If it has no way to the
        peer, go on with the next one; if no page can come any more, lose the link. Raises OutOfMemory as the transport
        does."""
        transport = self.transport
        if transport is None:
            return
        try:
            for landed in transport.step(POLL_BYTES):
                self.last_heard, self._has_asked, self._num_passed_over = self._clock(), False, 0
                yield landed
        except Unreachable as error:
            if self.transport is transport:
                transport.close()
                self.transport = None
                self._retry_without(transport.name, str(error))
        except Refused as error:
            self.is_refused = True
            self.lose(str(error))
        except TransferError as error:
            self.lose(str(error))

    def welcome(self, message: LinkWelcome) -> None:
        """Open the transport that the welcome names. If the peer's memory cannot be mapped, say hello again without
        that transport. Raises StaleMessage if the same welcome came before, because hello was repeated."""
        if message == self._welcomed:
            self._pass_over()
            raise StaleMessage("this welcome came before")
        self._welcomed = message
        if (message.node_id, message.epoch) != (self.peer.node_id, self.peer.epoch):
            self.lose(f"it is {message.node_id} of epoch {message.epoch}, not {self.peer.node_id} of {self.peer.epoch}")
        elif self.transport is not None or not self._can_use(message.transport):
            self.lose(f"it welcomed us with transport {message.transport!r}, out of turn or not among ours")
        else:
            self.protocol = max(self.protocol, message.since)
            self.lease_s = message.lease_s
            self.num_pages, self.num_tails = message.num_pages, message.num_tails
            self._start(message)

    def check(self, now: float) -> None:
        """Lose the link if its connection was closed, or if an answer is overdue. If the peer is connected and late,
        ask whether it runs."""
        self.check_connection()
        silent_s = now - self.last_heard
        if silent_s > self._factor * self._answer_s:
            self.lose(self._silence_words(silent_s))
        elif silent_s > self._answer_s and self.transport is not None and not self._has_asked:
            self._ask()

    def check_connection(self) -> None:
        """Lose the link if the connection was closed, or if the address cannot be reached."""
        while self.lost is None:
            try:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            kind = zmq.Event(event["event"])
            if kind == zmq.EVENT_CONNECTED:
                self._connection = TcpConnection(event["value"])
            if kind in _STEPS:
                self._advance(_STEPS[kind])
                continue
            self.lose(_LOSSES[kind] + self._doubt())

    def check_key(self) -> None:
        """Lose the link if the allow-list names another key of the peer now, or none."""
        if self._allow_list is not None and self._allow_list.key_of(self.peer.node_id) != self.server_key:
            self.lose(f"its key is not in allow-list {self._allow_list.path} any more")

    def refuse(self, reason: str) -> None:
        """End the link as the peer demands. If it demands so before its welcome, the two nodes can never hand over."""
        self.is_refused = self.transport is None
        self.lose(reason)

    def lose(self, reason: str) -> None:
        """End the link with this reason. The peer's memory is unmapped at once."""
        if self.lost is None:
            self.lost = f"node {self.peer.node_id}: {reason}"
            logger.info("data link lost: %s", self.lost)
        if self.transport is not None:
            self.transport.close()
            self.transport = None

    def close(self) -> None:
        """Close the sockets and unmap the peer's memory."""
        self.lose("closed")
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)

    def _ask(self) -> None:
        self._has_asked = True
        if self.transport is None or not self.transport.ask():
            self.send(self._hello)

    def _read(self) -> tuple[ToDecode, memoryview | None] | None:
        """Return the next message on the link's own socket."""
        try:
            frames: Any = receive_frames(self.socket, 2, copy=False)
        except zmq.Again:
            return None
        message = decode_frame(to_decode_decoder, frames[0].bytes if len(frames[0]) <= DATA_FRAME_BYTES else b"")
        if len(frames) != (2 if isinstance(message, Pages) else 1):
            raise ProtocolError(f"{type(message).__name__} with {len(frames)} frames")
        return message, frames[1].buffer if len(frames) == 2 else None

    def _pass_over(self) -> None:
        """The peer has answered a hello that was said again. If it owed an answer to earlier messages, they or their
        answers were lost, so the link is lost."""
        if not self._has_asked:
            return
        self._num_passed_over += 1
        if self._num_passed_over >= self._most_passed_over:
            silent_s = self._clock() - self.last_heard
            self.lose(f"it answers small messages, but pages asked for {silent_s:.1f} s ago have not come")
        else:
            self._ask()

    def _advance(self, factor: int) -> None:
        """The connection has come further."""
        now = self._clock()
        if factor == BUSY_FACTOR and self._reached_at is not None:
            self.handshake_s = now - self._reached_at
            self._measure()
        self._reached_at, self._factor, self.last_heard = now, factor, max(self.last_heard, now)

    def _measure(self) -> None:
        """Measure the round trip, and let the time in which a cut network is noticed follow it."""
        if self._connection is not None:
            self.round_trip_s = self._connection.follow_round_trip(UNACKNOWLEDGED_S) or self.round_trip_s

    def _silence_words(self, silent_s: float) -> str:
        """Return why a link is lost whose peer has been silent for so long."""
        if self._factor < BUSY_FACTOR:
            what = "no connection came about" if self._factor == 1 else "the handshake is not done"
            return f"it has not answered for {self._factor * self._answer_s:g} s: {what}"
        owed = "this node's hello" if self.transport is None else "a request for pages"
        return f"it is connected and has not answered {owed} for {silent_s:.0f} s"

    def _doubt(self) -> str:
        """Return likely causes of a lost connection and the remedy, "" if none is known."""
        if self.transport is None:
            return " before its welcome: does its --allow-list know this node?" if self._allow_list is not None else ""
        if not self._is_used:
            return ""
        return (
            " after its welcome, while offers or pages were awaited: either the node has ended, or the network is cut "
            "or drops large packets (MTU)"
        )

    def _open(self, peer: Peer, end: Endpoint) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes], bytes]:
        """Return the connected socket, its monitor, and the server's public key. Raises TransferError."""
        opened = ExitStack()
        try:
            socket = end.context.socket(zmq.DEALER)
            opened.callback(socket.close, linger=0)
            monitor = open_monitor(socket, sum(_LOSSES) | sum(_STEPS))
            opened.callback(monitor.close, linger=0)
            opened.callback(socket.disable_monitor)
            return (
                socket,
                monitor,
                connect_data_socket(
                    socket,
                    peer,
                    end.keys,
                    max_frame=self._max_frame(),
                    silence_s=silence_s(self.handshake_s, self.round_trip_s),
                ),
            )
        except (zmq.ZMQError, ConfigError) as error:  # a ZMQError also if no file descriptor is left
            opened.close()
            raise TransferError(f"cannot open a link to {peer.data_address!r}: {error}", node=peer.node_id) from error

    def _max_frame(self) -> int:
        """Return the largest frame of the link, bytes: at least one page."""
        page_bytes = sum(pool.page_bytes for pool in self._end.memory)
        return max(DATA_FRAME_BYTES, page_bytes) + FRAME_SLACK_BYTES

    def _can_use(self, transport: str) -> bool:
        """Return whether hello listed the transport, or it is `ranks`, which need not be listed."""
        return transport in self._hello.transports or (transport == RANKS and self._end.team is not None)

    def _start(self, message: LinkWelcome) -> None:
        host = replace(self._host, handshake_s=self.handshake_s, round_trip_s=self.round_trip_s)
        try:
            self.transport = transport_named(message.transport).open(replace(self._end, peer=host), message)
        except TransferError as error:
            if message.transport == RANKS:
                self.refuse(str(error))  # there is no other way between nodes with ranks
            else:
                self._retry_without(message.transport, str(error))
            return
        logger.info("linked to node %s, pages travel by %s", self.peer.node_id, message.transport)

    def _retry_without(self, transport: str, reason: str) -> None:
        others = tuple(name for name in self._hello.transports if name != transport)
        if not others:
            self.lose(reason)
            return
        logger.warning("node %s: %s; pages will travel by %s", self.peer.node_id, reason, others[0])
        self._hello = msgspec.structs.replace(self._hello, transports=others)
        self._greeted_at = self._clock()
        self.send(self._hello)


class PullLinks:
    """The links of our `end`, by the peer's epoch. `answer_s` is how long a peer may owe an answer.

    Links for tickets have the `team` of this node's ranks. Links of a rank go to rank `source` of prefill nodes, which
    gives a `part` of each page.
    """

    def __init__(
        self,
        end: Endpoint,
        answer_s: float,
        *,
        team: PullTeam | None = None,
        source: Shard | None = None,
        part: PagePart | None = None,
    ) -> None:
        self._end, self._answer_s, self._team, self._part = end, answer_s, team, part
        self._allow_list = end.allow_list
        for name in end.transports:
            TRANSPORTS[name].begin_pulls(end.memory, end.own_host)
        needs_inbox = any(TRANSPORTS[name].needs_same_host or TRANSPORTS[name].needs_inbox for name in end.transports)
        self._inbox = _inbox(end.shared_dir) if needs_inbox else None
        self._inbox_looks = Throttle(clock=end.clock)
        inbox = "" if self._inbox is None else self._inbox.address
        self.hello = end.hello(inbox) if source is None else end.rank_hello(inbox, source)
        self.by_epoch: dict[str, PullLink] = {}
        self._handshakes_s: dict[str, float] = {}  # of the last link, by the peer's name
        self._router_round_trip_s = 0.0
        self._polled_at = end.clock()

    def __iter__(self) -> Iterator[PullLink]:
        """Iterate over the links as they are now. Links may be opened and closed meanwhile."""
        return iter(list(self.by_epoch.values()))

    def open(self, peer: Peer) -> PullLink:
        """Return the link to this epoch of the peer, opened if need be. Raises TransferError if its address cannot be
        used."""
        link = self.by_epoch.get(peer.epoch)
        if link is None:
            link = self.by_epoch[peer.epoch] = PullLink(
                peer,
                self.hello,
                self._end,
                self._inbox,
                self._answer_s,
                team=self._team,
                part=self._part,
                handshake_s=self._handshakes_s.get(peer.node_id, 0.0),
                round_trip_s=self._router_round_trip_s,
            )
        return link

    def allow_for(self, round_trip_s: float) -> None:
        """Give new links more time, since a message to the router and back takes so long."""
        self._router_round_trip_s = round_trip_s

    def other_epochs(self, peer: Peer) -> list[PullLink]:
        """Return the links to other epochs of the peer."""
        return [link for link in self if link.peer.node_id == peer.node_id and link.peer.epoch != peer.epoch]

    def close(self, link: PullLink) -> None:
        """Close the link. The peer's memory is unmapped at once."""
        del self.by_epoch[link.peer.epoch]
        if len(self._handshakes_s) >= MAX_NAMES:
            self._handshakes_s.clear()
        self._handshakes_s[link.peer.node_id] = link.handshake_s
        link.close()
        self._tidy_inbox()

    def close_all(self) -> None:
        """Close all links and the inbox."""
        for link in self:
            self.close(link)
        if self._inbox is not None:
            self._inbox.close()

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets that the loop polls for input. They change when links open and close."""
        return [socket for link in self for socket in link.sockets]

    def begin_poll(self) -> None:
        """Excuse the peers from the time in which this node did not poll, and lose links whose key is not listed any
        more. Called before the links are read."""
        now = self._end.clock()
        away_s, self._polled_at = max(0.0, now - self._polled_at - AWAY_S), now  # a long step, or a clock that jumped
        is_check_due = self._allow_list is not None and self._allow_list.is_due()
        for link in self:
            if is_check_due:
                link.check_key()
            link.excuse(away_s)
        if self._inbox_looks.is_due():
            self._tidy_inbox()

    def _tidy_inbox(self) -> None:
        """Close descriptors that arrived for a link that is over. A link that is still opening may wait for its
        descriptors."""
        if self._inbox is not None and all(link.transport is not None for link in self):
            self._inbox.discard()


def _inbox(directory: Path | None) -> DescriptorInbox | None:
    """Return an inbox for the descriptors of peers' pools; None if the system has no such sockets."""
    try:
        return DescriptorInbox(directory)
    except OSError as error:
        logger.warning("no Unix socket for descriptors (%s): other containers cannot share memory", error.strerror)
        return None
