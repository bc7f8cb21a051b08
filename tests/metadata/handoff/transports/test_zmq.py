"""Pages as messages: how many the transport asks for, which it takes, and which it ignores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from handoff_nodes import DRAFT_SCHEMA, make_memory, same_pages, unit

from baton.metadata.errors import ProtocolError
from baton.metadata.handoff.memory import pack_pages, unpack_page
from baton.metadata.handoff.schema.schema import page_bytes
from baton.metadata.handoff.transports import zmq as zmq_transport
from baton.metadata.handoff.transports.base import Landed, Move
from baton.metadata.handoff.transports.zmq import ZmqTransport
from baton.metadata.wire.data_link import Pages, Pull
from baton.metadata.wire.request import unpack_ids

PER_PULL = 3


class Wire:
    """A transport whose pulls are recorded, and answered when the test says so."""

    def __init__(self) -> None:
        self.source, self.target = make_memory(DRAFT_SCHEMA, 64, seed=4), make_memory(DRAFT_SCHEMA, 64)
        self.pulls: list[Pull] = []
        self.transport = ZmqTransport(self.target, self.pulls.append)

    def answer(self, generation: int = 1) -> list[Landed]:
        pull = self.pulls.pop(0)
        indices = unpack_ids(pull.indices)
        generations = np.full(len(indices), generation, "<i8").tobytes()
        pages = Pages(unit=pull.unit, indices=pull.indices, generations=generations)
        frame = pack_pages(self.source, [i + 1 for i in indices])
        return list(self.transport.receive(pages, memoryview(frame)))


@pytest.fixture
def wire(monkeypatch) -> Iterator[Wire]:
    monkeypatch.setattr("baton.metadata.handoff.transports.zmq.MESSAGE_BYTES", PER_PULL * page_bytes(DRAFT_SCHEMA) + 1)
    wire = Wire()
    yield wire
    for pool in (*wire.source, *wire.target):
        pool.close()


def moves(indices, rid: str = "r") -> list[Move]:
    """Return moves of index i from page i + 1 to page 60 - i."""
    return [Move(unit(rid), i, i + 1, 60 - i, 1, b"") for i in indices]


def test_packed_pages_unpack_into_other_numbers(wire):
    frame = pack_pages(wire.source, [7, 3])
    assert frame.nbytes == 2 * page_bytes(DRAFT_SCHEMA)
    unpack_page(wire.target, 10, frame[: frame.nbytes // 2])
    unpack_page(wire.target, 11, frame[frame.nbytes // 2 :])
    assert same_pages(wire.target, [10, 11], wire.source, [7, 3])
    assert int(sum(pool.pages.any(axis=(0, 2)).sum() for pool in wire.target)) == 4


def test_a_bounded_number_of_bounded_messages_is_on_the_way(wire, monkeypatch):
    monkeypatch.setattr(zmq_transport, "MAX_IN_FLIGHT", 4)
    wire.transport.fetch(moves(range(20)))
    assert wire.transport.is_busy and not wire.transport.is_waiting
    wire.transport.step(1)
    assert [len(unpack_ids(pull.indices)) for pull in wire.pulls] == [PER_PULL] * 4
    assert not wire.transport.is_busy and wire.transport.is_waiting
    landed = []
    while wire.pulls:
        landed += wire.answer()
        wire.transport.step(1)
        assert len(wire.pulls) <= 4
    assert [item.move.index for item in landed] == list(range(20))
    assert same_pages(wire.target, [60 - i for i in range(20)], wire.source, range(1, 21))
    assert not wire.transport.is_waiting


def test_each_ticket_has_its_own_pull(wire):
    wire.transport.fetch([*moves([0], "a"), *moves([1], "b")])
    wire.transport.step(1)
    assert [pull.unit.rid for pull in wire.pulls] == ["a", "b"]


def test_generations_are_handed_on(wire):
    wire.transport.fetch(moves([0]))
    wire.transport.step(1)
    assert [landed.generation for landed in wire.answer(generation=9)] == [9]


def test_pages_that_were_given_up_write_nothing(wire):
    wire.transport.fetch([*moves(range(4), "a"), *moves([9], "b")])
    wire.transport.step(1)
    wire.transport.forget(unit("a"))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="not asked for"):
            wire.answer()
    assert not any(pool.pages.any() for pool in wire.target)
    assert [landed.move.index for landed in wire.answer()] == [9]


@pytest.mark.parametrize("num_bytes", [0, page_bytes(DRAFT_SCHEMA) - 1, page_bytes(DRAFT_SCHEMA) + 1])
@pytest.mark.parametrize("num_generations", [0, 1, 2])
def test_frames_of_a_wrong_length_write_nothing(wire, num_bytes, num_generations):
    wire.transport.fetch(moves([0]))
    wire.transport.step(1)
    pages = Pages(unit=unit(), indices=wire.pulls[0].indices, generations=bytes(8 * num_generations))
    with pytest.raises(ProtocolError, match="take"):
        list(wire.transport.receive(pages, memoryview(b"\xff" * num_bytes)))
    assert not any(pool.pages.any() for pool in wire.target)


def test_a_closed_transport_waits_for_nothing(wire):
    wire.transport.fetch(moves(range(20)))
    wire.transport.step(1)
    wire.transport.close()
    assert not wire.transport.is_waiting and not wire.transport.is_busy
