"""The simulated prefill node: order, chunks, and the pages that it holds."""

from __future__ import annotations

import pytest
from simulated import TIMES

from baton.deploy.simulation.agenda import Agenda
from baton.deploy.simulation.costs import Costs
from baton.deploy.simulation.prefill_node import SimulatedPrefillNode
from baton.deploy.simulation.request import SimulatedRequest
from baton.deploy.simulation.traffic import Arrival
from baton.router.placement.prompt_placement import RemoteFigures


class Bench:
    """A node, and when its prompts were computed. Each prompt is handed over `handoff_s` later."""

    def __init__(self, chunk_tokens: int, pool_tokens: int = 100_000, handoff_s: float = 0.0) -> None:
        self.agenda, self.handoff_s = Agenda(), handoff_s
        self.node = SimulatedPrefillNode(self.agenda, Costs(TIMES, 64), 64, pool_tokens, chunk_tokens, self.computed)
        self.seen: list[tuple[int, float, int]] = []

    def computed(self, node: SimulatedPrefillNode, request: SimulatedRequest, num_tokens: int) -> None:
        self.seen.append((request.order, round(self.agenda.now, 6), num_tokens))
        self.agenda.at(self.agenda.now + self.handoff_s, node.release, request)

    def run(self, *prompts: tuple[float, int]) -> list[tuple[int, float, int]]:
        for order, (at_s, prompt_len) in enumerate(prompts):
            self.agenda.at(at_s, self.node.submit, SimulatedRequest(order, Arrival(at_s, prompt_len, 2)))
        self.agenda.run()
        assert self.node.is_empty
        return self.seen


def test_a_prompt_takes_its_chunks() -> None:
    assert Bench(100).run((0.5, 250)) == [(0, 0.525, 50)]


def test_prompts_share_a_chunk_and_end_together() -> None:
    assert Bench(1000).run((0.0, 500), (0.01, 200), (0.02, 300)) == [(0, 0.05, 500), (1, 0.1, 200), (2, 0.1, 300)]


def test_prompts_share_a_chunk_only_while_it_is_small() -> None:
    """Longer chunks are no faster here, so prompts share 512 tokens, and each longer prompt has its own chunk."""
    assert Bench(2000).run((0.0, 500), (0.01, 200), (0.02, 300), (0.03, 900), (0.04, 1100)) == [
        (0, 0.05, 500),
        (1, 0.1, 200),
        (2, 0.1, 300),
        (3, 0.19, 900),
        (4, 0.3, 1100),
    ]


def test_a_chunk_is_submitted_ahead_only_while_prompts_are_begun() -> None:
    """Two chunks are submitted at once. The second prompt misses the second chunk, but not the third."""
    assert Bench(100).run((0.0, 150), (0.001, 50)) == [(0, 0.015, 50), (1, 0.02, 50)]
    assert Bench(100).run((0.0, 250), (0.001, 50)) == [(0, 0.03, 50), (1, 0.03, 50)]


def test_a_prompt_waits_until_the_pool_holds_all_of_it() -> None:
    bench = Bench(1000, pool_tokens=800, handoff_s=0.5)
    assert bench.run((0.0, 500), (0.0, 400)) == [(0, 0.05, 500), (1, 0.59, 400)]


def test_the_books_hold_a_prompt_until_it_is_handed_over() -> None:
    bench = Bench(1000, handoff_s=0.5)
    counts = list[int]()
    for at_s in (0.01, 0.3, 0.6):
        bench.agenda.at(at_s, lambda: counts.append(bench.node.num_prompts))
    bench.run((0.0, 500))
    assert counts == [1, 1, 0]


def test_remote_figures_count_the_prompts_before_and_what_chunks_took() -> None:
    bench = Bench(1000)
    request = SimulatedRequest(1, Arrival(0.0, 100, 2))
    assert not bench.node.remote_figures(request, 0.0, 0.01).times.are_known
    bench.run((0.0, 700))
    bench.agenda.at(1.0, bench.node.submit, SimulatedRequest(0, Arrival(1.0, 700, 2)))
    figures = list[RemoteFigures]()
    bench.agenda.at(1.01, lambda: figures.append(bench.node.remote_figures(request, 0.02, 0.01)))
    bench.agenda.run()
    assert figures[0].num_queued_tokens == pytest.approx(600, abs=1)  # 10 ms of the 70 are over
    assert figures[0].two_tokens_s == pytest.approx(0.07 + (0.02 + 0.01) / 2, abs=1e-3)
