"""Pages that NIXL reads from the memory of a GPU, between two nodes of one host."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster

from baton.metadata.bus.curve import KeyPair
from baton.metadata.handoff.nixl_agents import has_nixl

DEMO = Path(__file__).parents[2] / "deploy" / "demo"


@pytest.mark.skipif(not has_nixl(), reason="needs nixl-cu13 or nixl-cu12")
def test_pages_on_a_gpu_are_read_where_they_are(tmp_path: Path) -> None:
    """The answer is that of pages which travel by ZeroMQ."""
    texts = []
    keys = tmp_path / "cluster.key"
    KeyPair.create(keys)
    for transport in ("zmq", "nixl"):
        directory = tmp_path / transport
        directory.mkdir()
        of_keys = ["--keys", str(keys)]
        how = [*of_keys, "--device", "cuda", "--transport", transport, "--plain-pages"]
        with Cluster(directory, DEMO) as cluster:
            cluster.start(router_flags=of_keys, node_flags=how)
            answer = cluster.complete("def main(" * 60, max_tokens=40, temperature=0)
            assert f"pages travel by {transport}" in cluster.processes["decode-0"].log
        texts.append(answer["choices"][0]["text"])
    assert texts[0] == texts[1]
