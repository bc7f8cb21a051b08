"""Rank 1 of a prefill node against decode ranks that are early, late or lying."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from handoff_nodes import unit
from patience import Patience, wait_until
from rank_nodes import NUM_PAGES, heads_schema, part_of, rank_end, whole_pages

from baton.metadata.errors import ConfigError, TransferError
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.handoff.page_server import PageServer
from baton.metadata.handoff.pages import page_checksums
from baton.metadata.handoff.ranks.orders import CloseReader, EndUnit, OfferDigests, OfferPages, ServeUnit
from baton.metadata.handoff.schema.kv_layout import Shard
from baton.metadata.handoff.served_links import MAX_UNSENT
from baton.metadata.wire.data_link import Claim, LinkRefused, LinkWelcome, Pages, Pull, to_decode_decoder
from baton.metadata.wire.frames import decode_frame, encode
from baton.metadata.wire.node_info import HostMemory
from baton.metadata.wire.protocol import PROTOCOL_MAX
from baton.metadata.wire.request import pack_ids

SCHEMA = heads_schema(6, 6)
END = "d1" * 8  # the epoch of the decode node of rank_end


class Server:
    """Rank 1 of 2, the memory of rank 0, and links by hand."""

    def __init__(self) -> None:
        self.first = rank_end(SCHEMA, Shard(0, 2), "prefill")
        self.end = rank_end(SCHEMA, Shard(1, 2), "prefill")
        self.server = PageServer(self.end, "127.0.0.1", self.first.memory[0].where)
        self.reports: list[Any] = []
        self.links: list[Link] = []

    def link(self, **changes: Any) -> Link:
        self.links.append(Link(self, **changes))
        return self.links[-1]

    def offer(self, *pages: int, number: int = 1) -> None:
        self.server.do(OfferPages(number, unit(), range(len(pages)), pages, [7] * len(pages)))

    def poll(self) -> None:
        self.reports += self.server.poll()

    def until(self, condition: Callable[[], object]) -> None:
        """Poll until the condition holds."""
        wait_until(lambda: self.poll() or condition(), lambda: f"{self.reports}", pause_s=0.001)

    def close(self) -> None:
        self.server.close()
        for link in self.links:
            link.socket.close()
        for pool in (*self.first.memory, *self.end.memory):
            pool.close()


class Link:
    """A link of a rank of 3 of a decode node: rank 0 needs no head of rank 1, rank 1 needs one."""

    def __init__(self, of: Server, rank: int = 1, **changes: Any) -> None:
        self.of = of
        end = rank_end(SCHEMA, Shard(rank, 3), "decode", transports=("zmq",))
        hello = end.rank_hello("", Shard(1, 2))
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(of.server.address)
        self.send(msgspec.structs.replace(hello, protocol=PROTOCOL_MAX, **changes))
        for pool in end.memory:
            pool.close()

    def send(self, message: Any) -> None:
        self.socket.send(encode(message))

    def pull(self, *indices: int) -> None:
        self.send(Pull(unit=unit(), indices=pack_ids(indices)))

    def next(self, kind: Any) -> tuple[Any, bytes]:
        patience = Patience(5)
        while not patience.is_over():
            self.of.poll()
            if self.socket.poll(1):
                body, *data = self.socket.recv_multipart()
                message = decode_frame(to_decode_decoder, body)
                if isinstance(message, kind):
                    return message, data[0] if data else b""
        raise AssertionError(f"no {kind} within 5 s")

    def dropped(self, count: int) -> None:
        """Wait until so many frames were refused."""
        self.of.until(lambda: self.of.server.num_dropped >= count)
        assert self.of.server.num_dropped == count


@pytest.fixture
def of() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def test_a_pull_brings_the_bytes_of_the_shard_alone(of: Server) -> None:
    """Rank 1 of 3 needs heads 2 and 3, of which rank 1 of 2 has head 3: its first."""
    link = of.link()
    link.next(LinkWelcome)
    of.offer(2, 5)
    of.server.do(ServeUnit(unit(), END))
    of.first.memory[0].generations[[2, 5]] = [7, 9]
    link.pull(1, 0)
    pages, data = link.next(Pages)
    assert np.frombuffer(pages.generations, "<i8").tolist() == [9, 7], "rank 0 counts them"
    expected = b""
    for page in (5, 2):
        for pool, layout in zip(part_of(SCHEMA, whole_pages(SCHEMA), Shard(3, 6)), of.end.memory, strict=True):
            size = layout.layout.block_ranges[0][1]
            expected += pool[:, page, :size].tobytes() + pool[:, page, size:].tobytes()
    assert data == expected


def test_a_digest_is_of_the_ranks_own_heads(of: Server) -> None:
    of.offer(2, 5, number=4)
    of.poll()
    wanted = b"".join(page_checksums(of.end.memory, page) for page in (2, 5))
    assert of.reports == [OfferDigests(4, wanted)] and of.server.wait_s() is None


def test_a_pull_that_overtakes_its_order_is_answered_later(of: Server) -> None:
    link = of.link()
    link.next(LinkWelcome)
    of.offer(2)
    link.pull(0)
    for _ in range(50):
        of.poll()
        time.sleep(0.001)
    assert not link.socket.poll(0)
    of.server.do(ServeUnit(unit(), END))
    link.next(Pages)
    link.pull(0)
    link.next(Pages)
    assert of.server.num_dropped == 0


def test_early_pulls_are_bounded_and_go_with_their_ticket(of: Server) -> None:
    link = of.link()
    link.next(LinkWelcome)
    for _ in range(3 * MAX_UNSENT):
        link.pull(0)
    of.until(lambda: sum(map(len, of.server._early.values())) >= MAX_UNSENT)
    for _ in range(50):
        of.poll()
        time.sleep(0.001)
    assert sum(map(len, of.server._early.values())) == MAX_UNSENT
    of.server.do(EndUnit(unit()))
    assert not any(of.server._early.values())
    link.pull(0)
    of.until(lambda: any(of.server._early.values()))
    of.server.do(CloseReader(END))
    assert not any(of.server._early.values()) and not of.server._links.peers.by_link


def test_no_pull_is_kept_of_a_link_that_was_forgotten(of: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.metadata.handoff.served_links.MAX_LINKS", 1)
    for number in range(5):
        link = of.link(epoch=f"{number}" * 16)
        link.next(LinkWelcome)
        link.pull(0)
        of.until(lambda: of.server._early.keys() & of.server._links.peers.by_link.keys())
    assert len(of.server._early) <= len(of.server._links.peers.by_link) == 2


def test_only_the_holder_of_the_ticket_may_pull_and_only_offered_pages(of: Server) -> None:
    thief, link = of.link(epoch="f" * 16, node_id="d7"), of.link()
    thief.next(LinkWelcome)
    link.next(LinkWelcome)
    of.offer(2)
    of.server.do(ServeUnit(unit(), END))
    thief.pull(0)
    thief.dropped(1)
    link.pull(1)
    link.dropped(2)
    link.pull(0, 0)
    link.dropped(3)
    link.pull(0)
    link.next(Pages)
    of.server.do(EndUnit(unit()))
    link.pull(0)
    for _ in range(50):
        of.poll()
        time.sleep(0.001)
    assert not link.socket.poll(0) and not thief.socket.poll(0)


def test_tickets_are_with_rank_0(of: Server) -> None:
    link = of.link()
    link.next(LinkWelcome)
    link.send(Claim(unit=unit(), num_cached_pages=0))
    link.dropped(1)
    hello = rank_end(SCHEMA, Shard(0, 1), "decode", transports=("zmq",)).hello("")
    other = of.link()
    other.next(LinkWelcome)
    other.socket.close()
    other.socket = zmq.Context.instance().socket(zmq.DEALER)
    other.socket.connect(of.server.address)
    other.send(msgspec.structs.replace(hello, protocol=PROTOCOL_MAX))
    refused, _ = other.next(LinkRefused)
    assert "tickets: this is rank 1 of 2, rank 0 has them" in refused.reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source_rank": 0}, "ranks: this is 1 of 2, the hello is for 0 of 2"),
        ({"source_size": 3}, "ranks: this is 1 of 2, the hello is for 1 of 3"),
        ({"size": 4}, "ranks: 2 here, 4 there: 6 KV heads cannot be split over 4 ranks"),
        ({"rank": 0}, "heads: none in common, rank 1 of 2 here, 0 of 3 there"),
    ],
)
def test_a_rank_that_has_nothing_to_give_says_so(changes: dict[str, Any], words: str, of: Server) -> None:
    refused, _ = of.link(**changes).next(LinkRefused)
    assert words in refused.reason and "prefill node p0 and decode node d0" in refused.reason


def test_a_closed_link_is_told(of: Server) -> None:
    link = of.link()
    link.next(LinkWelcome)
    of.server.do(CloseReader(END))
    link.pull(0)
    refused, _ = link.next(LinkRefused)
    assert "this link was closed" in refused.reason


def test_rank_0_has_no_page_server_and_its_memory_must_be_there() -> None:
    end = rank_end(SCHEMA, Shard(0, 2), "prefill")
    with pytest.raises(ConfigError, match="rank 0 of a prefill node"):
        PageServer(end, "127.0.0.1", end.memory[0].where)
    second = rank_end(SCHEMA, Shard(1, 2), "prefill")
    with pytest.raises(TransferError, match="peer's pool has"):
        PageServer(second, "127.0.0.1", HostMemory(1, 2, 3))
    small = PageMemory(second.memory[0].layout, NUM_PAGES)
    gone = small.where
    small.close()
    with pytest.raises(TransferError):
        PageServer(second, "127.0.0.1", gone)
    for pool in (*end.memory, *second.memory):
        pool.close()
