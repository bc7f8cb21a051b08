"""Several routers share the same nodes, and none of them is needed by the others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, held, wait_until
from patience import load_factor
from releases import newest, unpack

NewCluster = Callable[..., Cluster]
PROMPTS = [[1 + (7 * index + step) % 50 for step in range(20 + index)] for index in range(6)]
FREED_S = 2.0  # after this time, no ledger shows a request of a dead router


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[tuple[Cluster, Cluster]]:
    """Two routers, and one prefill and one decode node that have joined both. The first one has started the nodes."""
    first, second = (tmp_path_factory.mktemp(name) for name in ("first", "second"))
    with Cluster(second, model_dir, is_forked=True) as other, Cluster(first, model_dir, is_forked=True) as cluster:
        other.start_router()
        cluster.also_join = (other.node_address,)
        cluster.start(node_flags=["--num-pages", "200"])
        yield cluster, other


@pytest.fixture
def clusters(shared: tuple[Cluster, Cluster]) -> tuple[Cluster, Cluster]:
    """The same, after a test that has killed the second router, too."""
    other = shared[1]
    if other.processes["router"].popen.poll() is not None:
        other.start_router()
    for each in shared:
        each.wait_ready(num_nodes=2)
    return shared


def texts(cluster: Cluster, seeds: range, **fields: Any) -> list[str]:
    """Return the texts of all prompts with these seeds, which are asked for at the same time."""
    asked = [(prompt, seed) for seed in seeds for prompt in PROMPTS]
    with ThreadPoolExecutor(len(asked)) as threads:
        bodies = threads.map(lambda each: cluster.complete(each[0], seed=each[1], **fields), asked)
    return [body["choices"][0]["text"] for body in bodies]


def test_two_routers_serve_at_the_same_time_with_the_same_texts(clusters: tuple[Cluster, Cluster]) -> None:
    expected = texts(clusters[0], range(2), max_tokens=24)
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda each: texts(each, range(2), max_tokens=24), clusters))
    assert both == [expected, expected]
    assert len(set(expected)) > len(PROMPTS), "texts differ, so a token of another request would show"


def test_a_router_that_is_killed_takes_only_its_own_requests_with_it(clusters: tuple[Cluster, Cluster]) -> None:
    cluster, other = clusters
    expected = texts(cluster, range(2), max_tokens=150)

    def lost(prompt: list[int]) -> str:
        try:
            return other.complete(prompt, max_tokens=400, ignore_eos=True)["choices"][0]["text"]
        except OSError:
            return "the connection was closed"

    with ThreadPoolExecutor(len(PROMPTS) + 1) as threads:
        doomed = [threads.submit(lost, prompt) for prompt in PROMPTS]
        epochs = [each.ledger()["router"]["epoch"] for each in clusters]
        wait_until(lambda: _owners(cluster).get(epochs[1], 0) > 0, "the nodes work for the other router")
        assert set(_owners(cluster)) == set(epochs)
        own = threads.submit(texts, cluster, range(2), max_tokens=150)
        wait_until(lambda: _owners(cluster)[epochs[0]] > 0, "and for this one")
        other.processes["router"].kill()
        since = time.monotonic()
        wait_until(lambda: set(_owners(cluster)) == {epochs[0]}, "no node has work of the dead router")
        assert time.monotonic() - since < FREED_S * load_factor()
        assert own.result() == expected
        assert "the connection was closed" in {each.result() for each in doomed}
    wait_until(lambda: not held(cluster.ledger()), lambda: str(held(cluster.ledger())))
    assert _owners(cluster) == {epochs[0]: 0}
    assert texts(cluster, range(1), max_tokens=150) == expected[: len(PROMPTS)]


def test_a_router_that_comes_back_serves_again_beside_the_other(clusters: tuple[Cluster, Cluster]) -> None:
    cluster, other = clusters
    expected = texts(cluster, range(1), max_tokens=16)
    other.processes["router"].kill()
    assert texts(cluster, range(1), max_tokens=16) == expected
    other.start_router()
    other.wait_ready(num_nodes=2)
    assert texts(other, range(1), max_tokens=16) == expected


def _owners(cluster: Cluster) -> Counter[str]:
    """Return how many units the nodes hold, by the epoch of the router that they are of."""
    owners: Counter[str] = Counter()
    for books in cluster.ledger()["nodes"].values():
        owners.update(books["routers"])
    return owners


def test_a_node_that_is_drained_at_one_router_is_drained_for_all(clusters: tuple[Cluster, Cluster]) -> None:
    cluster, other = clusters
    for ask, hear, path in ((cluster, other, "drain"), (other, cluster, "undrain"), (other, cluster, "drain")):
        assert ask.post(f"/admin/nodes/decode-0/{path}")[0] == 200
        wait_until(
            lambda hear=hear, path=path: _is_draining(hear) == (path == "drain"), f"the other router hears: {path}"
        )
    assert _is_draining(cluster) and _is_draining(other)
    assert cluster.post("/admin/nodes/decode-0/undrain")[0] == 200
    wait_until(lambda: not _is_draining(other), "both serve again")
    assert texts(cluster, range(1), max_tokens=8) == texts(other, range(1), max_tokens=8)


def test_prefill_nodes_divide_the_prompts_that_they_take_between_routers(clusters: tuple[Cluster, Cluster]) -> None:
    cluster, other = clusters
    wait_until(lambda: [_prefill_load(each)["num_routers"] for each in clusters] == [2, 2], "both are counted")
    both = _prefill_load(cluster)["max_prompts"]
    other.processes["router"].kill()
    wait_until(lambda: _prefill_load(cluster)["max_prompts"] == 2 * both, "a router has gone")


def _is_draining(cluster: Cluster) -> bool:
    (node,) = [node for node in cluster.nodes() if node["role"] == "decode"]
    return node["is_draining"]


def _prefill_load(cluster: Cluster) -> dict[str, int]:
    (node,) = [node for node in cluster.nodes() if node["role"] == "prefill"]
    return node["load"]


@pytest.mark.parametrize("is_older_first", [True, pytest.param(False, marks=pytest.mark.whole)])
def test_a_router_of_the_previous_release_serves_the_same_nodes_beside_a_new_one(
    new_cluster: NewCluster, tmp_path: Path, is_older_first: bool
) -> None:
    """It knows of no other router. Nodes speak its protocol with it, and theirs with the new router."""
    release = unpack(newest(), tmp_path)
    other, cluster = new_cluster(), new_cluster()
    (cluster if is_older_first else other).releases["router"] = release
    other.start_router()
    cluster.also_join = (other.node_address,)
    cluster.start()
    other.wait_ready(num_nodes=2)
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda each: texts(each, range(1), max_tokens=24), (cluster, other)))
    assert both[0] == both[1]
