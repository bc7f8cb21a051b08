"""A model of the Hugging Face hub is served by its name, by `baton up` and by nodes that resolve it themselves."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Cluster, wait_until
from hub_server import HubServer, running

pytestmark = pytest.mark.whole

DEMO = Path(__file__).parents[2] / "deploy" / "demo"
PROMPT = "import os\n\ndef "
ANSWER = "joinpath(path):"  # README.md


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with running(HubServer()) as server:
        server.add("org/demo", DEMO)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield server


def test_nodes_of_two_commits_refuse_each_other_and_one_revision_joins_them(
    hub: HubServer, new_cluster: Callable[..., Cluster]
) -> None:
    """The second commit has the same weights."""
    cluster = new_cluster(Path("org/demo"))
    cluster.is_forked = False  # a fork has read the hub's settings already
    first = hub.repositories["org/demo"].commit
    cluster.start_router()
    prefill = cluster.start_node("prefill", "prefill-0")
    wait_until(lambda: "joined router" in prefill.log, lambda: cluster.tails(), 60)
    demo = hub.repositories["org/demo"]
    demo.earlier[first] = demo.files
    demo.files = {**demo.files, "LICENSE": b"of the second commit"}
    second = demo.commit
    refused = cluster.start_node("decode", "decode-0")
    assert refused.wait(60) == 3
    assert f"commit: {second} here, {first} there (give both one --revision)" in refused.log
    del cluster.processes["decode-0"]
    cluster.start_node("decode", "decode-1", "--revision", first)
    cluster.wait_ready(num_nodes=2)
    assert {node["commit"] for node in cluster.nodes()} == {first}
    answer = cluster.complete(PROMPT, max_tokens=10, temperature=0, model="org/demo")
    assert answer["choices"][0]["text"].startswith(ANSWER)


def test_up_goes_on_with_a_download_that_was_interrupted_by_ctrl_c(hub: HubServer, tmp_path: Path) -> None:
    argv = [sys.executable, "-P", "-m", "baton.deploy.cli", "up", "--model", "org/demo", "--port", "0"]
    argv += ["--run-dir", str(tmp_path / "run"), "--num-pages", "64"]

    def start(path: Path) -> subprocess.Popen[bytes]:
        with path.open("w") as log:
            return subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)

    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    hub.bytes_per_s = 2e6
    first = start(logs[0])
    parts = (tmp_path / "hf").rglob
    wait_until(lambda: any(path.stat().st_size for path in parts("*.incomplete")), logs[0].read_text, 60)
    first.send_signal(signal.SIGINT)
    assert first.wait(20) == 130
    assert logs[0].read_text().endswith("stopped; the next start takes the download of org/demo up where it ended\n")
    hub.bytes_per_s = None
    second = start(logs[1])
    try:
        wait_until(lambda: "Baton is ready" in logs[1].read_text(), logs[1].read_text, 120)
        assert " of it is here already, to " in logs[1].read_text() and "(model org/demo)" in logs[1].read_text()
    finally:
        second.send_signal(signal.SIGINT)
        assert second.wait(30) == 0, logs[1].read_text()
    assert not list(parts("*.incomplete")) and list((tmp_path / "run").iterdir())
