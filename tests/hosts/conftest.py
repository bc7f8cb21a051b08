"""Fixtures of the tests between hosts (tests/support/hosts)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from host_cluster import DEMO, HOSTS, HostCluster
from network import Network, reason_against

from baton.metadata.bus.curve import KeyPair


@pytest.fixture(scope="module")
def new_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Network]]:
    """`new_network(*hosts, family="ipv4")`: a network of hosts that ends with the module's tests. Skips where there can
    be none."""
    if reason := reason_against():
        pytest.skip(reason)
    with ExitStack() as networks:

        def make(*hosts: str, **more: Any) -> Network:
            return networks.enter_context(Network(tmp_path_factory.mktemp("network"), hosts, **more))

        yield make


@pytest.fixture(scope="module")
def new_cluster(
    new_network: Callable[..., Network], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., HostCluster]]:
    """`new_cluster(*hosts, family="ipv4")`: a cluster of the demo model without processes, for hosts of its own. It is
    checked and stopped when the module's tests have ended."""
    with ExitStack() as clusters:

        def make(*hosts: str, **more: Any) -> HostCluster:
            cluster = HostCluster(tmp_path_factory.mktemp("cluster"), DEMO, new_network(*(hosts or HOSTS), **more))
            KeyPair.create(cluster.keys)
            clusters.callback(cluster.close)
            return cluster

        yield make
