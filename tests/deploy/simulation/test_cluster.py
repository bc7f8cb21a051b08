"""A simulated cluster as a whole: conservation, queueing theory, and what must grow with the rate."""

from __future__ import annotations

import random

import msgspec
import pytest
from simulated import TIMES
from thinned import thinned

from baton.deploy.simulation.cluster import ClusterShape, simulate
from baton.deploy.simulation.figures import Slo, summary
from baton.deploy.simulation.times import find, read
from baton.deploy.simulation.traffic import Arrival, poisson

SHAPES = [
    ClusterShape(1, 1, "never"),
    ClusterShape(1, 1, "auto"),
    ClusterShape(0, 2, "always"),
    ClusterShape(2, 3, "never"),
    ClusterShape(3, 2, "auto"),
]
EIGHT_B = read(find("llama-3.1-8b-h200"))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("pool_tokens", [700, 3000, 100_000])
def test_every_request_ends_once_and_the_books_are_empty(shape: ClusterShape, pool_tokens: int) -> None:
    """`simulate` compares the books. Small pools preempt, few slots let requests wait."""
    draw, num_preemptions = random.Random(pool_tokens), 0
    for max_running in (1, 3, 64):
        arrivals = [
            Arrival(draw.uniform(0, 3), draw.choice([1, 2, 17, 300, 600]), draw.choice([1, 2, 30, 90]))
            for _ in range(120)
        ]
        times = msgspec.structs.replace(TIMES, pool_tokens=pool_tokens)
        outcome = simulate(shape, times, sorted(arrivals), max_running)
        assert len(outcome.records) == 120 and outcome.num_refused == 0
        for (_, _, num_tokens, *_), record in zip(sorted(arrivals), outcome.records, strict=True):
            assert record.ttft_s > 0 and record.gap_s >= record.second_s >= 0
            assert (record.tpot_s > 0) == (num_tokens > 1) and record.gap_s >= record.tpot_s - 1e-9
        num_preemptions += outcome.num_preemptions
    assert num_preemptions == 0 if pool_tokens == 100_000 else num_preemptions > 0 or pool_tokens > 700


def test_a_request_that_no_node_can_hold_is_refused() -> None:
    arrivals = [Arrival(0.0, 99_999, 2), Arrival(0.0, 10, 2)]
    outcome = simulate(ClusterShape(1, 1, "never"), TIMES, arrivals, 8)
    assert (len(outcome.records), outcome.num_refused) == (1, 1)
    times = msgspec.structs.replace(TIMES, context_len=11)
    assert simulate(ClusterShape(1, 1, "never"), times, arrivals, 8).num_refused == 2


@pytest.mark.parametrize("load", thinned([0.3, 0.6], lambda i, _: i == 1))
def test_one_server_waits_as_long_as_queueing_theory_says(load: float) -> None:
    """Prompts of a whole chunk on one prefill node are an M/D/1 queue, whose mean wait is load / 2 (1 - load) services.

    The time to a single token is that of the router, the wait and one service.
    """
    service_s = 0.8192  # of 8,192 tokens
    arrivals = poisson(load / service_s, 100_000 * service_s / load, 8192, 1, seed=5)
    outcome = simulate(ClusterShape(1, 1, "never"), TIMES, arrivals, 1000)
    waits = [record.ttft_s - 0.001 - service_s for record in outcome.records]
    assert min(waits) == pytest.approx(0, abs=1e-6)
    assert sum(waits) / len(waits) == pytest.approx(load / (2 * (1 - load)) * service_s, rel=0.03)
    assert outcome.prefill_busy == pytest.approx(load, rel=0.03)


@pytest.mark.parametrize("shape", thinned(SHAPES[:3], lambda i, _: i == 2), ids=lambda shape: shape.name)
def test_more_requests_per_second_are_served_no_better(shape: ClusterShape) -> None:
    slo, last = Slo(300, 12), (0.0, 0.0, -1.0)
    for rate in (2.0, 5.0, 9.0, 14.0):
        arrivals = [each._replace(at_s=each.at_s / rate) for each in poisson(1.0, 600, 2048, 128, seed=1)]
        outcome = simulate(shape, EIGHT_B, arrivals, 64)
        row = summary(outcome.records, outcome.took_s, [slo])
        now = row["ttft_ms_p50"], row["tpot_ms_p50"], 1 - row["good_share_300_12"]
        assert all(new >= old * 0.98 - 0.01 for new, old in zip(now, last, strict=True)), (rate, now, last)
        last = now
    assert last[0] > 60


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_equal_seeds_give_equal_results(shape: ClusterShape) -> None:
    def once(seed: int) -> object:
        return simulate(shape, EIGHT_B, poisson(10, 20, 1024, 64, seed), 64)

    assert once(1) == once(1) != once(2)


def test_an_idle_cluster_takes_the_sum_of_the_measured_times() -> None:
    """Remote: router, chunk; handoff, round. Local: router, chunk, round; round."""
    arrival = [Arrival(0.0, 1001, 11)]
    remote = simulate(ClusterShape(1, 1, "never"), TIMES, arrival, 8).records[0]
    assert remote.ttft_s == pytest.approx(0.001 + 0.1001)
    assert remote.second_s == pytest.approx(0.005 + 0.011, abs=1e-5)
    assert remote.tpot_s == pytest.approx(0.011 + 0.005 / 10, abs=1e-5)
    local = simulate(ClusterShape(0, 1, "always"), TIMES, arrival, 8).records[0]
    assert local.ttft_s == pytest.approx(0.001 + 0.1 + 0.011, abs=1e-5)
    assert local.second_s == pytest.approx(0.011, abs=1e-5) == local.tpot_s


def test_a_shape_names_its_flags() -> None:
    assert ClusterShape(1, 3, "auto").flags == "--prefill 1 --decode 3 --local-prefill auto"
    assert ClusterShape(0, 2, "always").flags == "--prefill 0 --decode 2"  # `baton up` lets decode nodes compute then
