"""Two nodes in network, mount and process namespaces share memory if one can hand the other a descriptor, and use
the network otherwise."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import pytest
from host_cluster import HostCluster
from patience import wait_until

TEXT = {"prompt": "def main(" * 20, "max_tokens": 12, "temperature": 0}


def transport_of(cluster: HostCluster) -> str:
    """Start the cluster and let it answer. Return the transport by which pages have travelled."""
    cluster.begin()
    cluster.complete(**TEXT)
    return cluster.processes["decode-0"].log.rpartition("pages travel by ")[2].split()[0]


@pytest.mark.parametrize(
    "is_shared", [True, pytest.param(False, marks=pytest.mark.whole)], ids=["shared directory", "nothing shared"]
)
def test_containers_of_one_host_share_memory_by_a_directory(
    new_cluster: Callable[..., HostCluster], is_shared: bool
) -> None:
    cluster = new_cluster()
    with tempfile.TemporaryDirectory() as directory:  # the path of a socket must be short
        cluster.node_flags = ["--shared-dir", directory] if is_shared else []
        assert transport_of(cluster) == ("local" if is_shared else "aes")
        cluster.close()


@pytest.mark.whole
def test_containers_of_one_pod_share_memory_by_their_network(new_cluster: Callable[..., HostCluster]) -> None:
    cluster = new_cluster()
    cluster.network_of["decode-0"] = "prefill-0"
    assert transport_of(cluster) == "local"


@pytest.mark.whole
def test_nodes_that_must_share_memory_and_cannot_are_refused_in_words(new_cluster: Callable[..., HostCluster]) -> None:
    cluster = new_cluster()
    cluster.node_flags = ["--transport", "local"]
    cluster.start_router()
    for name in cluster.nodes_wanted:
        cluster.start_wanted(name)
    words = "transports: local here, local there (no shared memory)"
    wait_until(lambda: words in cluster.processes["prefill-0"].log, cluster.tails)
