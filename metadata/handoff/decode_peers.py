"""The decode nodes, and their ranks, whose links a rank of a prefill node has welcomed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from ..bus.throttle import Throttle
from ..errors import ConfigError, ProtocolError, TransferError
from ..wire.data_link import LinkHello, LinkRefused, LinkWelcome, RankHello, RanksWelcome
from ..wire.protocol import known
from ..wire.request import MAX_TEXT
from .endpoint import Endpoint, usable
from .pages import OfferedPages
from .ranks.shards import PagePart, page_parts
from .schema.kv_layout import Shard
from .schema.schema import kv_layouts
from .tickets import Holder
from .transports.local import LocalTransport
from .transports.ranks import RANKS
from .transports.registry import TRANSPORTS

logger = logging.getLogger(__name__)

MAX_LINKS = 1024


@dataclass(slots=True)
class DecodePeer:
    """The decode node at the other end of an open link, or one of its ranks, which gets `part` of each page. `unsent`
    are messages of pages that ZeroMQ has not sent yet."""

    node_id: str
    epoch: str
    protocol: int  # the node is addressed in it
    hello: LinkHello  # its last one
    welcome: LinkWelcome  # our answer
    part: PagePart | None = None  # of a link for pages alone; None: the link has tickets
    unsent: list[zmq.MessageTracker] = field(default_factory=list[zmq.MessageTracker])

    @property
    def num_unsent(self) -> int:
        """Number of messages of pages that wait to be sent."""
        self.unsent = [tracker for tracker in self.unsent if not tracker.done]
        return len(self.unsent)


class DecodePeers:
    """The decode nodes that may claim tickets or pull pages of our `end`, by link.

    `lease_s` is how long a ticket's lease lasts. `addresses` are those of all ranks of this node, by rank. Only rank 0
    has tickets.
    """

    def __init__(self, end: Endpoint, pages: OfferedPages, lease_s: float, addresses: Sequence[str]) -> None:
        self._end, self._pages, self._lease_s, self._addresses = end, pages, lease_s, tuple(addresses)
        served = [name for name in end.transports if TRANSPORTS[name].can_serve(pages)]
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
        self.by_link[holder].part = self._part_of(hello) if isinstance(hello, RankHello) else None
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
        transports = self._rank_transports if isinstance(hello, RankHello) else self._transports
        reasons = [*self._end.objections(hello, transports), *self._objections_to_rank(hello)]
        if reasons:
            reason = f"prefill node {self._end.node_id} and decode node {hello.node_id}: {'; '.join(reasons)}"
            if self._refusals.is_due():
                logger.warning("refused a decode node: %s", reason)
            return LinkRefused(reason=reason[:MAX_TEXT])
        for transport in usable(transports, hello, self._end.host):
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
        if transport == RANKS:
            return RanksWelcome(**msgspec.structs.asdict(welcome), addresses=self._addresses)
        return TRANSPORTS[transport].welcome(welcome, self._pages, hello)

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
