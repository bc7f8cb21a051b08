"""The simulated router: which nodes it gives to requests, and in which order."""

from __future__ import annotations

import msgspec
import pytest
from simulated import TIMES

from baton.deploy.simulation import router as simulated_router
from baton.deploy.simulation.cluster import ClusterShape, simulate
from baton.deploy.simulation.times import HandoffPoint
from baton.deploy.simulation.traffic import Arrival


def test_requests_wait_for_room_first_come_first_served() -> None:
    arrivals = [Arrival(0.001 * order, 10, 20) for order in range(5)]
    records = simulate(ClusterShape(1, 1, "never"), TIMES, arrivals, 1).records
    ends = [0.001 * at + each.ttft_s + 19 * each.tpot_s for at, each in enumerate(records)]
    assert ends == sorted(ends) and records[4].ttft_s > 4 * 0.19


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("place_prompt", ClusterShape(1, 1, "never")),
        ("choose_decode", ClusterShape(1, 1, "never")),
        ("choose_remote", ClusterShape(1, 1, "never")),
        ("choose_local", ClusterShape(0, 1, "always")),
        ("place_sooner", ClusterShape(1, 1, "auto")),
    ],
)
def test_the_products_own_functions_decide(name: str, shape: ClusterShape, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    real = getattr(simulated_router, name)

    def count(*args: object, **more: object) -> object:
        nonlocal calls
        calls += 1
        return real(*args, **more)

    monkeypatch.setattr(simulated_router, name, count)
    simulate(shape, TIMES, [Arrival(0.0, 10, 2)] * 3, 8)
    assert calls == 3


def test_a_prompt_goes_to_the_prefill_node_that_finishes_it_first() -> None:
    """The second prompt finds the first node busy, the third one the second node less busy."""
    arrivals = [Arrival(0.0, 5000, 2), Arrival(0.001, 1000, 2), Arrival(0.002, 1000, 2)]
    ttfts = [each.ttft_s for each in simulate(ClusterShape(2, 1, "never"), TIMES, arrivals, 8).records]
    assert ttfts[1] < 0.15 and ttfts[2] < 0.25 and ttfts[0] > 0.5


def test_sequences_spread_over_decode_nodes() -> None:
    arrivals = [Arrival(0.0, 10, 50)] * 4
    outcome = simulate(ClusterShape(0, 4, "always"), TIMES, arrivals, 8)
    assert len({record.tpot_s for record in outcome.records}) == 1 and outcome.num_local == 4


def test_auto_takes_the_sooner_role() -> None:
    """A short prompt on an idle node saves the handoff. A long one behind a queue of prefill waits less."""
    times = msgspec.structs.replace(TIMES, handoffs=(HandoffPoint(100, 20.0),))
    first = Arrival(0.0, 100, 2)  # a prefill node shows by it how long prompts take there

    def num_local(*arrivals: Arrival) -> int:
        return simulate(ClusterShape(1, 1, "auto"), times, [first, *arrivals], 8).num_local

    assert num_local() == 0
    assert num_local(Arrival(1.0, 100, 5)) == 1
    assert 0 < num_local(*[Arrival(1.0, 10_000, 2)] * 5) < 5
    stream = Arrival(1.0, 50, 400)
    assert num_local(stream, Arrival(2.0, 500, 2)) == 1  # ten chunks beside the stream last longer than the handoff


def test_a_single_token_needs_no_decode_node() -> None:
    outcome = simulate(ClusterShape(1, 1, "never"), TIMES, [Arrival(0.0, 1000, 1)] * 3, 1)
    assert outcome.decode_busy == 0 and [record.tpot_s for record in outcome.records] == [0.0] * 3
