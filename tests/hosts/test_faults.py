"""Faults of the network between a router, a prefill node and a decode node on hosts of their own: every stream has the
tokens of the clean run, or ends with one clear error, and then nothing is held."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
from faults import CUT, Load, clean_answers, conditions, play
from host_cluster import DEMO, HOSTS, HostCluster
from streams import Known
from switch import Conditions

WAYS = tuple(itertools.permutations(HOSTS, 2))
LOST_ROUTER = f"{CUT}|503"  # of requests before it was lost, and before nodes have joined it again
NODES_WAIT_S = 20.0  # for a host that is back


class Served(NamedTuple):
    """A cluster that is ready, and what it answers without a fault."""

    cluster: HostCluster
    answers: list[Known]


@pytest.fixture(scope="module")
def served(new_cluster: Callable[..., HostCluster]) -> Served:
    cluster = new_cluster(family="ipv6").begin()
    return Served(cluster, clean_answers(cluster, DEMO))


def _whole(*cells: object) -> list[object]:
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.whole) for each in cells]


@pytest.mark.parametrize(
    ("source", "target", "cut_s"),
    [
        ("decode-0", "router", 1),
        *_whole(*((*way, cut_s) for way in WAYS for cut_s in (1, 3, 10) if (*way, cut_s) != ("decode-0", "router", 1))),
    ],
)
def test_streams_survive_a_cut_in_one_direction(served: Served, source: str, target: str, cut_s: float) -> None:
    network = served.cluster.network
    before = network.num_dropped(source, target)

    def cut(load: Load) -> None:
        with conditions(served.cluster, Conditions(is_cut=True), (source, target)):
            load.send_for(cut_s)

    play(served.cluster, served.answers, cut)
    assert network.num_dropped(source, target) > before


@pytest.mark.whole
@pytest.mark.parametrize("cut_s", [1, 10])
@pytest.mark.parametrize("ends", list(itertools.combinations(HOSTS, 2)), ids=" ".join)
def test_streams_survive_a_cut_in_both_directions(served: Served, ends: tuple[str, str], cut_s: float) -> None:
    def cut(load: Load) -> None:
        with conditions(served.cluster, Conditions(is_cut=True), ends, ends[::-1]):
            load.send_for(cut_s)

    play(served.cluster, served.answers, cut)


@pytest.mark.whole
@pytest.mark.parametrize(
    "worse",
    [
        pytest.param(Conditions(delay_s=0.02, loss=0.01), id="20 ms, 1 % lost"),
        pytest.param(Conditions(delay_s=0.3), id="300 ms"),
        pytest.param(Conditions(reorder=0.1), id="10 % late"),
        pytest.param(Conditions(rate=200e3), id="200 kB/s"),
    ],
)
def test_streams_survive_a_slow_or_lossy_network(served: Served, worse: Conditions) -> None:
    def stay(load: Load) -> None:
        with conditions(served.cluster, worse):
            load.send_for(5)
            load.judge()

    play(served.cluster, served.answers, stay)


@pytest.mark.whole
@pytest.mark.parametrize("mtu", [1400, 600])
@pytest.mark.parametrize(("source", "target"), WAYS)
def test_streams_survive_a_hole_for_large_packets(served: Served, source: str, target: str, mtu: int) -> None:
    def stay(load: Load) -> None:
        with conditions(served.cluster, Conditions(mtu=mtu), (source, target)):
            load.send_for(8)

    play(served.cluster, served.answers, stay)


@pytest.mark.parametrize("name", ["decode-0", *_whole("prefill-0", "router")])
def test_a_host_that_vanishes_comes_back_under_other_addresses(served: Served, name: str) -> None:
    """No packet tells the others that the host is gone. Its name stands for other addresses when it is back."""
    cluster = served.cluster
    ways = [way for way in WAYS if name in way]

    def vanish(load: Load) -> None:
        with conditions(cluster, Conditions(is_cut=True), *ways), cluster.restarted(name):
            cluster.network.move(name)
            load.send_for(0.5)
        begun = time.monotonic()
        cluster.wait_ready(num_nodes=len(cluster.nodes_wanted))
        assert time.monotonic() - begun < NODES_WAIT_S

    play(cluster, served.answers, vanish, allowed=LOST_ROUTER if name == "router" else None)


@pytest.mark.whole
@pytest.mark.parametrize("name", HOSTS)
def test_a_process_that_ends_comes_back_under_other_addresses(served: Served, name: str) -> None:
    def end(load: Load) -> None:
        with served.cluster.restarted(name):
            served.cluster.network.move(name)
            load.send_for(0.5)
        served.cluster.wait_ready(num_nodes=len(served.cluster.nodes_wanted))

    play(served.cluster, served.answers, end, allowed=LOST_ROUTER if name == "router" else None)
