"""Fixtures of the integration tests: clusters of processes (clusters/cluster.py), and real nodes in the test's own
process (tests/support/nodes/served.py)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from cluster import Cluster
from drafters import settings, target_of
from served import Served

_CLUSTERS = pytest.StashKey[list[Cluster]]()
_FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama checkpoint, small enough to load at once."""
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture
def new_cluster(request: pytest.FixtureRequest, tmp_path: Path, model_dir: Path) -> Iterator[Callable[..., Cluster]]:
    """`new_cluster(model)`: a cluster without processes, of the tiny model by default. It is checked and stopped when
    the test ends."""
    clusters: list[Cluster] = request.node.stash.setdefault(_CLUSTERS, [])

    def make(model: Path | None = model_dir) -> Cluster:
        directory = tmp_path / f"cluster-{len(clusters)}"
        directory.mkdir()
        clusters.append(Cluster(directory, model, is_forked=True))
        return clusters[-1]

    yield make
    with ExitStack() as stack:  # it closes every cluster, even if the check of another one fails
        for cluster in clusters:
            stack.callback(cluster.kill_all if request.node.stash.get(_FAILED, False) else cluster.close)


@pytest.fixture
def cluster(new_cluster: Callable[..., Cluster]) -> Cluster:
    """A router, one prefill and one decode node with the tiny model, ready."""
    return new_cluster().start()


@pytest.fixture
def start(checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """`start("eagle", **more)`: a router without nodes, whose nodes will use that drafter. `more`: arguments of
    `Served`."""
    with ExitStack() as stack:

        def make(algorithm: str = "none", **more: Any) -> Served:
            model = target_of(algorithm, checkpoint)
            drafts = {} if algorithm == "none" else settings(algorithm, model, tmp_path, steps=3)
            return stack.enter_context(Served(model, **drafts, **more))

        yield make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the last lines of the logs to the report of a test that failed."""
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
        for cluster in item.stash.get(_CLUSTERS, []):
            report.sections.append((f"logs of {cluster.base_url}", cluster.tails()))
    return report
