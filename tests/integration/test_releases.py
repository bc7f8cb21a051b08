"""Processes of the previous release run beside those of this tree, as during an upgrade and on the way back."""

from __future__ import annotations

import itertools
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from cluster import Cluster, wait_until
from models import flags, known_answers, make_target
from releases import configuration_keys, newest, unpack
from streams import Known, Stream

from baton.deploy.cli import _settings, main
from baton.deploy.config_file import read_tables
from baton.metadata.bus.curve import KeyPair
from baton.metadata.errors import ConfigError
from baton.metadata.wire.protocol import PROTOCOL_MAX

pytestmark = pytest.mark.timeout(300)

OLD = newest()
PROMPTS = [f"prompt {i} " * 8 for i in range(12)]
BODIES: list[dict[str, Any]] = [
    {"prompt": [*range(40, 65)], "temperature": 0},
    {"prompt": [*range(90, 120, 2)], "temperature": 0.8, "seed": 3, "n": 2, "frequency_penalty": 0.3},
    {"prompt": [*range(300, 310)], "temperature": 1.0, "seed": 8, "top_p": 0.9},
]
INTERVAL_S = 0.25  # between the beginnings of two streams
MOST_STREAMS = 8  # that run at the same time: on a busy machine they must not pile up

NewCluster = Callable[..., Cluster]


class Rollout(NamedTuple):
    """How all processes become those of another release, one after the other."""

    order: tuple[str, ...]  # of roles
    way: Literal["replaced", "stopped", "killed"]  # replaced: a new node starts, then the old one stops
    algorithm: str = "none"
    flags: tuple[str, ...] = ()  # of all nodes
    ranks: tuple[str, ...] = ()  # flags of one node of each role
    older: tuple[str, ...] = ()  # processes that begin with the release before the previous one


ROUTER_FIRST, NODES_FIRST = ("router", "prefill", "decode"), ("decode", "prefill", "router")
ROLLOUTS = {
    "router first, nodes replaced": Rollout(ROUTER_FIRST, "replaced", "eagle"),
    "nodes first, killed": Rollout(NODES_FIRST, "killed", "eagle", ("--transport", "zmq")),
    "groups of ranks, stopped": Rollout(ROUTER_FIRST, "stopped", "mtp3", ranks=("--dp-attention", "2")),
    "ranks, nodes of two older protocols": Rollout(
        ROUTER_FIRST, "stopped", ranks=("--tp", "2"), older=("prefill-1", "decode-0")
    ),
}


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
        pytest.param(
            ("router", "prefill-1", "decode-1"), "local", id="all but a node of each role", marks=pytest.mark.whole
        ),
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
    nodes, rounds = [each for name, each in cluster.processes.items() if name != "router"], itertools.count()

    def have_served() -> bool:
        """Return whether each node has served a request; if not, send so many that also a node whose chunks were
        measured at a bad moment gets some."""
        if all("rid=cmpl-" in node.log for node in nodes):
            return True
        number = next(rounds)
        _texts(cluster, [f"{number} {place} {prompt}" for place in range(3) for prompt in PROMPTS])
        return False

    wait_until(have_served, lambda: cluster.tails(), 60)
    for name, process in cluster.processes.items():
        agreed = OLD if name in old or "router" in old else PROTOCOL_MAX
        assert name == "router" or f", protocol {agreed}\n" in process.log, process.log
        assert "ValidationError" not in process.log, process.log  # what cannot be decoded
        if name.startswith("decode"):
            assert len(re.findall(f"linked to .*, pages travel by {transport}", process.log)) == 2, process.log
    alone = new_cluster().start(node_flags=["--transport", transport])
    assert _texts(alone, PROMPTS) == first


@pytest.mark.whole
def test_pages_to_and_from_an_older_node_go_under_curve(new_cluster: NewCluster, release: Path, tmp_path: Path) -> None:
    """Nodes of one key. The newer ones offer encryption beside CURVE, which the older ones do not know."""
    cluster, keys = new_cluster(), tmp_path / "cluster.key"
    cluster.releases = dict.fromkeys(("prefill-1", "decode-1"), release)
    cluster.ready_s = 150.0
    KeyPair.create(keys)
    cluster.start_router("--keys", str(keys))
    for role in ("prefill", "decode"):
        cluster.start_node(role, f"{role}-0", "--keys", str(keys), "--plain-pages")
        cluster.start_node(role, f"{role}-1", "--keys", str(keys), "--transport", "zmq")
    cluster.wait_ready(4)
    wait_until(lambda: _pairs(cluster) == ["ready"] * 4, lambda: cluster.tails(), 60)
    first = _texts(cluster, PROMPTS)
    assert _texts(cluster, PROMPTS[::-1])[::-1] == first
    newer, older = (cluster.processes[name].log for name in ("decode-0", "decode-1"))
    assert "linked to node prefill-0, pages travel by local" in newer
    assert "linked to node prefill-1, pages travel by zmq" in newer
    assert older.count("pages travel by zmq") == 2
    assert "--plain-pages: whoever sees the network" in newer


def test_streams_survive_an_upgrade_and_a_router_that_goes_back(new_cluster: NewCluster, release: Path) -> None:
    """A node agrees on the protocol anew with each router, because the next router may be older."""
    cluster = new_cluster()
    cluster.ready_s = 150.0
    members = Members(cluster, Rollout(ROUTER_FIRST, "replaced"), ["router", "prefill-0", "decode-0"])
    members.start(dict.fromkeys(members.names, release))
    with Load(cluster, [_known(cluster, body) for body in BODIES]) as load:
        for name, goal in (("router", None), ("prefill-0", None), ("decode-0", None), ("router", release)):
            load.change(members, name, goal)
        for name in members.names[1:]:
            joined = [line for line in cluster.processes[name].log.splitlines() if "joined router" in line]
            agreed = [int(line.rpartition(" ")[2]) for line in joined]  # more than once with a router, if it was silent
            assert [*dict.fromkeys(agreed)] == [*dict.fromkeys((PROTOCOL_MAX, OLD))], joined
    load.judge()


@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rollout", [pytest.param(each, id=name) for name, each in ROLLOUTS.items()])
def test_streams_survive_each_order_of_an_upgrade_and_of_the_way_back(
    rollout: Rollout, new_cluster: NewCluster, release: Path, tmp_path: Path
) -> None:
    target, keys = make_target(tmp_path), str(tmp_path / "cluster.key")
    assert main(["keys", keys]) == 0
    answers = list(known_answers(target).values())
    cluster = new_cluster(target)
    cluster.ready_s, cluster.exit_s = 150.0, 60.0
    names = ["router", "prefill-0", "prefill-1", "decode-0", "decode-1"]
    node_flags = ["--model-name", "chaos", "--page-size", "8", "--num-pages", "96", *flags(rollout.algorithm, target)]
    members = Members(cluster, rollout, names, [*node_flags, *rollout.flags], ["--keys", keys])
    older = unpack(OLD - 1, tmp_path) if rollout.older else release
    members.start({name: older if name in rollout.older else release for name in names})
    with Load(cluster, answers) as load:
        for goal in (None, release):
            for role in rollout.order:
                for name in [name for name in members.names if name.startswith(role)]:
                    load.change(members, name, goal)
    load.judge()


@pytest.mark.whole
def test_nodes_with_tail_pages_and_an_older_node_refuse_each_other_in_words(
    new_cluster: NewCluster, release: Path, tmp_path: Path
) -> None:
    """The older node knows one pool of the model. The others serve on."""
    cluster = new_cluster(make_target(tmp_path, has_tails=True))
    cluster.start()
    before = _texts(cluster, PROMPTS[:2])
    cluster.releases = {"prefill-1": release}
    older = cluster.start_node("prefill", "prefill-1")
    assert older.wait(150.0) == 3  # what a refusal ends with
    words = "differs in target.num_layers: 2 here, 1 there, target.window: absent here, 1 layers x"
    assert words in older.log and f"protocol versions: 4..{OLD} here, 8..8 there" in older.log, older.log
    assert _pairs(cluster) == ["ready"] and _texts(cluster, PROMPTS[:2]) == before


def test_each_key_of_the_previous_release_is_read_or_refused_with_what_to_write_instead(
    release: Path, tmp_path: Path
) -> None:
    commands, path = ("router", "prefill", "decode"), tmp_path / "baton.toml"
    known = {name: _settings(name) for name in commands}
    for name, keys in configuration_keys(release, *commands).items():
        for key in set(keys) - known[name].keys():
            path.write_text(f"[{name}]\n{key} = 1\n")
            with pytest.raises(ConfigError, match=rf"\[{name}\] has no setting '{key}' \(value 1\); "):
                read_tables(str(path), known)


class Members:
    """The processes of a cluster that become those of another release, one after the other."""

    def __init__(
        self,
        cluster: Cluster,
        rollout: Rollout,
        names: Sequence[str],
        node_flags: Sequence[str] = (),
        all_flags: Sequence[str] = (),
    ) -> None:
        self._cluster, self._rollout, self.names = cluster, rollout, list(names)
        limit = "0.5" if rollout.way == "stopped" else "60"  # what nodes still hold then moves to others
        self._router_flags = ["--drain-timeout-s", "60", *all_flags]
        self._node_flags = ["--drain-timeout-s", limit, *node_flags, *all_flags]

    def start(self, releases: dict[str, Path]) -> None:
        for name, release in releases.items():
            self._start(name, release)
        self._cluster.wait_ready(num_nodes=self._num_nodes())

    def change(self, name: str, release: Path | None) -> None:
        """Replace a process by one of `release`, or of this tree if it is None."""
        process, way = self._cluster.processes[name], self._rollout.way
        if way == "replaced" and name != "router":
            new = name.removesuffix("b") if name.endswith("b") else f"{name}b"
            self.names[self.names.index(name)] = new
            self._start(new, release)
            self._cluster.wait_ready(num_nodes=self._num_nodes() + 1)
        process.send_signal(signal.SIGKILL if way == "killed" else signal.SIGTERM)
        assert process.wait(self._cluster.exit_s) == (-signal.SIGKILL if way == "killed" else 0)
        if name in self.names:
            self._start(name, release)
        self._cluster.wait_ready(num_nodes=self._num_nodes())

    def _start(self, name: str, release: Path | None) -> None:
        self._cluster.releases.pop(name, None)
        if release is not None:
            self._cluster.releases[name] = release
        role, _, index = name.partition("-")
        if role == "router":
            self._cluster.start_router(*self._router_flags)
        else:
            ranks = self._rollout.ranks if index.startswith("1") else ()
            self._cluster.start_node(role, name, *self._node_flags, *ranks)

    def _num_nodes(self) -> int:
        is_group = "--dp-attention" in self._rollout.ranks
        return len(self.names) - 1 + (2 if is_group else 0)


class Load:
    """Streams that begin one after the other, whether or not earlier ones have ended."""

    def __init__(self, cluster: Cluster, answers: Sequence[Known]) -> None:
        self._cluster, self._answers = cluster, answers
        self._streams: list[tuple[float, Stream]] = []  # with the time of their beginning
        self._router_changes: list[tuple[float, float]] = []  # when each began and ended
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def change(self, members: Members, name: str, release: Path | None) -> None:
        """Change a process while streams are under way."""
        wait_until(lambda: any(stream.num_tokens for stream in self._running()), "a stream under way")
        began = time.monotonic()
        members.change(name, release)
        if name == "router":
            self._router_changes.append((began, time.monotonic()))

    def judge(self) -> None:
        """Check that each stream had its tokens. One that met the change of a router may have ended early: then the
        same request has its tokens on the next router."""
        early: dict[str, Known] = {}
        for began, stream in self._streams:
            stream.thread.join()
            assert not stream.problems, (stream.known.name, stream.problems)
            if not stream.is_done:
                ended = began + stream.seconds
                met_change = any(began < end and ended > start for start, end in self._router_changes)
                assert met_change, (stream.known.name, stream.rid, stream.num_tokens, stream.outcome, stream.error)
                early[stream.known.name] = stream.known
        assert sum(stream.is_done for _, stream in self._streams) > len(self._answers)
        for again in [Stream(self._cluster.connection, known) for known in early.values()]:
            again.thread.join()
            assert again.is_done and not again.problems, (again.known.name, again.error, again.problems)

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            if len(self._running()) < MOST_STREAMS:
                known = self._answers[len(self._streams) % len(self._answers)]
                self._streams.append((time.monotonic(), Stream(self._cluster.connection, known)))

    def _running(self) -> list[Stream]:
        return [stream for _, stream in self._streams if stream.thread.is_alive()]


def _known(cluster: Cluster, body: dict[str, Any]) -> Known:
    """Return a request with the answer that the cluster gives to it now."""
    asked = {"max_tokens": 80, "ignore_eos": True, "return_token_ids": True, **body, "model": cluster.model_name}
    status, answer = cluster.post("/v1/completions", asked)
    assert status == 200, answer
    ids = tuple(tuple(choice["token_ids"]) for choice in answer["choices"])
    return Known(str(body), asked, ids, tuple((choice["finish_reason"], None) for choice in answer["choices"]))


def _texts(cluster: Cluster, prompts: list[str]) -> list[str]:
    """Return greedy answers to all prompts, sent at once."""

    def ask(prompt: str) -> str:
        return cluster.complete(prompt, max_tokens=30, temperature=0)["choices"][0]["text"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))


def _pairs(cluster: Cluster) -> list[str]:
    return [pair["state"] for pair in cluster.get("/debug/nodes")[1]["pairs"]]
