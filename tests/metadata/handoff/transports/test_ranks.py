"""Pages between nodes with unlike numbers of ranks: every rank gets its own heads, and wrong bytes are caught."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from handoff_nodes import make_row, named, peer_of, spin, unit
from rank_nodes import RankPair, heads_schema, pages_in, rank_end

from baton.metadata.errors import ConfigError, OutOfMemory, RankLost
from baton.metadata.handoff.ranks.orders import (
    FetchedPages,
    FetchFailed,
    FetchPages,
    OfferPages,
    OpenSource,
    SourceLost,
)
from baton.metadata.handoff.ranks.puller import RankPuller
from baton.metadata.handoff.schema.kv_layout import Shard
from baton.metadata.handoff.schema.schema import page_bytes
from baton.metadata.handoff.tickets import TicketEnded, TicketFailed
from baton.metadata.handoff.transfer import Arrived, TransferFailed
from baton.metadata.handoff.transports.ranks import RanksTransport
from baton.metadata.wire.data_link import Ack, Claim

MakePair = Callable[..., RankPair]

# ranks of prefill, ranks of decode, heads of the target, heads of the draft
SIZES = [
    (1, 2, 4, 2),
    (2, 1, 4, 2),
    (2, 2, 4, 2),
    (2, 3, 6, 1),
    (3, 2, 6, 6),
    (2, 4, 2, 4),
    (4, 2, 2, 4),
    (4, 3, 12, 1),
    (4, 1, 2, 1),
    (1, 4, 2, None),
]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    made: list[RankPair] = []

    def make(*args: Any, **how: Any) -> RankPair:
        made.append(RankPair(*args, **how))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def run(pair: RankPair, *kinds: type) -> list[Any]:
    """Poll all ranks until each kind of event came. Return the events."""
    return spin(pair.nodes, lambda events: all(named(events, kind) for kind in kinds))


@pytest.mark.parametrize("way", ["local", "zmq"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_rank_gets_its_heads(sizes: tuple[int, int, int, int | None], way: str, make_pair: MakePair) -> None:
    num_prefill, num_decode, target, draft = sizes
    pair = make_pair(heads_schema(target, draft), num_prefill, num_decode, decode=(way,))
    pair.claim([9, 1, 4])
    pair.offer([2, 3, 5])
    events = run(pair, Arrived, TicketEnded)
    [event] = named(events, Arrived)
    assert event.row == make_row(pair.schema) and event.num_pages == 3 and event.times.transport == "ranks"
    assert named(events, TicketEnded) == [TicketEnded(unit(), "acked")]
    assert pair.has_arrived([9, 1, 4], [2, 3, 5])
    assert not pair.client.tickets() and not pair.server.tickets()
    assert pair.server.dropped.count == pair.client.dropped.count == 0
    assert not any(each.num_dropped for each in pair.page_servers)
    assert not any(each.dropped.count for each in pair.pullers)


@pytest.mark.parametrize("way", ["cuda", "zmq"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_rank_gets_its_heads_on_its_gpu(
    sizes: tuple[int, int, int, int | None], way: str, make_pair: MakePair
) -> None:
    num_prefill, num_decode, target, draft = sizes
    pair = make_pair(heads_schema(target, draft), num_prefill, num_decode, has_gpu=True, decode=(way,))
    pair.offer([2, 3, 5])
    pair.claim([9, 1, 4])
    run(pair, Arrived, TicketEnded)
    assert pair.has_arrived([9, 1, 4], [2, 3, 5])
    assert bool(pair.targets[0].device.called("gather")) == (way == "cuda")


@pytest.mark.parametrize("way", ["local", "zmq"])
def test_the_handoff_is_over_when_all_ranks_have_their_pages(way: str, make_pair: MakePair) -> None:
    pair = make_pair(heads_schema(6, 1), 2, 3, decode=(way,))
    pair.offer([2, 3])
    pair.claim([9, 1])
    others = [pair.server, pair.client, pair.serve_line]
    spin(others, lambda _: pages_in(pair.targets[0])[1][:, [9, 1]].any(axis=(0, 2)).all())
    events = [event for _ in range(200) for node in others for event in node.poll()]
    assert not named(events, Arrived) and not named(events, TicketEnded)
    assert pair.client.tickets() == pair.server.tickets() == [unit()]
    run(pair, Arrived, TicketEnded)
    assert pair.has_arrived([9, 1], [2, 3])


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2)])
def test_between_nodes_of_one_rank_nothing_of_this_happens(sizes: tuple[int, int], make_pair: MakePair) -> None:
    pair = make_pair(heads_schema(4, 2), *sizes, decode=("local",))
    pair.offer([2])
    pair.claim([9])
    [event] = named(run(pair, Arrived), Arrived)
    assert event.times.transport == ("local" if sizes == (1, 1) else "ranks")
    assert (pair.client._team._own is None) == (sizes == (1, 1))


@pytest.mark.parametrize("way", ["local", "zmq"])
def test_a_node_without_checksums_hands_over_too(way: str, make_pair: MakePair) -> None:
    pair = make_pair(heads_schema(6, 1, checksums=False), 2, 3, decode=(way,))
    pair.offer([2, 3])
    pair.claim([9, 1])
    run(pair, Arrived)
    assert pair.has_arrived([9, 1], [2, 3])


def test_cached_pages_are_neither_digested_nor_written(make_pair: MakePair) -> None:
    pair = make_pair(heads_schema(6, 1), 2, 3)
    pair.claim([9, 1, 4], num_cached=2)
    spin(pair.nodes, lambda _: pair.client._links.by_epoch["e0" * 8].transport)
    spin(pair.nodes, lambda events: pair.server._book._parked)
    pair.offer([2, 3, 5])
    [event] = named(run(pair, Arrived), Arrived)
    assert event.num_pages == 1 and pair.has_arrived([4], [5])
    assert pair.serve_line is not None
    offered = [order.indices for _, order in pair.serve_line.sent if isinstance(order, OfferPages)]
    assert offered == [(2,)] or offered == [[2]]


def test_pages_of_a_gpu_do_not_come_from_its_mirror(make_pair: MakePair) -> None:
    """A rank's link may open after the offer, so the mirror would not have the pages."""
    pair = make_pair(heads_schema(4), 2, 1, has_gpu=True, decode=("local", "zmq"))
    pair.offer([2, 3])
    pair.claim([9, 1])
    run(pair, Arrived)
    assert pair.has_arrived([9, 1], [2, 3])
    hellos = [*pair.server._links.peers.by_link.values(), *pair.page_servers[0]._links.peers.by_link.values()]
    assert sorted(peer.welcome.transport for peer in hellos) == ["ranks", "zmq", "zmq"]


def test_a_pull_may_ask_for_as_many_bytes_of_a_part(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = heads_schema(4)
    for module in ("served_links.PULL_BYTES", "transports.zmq.MESSAGE_BYTES"):
        monkeypatch.setattr(f"baton.metadata.handoff.{module}", page_bytes(schema))  # two parts for two ranks
    pair = make_pair(schema, 1, 2, decode=("zmq",))
    pair.server.open(unit(), 4)
    pair.server.offer(unit(), range(4), [2, 3, 5, 8], [7] * 4, make_row(schema))
    pair.claim([9, 1, 4, 12])
    run(pair, Arrived)
    assert pair.has_arrived([9, 1, 4, 12], [2, 3, 5, 8])
    assert pair.server.dropped.count == 0


def test_ranks_of_another_node_get_no_pages_of_a_ticket(make_pair: MakePair) -> None:
    """Nor do they end it: only the link of the tickets does."""
    pair = make_pair(heads_schema(4), 1, 2, decode=("zmq",))
    pair.server.open(unit(), 2)
    pair.server.offer(unit(), [0], [2], [7])
    pair.claim([9, 1])
    spin(pair.nodes, lambda _: all(pages_in(end)[0][:, 9].any() for end in pair.targets))
    thief = RankPuller(rank_end(pair.schema, Shard(1, 2), "decode", transports=("zmq",), epoch="f" * 16))
    thief.do(OpenSource(1, peer_of(pair.server), [pair.server.address]))
    thief.do(FetchPages(2, pair.server.end.epoch, unit(), [0], [2], [5], [7], bytes(8 * len(thief._columns))))
    for _ in range(200):
        assert not [event for node in (*pair.nodes, thief) for event in node.poll()]
        time.sleep(0.001)
    assert len(pair.server._links.peers.by_link) == 4 and not pages_in(thief.end)[0].any()
    [link] = thief._sources[pair.server.end.epoch].links.values()
    link.send(Ack(unit=unit()))
    link.send(Claim(unit=unit("other"), num_cached_pages=0))
    spin(pair.nodes, lambda _: pair.server.dropped.count == 2)
    assert pair.server.tickets() == [unit()]
    thief.close()
    for pool in thief.end.memory:
        pool.close()


# --- wrong bytes ---


@pytest.mark.parametrize("way", ["local", "zmq", "cuda"])
@pytest.mark.parametrize("pool", [0, 1], ids=["target", "draft"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_wrong_byte_of_one_rank_is_caught(rank: int, pool: int, way: str, make_pair: MakePair) -> None:
    """The last byte of the last head of the rank, so that exactly one decode rank reads it."""
    pair = make_pair(heads_schema(6, 6), 2, 3, decode=(way,), has_gpu=way == "cuda")
    pair.offer([2, 3])
    spin(pair.nodes, lambda _: pair.server._book.get(unit()).checksums.keys() == {0, 1})
    pages_in(pair.sources[rank])[pool][-1, 3, -1] ^= 1
    pair.claim([9, 1])
    events = run(pair, TransferFailed, TicketEnded)
    [failed] = named(events, TransferFailed)
    last = (2, 5)[rank]
    block = 2 * 12 + 6 + last if pool == 0 else 3 * 12 + 6 + last
    assert f"page 1 from node p0: checksum of block {block} wrong 3 times" in failed.reason
    assert pair.client.num_checksum_failures == 3 and not failed.is_refused
    assert named(events, TicketEnded)[0].how == "dropped"


@pytest.mark.parametrize("way", ["local", "zmq"])
def test_a_copy_that_was_damaged_once_is_fetched_again(way: str, make_pair: MakePair) -> None:
    pair = make_pair(heads_schema(6, 1), 2, 3, decode=(way,))
    pair.offer([2, 3])
    spin(pair.nodes, lambda _: pair.server._book.get(unit()).checksums.keys() == {0, 1})
    pool = pages_in(pair.sources[1])[0]
    pool[0, 2, 0] ^= 1
    pair.claim([9, 1])
    spin(pair.nodes, lambda _: pair.client.num_checksum_failures == 1)
    pool[0, 2, 0] ^= 1
    [event] = named(run(pair, Arrived), Arrived)
    assert event.times.num_repeated == pair.client.num_checksum_failures <= 2
    assert pair.has_arrived([9, 1], [2, 3])


@pytest.mark.parametrize("way", ["local", "zmq", "cuda"])
def test_a_page_that_rank_0_gave_away_is_noticed_on_every_rank(way: str, make_pair: MakePair) -> None:
    """Only rank 0 counts generations. Here the reused page has the same bytes, so no checksum tells."""
    pair = make_pair(heads_schema(6, 1), 2, 3, decode=(way,), has_gpu=way == "cuda")
    pair.offer([2, 3])
    spin(pair.nodes, lambda _: pair.server._book.get(unit()).checksums.keys() == {0, 1})
    pair.sources[0].memory[0].generations[3] += 1
    pair.claim([9, 1])
    [failed] = named(run(pair, TransferFailed), TransferFailed)
    assert "page 1 from node p0 was reused: generation 8 there, 7 offered" in failed.reason


# --- ends ---


@pytest.mark.parametrize("way", ["local", "zmq"])
def test_after_a_drop_no_rank_writes_the_pages(way: str, make_pair: MakePair) -> None:
    pair = make_pair(heads_schema(6, 1), 2, 3, decode=(way,))
    pair.offer([2, 3, 5])
    pair.claim([9, 1, 4])
    spin(pair.nodes, lambda _: pair.client._transfers[unit()].missing())
    pair.client.drop(unit(), "cancelled")
    assert pair.pull_line is not None
    pair.pull_line.poll()  # the ranks have read the order before any later work
    before = [[pool.copy() for pool in pages_in(end)] for end in pair.targets]
    events = spin(pair.nodes, lambda events: named(events, TicketEnded))
    for _ in range(20):
        events += [event for node in pair.nodes for event in node.poll()]
    assert [event.how for event in events] == ["dropped"]
    for end, pools in zip(pair.targets, before, strict=True):
        assert all(np.array_equal(pool, old) for pool, old in zip(pages_in(end), pools, strict=True))
    pair.claim([9, 1, 4], rid="next")
    pair.offer([2, 3, 5], rid="next")
    run(pair, Arrived)
    assert pair.has_arrived([9, 1, 4], [2, 3, 5])


def test_a_ticket_that_has_ended_is_forgotten_by_all_ranks(make_pair: MakePair) -> None:
    pair = make_pair(heads_schema(6, 1), 2, 3, decode=("zmq",))
    pair.offer([2])
    pair.claim([9])
    run(pair, Arrived, TicketEnded)
    spin(pair.nodes, lambda _: not pair.page_servers[0]._grants)
    assert not pair.server._ranks._readers and not pair.server._ranks._waiting  # type: ignore[union-attr]
    for puller in (*pair.pullers, pair.client._team._own):
        assert puller is not None and not any(source.pages for source in puller._sources.values())
    assert pair.client.wait_s() is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_gone_ends_all_transfers_of_the_link(rank: int, make_pair: MakePair) -> None:
    pair = make_pair(heads_schema(6, 1), 2, 3, decode=("zmq",))
    pair.server.open(unit(), 2)
    pair.server.open(unit("b"), 1)
    pair.server.offer(unit(), [0], [2], [7])
    pair.claim([9, 1])
    pair.claim([4], rid="b")
    spin(pair.nodes, lambda _: pages_in(pair.targets[2])[0][:, 9].any())
    (pair.server, *pair.page_servers)[rank].close()
    pair.nodes.remove((pair.server, pair.serve_line)[rank])
    events = spin(pair.nodes, lambda events: len(named(events, TransferFailed)) == 2)
    assert {event.unit for event in events} == {unit(), unit("b")}
    assert all("node p0: " in event.reason and not event.is_refused for event in events)
    spin(pair.nodes, lambda _: not any(puller.sockets() for puller in pair.pullers))
    assert pair.client.sockets() == [] and pair.client.tickets() == []


def test_a_node_that_has_lost_a_rank_can_close(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(heads_schema(6, 1), 2, 3)
    pair.server.open(unit(), 2)
    pair.server.offer(unit(), [0], [2], [7])
    pair.claim([9, 1])
    spin(pair.nodes, lambda _: pages_in(pair.targets[2])[0][:, 9].any())

    def send(rank: int, order: Any) -> None:
        raise RankLost("rank 2 is gone")

    monkeypatch.setattr(pair.pull_line, "send", send)
    with pytest.raises(RankLost):
        pair.claim([4], rid="b")
    pair.client.close()
    assert pair.client.sockets() == [] and not pair.client.tickets()


def test_a_prefill_node_that_is_closed_is_left_by_all_ranks(make_pair: MakePair) -> None:
    pair = make_pair(heads_schema(6, 1), 2, 3, decode=("local",))
    pair.offer([2])
    pair.claim([9])
    run(pair, Arrived)
    assert all(puller.sockets() for puller in pair.pullers)
    pair.client.close_peer(pair.server.end.epoch)
    spin(pair.nodes, lambda _: not any(puller.sockets() for puller in pair.pullers))
    assert pair.client.sockets() == []


def test_a_decode_node_that_is_gone_is_left_by_all_ranks(make_pair: MakePair) -> None:
    pair = make_pair(heads_schema(6, 1), 2, 3, decode=("zmq",))
    pair.server.open(unit(), 2)
    pair.server.offer(unit(), [0], [2], [7])
    pair.claim([9, 1])
    spin(pair.nodes, lambda _: all(pages_in(end)[0][:, 9].any() for end in pair.targets))
    assert len(pair.page_servers[0]._links.peers.by_link) == 2, "ranks 1 and 2 need heads of it"
    pair.server.close_peer(pair.client.end.epoch)
    [ended] = named(spin([pair.server, pair.serve_line], lambda events: named(events, TicketEnded)), TicketEnded)
    assert ended.how == "closed"
    assert not pair.page_servers[0]._links.peers.by_link and not pair.server._links.peers.by_link


# --- refusals ---


@pytest.mark.parametrize(("num_prefill", "num_decode", "words"), [(3, 1, "over 3 ranks"), (1, 3, "over 3 ranks")])
def test_sizes_that_do_not_divide_the_heads_are_refused(
    num_prefill: int, num_decode: int, words: str, make_pair: MakePair
) -> None:
    with pytest.raises(ConfigError, match=f"4 KV heads cannot be split {words}"):
        make_pair(heads_schema(4), num_prefill, num_decode)


def test_a_welcome_of_a_size_that_does_not_divide_is_refused_in_words(make_pair: MakePair) -> None:
    pair = make_pair(heads_schema(4), 2, 2)
    pair.server._links.peers._addresses = ("tcp://127.0.0.1:1",) * 3
    pair.claim([9])
    [failed] = named(run(pair, TransferFailed), TransferFailed)
    assert failed.is_refused
    assert "3 ranks there, 2 here: 4 KV heads cannot be split over 3 ranks" in failed.reason


def test_ranks_without_a_common_transport_are_refused_in_words(make_pair: MakePair) -> None:
    pair = make_pair(heads_schema(4), 1, 2, prefill=("local",), decode=("zmq",))
    pair.claim([9])
    [failed] = named(run(pair, TransferFailed), TransferFailed)
    assert failed.is_refused and "transports: local here, zmq there (same host)" in failed.reason


@pytest.mark.parametrize(("num_prefill", "num_decode", "ranks_there"), [(2, 1, 2), (1, 2, 1)])
def test_an_older_peer_and_a_node_with_ranks_refuse_each_other(
    num_prefill: int, num_decode: int, ranks_there: int, make_pair: MakePair
) -> None:
    pair = make_pair(heads_schema(4), num_prefill, num_decode)
    old = msgspec.structs.replace(peer_of(pair.server), protocol=5)
    pair.client.claim(unit(), old, 0, [9])
    [failed] = named(run(pair, TransferFailed), TransferFailed)
    assert failed.is_refused
    assert f"ranks: {ranks_there} here, protocol 4 of the link, ranks need 6" in failed.reason


def test_unlike_models_are_refused_on_the_link_of_the_tickets(make_pair: MakePair) -> None:
    pair = make_pair(heads_schema(4), 2, 2)
    other = make_pair(heads_schema(2), 2, 2)
    other.client.claim(unit(), peer_of(pair.server), 0, [9])
    [failed] = named(spin([*pair.nodes, *other.nodes], lambda events: named(events, TransferFailed)), TransferFailed)
    assert failed.is_refused and "target.num_kv_heads: 4 here, 2 there" in failed.reason


# --- memory ---


def test_a_rank_digests_pages_after_the_work_that_computes_them(make_pair: MakePair) -> None:
    pair = make_pair(heads_schema(4), 2, 1, has_gpu=True)
    pair.offer([2, 3])
    spin(pair.nodes, lambda _: pair.server._book.get(unit()).checksums.keys() == {0, 1})
    calls = pair.sources[1].device.calls
    assert [name for name, pages in calls if 3 in pages] == ["expect", "digest"]


def test_ranks_digest_pages_ahead_of_their_offer(make_pair: MakePair) -> None:
    """The checksums that were begun wait for no later work, which the rank may have been given before the offer."""
    pair = make_pair(heads_schema(4), 2, 1, has_gpu=True)
    pair.server.digest_ahead([2, 3], [7, 7])
    pair.server.open(unit(), 3)
    pair.server.offer(unit(), [0, 1, 2], [2, 3, 5], [7, 7, 7])
    pair.server.finish(unit(), make_row(pair.schema))
    pair.claim([9, 4, 1])
    run(pair, Arrived)
    assert pair.has_arrived([9, 4, 1], [2, 3, 5])
    for end in pair.sources:
        assert end.device.called("begin_digest") == [2, 3] and end.device.called("digest") == [5]
    assert pair.sources[1].device.called("expect") == [5]


def test_ranks_in_host_memory_are_not_asked_to_digest_ahead(make_pair: MakePair) -> None:
    pair = make_pair(heads_schema(4), 2, 1)
    pair.server.digest_ahead([2, 3], [7, 7])
    assert pair.serve_line is not None and not pair.serve_line.sent


def test_a_prefill_rank_without_memory_fails_the_ticket(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(heads_schema(4), 2, 1, has_gpu=True)

    def full(pages: Any) -> Any:
        raise OutOfMemory("no memory for digests")

    monkeypatch.setattr(pair.sources[1].device, "digest", full)
    pair.offer([2])
    [failed] = named(run(pair, TicketFailed), TicketFailed)
    assert failed == TicketFailed(unit(), "rank 1: no memory for digests")


def test_a_decode_rank_without_memory_fails_the_transfer(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(heads_schema(4), 2, 2, has_gpu=True, decode=("cuda",))

    def full(*_: Any) -> Any:
        raise OutOfMemory("no memory for a gather")

    gather = pair.targets[1].device.gather
    monkeypatch.setattr(pair.targets[1].device, "gather", full)
    pair.offer([2])
    pair.claim([9])
    [failed] = named(run(pair, TransferFailed, TicketEnded), TransferFailed)
    assert failed.code == "out_of_memory" and failed.reason == "rank 1: no memory for a gather"
    monkeypatch.setattr(pair.targets[1].device, "gather", gather)
    pair.offer([2], rid="next")
    pair.claim([9], rid="next")
    run(pair, Arrived)
    assert pair.has_arrived([9], [2])


# --- reports ---


def test_late_reports_change_nothing(make_pair: MakePair) -> None:
    """Of a fetch that was forgotten, and of links that were opened before."""
    pair = make_pair(heads_schema(4), 1, 2)
    pair.offer([2, 3])
    pair.claim([9, 1])
    run(pair, Arrived)
    transport = pair.client._links.by_epoch[pair.server.end.epoch].transport
    assert isinstance(transport, RanksTransport)
    epoch = pair.server.end.epoch
    transport.take(1, FetchedPages(epoch, 10**9, [0], [7], {}))
    transport.take(1, FetchFailed(epoch, 10**9, unit(), "no memory"))
    transport.take(1, SourceLost(epoch, transport._number - 1, "gone", False))
    assert not transport.is_busy and list(transport.step(1)) == []
