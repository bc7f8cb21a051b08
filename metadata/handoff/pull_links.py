"""The links of a decode node or of one of its ranks, one per epoch of a prefill node. They share an inbox for file
descriptors."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import zmq

from ..bus.throttle import Throttle
from ..wire.node_info import Peer
from .descriptors import DescriptorInbox
from .endpoint import Endpoint
from .pull_link import PullLink
from .ranks.shards import PagePart
from .schema.kv_layout import Shard
from .transports.base import PullTeam
from .transports.registry import TRANSPORTS

logger = logging.getLogger(__name__)

MAX_NAMES = 1024  # nodes whose handshakes are remembered
AWAY_S = 0.5  # if two polls lie further apart, the peers are not blamed for the time beyond


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
        needs_inbox = end.device is not None and any(TRANSPORTS[name].needs_inbox for name in end.transports)
        self._inbox = _inbox() if needs_inbox else None
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
        return [socket for link in self for socket in (link.socket, link.monitor)]

    def begin_poll(self) -> None:
        """Excuse the peers from the time in which this node did not poll, and lose links whose key is not listed any
        more. Called before the links are read."""
        now = self._end.clock()
        away_s, self._polled_at = max(0.0, now - self._polled_at - AWAY_S), now  # a long step, or a clock that jumped
        is_check_due = self._end.allow_list is not None and self._end.allow_list.is_due()
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


def _inbox() -> DescriptorInbox | None:
    """Return an inbox for the descriptors of peers' pools; None if the system has no such sockets."""
    try:
        return DescriptorInbox()
    except OSError as error:
        logger.warning("no Unix socket for descriptors (%s): pages travel by way of the host", error.strerror)
        return None
