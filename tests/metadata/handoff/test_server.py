"""Prefill's end of the link against decode nodes that are many, early, late, dead or lying."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from handoff_nodes import FINGERPRINTS, SCHEMA, make_client, make_row, make_server, named, peer_of, spin, unit
from patience import Patience

from baton.metadata.bus.addresses import host_identity
from baton.metadata.bus.curve import KeyPair
from baton.metadata.errors import ConfigError
from baton.metadata.handoff.pages import page_checksums
from baton.metadata.handoff.schema.schema import make_schema, page_bytes
from baton.metadata.handoff.served_links import MAX_UNSENT
from baton.metadata.handoff.tickets import Claimed, TicketEnded
from baton.metadata.handoff.transfer import Arrived, TransferFailed
from baton.metadata.wire.data_link import (
    Ack,
    Claim,
    Drop,
    LinkHello,
    LinkRefused,
    LinkWelcome,
    Offer,
    Pages,
    Pull,
    Renew,
    Revoke,
    UnknownClaim,
    to_decode_decoder,
)
from baton.metadata.wire.frames import decode_frame, encode, seal
from baton.metadata.wire.node_info import HandoffSchema, PoolLayout, RowField
from baton.metadata.wire.request import MAX_CHOICES, MAX_TEXT, Unit, pack_ids, unpack_ids


class Decode:
    """A decode node by hand: sends what the test wants, and shows what comes back."""

    def __init__(self, address: str, hello: bool = True) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.connect(address)
        if hello:
            self.hello()

    def hello(
        self,
        epoch: str = "d1" * 8,
        transports: tuple[str, ...] = ("zmq",),
        host: str = "elsewhere",
        layout: HandoffSchema = SCHEMA,
    ) -> None:
        self.send(
            LinkHello(
                node_id="d0",
                epoch=epoch,
                layout=layout,
                target_fingerprint=FINGERPRINTS[0],
                draft_fingerprint=None,
                transports=transports,
                host=host,
            )
        )

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.socket.send(message if isinstance(message, bytes) else encode(message))

    def frames(self, server: Any, kind: type | tuple[type, ...]) -> tuple[Any, bytes]:
        """The next message of that kind, with its data frame."""
        patience = Patience(3)
        while not patience.is_over():
            self.events += server.poll()
            if self.socket.poll(1):
                payload, *data = self.socket.recv_multipart()
                message = decode_frame(to_decode_decoder, payload)
                if isinstance(message, kind):
                    return message, b"".join(data)
        raise AssertionError(f"no {kind} came")

    def get(self, server: Any, kind: type) -> Any:
        return self.frames(server, kind)[0]

    events: list[Any]

    def close(self) -> None:
        self.socket.close(linger=0)


@pytest.fixture
def server(nodes):
    server, memory = make_server()
    server.test_memory = memory
    nodes += [*memory, server]
    return server


@pytest.fixture
def decode(nodes, server) -> Decode:
    decode = Decode(server.address)
    decode.events = []
    nodes.append(decode)
    return decode


def claim(server, decode: Decode, offered: int = 2, num_pages: int = 3, have: int = 0) -> None:
    """A ticket of source pages 5, 6, ... of which the first `offered` are offered, claimed."""
    server.open(unit(), num_pages)
    server.offer(unit(), list(range(offered)), [5 + i for i in range(offered)], [1] * offered)
    decode.send(Claim(unit=unit(), num_cached_pages=have))
    decode.get(server, Offer)


def test_an_offer_lists_pages_generations_and_checksums(server, decode):
    server.open(unit(), 3)
    decode.send(Claim(unit=unit(), num_cached_pages=1))
    spin([server], lambda events: named(events, Claimed))
    server.offer(unit(), [0, 1, 2], [9, 4, 7], [1, 2, 3])
    offer = decode.get(server, Offer)
    assert unpack_ids(offer.indices) == [1, 2] and unpack_ids(offer.pages) == [4, 7] and offer.num_pages == 3
    assert np.frombuffer(offer.generations, "<i8").tolist() == [2, 3]
    assert offer.checksums == page_checksums(server.test_memory, 4) + page_checksums(server.test_memory, 7)
    assert offer.row is None
    server.finish(unit(), make_row(SCHEMA))
    final = decode.get(server, Offer)
    assert final.row == make_row(SCHEMA) and final.indices == b"" and final.row_checksum


def test_checksums_are_computed_once_a_generation_and_kept_with_the_page(server, decode):
    server.open(unit("a"), 1)
    server.offer(unit("a"), [0], [4], [1])
    before = page_checksums(server.test_memory, 4)
    server.test_memory[0].pages[0, 4, 0] ^= 1  # a fault while the page lies in the prefix cache
    for rid, generation in (("b", 1), ("c", 2)):
        server.open(unit(rid), 1)
        server.offer(unit(rid), [0], [4], [generation])
        decode.send(Claim(unit=unit(rid), num_cached_pages=0))
        offer = decode.get(server, Offer)
        assert (offer.checksums == before) == (generation == 1)


def test_pages_come_in_the_order_asked_for(server, decode):
    claim(server, decode, offered=3)
    decode.send(Pull(unit=unit(), indices=pack_ids([2, 0])))
    pages, data = decode.frames(server, Pages)
    assert unpack_ids(pages.indices) == [2, 0]
    expected = [server.test_memory[0].pages[:, page].tobytes() for page in (7, 5)]
    assert data == b"".join(expected) and len(data) == 2 * page_bytes(SCHEMA)


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        (pack_ids([2]), "pages [2], which were not offered"),
        (pack_ids([-1]), "pages [-1], which were not offered"),
        (pack_ids([3]), "pages [3], which were not offered"),
        (pack_ids([0, 1 << 30]), "pages [1073741824], which were not offered"),
        (b"", "pull of 0 pages, 0 of them different; ask for 1 to"),
        (b"abc", "3 bytes is not int32"),
        (pack_ids([1] * 30_000), "pull of 30000 pages, 1 of them different"),
        (pack_ids([0, 1, 0]), "pull of 3 pages, 2 of them different"),
        (pack_ids(range(-1500, 1500)), "pull of 3000 pages, 3000 of them different"),
        (pack_ids([-(1 << 31), 1 << 30]), "pages [-2147483648, 1073741824], which were not offered"),
    ],
    ids=[
        "not offered",
        "negative",
        "beyond",
        "one of two",
        "none",
        "no column",
        "too many",
        "twice",
        "more than a message",
        "huge",
    ],
)
def test_a_pull_outside_the_ticket_is_dropped_and_the_link_goes_on(server, decode, indices, words, caplog):
    claim(server, decode)
    decode.send(Pull(unit=unit(), indices=indices), Pull(unit=unit(), indices=pack_ids([1])))
    pages, data = decode.frames(server, Pages)
    assert unpack_ids(pages.indices) == [1] and len(data) == page_bytes(SCHEMA)
    assert server.dropped.count == 1 and server.tickets() == [unit()]
    assert words in caplog.text


def test_pulls_that_nobody_reads_are_bounded(nodes):
    """A decode node that asks for ever and takes nothing costs a bounded amount of memory."""
    layout = PoolLayout(num_layers=1, num_kv_heads=1, head_dim=1 << 16, dtype="float32")
    server, memory = make_server(make_schema(layout, None, 8), num_pages=8, lease_s=30.0)
    nodes += [*memory, server]
    decode = Decode(server.address, hello=False)
    decode.socket.set(zmq.RCVHWM, 1)
    decode.events = []
    nodes.append(decode)
    decode.hello(layout=make_schema(layout, None, 8))
    claim(server, decode)
    decode.send(*[Pull(unit=unit(), indices=pack_ids([1]))] * 100)
    spin([server], lambda _: server.dropped.count > 0)
    assert server._links.peers.by_link and len(next(iter(server._links.peers.by_link.values())).unsent) <= MAX_UNSENT
    decode.frames(server, Pages)


def test_pages_that_decode_has_cannot_be_pulled(server, decode):
    claim(server, decode, have=1)
    decode.send(Pull(unit=unit(), indices=pack_ids([0])))
    spin([server], lambda _: server.dropped.count == 1)


def test_somebody_elses_ticket_cannot_be_pulled_renewed_or_ended(nodes, server, decode):
    claim(server, decode, offered=3)
    server.finish(unit(), make_row(SCHEMA))
    thief = Decode(server.address)
    thief.events = []
    nodes.append(thief)
    thief.send(
        Pull(unit=unit(), indices=pack_ids([0])),
        Ack(unit=unit()),
        Drop(unit=unit(), reason="mine"),
        Claim(unit=unit(), num_cached_pages=0),
        Renew(units=(unit(),)),
    )
    revoke, _ = thief.frames(server, (Pages, Offer, Revoke))  # the answer to the last of them, and the first to come
    assert isinstance(revoke, Revoke) and not revoke.finished and "no such ticket" in revoke.reason
    assert server.tickets() == [unit()] and not named(thief.events, TicketEnded)


def test_an_ack_before_the_final_offer_is_dropped(server, decode):
    claim(server, decode)
    decode.send(Ack(unit=unit()))
    spin([server], lambda _: server.dropped.count == 1)
    assert server.tickets() == [unit()]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        seal(b""),
        seal(b"\xc1"),
        seal(b"\x93" * 5000),
        encode({"type": "claim", "unit": ["r", MAX_CHOICES, 0], "have": 0}),
        encode({"type": "claim", "unit": ["r", 0, 0], "have": -1}),
        encode({"type": "claim", "unit": ["r", 0, 0], "have": 0, "more": 1}),
        encode(UnknownClaim(unit=unit())),
    ],
)
def test_junk_is_counted_and_answers_nothing(server, decode, frame):
    decode.get(server, LinkWelcome)
    decode.send(frame)
    spin([server], lambda _: server.dropped.count == 1)
    claim(server, decode)


def test_several_frames_are_no_message(server, decode):
    decode.get(server, LinkWelcome)
    decode.socket.send_multipart([encode(Claim(unit=unit(), num_cached_pages=0)), b"more"])
    spin([server], lambda _: server.dropped.count == 1)


def test_nothing_is_taken_before_hello(nodes, server):
    decode = Decode(server.address, hello=False)
    decode.events = []
    nodes.append(decode)
    server.open(unit(), 1)
    decode.send(Claim(unit=unit(), num_cached_pages=0))
    assert "closed" in decode.get(server, LinkRefused).reason
    assert not named(decode.events, Claimed)


@pytest.mark.parametrize(
    ("host", "expected"), [("elsewhere", "zmq"), (None, "local")], ids=["another host", "this host"]
)
def test_memory_is_shared_on_one_host_only(nodes, server, host, expected):
    decode = Decode(server.address, hello=False)
    decode.events = []
    nodes.append(decode)
    decode.hello(transports=("local", "zmq"), host=host or host_identity())
    welcome = decode.get(server, LinkWelcome)
    assert welcome.transport == expected and bool(welcome.fds) == (expected == "local")
    assert welcome.sizes == ((server.test_memory[0].size,) if expected == "local" else ())


def test_a_pool_that_is_not_shared_is_not_offered_for_mapping(nodes):
    server, memory = make_server()
    server.close()
    memory[0].fd, fd = None, memory[0].fd
    again, other = make_server(transports=("local",))
    other[0].fd, other_fd = None, other[0].fd
    nodes += [*memory, *other, again]
    assert fd is not None and other_fd is not None
    client, target = make_client()
    nodes += [*target, client]
    client.claim(unit(), peer_of(again), 0, [3])
    again._links.peers._transports = []
    failed = spin([again, client], lambda events: named(events, TransferFailed))[-1]
    assert failed.is_refused
    memory[0].fd, other[0].fd = fd, other_fd


def test_several_decode_nodes_are_served_at_once(nodes, server):
    clients = []
    for number in range(3):
        client, target = make_client(
            node_id=f"d{number}", epoch=f"d{number}" * 8, transports=(("local", "zmq")[number % 2],)
        )
        nodes += [*target, client]
        clients.append((client, target))
        server.open(unit(f"r{number}"), 2)
        client.claim(unit(f"r{number}"), peer_of(server), 0, [3, 4])
        server.offer(unit(f"r{number}"), [0, 1], [1 + number, 9], [1, 1])
        server.finish(unit(f"r{number}"), make_row(SCHEMA, number))
    polled = [server, *(client for client, _ in clients)]
    spin(polled, lambda events: len(named(events, Arrived)) == len(named(events, TicketEnded)) == 3)
    for number, (_, target) in enumerate(clients):
        assert np.array_equal(target[0].pages[:, [3, 4]], server.test_memory[0].pages[:, [1 + number, 9]])


def test_a_closed_epoch_ends_its_tickets_at_once_and_no_others(nodes, server):
    held = []
    for number in range(2):
        decode = Decode(server.address, hello=False)
        decode.events = []
        decode.hello(epoch=f"d{number}")
        nodes.append(decode)
        held.append(decode)
        server.open(unit(choice=number), 1)
        decode.send(Claim(unit=unit(choice=number), num_cached_pages=0))
    spin([server], lambda events: len(named(events, Claimed)) == 2)
    server.close_peer("d0")
    assert [(event.unit.choice, event.how) for event in server.poll()] == [(0, "closed")]
    assert server.tickets() == [unit(choice=1)]
    held[0].send(Pull(unit=unit(choice=0), indices=pack_ids([0])))
    held[0].get(server, LinkRefused)  # it lives, and learns that it has to open another link


@pytest.mark.timing
def test_a_decode_node_that_vanished_lets_its_lease_end(nodes, server, decode):
    claim(server, decode)
    decode.close()
    start = time.monotonic()
    events = spin([server], lambda events: named(events, TicketEnded))
    assert events[-1].how == "lease" and time.monotonic() - start < 1.5
    server.offer(unit(), [2], [7], [1])  # the chunk that was being computed: ignored
    server.finish(unit(), make_row(SCHEMA))
    assert server.poll() == [] and server.tickets() == []


def test_a_busy_loop_does_not_end_leases_that_were_renewed(server, decode):
    claim(server, decode)
    time.sleep(0.9)
    decode.send(Renew(units=(unit(),)))
    time.sleep(0.5)  # the lease is over by the clock, the renewal waits in the socket
    assert not named(server.poll(), TicketEnded) and server.tickets() == [unit()]


def test_a_lease_is_judged_only_when_every_message_is_read(server, decode, monkeypatch):
    monkeypatch.setattr("baton.metadata.handoff.served_links.DRAIN_LIMIT", 2)
    claim(server, decode)
    decode.send(*[Renew(units=())] * 4, Renew(units=(unit(),)))
    time.sleep(1.2)  # over by the clock
    for _ in range(2):
        assert server.poll() == [] and server.wait_s() == 0
    assert server.poll() == [] and server.tickets() == [unit()] and server.wait_s() > 0


def test_a_refused_node_is_told_both_values(nodes):
    server, memory = make_server(fingerprints=("a" * 16, None))
    nodes += [*memory, server]
    decode = Decode(server.address)
    decode.events = []
    nodes.append(decode)
    assert "aaaaaaaaaaaaaaaa here, ffffffffffffffff there" in decode.get(server, LinkRefused).reason


def test_a_link_that_was_refused_later_stops_nothing(server, decode):
    """Its ticket lives on for a lease, and is offered pages that nobody takes."""
    claim(server, decode, offered=1)
    decode.hello(layout=make_schema(SCHEMA.target, None, 8))
    decode.get(server, LinkRefused)
    server.offer(unit(), [1], [6], [1])
    server.poll()
    assert server.tickets() == [unit()]


def test_a_refusal_is_no_longer_than_a_message_may_be(nodes, server):
    """However many fields differ: the other side must be able to read why."""
    decode = Decode(server.address, hello=False)
    decode.events = []
    nodes.append(decode)
    rows = tuple(RowField(name=f"{number}" * 60, dtype="int32", width=1) for number in range(64))
    decode.hello(layout=msgspec.structs.replace(SCHEMA, row=rows))
    assert len(decode.get(server, LinkRefused).reason) == MAX_TEXT


def test_rows_and_offers_that_do_not_fit_are_our_bug(server):
    server.open(unit(), 1)
    with pytest.raises(AssertionError):
        server.finish(unit(), make_row(SCHEMA))  # before its pages
    server.offer(unit(), [0], [1], [1])
    with pytest.raises(AssertionError):
        server.finish(unit(), b"short")
    with pytest.raises(AssertionError):
        server.open(unit(), 1)
    assert isinstance(unit(), Unit)


def test_pages_are_not_served_to_other_hosts_without_keys():
    with pytest.raises(ConfigError, match="keys"):
        make_server(bind_host="0.0.0.0")


def test_ipc_addresses_work(nodes, tmp_path):
    server, memory = make_server(bind_host=f"ipc://{tmp_path}/pages")
    client, target = make_client(transports=("zmq",))
    nodes += [*memory, *target, server, client]
    server.open(unit(), 1)
    server.offer(unit(), [0], [1], [1])
    server.finish(unit(), make_row(SCHEMA))
    client.claim(unit(), peer_of(server), 0, [3])
    spin([server, client], lambda events: named(events, Arrived))
    assert np.array_equal(target[0].pages[:, 3], memory[0].pages[:, 1])


def test_an_address_of_another_host_is_a_plain_error():
    with pytest.raises(ConfigError, match=r"cannot serve pages on tcp://192\.0\.2\.1"):
        make_server(bind_host="192.0.2.1", keys=KeyPair.generate())
