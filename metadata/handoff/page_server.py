"""Rank 1 or above of a node that serves pages: it digests its heads of offered pages, and lets the ranks of other nodes
pull them.

Rank 0 has the tickets. It tells this rank which pages are offered and who may pull them (ranks/orders.py). The server
has no thread. The rank's loop does the orders in the order of its other work, polls `sockets()`, and calls `poll`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import UnionType
from typing import ClassVar

import zmq

from ..errors import ConfigError, OutOfMemory, ProtocolError
from ..wire.data_link import LinkHello, Pull, ToPrefill
from ..wire.node_info import HostMemory
from ..wire.request import Unit
from .endpoint import Endpoint
from .pages import OfferedPages
from .ranks.orders import (
    CloseReader,
    DigestAhead,
    EndUnit,
    OfferDigests,
    OfferFailed,
    OfferPages,
    ServeOrder,
    ServeReport,
    ServeUnit,
)
from .served_links import MAX_UNSENT, ServedLinks
from .tickets import Holder


@dataclass(slots=True)
class _Grant:
    """The pages of a ticket, by index, and the epoch of the decode node that may pull them."""

    pages: dict[int, int] = field(default_factory=dict[int, int])
    reader: str | None = None


class PageServer:
    """Serves the heads of our `end`, a rank above 0, to the ranks of any number of decode nodes.

    `counted` is the target's pool of rank 0 (PageMemory.where), which has the generations. Raises ConfigError as
    `bind_data_socket` does, and TransferError if the memory of rank 0 cannot be mapped. The owner calls `close`.
    """

    orders: ClassVar[UnionType] = ServeOrder

    def __init__(self, end: Endpoint, bind_host: str, counted: HostMemory) -> None:
        if end.shard.rank == 0:
            raise ConfigError("rank 0 of a prefill node serves its pages with its tickets (HandoffServer)")
        self._pages = OfferedPages(end.schema, end.memory, end.device, counted)
        self._links = ServedLinks(end, self._pages, bind_host, self._forget_holder)
        self._grants: dict[Unit, _Grant] = {}
        self._early: dict[Holder, deque[Pull]] = {}  # pulls that came before their order
        self._reports: list[ServeReport] = []
        self._has_more = False

    @property
    def address(self) -> str:
        """Return the address at which decode ranks open their links."""
        return self._links.address

    @property
    def num_dropped(self) -> int:
        """Number of frames that were refused."""
        return self._links.dropped.count

    def do(self, order: ServeOrder) -> None:
        """Do an order of rank 0. `poll` returns the report for it."""
        match order:
            case DigestAhead(pages=pages, generations=generations):
                self._pages.digest_ahead(pages, generations)
            case OfferPages(number=number, unit=unit, indices=indices, pages=pages, generations=generations):
                self._grants.setdefault(unit, _Grant()).pages |= zip(indices, pages, strict=True)
                self._pages.await_work(pages, generations)
                try:
                    checksums = self._pages.checksums(pages, generations)
                except OutOfMemory as error:
                    self._reports.append(OfferFailed(unit, str(error)))
                else:
                    self._reports.append(OfferDigests(number, b"".join(checksums)))
            case ServeUnit(unit=unit, epoch=epoch):
                self._grants.setdefault(unit, _Grant()).reader = epoch
                for holder, pull in self._take_early(unit):
                    try:
                        self._answer(holder, pull)
                    except ProtocolError as error:
                        self._links.dropped.add(holder, error)
            case EndUnit(unit=unit):
                self._grants.pop(unit, None)
                self._take_early(unit)
            case CloseReader(epoch=epoch):
                self._links.close_peer(epoch)

    def poll(self) -> list[ServeReport]:
        """Answer decode ranks, bounded. Return reports for rank 0."""
        self._links.close_unlisted()
        self._has_more = not self._links.drain(self._answer)
        reports, self._reports = self._reports, []
        return reports

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets that the loop polls for input."""
        return self._links.sockets

    def wait_s(self) -> float | None:
        """Return how many seconds the loop may wait on the socket before it must poll; None: no limit."""
        return 0.0 if self._has_more or self._reports else None

    def close(self) -> None:
        """Close the socket, and unmap the memory of rank 0."""
        self._links.close()
        self._pages.close()

    def _answer(self, holder: Holder, message: ToPrefill) -> int:
        if isinstance(message, LinkHello):
            peers = self._links.peers
            self._links.send(holder, peers.meet(holder, message, self._busy()))
            # a new link may have put an old one out of the table
            self._early = {other: pulls for other, pulls in self._early.items() if other in peers.by_link}
            return 0
        peer = self._links.peer(holder, message)
        if not isinstance(message, Pull):
            raise ProtocolError(f"{type(message).__name__} on a link for pages alone")
        grant = self._grants.get(message.unit, _Grant())
        if grant.reader is None:
            self._early.setdefault(holder, deque(maxlen=MAX_UNSENT)).append(message)
            return 0
        if grant.reader != peer.epoch:
            raise ProtocolError(f"pull of {message.unit}, whose ticket is another decode node's", rid=message.unit.rid)
        try:
            return self._links.answer_pull(holder, message, grant.pages)
        except OutOfMemory as error:
            self._reports.append(OfferFailed(message.unit, str(error)))
            return 0

    def _take_early(self, unit: Unit) -> list[tuple[Holder, Pull]]:
        """Remove the pulls of this unit that came before it was known who may pull, and return them."""
        taken = [(holder, pull) for holder, pulls in self._early.items() for pull in pulls if pull.unit == unit]
        for holder, pull in taken:
            self._early[holder].remove(pull)
        return taken

    def _busy(self) -> set[Holder]:
        """Return the links to decode nodes that may pull under some ticket."""
        epochs = {grant.reader for grant in self._grants.values()}
        return {holder for holder, peer in self._links.peers.by_link.items() if peer.epoch in epochs}

    def _forget_holder(self, holder: Holder, reason: str) -> None:  # noqa: ARG002
        self._early.pop(holder, None)
