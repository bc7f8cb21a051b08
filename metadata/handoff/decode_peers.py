"""The decode nodes whose links a prefill node has welcomed."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

import zmq

from ..bus.throttle import Throttle
from ..errors import ProtocolError, TransferError
from ..wire.data_link import LinkHello, LinkRefused, LinkWelcome
from ..wire.protocol import known
from ..wire.request import MAX_TEXT
from .endpoint import Endpoint, can_use
from .pages import OfferedPages
from .tickets import Holder
from .transports.registry import TRANSPORTS

logger = logging.getLogger(__name__)

MAX_LINKS = 1024


@dataclass(slots=True)
class DecodePeer:
    """The decode node at the other end of an open link. `unsent` are messages of pages that ZeroMQ has not sent yet."""

    node_id: str
    epoch: str
    protocol: int  # the node is addressed in it
    hello: LinkHello  # its last one
    welcome: LinkWelcome  # our answer
    unsent: list[zmq.MessageTracker] = field(default_factory=list[zmq.MessageTracker])

    @property
    def num_unsent(self) -> int:
        """Number of messages of pages that wait to be sent."""
        self.unsent = [tracker for tracker in self.unsent if not tracker.done]
        return len(self.unsent)


class DecodePeers:
    """The decode nodes that may claim tickets of our `end`, by link. `lease_s` is how long a ticket's lease lasts."""

    def __init__(self, end: Endpoint, pages: OfferedPages, lease_s: float) -> None:
        self._end, self._pages, self._lease_s = end, pages, lease_s
        self._transports = [name for name in end.transports if TRANSPORTS[name].can_serve(pages)]
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
        answer = self._answer(hello)
        if isinstance(answer, LinkRefused):
            self.by_link.pop(holder, None)
            return answer
        if peer is None or peer.welcome.transport != answer.transport:
            logger.info("decode node %s linked, pages travel by %s", hello.node_id, answer.transport)
        if peer is None:
            self._prune(busy)
            self.by_link[holder] = DecodePeer(hello.node_id, hello.epoch, known(hello.protocol), hello, answer)
        else:
            peer.protocol, peer.hello, peer.welcome = known(hello.protocol), hello, answer
        return answer

    def links_of(self, epoch: str) -> list[Holder]:
        """Return the links to this epoch of a decode node."""
        return [holder for holder, peer in self.by_link.items() if peer.epoch == epoch]

    def unlisted(self) -> list[Holder]:
        """Return the links to decode nodes that are not in the allow-list any more. Reads the list about once per
        second."""
        allow_list = self._end.allow_list
        if allow_list is None or not allow_list.is_due():
            return []
        return [holder for holder, peer in self.by_link.items() if allow_list.key_of(peer.node_id) is None]

    def _answer(self, hello: LinkHello) -> LinkWelcome | LinkRefused:
        reasons = self._end.objections(hello, self._transports)
        if reasons:
            reason = f"prefill node {self._end.node_id} and decode node {hello.node_id}: {'; '.join(reasons)}"
            if self._refusals.is_due():
                logger.warning("refused a decode node: %s", reason)
            return LinkRefused(reason=reason[:MAX_TEXT])
        for transport in dict.fromkeys(hello.transports):
            if can_use(transport, self._transports, hello, self._end.host):
                try:
                    return self._welcome(transport, hello)
                except TransferError as error:
                    if self._refusals.is_due():
                        logger.warning("decode node %s: transport %s failed: %s", hello.node_id, transport, error)
        return LinkRefused(reason=f"prefill node {self._end.node_id}: none of the transports {hello.transports} works")

    def _welcome(self, transport: str, hello: LinkHello) -> LinkWelcome:
        welcome = LinkWelcome(
            node_id=self._end.node_id,
            epoch=self._end.epoch,
            transport=transport,
            lease_s=self._lease_s,
            num_pages=self._end.memory[0].num_pages,
        )
        return TRANSPORTS[transport].welcome(welcome, self._pages, hello)

    def _prune(self, busy: Collection[Holder]) -> None:
        """Keep the table of links bounded: remove the oldest that hold no ticket."""
        for holder in list(self.by_link)[: max(0, len(self.by_link) - MAX_LINKS)]:
            if holder not in busy:
                del self.by_link[holder]
