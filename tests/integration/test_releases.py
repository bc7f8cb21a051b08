"""Processes of the previous release run beside those of this tree, as during a rolling upgrade."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster import Cluster, wait_until
from releases import unpack

from baton.metadata.wire.protocol import PROTOCOL_MAX

pytestmark = pytest.mark.timeout(300)

OLD = PROTOCOL_MAX - 1
PROMPTS = [f"prompt {i} " * 8 for i in range(12)]

NewCluster = Callable[..., Cluster]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The previous release, unpacked once. Its compiled kernels are kept for the other tests."""
    return unpack(OLD, tmp_path_factory.mktemp("releases"))


@pytest.mark.parametrize(
    ("old", "transport"),
    [
        pytest.param(("router",), "local", id="old router, local", marks=pytest.mark.whole),
        pytest.param(("router",), "zmq", id="old router, zmq", marks=pytest.mark.whole),
        pytest.param(("prefill-1", "decode-1"), "local", id="a node of each role, local", marks=pytest.mark.whole),
        pytest.param(("prefill-1", "decode-1"), "zmq", id="a node of each role, zmq"),
        pytest.param(("router", "prefill-1", "decode-1"), "local", id="all but a node of each role, local"),
    ],
)
def test_processes_of_two_releases_share_the_work(
    old: tuple[str, ...], transport: str, new_cluster: NewCluster, release: Path
) -> None:
    """Two nodes of each role make four pairs. A pair is ready only after its canary gave the right tokens."""
    cluster = new_cluster()
    cluster.releases = dict.fromkeys(old, release)
    cluster.ready_s = 150.0
    cluster.start(prefill=2, decode=2, node_flags=["--transport", transport])
    wait_until(lambda: _pairs(cluster) == ["ready"] * 4, lambda: cluster.tails(), 60)
    first = _texts(cluster, PROMPTS)
    assert _texts(cluster, PROMPTS[::-1])[::-1] == first  # in other company
    for name, process in cluster.processes.items():
        agreed = OLD if name in old or "router" in old else PROTOCOL_MAX
        assert name == "router" or f", protocol {agreed}\n" in process.log, process.log
        assert "ValidationError" not in process.log, process.log  # what cannot be decoded
        if name.startswith("decode"):
            assert process.log.count(f"pages travel by {transport}") == 2, process.log
        assert name == "router" or "rid=cmpl-" in process.log, "it has served no request"
    alone = new_cluster().start(node_flags=["--transport", transport])
    assert _texts(alone, PROMPTS) == first


def test_nodes_stay_while_their_router_becomes_another_release_and_back(new_cluster: NewCluster, release: Path) -> None:
    """A node agrees on the protocol anew with each router, because the next router may be older."""
    cluster, releases = new_cluster(), {"router": release}
    cluster.start()
    texts = _texts(cluster, PROMPTS[:2])
    for router, agreed in ((releases, OLD), ({}, PROTOCOL_MAX)):
        cluster.processes["router"].kill()
        cluster.releases = router
        cluster.start_router()
        cluster.wait_ready(num_nodes=2)
        assert _texts(cluster, PROMPTS[:2]) == texts
        for name in ("prefill-0", "decode-0"):
            joined = [line for line in cluster.processes[name].log.splitlines() if "joined router" in line]
            assert joined[-1].endswith(f", protocol {agreed}"), joined


def _texts(cluster: Cluster, prompts: list[str]) -> list[str]:
    """Return greedy answers to all prompts, sent at once."""

    def ask(prompt: str) -> str:
        return cluster.complete(prompt, max_tokens=30, temperature=0)["choices"][0]["text"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))


def _pairs(cluster: Cluster) -> list[str]:
    return [pair["state"] for pair in cluster.get("/debug/nodes")[1]["pairs"]]
