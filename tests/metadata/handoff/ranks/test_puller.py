"""A rank of a decode node without its rank 0: the test gives the orders and reads the reports."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from handoff_nodes import make_row, peer_of, unit
from rank_nodes import LocalLine, RankPair, heads_schema, pages_in, rank_end

from baton.metadata.handoff.pages import page_checksums
from baton.metadata.handoff.ranks.orders import (
    CloseSource,
    ExpectPages,
    FetchedPages,
    FetchPages,
    ForgetUnit,
    OpenSource,
    SourceLost,
)
from baton.metadata.handoff.ranks.puller import RankPuller, RankTeam
from baton.metadata.handoff.schema.kv_layout import Shard
from baton.metadata.handoff.transports.base import Landed


class Rank:
    """Rank 1 of 3, which needs heads of both ranks of a prefill node, whose ticket is claimed by hand."""

    def __init__(self, transport: str, *, has_gpu: bool = False) -> None:
        self.pair = RankPair(heads_schema(6), 2, 3, decode=(transport,), has_gpu=has_gpu, answer_s=1.0)
        self.puller: RankPuller = self.pair.pullers[0]
        self.reports: list[Any] = []
        self.pair.offer([2, 3])
        self.pair.claim([12, 13])
        line: Any = self.pair.serve_line
        self.others = [self.pair.server, self.pair.client, line]
        for _ in range(50):  # the ticket is claimed; ranks 1 and 2 of the decode node do nothing of their own
            self.poll()
        server = self.pair.server
        addresses = (server.address, self.pair.page_servers[0].address)
        self.opening = OpenSource(1, peer_of(server), addresses)
        self.checksums = [page_checksums(self.puller.end.memory, page) for page in (0, 0)]

    def poll(self) -> None:
        for node in self.others:
            node.poll()
        self.reports += self.puller.poll()
        time.sleep(0.0005)

    def until(self, count: int) -> list[Any]:
        deadline = time.monotonic() + 10
        while len(self.reports) < count:
            assert time.monotonic() < deadline, self.reports
            self.poll()
        return self.reports

    def fetch(self, number: int, indices: Sequence[int], targets: Sequence[int], checksums: bytes) -> None:
        sources = [(2, 3)[index] for index in indices]
        epoch = self.pair.server.end.epoch
        self.puller.do(FetchPages(number, epoch, unit(), indices, sources, targets, [7] * len(indices), checksums))

    def digests(self, *pages: int) -> bytes:
        """Return the checksums that the pages should have, of the rank's own heads."""
        ticket = self.pair.server._book.get(unit())
        assert ticket is not None
        stride = 8 * len(self.puller._columns)
        own = b""
        for index in pages:
            whole = ticket.checksums[index]
            own += b"".join(whole[8 * column : 8 * column + 8] for column in self.puller._columns)
        assert len(own) == stride * len(pages)
        return own


@pytest.fixture(params=["local", "zmq"])
def rank(request: Any) -> Iterator[Rank]:
    made = Rank(request.param)
    yield made
    made.pair.close()


def test_pages_are_fetched_from_both_ranks_and_checked(rank: Rank) -> None:
    rank.puller.do(ExpectPages([9, 4]))
    rank.puller.do(rank.opening)
    rank.fetch(5, [0, 1], [9, 4], rank.digests(0, 1))
    while sum(len(report.indices) for report in rank.reports) < 2:
        rank.until(len(rank.reports) + 1)
    assert all(isinstance(each, FetchedPages) and each.number == 5 and not each.wrong_blocks for each in rank.reports)
    pages = {i: g for each in rank.reports for i, g in zip(each.indices, each.generations, strict=True)}
    assert pages == {0: 7, 1: 7} and rank.pair.has_arrived is not None
    assert pages_in(rank.puller.end)[0][:, [9, 4]].any(axis=(0, 2)).all()
    assert rank.puller.wait_s() is None and rank.puller.sockets()


def test_a_wrong_checksum_is_reported_by_the_block_of_the_whole_page(rank: Rank) -> None:
    wrong = bytearray(rank.digests(1))
    wrong[8 * 5] ^= 1  # layer 1 of K0 K1 V0 V1: its K1, which is head 3 of the whole page
    rank.puller.do(rank.opening)
    rank.fetch(6, [1], [4], bytes(wrong))
    assert rank.until(1) == [FetchedPages(rank.pair.server.end.epoch, 6, [1], [7], {1: 12 + 3})]


def test_nothing_is_written_after_forget_and_close(rank: Rank) -> None:
    rank.puller.do(rank.opening)
    for _ in range(100):
        rank.poll()
    for end in (ForgetUnit(unit()), CloseSource(rank.pair.server.end.epoch)):
        rank.fetch(7, [0, 1], [9, 4], rank.digests(0, 1))
        rank.puller.do(end)
        for _ in range(100):
            rank.poll()
        assert not pages_in(rank.puller.end)[0].any() and rank.reports == []
    assert rank.puller.sockets() == []
    rank.fetch(8, [0], [9], rank.digests(0))
    assert rank.puller.wait_s() is not None or not rank.puller._sources


def test_links_that_cannot_be_opened_are_reported(rank: Rank) -> None:
    epoch = rank.pair.server.end.epoch
    rank.puller.do(OpenSource(2, rank.opening.peer, ("nowhere", "tcp://127.0.0.1:1")))
    [lost] = rank.until(1)
    assert isinstance(lost, SourceLost) and (lost.epoch, lost.number, lost.is_refused) == (epoch, 2, False)
    rank.puller.do(OpenSource(3, rank.opening.peer, ("tcp://127.0.0.1:1",) * 4))
    assert rank.until(2)[1] == SourceLost(
        epoch, 3, "6 KV heads cannot be split over 4 ranks: use a divisor or a multiple", True
    )
    rank.puller.do(OpenSource(4, rank.opening.peer, ("tcp://127.0.0.1:1",) * 2))
    lost = rank.until(3)[2]
    assert lost.number == 4 and "its rank 0, on the link of rank 1: it cannot be reached" in lost.reason
    assert rank.puller.sockets() == []


def test_a_rank_that_does_not_answer_is_left(rank: Rank) -> None:
    rank.puller.do(rank.opening)
    rank.fetch(5, [0], [9], rank.digests(0))
    rank.others.clear()
    for link in (link for links in rank.puller._links.values() for link in links):
        link._answer_s = 0.1
    [lost] = rank.until(1)
    assert "has not answered" in lost.reason and not lost.is_refused


def test_parts_of_one_page_do_not_come_by_the_gpu_and_by_the_host() -> None:
    rank = Rank("cuda", has_gpu=True)
    rank.puller.do(rank.opening)
    for _ in range(100):
        rank.poll()
    [source] = rank.puller._sources.values()
    for target in rank.pair.targets:
        target.device.is_slow = True
    rank.fetch(5, [0], [9], rank.digests(0))
    move = source.pages[unit()][0].move
    rank.puller._land(source, 0, Landed(move, 7))
    rank.puller._land(source, 1, Landed(move, 7, bytes(8 * len(rank.puller._columns))))
    [lost] = rank.until(1)
    assert "by unlike transports" in lost.reason
    rank.pair.close()
    assert make_row(rank.pair.schema)


class TeamRank:
    """A rank that reports what the test says."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.reports: list[Any] = []

    def do(self, order: Any) -> None:
        self.done.append(order)

    def poll(self) -> list[Any]:
        reports, self.reports = self.reports, []
        return reports


@pytest.fixture
def ranks() -> list[TeamRank]:
    return [TeamRank(), TeamRank()]


@pytest.fixture
def team(ranks: list[TeamRank]) -> Iterator[RankTeam]:
    end = rank_end(heads_schema(6), Shard(0, 3), "decode")
    yield RankTeam(end, LocalLine(ranks), 5.0)
    for pool in end.memory:
        pool.close()


def test_a_node_of_one_rank_has_a_puller_when_it_needs_one() -> None:
    end = rank_end(heads_schema(6), Shard(0, 1), "decode")
    team = RankTeam(end, None, 5.0)
    team.expect([3])
    assert team.size == 1 and team.poll() == [] and team.sockets() == [] and team.wait_s() is None
    assert team._own is None
    team.send(0, ForgetUnit(unit()))
    assert team._own is not None and team.poll() == [] and team.wait_s() is None
    team.close()
    for pool in end.memory:
        pool.close()


def test_orders_go_to_their_rank_and_reports_have_theirs(team: RankTeam, ranks: list[TeamRank]) -> None:
    line: Any = team._line
    team.expect([3, 4])
    team.send(2, ForgetUnit(unit()))
    line.poll()
    assert [rank.done for rank in ranks] == [[ExpectPages([3, 4])], [ExpectPages([3, 4]), ForgetUnit(unit())]]
    lost = SourceLost("e", 1, "gone", False)
    ranks[1].reports = [lost]
    line.poll()
    assert team.poll() == [(2, lost)] and team.poll() == []
