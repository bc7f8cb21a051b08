"""Tickets of requests, with a real handoff server and client: each page is offered once, when it is ready."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from handoff_nodes import make_client, named, peer_of, spin

from baton.engine.engine import Engine
from baton.metadata.handoff.client import HandoffClient
from baton.metadata.handoff.endpoint import Endpoint
from baton.metadata.handoff.schema.buffers import MetadataBuffers, Sampled
from baton.metadata.handoff.server import HandoffServer
from baton.metadata.handoff.transfer import Arrived, Revoked
from baton.metadata.wire.request import Unit
from baton.prefill_node.chunk_work import PromptEnd
from baton.prefill_node.request import Request
from baton.prefill_node.scheduler import PrefillScheduler
from baton.prefill_node.tickets import Tickets

from .conftest import MakeRequest


class Link:
    """Tickets of a prefill node, and the decode node's end of the data link."""

    def __init__(self, engine: Engine, handoff: HandoffServer, client: HandoffClient) -> None:
        self.engine, self.handoff, self.client = engine, handoff, client
        self.tickets = Tickets(engine.pool, handoff)
        self.scheduler = PrefillScheduler(engine.cache, 4, 64)
        self.ended: list[Any] = []

    def start(self, request: Request) -> None:
        """Open the request's tickets and claim them from the decode node."""
        self.tickets.open(request)
        self.scheduler.submit(request)
        assert self.scheduler.start() == [request]
        for index, unit in enumerate(request.choices):
            pages = [1 + index * len(request.pages) + page for page in range(len(request.pages))]
            self.client.claim(unit, peer_of(self.handoff), 0, pages)

    def compute(self, request: Request, num_tokens: int) -> None:
        """Record tokens as computed, and offer what is ready. The pages' contents do not matter here."""
        request.submit_chunk(num_tokens)
        request.finish_chunk(num_tokens, 0.0, 0.0)
        if not request.is_computed:
            self.tickets.offer_computed(request)

    def poll(self) -> list[Any]:
        self.ended += self.tickets.poll()
        return []

    def spin(self, num_events: int) -> list[Any]:
        """Poll both ends until the decode node has this many events and no ticket is open."""
        return spin([self.client, self], lambda events: len(events) == num_events and not self.tickets.units())


@pytest.fixture
def link(engine: Engine) -> Iterator[Link]:
    with ExitStack() as stack:
        end = Endpoint(
            node_id="p0",
            epoch="e0" * 8,
            schema=engine.schema,
            fingerprints=engine.fingerprints,
            memory=engine.memory,
            transports=("local", "zmq"),
        )
        handoff = HandoffServer(end, "127.0.0.1", lease_s=30.0)
        stack.callback(handoff.close)
        client, _ = make_client(engine.schema, fingerprints=engine.fingerprints)
        stack.callback(client.close)
        link = Link(engine, handoff, client)
        yield link
        for request in list(link.scheduler):
            link.scheduler.remove(request)
        engine.cache.flush()


def test_full_pages_are_offered_early_and_the_last_one_with_the_row(link: Link, make_request: MakeRequest) -> None:
    request = make_request("r", 10, n=2)
    link.start(request)
    assert set(link.tickets.units()) == set(request.choices)
    for num_tokens, num_offered in ((3, 0), (5, 2), (1, 2)):
        link.compute(request, num_tokens)
        assert request.num_offered == num_offered
    link.compute(request, 1)
    buffer, rows = MetadataBuffers(link.engine.schema), dict[Unit, bytes]()
    for unit in request.choices:
        buffer.set_sampled(Sampled(40 + unit.choice, 0, None))
        rows[unit] = buffer.pack()
    end = PromptEnd.of(0, request)
    link.tickets.digest_last([end])
    link.tickets.offer_last(end, rows)
    arrived = named(link.spin(2), Arrived)
    assert {event.unit: event.row for event in arrived} == rows
    assert {event.num_pages for event in arrived} == {3}
    assert {ended.unit for ended in link.ended} == set(request.choices) and not request.tickets
    buffer.unpack(arrived[0].row)
    assert buffer.get_sampled(512).first_token == 40 + arrived[0].unit.choice
    assert (request.times.num_offers, request.times.early_pages) == (2, 2)


def test_a_revoked_ticket_ends_and_the_other_one_stands(link: Link, make_request: MakeRequest) -> None:
    request = make_request("r", 10, n=2)
    link.start(request)
    one, two = request.choices
    request.drop_choice(one)
    link.tickets.revoke(request, one, is_finished=False, reason="cancelled")
    events = spin([link.client, link], lambda events: link.ended and events)
    assert [(type(event), event.unit) for event in events] == [(Revoked, one)]
    assert [ended.unit for ended in link.ended] == [one] and request.tickets == {two}
    link.tickets.revoke(request, one, is_finished=False, reason="again")  # does nothing: it is not open
    link.tickets.revoke(request, two, is_finished=True, reason="stop")
    spin([link.client, link], lambda events: not link.tickets.units())


def test_a_request_without_a_decode_node_has_no_ticket(link: Link, make_request: MakeRequest) -> None:
    request = make_request("r", 10, has_decode=False)
    link.tickets.open(request)
    assert not request.tickets and not link.tickets.units()
