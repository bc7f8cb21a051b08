"""Pages that are read by NIXL: real agents, over TCP or shared memory as UCX chooses."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from handoff_nodes import (
    DRAFT_SCHEMA,
    SCHEMA,
    make_client,
    make_row,
    make_server,
    named,
    peer_of,
    run_prefill,
    same_pages,
    spin,
    unit,
)
from rank_nodes import RankPair, heads_schema

from baton.metadata.errors import TransferError
from baton.metadata.handoff.nixl_agents import RingAgent, has_nixl, interface_of
from baton.metadata.handoff.tickets import TicketEnded
from baton.metadata.handoff.transfer import Arrived, TransferFailed
from baton.metadata.handoff.transports import nixl
from baton.metadata.handoff.transports.base import Move
from baton.metadata.wire.node_info import Peer
from baton.metadata.wire.protocol import PROTOCOL_MAX

pytestmark = pytest.mark.skipif(not has_nixl(), reason="needs nixl-cu13 or nixl-cu12")

NUM_PAGES = 20


@pytest.fixture
def nodes() -> Iterator[Any]:
    made: list[Any] = []

    def make(schema: Any = SCHEMA, **more: Any) -> tuple[Any, ...]:
        server, source = make_server(schema, transports=("nixl", "zmq"), **more)
        client, target = make_client(schema, transports=("nixl", "zmq"))
        made.extend([client, server, *source, *target])
        return server, source, client, target

    yield make
    for node in made:
        node.close()


def offer(server: Any, client: Any, rid: str, schema: Any = SCHEMA) -> None:
    server.open(unit(rid), NUM_PAGES)
    server.offer(unit(rid), range(NUM_PAGES), range(1, NUM_PAGES + 1), [1] * NUM_PAGES, make_row(schema))
    client.claim(unit(rid), peer_of(server), 0, range(10, 10 + NUM_PAGES))


def arrive(server: Any, client: Any) -> Arrived:
    ends = Arrived, TicketEnded
    events = spin([server, client], lambda events: all(named(events, kind) for kind in ends))
    return named(events, Arrived)[0]


@pytest.mark.parametrize("schema", [SCHEMA, DRAFT_SCHEMA], ids=["target", "draft"])
def test_pages_arrive_equal_again_and_again(nodes: Any, schema: Any) -> None:
    server, source, client, target = nodes(schema)
    for number in range(3):
        for pool in target:
            pool.pages[:] = 0
        offer(server, client, f"r{number}", schema)
        assert arrive(server, client).times.transport == "nixl"
        assert same_pages(target, range(10, 10 + NUM_PAGES), source, range(1, NUM_PAGES + 1))
    assert nixl.num_quarantined() == 0


@pytest.mark.parametrize("has_gpu", [False, True], ids=["host", "GPU"])
@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (2, 3), (1, 2), (2, 1)])
def test_ranks_read_their_heads_of_the_ranks_that_have_them(num_prefill: int, num_decode: int, has_gpu: bool) -> None:
    """Pools on a GPU are read where they are; the GPU is a fake one here, with memory of the host."""
    schema = heads_schema(6, 6)
    names = ("nixl", "zmq")
    pair = RankPair(schema, num_prefill, num_decode, prefill=names, decode=names, has_gpu=has_gpu)
    try:
        for generation in range(2):
            pair.offer([3, 5, 8], rid=f"r{generation}")
            pair.claim([9, 1, 4], rid=f"r{generation}")
            events = spin(pair.nodes, lambda events: bool(named(events, Arrived) or named(events, TransferFailed)))
            assert named(events, Arrived), events
            assert num_prefill * num_decode > 1 or named(events, Arrived)[0].times.transport == "nixl"
            assert pair.has_arrived([9, 1, 4], [3, 5, 8])
        assert nixl.rings and nixl.num_quarantined() == 0
    finally:
        pair.close()


def test_a_page_that_is_reused_meanwhile_is_noticed(nodes: Any) -> None:
    server, source, client, _ = nodes()
    offer(server, client, "r")
    spin([server, client], lambda _: any(link.transport for link in client._links))
    source[0].generations[5] = 2
    events = spin([server, client], lambda events: named(events, TransferFailed) or named(events, Arrived))
    assert "was reused: generation 2 there, 1 offered" in named(events, TransferFailed)[0].reason


def test_nothing_is_written_after_forget_and_the_ring_is_whole_again(nodes: Any) -> None:
    server, _, client, target = nodes()
    offer(server, client, "first")
    arrive(server, client)
    for pool in target:
        pool.pages[:] = 0
    (link,) = client._links
    transport, ring = link.transport, link.transport._ring
    transport.fetch([Move(unit("x"), i, i + 1, i + 1, 1, b"") for i in range(8)])
    assert list(transport.step(0)) == [] and transport.is_waiting
    transport.forget(unit("x"))
    assert not transport.is_waiting and list(transport.step(1 << 20)) == []
    spin([server], lambda _: nixl.num_quarantined() == 0)
    assert ring.num_free == ring.num_slots and not any(pool.pages.any() for pool in target)
    offer(server, client, "second")
    assert arrive(server, client).times.transport == "nixl"


@pytest.fixture
def process() -> Iterator[Any]:
    """A prefill process that offers 20 pages, and the address of its data link."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    args = (theirs, SCHEMA, 1, [*range(1, 21)], 0.0, False, "e0" * 8, ("nixl",))
    made = context.Process(target=run_prefill, args=args, daemon=True)
    made.start()
    name, address = pipe.recv()
    yield made, Peer(node_id=name, epoch="e0" * 8, data_address=address, protocol=PROTOCOL_MAX)
    made.kill()
    made.join()


def test_a_stopped_peer_keeps_slots_in_quarantine_and_no_page(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL does not report that the peer stopped. The data link does, and the slots wait until the peer has gone."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(nixl, "_rings", {})
    prefill, peer = process
    client, target = make_client(transports=("nixl",))
    client.claim(unit(), peer, 0, range(10, 30))
    spin([client], lambda _: any(link.transport and link.transport.is_waiting for link in client._links))
    os.kill(prefill.pid, signal.SIGSTOP)
    spin([client], lambda _: client.wait_s() == nixl.LOOK_S)  # it does not spin
    (failed,) = named(spin([client], lambda events: named(events, TransferFailed)), TransferFailed)
    assert "closed" in failed.reason
    for pool in target:
        pool.pages[:] = 0
    assert nixl.num_quarantined() > 0
    prefill.kill()  # its sockets close
    spin([client], lambda _: nixl.num_quarantined() == 0)
    assert not any(pool.pages.any() for pool in target)
    for node in (client, *target):
        node.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"metadata": b""}, "NIXL cannot reach"),
        ({"metadata": b"nixl" * 50}, "NIXL cannot reach"),
        ({"agent": "another"}, "not of another"),
        ({"sizes": (5,)}, "pools like ours have"),
        ({"pools": ()}, "pools like ours have"),
    ],
)
def test_a_welcome_that_does_not_fit_leaves_the_next_transport(
    nodes: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: dict[str, Any], words: str
) -> None:
    server, _, client, _ = nodes()
    welcome = nixl.NixlTransport.welcome
    monkeypatch.setattr(nixl.NixlTransport, "welcome", lambda *args: msgspec.structs.replace(welcome(*args), **change))
    offer(server, client, "r")
    assert arrive(server, client).times.transport == "zmq"
    assert words in caplog.text


def test_damaged_metadata_of_an_agent_are_refused(nodes: Any) -> None:
    server, source, client, target = nodes()
    agent, ring, rng = server._pages.agent, RingAgent("damaged", 4096, "127.0.0.1"), random.Random(5)
    num_refused = 0
    for _ in range(60):
        data = bytearray(agent.metadata)
        for _ in range(rng.choice([1, 1, 2, 5])):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(3):
                case 0:
                    del data[at:]
                case 1:
                    data[at:at] = rng.randbytes(rng.randrange(1, 20))
                case _:
                    data[at : at + 8] = rng.randbytes(8)
        try:
            ring.meet(agent.name, bytes(data))
            ring.leave(agent.name)
        except TransferError:
            num_refused += 1
    assert num_refused > 45
    offer(server, client, "r")
    assert arrive(server, client).times.transport == "nixl"
    assert same_pages(target, range(10, 10 + NUM_PAGES), source, range(1, NUM_PAGES + 1))


def test_addresses_outside_the_pools_end_the_link(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server, _, client, _ = nodes()
    welcome = nixl.NixlTransport.welcome
    monkeypatch.setattr(
        nixl.NixlTransport, "welcome", lambda *args: msgspec.structs.replace(welcome(*args), pools=(4096,))
    )
    offer(server, client, "r")
    (failed,) = named(spin([server, client], lambda events: named(events, TransferFailed)), TransferFailed)
    assert "NIXL" in failed.reason
    assert nixl.num_quarantined() == 0


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.1") is None and interface_of("::1") is None
