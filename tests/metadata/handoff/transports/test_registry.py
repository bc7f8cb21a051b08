"""A transport is one file and one line in the registry: a toy that is only registered is negotiated and moves pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, get_args, get_type_hints

import msgspec
import pytest
from handoff_nodes import SCHEMA, make_client, make_row, make_server, named, peer_of, same_pages, spin, unit

from baton.metadata.config import NodeConfig
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.handoff.pages import OfferedPages
from baton.metadata.handoff.transfer import Arrived, TransferFailed
from baton.metadata.handoff.transports.base import Landed, PullEnd, Transport
from baton.metadata.handoff.transports.registry import TRANSPORTS
from baton.metadata.wire.data_link import LinkHello, LinkWelcome
from baton.metadata.wire.protocol import PROTOCOL_MAX

_published: dict[int, tuple[PageMemory, ...]] = {}  # in place of memory that two processes share


class ToyTransport(Transport):
    """A transport between two nodes of one process."""

    name: ClassVar[str] = "toy"
    needs_same_host: ClassVar[bool] = True
    prepared: ClassVar[list[int]] = []

    @classmethod
    def welcome(cls, welcome: LinkWelcome, pages: OfferedPages, hello: LinkHello) -> LinkWelcome:
        _published[7] = pages.memory
        return msgspec.structs.replace(welcome, pid=7)

    @classmethod
    def prepare(cls, pages: OfferedPages, numbers: list[int]) -> None:
        cls.prepared.extend(numbers)

    @classmethod
    def open(cls, end: PullEnd, welcome: LinkWelcome) -> ToyTransport:
        transport = cls(end.memory)
        transport.peer = _published[welcome.pid]
        return transport

    peer: tuple[PageMemory, ...]

    @property
    def is_busy(self) -> bool:
        return bool(self._queue)

    def step(self, max_bytes: int) -> Iterator[Landed]:
        while self._queue:
            move = self._queue.popleft()
            for pool, source in zip(self.memory, self.peer, strict=True):
                pool.pages[:, move.target] = source.pages[:, move.source]
            yield Landed(move, int(self.peer[0].generations[move.source]))


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSPORTS, "toy", ToyTransport)
    ToyTransport.prepared.clear()


def test_a_registered_transport_is_negotiated_and_moves_pages() -> None:
    server, source = make_server(transports=("toy", "zmq"))
    client, target = make_client(transports=("toy", "zmq"))
    server.open(unit(), 2)
    client.claim(unit(), peer_of(server), 0, [9, 4])
    server.offer(unit(), [0, 1], [5, 3], [1, 1], make_row(SCHEMA))
    (arrived,) = named(spin([server, client], lambda events: named(events, Arrived)), Arrived)
    assert arrived.times.transport == "toy"
    assert same_pages(target, [9, 4], source, [5, 3])
    assert ToyTransport.prepared == [5, 3]
    for node in (client, server, *source, *target):
        node.close()


def test_the_needs_of_a_transport_are_checked_when_nodes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyTransport, "since", PROTOCOL_MAX + 1)  # which nobody knows yet
    server, source = make_server(transports=("toy",))
    client, target = make_client(transports=("toy",))
    client.claim(unit(), peer_of(server), 0, [9, 4])
    (failed,) = named(spin([server, client], lambda events: named(events, TransferFailed)), TransferFailed)
    assert failed.is_refused and "transports: toy here, toy there (same host)" in failed.reason
    for node in (client, server, *source, *target):
        node.close()


def test_the_flag_offers_every_transport_of_the_registry() -> None:
    names = get_args(get_type_hints(NodeConfig)["transport"])
    assert names == ("auto", *(name for name in TRANSPORTS if name != "toy"))


def test_every_transport_is_registered_under_its_name() -> None:
    assert all(name == transport.name for name, transport in TRANSPORTS.items())
