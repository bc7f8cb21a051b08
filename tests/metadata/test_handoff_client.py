"""The handoff as a decode node sees it, over both transports, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from baton.metadata.handoff_client import Arrived
from baton.metadata.tickets import TicketEnded
from baton.tests.metadata.handoff_nodes import (
    DRAFT_SCHEMA,
    SCHEMA,
    make_client,
    make_row,
    make_server,
    named,
    peer_of,
    same_pages,
    spin,
    unit,
)


@pytest.fixture(params=["local", "zmq"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def nodes() -> Iterator[list[Any]]:
    """Whatever is appended here is closed afterwards, the last first."""
    held: list[Any] = []
    yield held
    for node in reversed(held):
        node.close()


@pytest.mark.parametrize("schema", [SCHEMA, DRAFT_SCHEMA], ids=["target", "target+draft"])
def test_pages_and_row_arrive_and_the_ticket_ends(transport, nodes, schema):
    server, source = make_server(schema)
    client, target = make_client(schema, transports=(transport,))
    nodes += [*source, *target, server, client]
    server.open(unit(), 3)
    client.claim(unit(), peer_of(server), 0, [9, 4, 7])
    server.offer(unit(), [0, 1], [5, 3], [1, 1])
    spin([server, client], lambda _: same_pages(target, [9, 4], source, [5, 3]))
    server.offer(unit(), [2], [8], [2])
    server.finish(unit(), make_row(schema))
    events = spin([server, client], lambda events: named(events, TicketEnded) and named(events, Arrived))
    assert same_pages(target, [9, 4, 7], source, [5, 3, 8])
    arrived = named(events, Arrived)[0]
    assert (arrived.unit, arrived.row, arrived.num_pages) == (unit(), make_row(schema), 3)
    assert named(events, TicketEnded) == [TicketEnded(unit(), "acked")]
    assert not server.tickets() and not client.tickets()
