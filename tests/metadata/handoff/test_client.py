"""The handoff as a decode node sees it, over all transports, against a real server."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from forked import fork_context
from handoff_nodes import (
    DRAFT_SCHEMA,
    SCHEMA,
    TARGET,
    make_client,
    make_memory,
    make_row,
    make_server,
    named,
    pages_of,
    peer_of,
    run_prefill,
    same_pages,
    spin,
    unit,
)

from baton.metadata.bus.curve import KeyPair
from baton.metadata.handoff import pull_link
from baton.metadata.handoff.client import MAX_PULLS, HandoffClient
from baton.metadata.handoff.schema.schema import blocks_per_page, make_schema
from baton.metadata.handoff.server import HandoffServer
from baton.metadata.handoff.tickets import Claimed, TicketEnded
from baton.metadata.handoff.transfer import Arrived, Revoked, TransferFailed
from baton.metadata.wire.data_link import LinkHello, LinkWelcome, Offer, to_prefill_decoder
from baton.metadata.wire.frames import decode_frame, encode
from baton.metadata.wire.node_info import Peer
from baton.metadata.wire.request import pack_ids


@pytest.fixture(params=["local", "zmq"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["local", "zmq", "cuda", "gpu local", "gpu zmq"])
def way(request: pytest.FixtureRequest) -> str:
    """A transport, between nodes on GPUs where it says so or can only be so."""
    return request.param


class Pair:
    """A server and a client on one host, with their pools."""

    def __init__(self, nodes: list[Any], way: str, schema=SCHEMA, **server_settings: Any) -> None:
        self.has_gpu, transport = way not in ("local", "zmq"), way.split()[-1]
        self.server, self.source = make_server(schema, has_gpu=self.has_gpu, **server_settings)
        self.client, self.target = make_client(schema, has_gpu=self.has_gpu, transports=(transport,))
        self.both = [self.server, self.client]
        nodes += [*self.source, *self.target, *self.both]

    def claim(self, unit_, pages, have=0) -> None:
        self.client.claim(unit_, peer_of(self.server), have, pages)

    def spin(self, *kinds: type, timeout_s: float = 20.0) -> list[Any]:
        """Polls both until an event of each kind has come."""
        return spin(self.both, lambda events: all(named(events, kind) for kind in kinds), timeout_s)


@pytest.fixture
def pair(nodes, way) -> Pair:
    return Pair(nodes, way)


# --- what should happen ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [SCHEMA, DRAFT_SCHEMA], ids=["target", "target+draft"])
def test_pages_are_pulled_as_they_are_offered_and_the_ticket_ends(nodes, way, schema):
    pair = Pair(nodes, way, schema)
    pair.server.open(unit(), 3)
    pair.claim(unit(), [9, 4, 7])
    pair.server.offer(unit(), [0, 1], [5, 3], [1, 1])
    spin(pair.both, lambda _: same_pages(pair.target, [9, 4], pair.source, [5, 3]))  # before the ticket is finished
    pair.server.offer(unit(), [2], [8], [2])
    pair.server.finish(unit(), make_row(schema))
    events = pair.spin(Arrived, TicketEnded)
    assert same_pages(pair.target, [9, 4, 7], pair.source, [5, 3, 8])
    (arrived,) = named(events, Arrived)
    assert (arrived.unit, arrived.row, arrived.num_pages) == (unit(), make_row(schema), 3)
    assert arrived.num_bytes == sum(p.layout.page_bytes for p in pair.source) * 3
    assert 0 < arrived.transfer_s < 5
    assert named(events, TicketEnded) == [TicketEnded(unit(), "acked")]
    assert not pair.server.tickets() and not pair.client.tickets()
    assert not [i for i in range(48) if i not in (9, 4, 7) and any(p.pages[:, i].any() for p in pair.target)]


def test_pages_that_decode_has_are_neither_sent_nor_written(pair):
    for pool in pair.target:
        pool.pages[:, [11, 12]] = 0xAB
    pair.server.open(unit(), 4)
    pair.claim(unit(), [11, 12, 13, 14], have=2)
    pair.server.offer(unit(), [0, 1, 2, 3], [1, 2, 3, 4], [1, 1, 1, 1])
    pair.server.finish(unit(), make_row(SCHEMA))
    events = pair.spin(Arrived, Claimed)
    assert named(events, Claimed) == [Claimed(unit(), 2)]
    assert named(events, Arrived)[0].num_pages == 2
    assert all(np.all(pool.pages[:, [11, 12]] == 0xAB) for pool in pair.target)
    assert same_pages(pair.target, [13, 14], pair.source, [3, 4])


def test_everything_offered_before_the_claim_is_sent_with_it(pair):
    pair.server.open(unit(), 2)
    pair.server.offer(unit(), [0, 1], [1, 2], [1, 1])
    pair.server.finish(unit(), make_row(SCHEMA))
    pair.claim(unit(), [3, 4])
    pair.spin(Arrived, TicketEnded)
    assert same_pages(pair.target, [3, 4], pair.source, [1, 2])


def test_a_claim_that_comes_before_its_ticket_is_parked(pair):
    pair.claim(unit(), [3])
    pair.claim(unit("other"), [4])
    spin(
        pair.both,
        lambda _: pair.client.sockets() and pair.client._links.by_epoch[pair.server.end.epoch].transport is not None,
    )
    pair.server.open(unit(), 1)
    pair.server.offer(unit(), [0], [1], [1])
    pair.server.finish(unit(), make_row(SCHEMA))
    assert pair.spin(Arrived)[-1].unit == unit()


def test_choices_share_pages_and_have_rows_of_their_own(pair):
    """n tickets over the same source pages, all but the last, which was copied per choice."""
    for choice in range(3):
        pair.server.open(unit(choice=choice), 3)
        pair.claim(unit(choice=choice), [choice * 3 + 1, choice * 3 + 2, choice * 3 + 3])
        pair.server.offer(unit(choice=choice), [0, 1, 2], [5, 6, 10 + choice], [1, 1, 1])
        pair.server.finish(unit(choice=choice), make_row(SCHEMA, seed=choice))
    events = spin(pair.both, lambda events: len(named(events, Arrived)) == len(named(events, TicketEnded)) == 3)
    for arrived in named(events, Arrived):
        choice = arrived.unit.choice
        assert arrived.row == make_row(SCHEMA, seed=choice)
        ours = [choice * 3 + 1, choice * 3 + 2, choice * 3 + 3]
        assert same_pages(pair.target, ours, pair.source, [5, 6, 10 + choice])


def test_many_pages_take_several_messages(nodes, way, monkeypatch):
    for size in ("zmq.MESSAGE_BYTES", "cuda.GATHER_BYTES"):
        monkeypatch.setattr(f"baton.metadata.handoff.transports.{size}", 3 * 3 * 2 * 2 * 4 * 8 * 4)  # 3 pages
    pair = Pair(nodes, way)
    order = np.random.default_rng(0).permutation(np.arange(1, 32)).tolist()
    pair.server.open(unit(), 31)
    pair.claim(unit(), list(range(10, 41)))
    pair.server.offer(unit(), list(range(31)), order, [1] * 31)
    pair.server.finish(unit(), make_row(SCHEMA))
    pair.spin(Arrived)
    assert same_pages(pair.target, range(10, 41), pair.source, order)


def test_without_checksums_nothing_is_digested(nodes, way):
    schema = make_schema(TARGET, None, 4, checksums=False)
    pair = Pair(nodes, way, schema)
    pair.server.open(unit(), 1)
    pair.claim(unit(), [3])
    pair.server.offer(unit(), [0], [1], [1])
    pair.source[0].pages[:, 1] ^= 0xFF  # after the offer: nobody looks
    pair.server.finish(unit(), make_row(schema))
    pair.spin(Arrived)
    assert same_pages(pair.target, [3], pair.source, [1])


def test_one_client_pulls_from_two_servers(nodes, way):
    pair = Pair(nodes, way)
    second, source = make_server(seed=2, epoch="e2" * 8, node_id="p1", has_gpu=pair.has_gpu)
    nodes += [*source, second]
    for server, name, page in ((pair.server, "a", 3), (second, "b", 4)):
        server.open(unit(name), 1)
        pair.client.claim(unit(name), peer_of(server), 0, [page])
        server.offer(unit(name), [0], [7], [1])
        server.finish(unit(name), make_row(SCHEMA))
    spin([*pair.both, second], lambda events: len(named(events, Arrived)) == 2)
    assert same_pages(pair.target, [3], pair.source, [7]) and same_pages(pair.target, [4], source, [7])


def test_links_with_keys(nodes, transport):
    keys = KeyPair.generate()
    server, source = make_server(keys=keys)
    client, target = make_client(keys=keys, transports=(transport,))
    stranger, other = make_client(keys=KeyPair.generate(), transports=(transport,), epoch="d9" * 8)
    nodes += [*source, *target, *other, server, client, stranger]
    server.open(unit(), 1)
    stranger.claim(unit(), peer_of(server), 0, [3])
    events = spin([server, stranger], lambda events: named(events, TransferFailed))
    assert not named(events, Claimed)
    client.claim(unit(), peer_of(server), 0, [3])
    server.offer(unit(), [0], [1], [1])
    server.finish(unit(), make_row(SCHEMA))
    spin([server, client], lambda events: named(events, Arrived))


# --- what may go wrong ----------------------------------------------------------------------------------------------


def test_drop_ends_the_ticket_and_frees_the_pages_at_once(pair):
    pair.server.open(unit(), 2)
    pair.claim(unit(), [3, 4])
    pair.server.offer(unit(), [0], [1], [1])
    pair.spin(Claimed)
    pair.client.drop(unit(), "cancelled")
    before = pages_of(pair.target, range(48))
    events = pair.spin(TicketEnded)
    assert named(events, TicketEnded) == [TicketEnded(unit(), "dropped", "cancelled")]
    spin(pair.both, lambda _: True)
    assert all(np.array_equal(a, b) for a, b in zip(before, pages_of(pair.target, range(48)), strict=True))
    assert not named(events, Arrived) and not named(events, TransferFailed)
    pair.client.drop(unit(), "twice")


def test_no_page_is_written_after_drop(nodes, way, monkeypatch):
    """Pages that were queued or on their way when the claim was dropped leave no trace."""
    monkeypatch.setattr("baton.metadata.handoff.pull_link.POLL_BYTES", 1)
    monkeypatch.setattr("baton.metadata.handoff.transports.zmq.MESSAGE_BYTES", 1)
    monkeypatch.setattr("baton.metadata.handoff.transports.cuda.GATHER_BYTES", 1)
    pair = Pair(nodes, way)
    pair.server.open(unit(), 20)
    pair.server.offer(unit(), list(range(20)), list(range(1, 21)), [1] * 20)
    pair.claim(unit(), list(range(1, 21)))
    spin(pair.both, lambda _: pair.target[0].pages[:, 1].any())
    pair.client.drop(unit(), "cancelled")
    assert 1 <= int(pair.target[0].pages.any(axis=(0, 2)).sum()) < 20, "in the middle"
    for pool in pair.target:
        pool.pages[:] = 0
    until = time.monotonic() + 0.2
    spin(pair.both, lambda _: time.monotonic() > until)
    assert not any(pool.pages.any() for pool in pair.target)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("is_claimed", [True, False], ids=["claimed", "unclaimed"])
def test_revoke_reaches_the_claimer_and_ends_the_ticket(pair, finished, is_claimed):
    pair.server.open(unit(), 2)
    if is_claimed:
        pair.claim(unit(), [3, 4])
        pair.spin(Claimed)
    pair.server.revoke(unit(), finished, "stop token")
    if not is_claimed:
        assert pair.server.poll() == [TicketEnded(unit(), "revoked", "stop token")]
        pair.claim(unit(), [3, 4])
    events = spin(pair.both, lambda events: named(events, Revoked) and not pair.server.tickets())
    assert named(events, Revoked) == [Revoked(unit(), finished, "stop token")]
    assert [event.how for event in named(events, TicketEnded)] == ["revoked"] * is_claimed
    assert not pair.client.tickets()


@pytest.mark.timing
@pytest.mark.parametrize("way", ["zmq", "cuda"])
def test_a_lease_ends_when_renewals_stop_and_decode_is_told(pair):
    pair.server.open(unit(), 2)
    pair.claim(unit(), [3, 4])
    pair.spin(Claimed)
    until = time.monotonic() + 1.5
    spin(pair.both, lambda _: time.monotonic() > until)
    assert pair.server.tickets() == [unit()], "renewed, though older than a lease"
    start = time.monotonic()
    events = spin([pair.server], lambda events: named(events, TicketEnded))
    assert events[-1].how == "lease" and 0.5 < time.monotonic() - start < 1.5
    events = spin(pair.both, lambda events: named(events, Revoked))
    assert not events[-1].finished and "lease" in events[-1].reason


@pytest.mark.timing
@pytest.mark.parametrize("way", ["zmq", "cuda"])
def test_an_unknown_claim_fails_after_a_second(pair):
    start = time.monotonic()
    pair.claim(unit(), [3])
    events = pair.spin(TransferFailed)
    assert "does not know" in events[-1].reason and 0.8 < time.monotonic() - start < 2


def test_a_corrupted_page_is_found_repeated_and_fails_the_transfer(pair):
    pair.server.open(unit(), 2)
    pair.server.offer(unit(), [0, 1], [1, 2], [1, 1])
    pair.source[0].pages[2, 2, 77] ^= 0x10  # one bit, after the checksum was taken
    pair.server.finish(unit(), make_row(SCHEMA))
    pair.claim(unit(), [3, 4])
    events = pair.spin(TransferFailed, TicketEnded)
    (failed,) = named(events, TransferFailed)
    assert "page 1" in failed.reason and "checksum of block 8" in failed.reason  # layer 2, K, head 0
    assert named(events, TicketEnded)[0].how == "dropped"
    assert pair.client.num_checksum_failures == MAX_PULLS and not named(events, Arrived)


@pytest.mark.parametrize("way", ["local", "zmq", "cuda", "gpu zmq"])  # a mirror is copied once, before the offer
def test_a_fault_in_passing_is_repaired_by_pulling_again(pair):
    pair.server.open(unit(), 1)
    pair.server.offer(unit(), [0], [1], [1])
    pair.source[0].pages[0, 1, 0] ^= 0xFF
    pair.server.finish(unit(), make_row(SCHEMA))
    pair.claim(unit(), [3])
    spin(pair.both, lambda _: pair.client.num_checksum_failures == 1)
    pair.source[0].pages[0, 1, 0] ^= 0xFF
    pair.spin(Arrived)
    assert same_pages(pair.target, [3], pair.source, [1])


def test_a_page_used_again_under_the_ticket_is_noticed_by_its_generation(nodes, way):
    pair = Pair(nodes, way, make_schema(TARGET, None, 4, checksums=False))
    pair.server.open(unit(), 1)
    pair.server.offer(unit(), [0], [1], [3])
    pair.source[0].generations[1] += 1
    pair.claim(unit(), [3])
    failed = pair.spin(TransferFailed)[-1]
    assert "generation 4 there, 3 offered" in failed.reason


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schema": make_schema(TARGET, None, 8)}, "page_size: 4 here, 8 there"),
        ({"schema": make_schema(msgspec.structs.replace(TARGET, head_dim=16), None, 4)}, "head_dim: 8 here, 16 there"),
        ({"fingerprints": ("a" * 16, None)}, "target weights: ffffffffffffffff here, aaaaaaaaaaaaaaaa there"),
        ({"fingerprints": ("f" * 16, "b")}, "draft weights: None here, b there"),
        ({"transports": ("cuda",)}, "transports: local, zmq here, cuda there (same host)"),
    ],
    ids=["page size", "head dim", "target", "draft", "transport"],
)
def test_nodes_that_cannot_hand_over_are_refused_naming_both_values(nodes, settings, words):
    server, source = make_server()
    client, target = make_client(**settings)
    nodes += [*source, *target, server, client]
    server.open(unit(), 1)
    client.claim(unit(), peer_of(server), 0, [3])
    failed = named(spin([server, client], lambda events: named(events, TransferFailed)), TransferFailed)[0]
    assert words in failed.reason and failed.is_refused
    assert client.tickets() == [] and client.sockets() == []


def test_a_lost_hello_fails_the_claims_of_its_link_and_no_others(nodes, monkeypatch):
    """What follows a hello that was damaged on its way must not be refused as if the nodes could never hand over."""
    spoilt = []

    def encode_once_wrong(message: Any, protocol: int) -> bytes:
        if isinstance(message, LinkHello) and not spoilt:
            spoilt.append(message)
            return b"damaged"
        return encode(message, protocol)

    monkeypatch.setattr(pull_link, "encode", encode_once_wrong)
    server, source = make_server()
    client, target = make_client(answer_s=0.3)
    nodes += [*source, *target, server, client]
    for name in ("r", "s", "given up"):
        client.claim(unit(name), peer_of(server), 0, [3])
    client.drop(unit("given up"), "cancelled")
    failed = named(spin([server, client], lambda events: len(named(events, TransferFailed)) == 2), TransferFailed)
    assert spoilt and not any(event.is_refused for event in failed), failed
    server.open(unit(attempt=1), 1)
    server.offer(unit(attempt=1), [0], [1], [1])
    server.finish(unit(attempt=1), make_row(SCHEMA))
    client.claim(unit(attempt=1), peer_of(server), 0, [3])
    spin([server, client], lambda events: named(events, Arrived))


def test_a_link_that_takes_no_claims_is_lost_with_them(nodes, monkeypatch):
    """The queue is full when the welcome has come: all that waited for it fails, and may be tried again."""
    server, source = make_server()
    client, target = make_client()
    nodes += [*source, *target, server, client]
    for name in ("r", "s"):
        client.claim(unit(name), peer_of(server), 0, [3])

    def refuse(message: Any, protocol: int) -> bytes:
        raise zmq.Again

    monkeypatch.setattr(pull_link, "encode", refuse)
    failed = named(spin([server, client], lambda events: len(named(events, TransferFailed)) == 2), TransferFailed)
    assert all("takes no message" in event.reason and not event.is_refused for event in failed)
    assert client.tickets() == client.sockets() == []


def test_memory_that_cannot_be_mapped_falls_back_to_zmq(nodes, monkeypatch):
    server, source = make_server()
    client, target = make_client()
    nodes += [*source, *target, server, client]
    os.close(source[0].fd)  # what the peer would open is not there any more
    held, source[0].fd = source[0].fd, 1 << 20
    server.open(unit(), 1)
    server.offer(unit(), [0], [1], [1])
    server.finish(unit(), make_row(SCHEMA))
    client.claim(unit(), peer_of(server), 0, [3])
    spin([server, client], lambda events: named(events, Arrived))
    assert client._links.by_epoch[server.end.epoch].transport.name == "zmq"
    assert same_pages(target, [3], source, [1])
    source[0].fd = None
    assert held


def test_a_closed_peer_fails_its_claims_and_is_unmapped(pair):
    pair.server.open(unit(), 1)
    pair.claim(unit(), [3])
    pair.spin(Claimed)
    transport = pair.client._links.by_epoch[pair.server.end.epoch].transport
    pair.client.close_peer(pair.server.end.epoch)
    assert pair.client.sockets() == [] and not getattr(transport, "_peers", None)
    assert "p0 is gone" in named(pair.client.poll(), TransferFailed)[0].reason
    pair.client.close_peer("unknown")


def test_an_address_that_is_none_fails_the_claim(nodes):
    client, target = make_client()
    nodes += [*target, client]
    for number, address in enumerate(("", "tcp://nowhere", "tcp://127.0.0.1:1")):
        client.claim(unit(f"r{number}"), Peer(node_id=f"p{number}", epoch=f"e{number}", data_address=address), 0, [3])
    events = spin([client], lambda events: len(named(events, TransferFailed)) == 3)
    assert all(f"r{n}" in {event.unit.rid for event in events} for n in range(3)) and not client.sockets()


def test_no_page_crosses_the_network_without_keys(nodes):
    client, target = make_client()
    nodes += [*target, client]
    client.claim(unit(), Peer(node_id="p", epoch="e", data_address="tcp://192.0.2.1:5700"), 0, [3])
    assert "not on loopback" in spin([client], lambda events: events)[-1].reason


def test_a_peer_that_never_answers_fails_the_claim(nodes):
    context = zmq.Context.instance()
    silent = context.socket(zmq.ROUTER)
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    client, target = make_client(answer_s=0.05)
    nodes += [*target, client]
    client.claim(unit(), Peer(node_id="p", epoch="e", data_address=f"tcp://127.0.0.1:{port}"), 0, [3])
    failed = spin([client], lambda events: named(events, TransferFailed))[-1]
    assert "has not answered" in failed.reason
    silent.close(linger=0)


def test_the_loop_is_told_when_to_come_back(pair):
    assert pair.client.wait_s() is None and pair.server.wait_s() is None
    pair.server.open(unit(), 2)
    pair.claim(unit(), [3, 4])
    pair.spin(Claimed)
    spin(pair.both, lambda _: not pair.client._has_more)
    assert 0 <= pair.client.wait_s() <= 0.25 and 0 < pair.server.wait_s() <= 1.0


# --- a peer that lies -----------------------------------------------------------------------------------------------


class Liar:
    """A prefill node by hand: says what the test wants."""

    def __init__(self) -> None:
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.rcvtimeo = 2000
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.peer = Peer(node_id="p", epoch="e", data_address=f"tcp://127.0.0.1:{port}")
        self.holder = b""

    def receive(self, kind: type) -> Any:
        while True:
            self.holder, frame = self.socket.recv_multipart()
            message = decode_frame(to_prefill_decoder, frame)
            if isinstance(message, kind):
                return message

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart([self.holder, *frames])

    def poll(self) -> list[Any]:
        return []

    def close(self) -> None:
        self.socket.close(linger=0)


@pytest.fixture
def liar(nodes) -> Liar:
    liar = Liar()
    nodes.append(liar)
    return liar


def welcome(**changes: Any) -> bytes:
    fields = {"node_id": "p", "epoch": "e", "transport": "zmq", "lease_s": 1.0, "num_pages": 8}
    return encode(LinkWelcome(**(fields | changes)))


def offer(**changes: Any) -> bytes:
    stride = 8 * blocks_per_page(SCHEMA)
    fields = {
        "unit": unit(),
        "num_pages": 2,
        "indices": pack_ids([0]),
        "pages": pack_ids([1]),
        "generations": bytes(8),
        "checksums": bytes(stride),
    }
    return encode(Offer(**(fields | changes)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_pages": 3}, "2 pages here, 3 there"),
        ({"indices": pack_ids([2])}, "not claimed; claimed are 2 pages without the first 0"),
        ({"indices": pack_ids([-1])}, "not claimed; claimed are 2 pages without the first 0"),
        ({"pages": pack_ids([8])}, "not in a pool of 8"),
        ({"pages": pack_ids([-1])}, "not in a pool of 8"),
        ({"pages": pack_ids([0])}, "not in a pool of 8"),
        ({"pages": pack_ids([1, 2])}, "8 bytes of pages, not 4"),
        ({"indices": b"abc"}, "int32"),
        ({"generations": bytes(4)}, "4 bytes of generations, not 8"),
        ({"checksums": bytes(8)}, "has 8 bytes of checksums, not"),
        ({"indices": pack_ids([0, 0]), "pages": pack_ids([1, 1]), "generations": bytes(16),
          "checksums": bytes(16 * blocks_per_page(SCHEMA))}, "more than once"),
        ({"row": b"short"}, "row of 5 bytes"),
        ({"row": make_row(SCHEMA), "row_checksum": 5}, "the offer says 0x5: the row was damaged"),
    ],
)  # fmt: skip
def test_offers_outside_the_ticket_fail_the_transfer_and_write_nothing(nodes, liar, changes, words):
    client, target = make_client(transports=("zmq",))
    nodes += [*target, client]
    client.claim(unit(), liar.peer, 0, [3, 4])
    liar.receive(LinkHello)
    liar.send(welcome())
    liar.send(offer(**changes))
    failed = named(spin([client], lambda events: named(events, TransferFailed)), TransferFailed)[0]
    assert words in failed.reason
    assert client.dropped.count == 1 and not any(pool.pages.any() for pool in target)


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": "other"},
        {"node_id": "other"},
        {"transport": "local", "pid": 1 << 40, "fds": (3,), "sizes": (4096,)},
        {"transport": "local", "pid": os.getpid(), "fds": (0,), "sizes": (4096,)},
        {"transport": "local"},
        {"transport": "telepathy"},
    ],
    ids=["epoch", "node", "pid", "fd", "no fds", "transport"],
)
def test_a_welcome_that_cannot_be_is_the_end_of_the_link(nodes, liar, changes):
    client, target = make_client(transports=("local",) if changes.get("transport") == "local" else ("zmq",))
    nodes += [*target, client]
    client.claim(unit(), liar.peer, 0, [3, 4])
    liar.receive(LinkHello)
    liar.send(welcome(**changes))
    spin([client], lambda events: named(events, TransferFailed))
    assert client.sockets() == []


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xff\xff junk"],
        [b""],
        [offer(unit=unit("nobody")), b"and more"],
        [b"\x80" * 1000],
        [b"\xc1"],
    ],
)
def test_junk_is_counted_and_the_link_goes_on(nodes, liar, frames):
    client, target = make_client(transports=("zmq",))
    nodes += [*target, client]
    client.claim(unit(), liar.peer, 0, [3, 4])
    liar.receive(LinkHello)
    liar.send(welcome())
    liar.send(*frames)
    spin([client], lambda _: client.dropped.count == 1)
    assert client.tickets() == [unit()] and len(client.sockets()) == 2


# --- a process of its own -------------------------------------------------------------------------------------------


class PrefillProcess:
    """`run_prefill` in a process of its own."""

    def __init__(self, pages: list[int], pause_s: float, is_endless: bool = False, epoch: str = "e5" * 8) -> None:
        context = fork_context()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=run_prefill, args=(theirs, SCHEMA, 1, pages, pause_s, is_endless, epoch), daemon=True
        )
        self.process.start()
        theirs.close()
        assert self.pipe.poll(30)
        node_id, address = self.pipe.recv()
        self.peer = Peer(node_id=node_id, epoch=epoch, data_address=address)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def test_split_between_processes_equals_whole(nodes, transport):
    """Pages offered one by one in another process, as chunks would be, arrive here byte for byte."""
    pages = list(range(100, 140))
    prefill = PrefillProcess(pages, pause_s=0.002)
    client, target = make_client(transports=(transport,), num_pages=64)
    nodes += [prefill, *target, client]
    client.claim(unit(), prefill.peer, 3, list(range(10, 50)))
    arrived = spin([client], lambda events: named(events, Arrived))[-1]
    source = make_memory(SCHEMA, 1024, seed=1)  # the same random bytes
    nodes += source
    assert same_pages(target, range(13, 50), source, pages[3:])
    assert not any(pool.pages[:, 10:13].any() for pool in target)
    assert arrived.row == make_row(SCHEMA) and arrived.num_pages == 37
    assert prefill.pipe.poll(5) and prefill.pipe.recv() == (unit(), 3)
    assert prefill.pipe.poll(5) and prefill.pipe.recv() == (unit(), "acked", "")


@pytest.mark.timing
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_dead_prefill_fails_the_transfer_within_two_seconds(nodes, transport, number):
    prefill = PrefillProcess(list(range(1, 200)), pause_s=0.001, is_endless=True)
    client, target = make_client(transports=(transport,), num_pages=256)
    nodes += [prefill, *target, client]
    client.claim(unit(), prefill.peer, 0, list(range(1, 200)))
    spin([client], lambda _: target[0].pages[:, 5].any())  # in the middle of the transfer
    held = client._links.by_epoch[prefill.peer.epoch].transport
    prefill.signal(number)
    start = time.monotonic()
    failed = spin([client], lambda events: named(events, TransferFailed))[-1]
    assert time.monotonic() - start < 2.0 and prefill.peer.node_id in failed.reason
    assert client.sockets() == [] and not getattr(held, "_peers", None), "what was mapped is unmapped"
    assert client.tickets() == []


def test_a_restarted_prefill_is_another_one(nodes, transport):
    """The earlier life's link and mapping go when the new life is claimed from, and its claims fail."""
    client, target = make_client(transports=(transport,))
    first, source = make_server()
    second, other = make_server(epoch="e9" * 8, seed=5)
    nodes += [*target, *source, *other, client, first, second]
    first.open(unit("old"), 1)
    client.claim(unit("old"), peer_of(first), 0, [3])
    spin([first, client], lambda events: named(events, Claimed))
    held = client._links.by_epoch[first.end.epoch].transport
    second.open(unit("new"), 1)
    second.offer(unit("new"), [0], [1], [1])
    second.finish(unit("new"), make_row(SCHEMA))
    client.claim(unit("new"), peer_of(second), 0, [4])
    assert not getattr(held, "_peers", None) and list(client._links.by_epoch) == [second.end.epoch]
    events = spin([second, client], lambda events: named(events, Arrived))
    assert [event.unit.rid for event in named(events, TransferFailed)] == ["old"]
    assert "restarted" in named(events, TransferFailed)[0].reason
    assert same_pages(target, [4], other, [1])


def test_the_client_closes_what_it_holds():
    server, source = make_server()
    client, target = make_client()
    server.open(unit(), 1)
    client.claim(unit(), peer_of(server), 0, [3])
    spin([server, client], lambda events: named(events, Claimed))
    client.close()
    assert isinstance(client, HandoffClient) and client.sockets() == [] and client.tickets() == []
    assert isinstance(server, HandoffServer)
    server.close()
    for pool in (*source, *target):
        pool.close()
