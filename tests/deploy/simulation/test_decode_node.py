"""The simulated decode node: when sequences join rounds, gaps, chunks beside rounds, and preemption."""

from __future__ import annotations

import math
import random

import pytest
from simulated import TIMES

from baton.decode_node.chunk_length import ChunkBudget, ChunkRoom
from baton.deploy.simulation.agenda import Agenda
from baton.deploy.simulation.costs import Costs
from baton.deploy.simulation.decode_node import Gaps, RememberedCosts, SimulatedDecodeNode
from baton.deploy.simulation.figures import Record
from baton.deploy.simulation.request import SimulatedRequest
from baton.deploy.simulation.traffic import Arrival
from baton.engine.pace.step_times import ChunkCosts
from baton.router.placement.prompt_placement import LocalFigures


class Bench:
    """A node, and a router that gives it prompts. A remote prompt arrives `away_s` after it was granted."""

    def __init__(
        self, *, max_gap_s: float | None = math.inf, chunk_tokens: int = 1000, pool_tokens: int = 100_000
    ) -> None:
        self.agenda = Agenda()
        self.node = SimulatedDecodeNode(self.agenda, Costs(TIMES, 64), 64, pool_tokens, chunk_tokens, max_gap_s, self)
        self.away_s: dict[SimulatedRequest, float] = {}
        self.granted_at: list[tuple[int, float]] = []
        self.done: list[SimulatedRequest] = []
        self.num_requests = 0

    def granted(self, node: SimulatedDecodeNode, request: SimulatedRequest) -> None:
        self.granted_at.append((request.order, round(self.agenda.now, 6)))
        self.agenda.at(self.agenda.now + self.away_s[request], self.arrive, request)

    def arrive(self, request: SimulatedRequest) -> None:
        request.take_first(self.agenda.now)
        self.node.arrive(request)

    def ended(self, request: SimulatedRequest) -> None:
        self.done.append(request)

    def remote(self, at_s: float, prompt_len: int, num_tokens: int, away_s: float) -> SimulatedRequest:
        request = self.local(at_s, prompt_len, num_tokens)
        request.is_local = False
        self.away_s[request] = away_s
        return request

    def local(self, at_s: float, prompt_len: int, num_tokens: int) -> SimulatedRequest:
        request = SimulatedRequest(
            len(self.away_s) + len(self.granted_at) + int(at_s * 1e6), Arrival(at_s, prompt_len, num_tokens)
        )
        request.is_local = True
        self.agenda.at(at_s, self.node.ask, request)
        return request

    def run(self) -> None:
        self.agenda.run()
        assert self.node.is_empty


def _close(record: Record, *values: float) -> bool:
    return tuple(record) == pytest.approx(values, abs=2e-5)


def test_a_remote_sequence_alone_decodes_in_rounds() -> None:
    bench = Bench()
    request = bench.remote(0.0, 9, 4, away_s=0.2)
    bench.run()
    assert _close(request.record, 0.2, 0.01001, 0.01001, 0.01001)


def test_a_local_prompt_is_computed_but_for_its_last_token_then_takes_part_in_rounds() -> None:
    bench = Bench()
    request = bench.local(0.0, 2501, 3)  # 250 ms of chunks, rounds of 12.5
    bench.run()
    assert _close(request.record, 0.2625, 0.0125, 0.0125, 0.0125)


def test_a_sequence_joins_the_next_round_if_it_is_ready_before_that_is_submitted() -> None:
    """The first round of the running sequence ends at 110 ms. The next one is submitted at 108 ms."""
    for away_s, second_at in ((0.1075, 0.120), (0.1085, 0.130)):
        bench = Bench()
        bench.remote(0.0, 9, 50, away_s=0.1)
        request = bench.remote(0.0, 9, 2, away_s=away_s)
        bench.run()
        assert request.first_s + request.second_s == pytest.approx(second_at, abs=2e-4)


def test_messages_are_handled_when_a_round_ends_or_while_pages_are_awaited() -> None:
    bench = Bench()
    bench.remote(0.0, 9, 50, away_s=0.1)
    bench.remote(0.111, 9, 2, away_s=0.5)  # the second round runs from 110 to 120 ms
    bench.remote(0.203, 9, 2, away_s=0.5)  # the second request is awaited
    bench.run()
    assert [round(at, 3) for _, at in bench.granted_at] == [0.0, 0.12, 0.203]


def test_a_chunk_makes_the_gap_of_running_sequences_longer() -> None:
    bench = Bench(chunk_tokens=200)
    running = bench.remote(0.0, 9, 60, away_s=0.0)
    bench.local(0.1, 501, 2)  # chunks of 200, 200 and 100 tokens: 20, 20 and 10 ms
    bench.run()
    assert running.gap_s == pytest.approx(0.030, abs=3e-4)
    assert running.record.tpot_s == pytest.approx(0.010 + 0.050 / 59, abs=3e-4)


def test_chunks_keep_the_bound_on_gaps() -> None:
    bench = Bench(max_gap_s=None)
    running = bench.remote(0.0, 9, 200, away_s=0.0)
    local = bench.local(0.1, 151, 2)
    bench.run()
    assert 0.0145 < running.gap_s <= 0.0152  # 1.5 rounds
    assert local.record.ttft_s > 0.04


def test_the_products_own_budget_decides_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkBudget, "room", lambda self, *args: ChunkRoom(7))
    bench = Bench()
    running = bench.remote(0.0, 9, 200, away_s=0.0)
    local = bench.local(0.1, 71, 2)
    bench.run()
    assert local.record.ttft_s == pytest.approx(12 * 0.010 + 0.010, abs=0.02)
    assert running.gap_s < 0.0112


def test_remembered_costs_are_those_that_were_measured_last() -> None:
    plain, remembered = ChunkCosts({16: 0.1, 64: 0.2}), RememberedCosts({16: 0.1, 64: 0.2})
    draw = random.Random(3)
    for _ in range(200):
        size, depth, is_mixed = draw.choice([8, 20, 64, 90]), draw.choice([0, 5000]), draw.random() < 0.5
        if draw.random() < 0.2:
            seconds = draw.random()
            for each in (plain, remembered):
                each.observe(size, depth, seconds, is_mixed=is_mixed)
        within_s = draw.choice([0.05, 0.15, 0.3])
        for _ in range(2):
            assert plain.seconds(size, depth, is_mixed=is_mixed) == remembered.seconds(size, depth, is_mixed=is_mixed)
            assert plain.most_tokens(within_s, depth, 100, is_mixed=is_mixed) == remembered.most_tokens(
                within_s, depth, 100, is_mixed=is_mixed
            )


def test_the_largest_gap_since_a_round_is_that_of_a_search() -> None:
    draw, gaps, all_gaps = random.Random(2), Gaps(), list[float]()
    for number in range(300):
        all_gaps.append(draw.random())
        gaps.add(number, all_gaps[-1])
        since = draw.randrange(number + 1)
        assert gaps.largest_since(since) == max(all_gaps[since:])
    assert gaps.largest_since(300) == 0.0


def test_the_youngest_sequence_gives_way_if_the_pool_is_full_and_is_computed_again() -> None:
    bench = Bench(pool_tokens=300)
    old = bench.remote(0.0, 100, 120, away_s=0.0)
    young = bench.remote(0.001, 100, 120, away_s=0.0)
    bench.remote(0.6, 20, 2, away_s=0.0)  # there is room for it, but the preempted one comes first
    bench.run()
    assert bench.granted_at[2][1] > old.last_s - 0.001
    assert bench.node.num_preemptions >= 1
    assert bench.done.index(old) < bench.done.index(young)
    assert old.record.tpot_s < 0.0115 < young.record.tpot_s
    assert young.gap_s > 0.1


def test_a_request_waits_at_the_node_until_the_pool_has_room() -> None:
    bench = Bench(pool_tokens=300)
    bench.remote(0.0, 200, 21, away_s=0.0)
    bench.remote(0.001, 200, 2, away_s=0.0)
    bench.run()
    assert bench.granted_at[1][1] == pytest.approx(0.2, abs=0.01)


def test_books_are_what_the_router_sees() -> None:
    bench = Bench(pool_tokens=1000)
    bench.remote(0.0, 100, 3, away_s=1.0)
    seen = list[tuple[int, int]]()
    for at_s in (0.5, 2.0):
        bench.agenda.at(at_s, lambda: seen.append(bench.node.figures[:2]))
    bench.run()
    assert seen == [(1000 - 102, 1), (1000, 0)]


def test_local_figures_know_the_bound_and_the_queue() -> None:
    bench = Bench(max_gap_s=0.011)
    request = SimulatedRequest(9, Arrival(0.0, 500, 2))
    idle = bench.node.local_figures(request)
    assert idle.has_room and idle.times.seconds(500) == pytest.approx(0.05) and idle.num_queued_tokens == 0
    bench.remote(0.0, 5000, 30, away_s=0.0)
    figures = list[LocalFigures]()
    bench.agenda.at(0.1, lambda: figures.append(bench.node.local_figures(request)))
    bench.run()
    assert not figures[0].has_room and figures[0].round_s == pytest.approx(0.015, abs=1e-4)
