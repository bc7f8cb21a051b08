"""Fixtures of the multi-process tests; what they start is in tests/support/cluster.py."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from cluster import Cluster

_CLUSTERS = pytest.StashKey[list[Cluster]]()
_FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama checkpoint, small enough to load at once."""
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture
def new_cluster(request: pytest.FixtureRequest, tmp_path: Path, model_dir: Path) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters (of the tiny model, or of `model`) in which nothing runs yet. The test's end checks each."""
    clusters: list[Cluster] = request.node.stash.setdefault(_CLUSTERS, [])

    def make(model: Path | None = model_dir) -> Cluster:
        directory = tmp_path / f"cluster-{len(clusters)}"
        directory.mkdir()
        clusters.append(Cluster(directory, model, is_forked=True))
        return clusters[-1]

    yield make
    with ExitStack() as stack:  # every cluster is closed, whatever the check of another one raises
        for cluster in clusters:
            stack.callback(cluster.kill_all if request.node.stash.get(_FAILED, False) else cluster.close)


@pytest.fixture
def cluster(new_cluster: Callable[..., Cluster]) -> Cluster:
    """A router, one prefill and one decode node of the tiny model, ready."""
    return new_cluster().start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the ends of the logs to the report of a test that failed."""
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
        for cluster in item.stash.get(_CLUSTERS, []):
            report.sections.append((f"logs of {cluster.base_url}", cluster.tails()))
    return report
