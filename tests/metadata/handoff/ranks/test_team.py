"""The ranks of a decode node, as rank 0 sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from handoff_nodes import unit
from rank_nodes import LocalLine, heads_schema, rank_end

from baton.metadata.handoff.ranks.orders import ExpectPages, ForgetUnit, OfferDigests, SourceLost
from baton.metadata.handoff.ranks.team import RankTeam
from baton.metadata.handoff.schema.kv_layout import Shard


class Rank:
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
def ranks() -> list[Rank]:
    return [Rank(), Rank()]


@pytest.fixture
def team(ranks: list[Rank]) -> Iterator[RankTeam]:
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


def test_orders_go_to_their_rank_and_reports_have_theirs(team: RankTeam, ranks: list[Rank]) -> None:
    line: Any = team._line
    team.expect([3, 4])
    team.send(2, ForgetUnit(unit()))
    line.poll()
    assert [rank.done for rank in ranks] == [[ExpectPages([3, 4])], [ExpectPages([3, 4]), ForgetUnit(unit())]]
    lost = SourceLost("e", 1, "gone", False)
    ranks[1].reports = [lost]
    line.poll()
    assert team.poll() == [(2, lost)] and team.poll() == []


def test_a_report_of_a_prefill_node_is_a_defect(team: RankTeam, ranks: list[Rank]) -> None:
    ranks[0].reports = [OfferDigests(1, b"")]
    team._line.poll()  # type: ignore[union-attr]
    with pytest.raises(AssertionError, match="OfferDigests"):
        team.poll()
