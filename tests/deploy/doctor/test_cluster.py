"""`baton doctor --cluster`: the checks with made-up facts, and the command against a small HTTP server."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any

import msgspec
import pytest

from baton.deploy import cli
from baton.deploy.doctor import cluster
from baton.deploy.doctor.cluster import (
    ClusterFacts,
    MissingNode,
    NodeFaults,
    SeenNode,
    SeenNodes,
    SeenPair,
    check_cluster,
)
from baton.deploy.up import free_port
from baton.metadata.version import package_version

LAYOUT = {"algorithm": "eagle", "page_size": 16}
P0 = SeenNode("p0", "prefill", "demo", data_address="tcp://127.0.0.1:1", layout=LAYOUT, target_fingerprint="aa")
D0 = SeenNode("d0", "decode", "demo", layout=LAYOUT, target_fingerprint="aa")
NODES = SeenNodes((P0, D0), pairs=(SeenPair("p0", "d0", "ready"),))
HEALTHY = ClusterFacts(
    url="http://r", version=package_version(), nodes=NODES, clock_s=0.3, clock_error_s=0.5,
    transports=frozenset({("d0", "local")}),
)  # fmt: skip


def changed(value: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(value, **changes)


def with_decode(**changes: Any) -> dict[str, Any]:
    return {"nodes": changed(NODES, nodes=(P0, changed(D0, **changes)))}


CASES = {  # what is wrong: changed facts, the check, the level, words
    "an old router": ({"version": "0.0.9"}, "versions", "note", "the router is 0.0.9"),
    "not ready": (
        {"is_ready": False, "reason": "no decode node has joined"}, "service", "error", "no decode node has joined",
    ),
    "a lost node": (
        {"nodes": changed(NODES, degraded=(MissingNode("decode node d1 is gone: it was silent"),))},
        "degraded", "warning", "d1 is gone",
    ),
    "late heartbeats": (with_decode(last_seen_s=4.2), "heartbeats", "warning", "d0 was last heard 4.2 s ago"),
    "a silent node": ({"silent": ("d0",)}, "heartbeats", "warning", "d0 sends heartbeats"),
    "a wrong answer": (
        {"nodes": changed(NODES, pairs=(SeenPair("p0", "d0", "prefill node p0 is faulty: ..."),))},
        "canaries", "error", "p0 is faulty",
    ),
    "an untried pair": (
        {"nodes": changed(NODES, pairs=(SeenPair("p0", "d0", "untried"),))}, "canaries", "note", "untried",
    ),
    "unlike pages": (
        with_decode(layout={**LAYOUT, "page_size": 32}), "layouts", "warning", "page_size is 16 on p0 and 32 on d0",
    ),
    "unlike weights": (with_decode(target_fingerprint="bb"), "layouts", "warning", "weights is aa on p0 and bb on d0"),
    "sockets on one host": ({"transports": frozenset({("d0", "zmq")})}, "handoff", "warning", "by zmq"),
    "damaged pages": (with_decode(stats=NodeFaults(checksum_failures=3)), "handoff", "warning", "3 damaged pages"),
    "stray frames": (with_decode(stats=NodeFaults(dropped_frames=2)), "handoff", "warning", "dropped 2 frames"),
    "restarts": (with_decode(num_restarts=5), "restarts", "warning", "5 times"),
    "a clock ahead": ({"clock_s": 9.0}, "clock", "warning", "9.0 s ahead of"),
    "a clock behind": ({"clock_s": -70.0}, "clock", "warning", "70.0 s behind"),
    "no date": ({"clock_s": None}, "clock", "note", "no date"),
    "lost frames": ({"frames_error": "timed out"}, "MTU", "error", "not large ones: timed out"),
}  # fmt: skip


def test_a_healthy_cluster_has_only_ok_lines() -> None:
    assert {each.level for each in check_cluster(HEALTHY)} == {"ok"}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named_with_its_mend(case: str) -> None:
    changes, check, level, words = CASES[case]
    wrong = [each for each in check_cluster(changed(HEALTHY, **changes)) if each.level != "ok"]
    assert [(each.check, each.level) for each in wrong] == [(check, level)]
    assert words in wrong[0].what
    assert wrong[0].mend


def test_pages_over_sockets_between_hosts_are_as_they_should_be() -> None:
    nodes = changed(NODES, nodes=(changed(P0, data_address="tcp://10.0.0.1:7000"), D0))
    facts = changed(HEALTHY, nodes=nodes, transports=frozenset({("d0", "zmq")}))
    assert {each.level for each in check_cluster(facts)} == {"ok"}


@dataclass
class Router:
    """Answers each path with its JSON value, 404 without one. `ahead_s`: of its clock. `drops_large`: requests of more
    than one frame get no answer."""

    url: str = ""
    status: int = 200
    statuses: dict[str, int] = field(default_factory=dict)  # of single paths
    ahead_s: float = 0.0
    drops_large: bool = False
    keys: list[str | None] = field(default_factory=list)
    answers: dict[str, Any] = field(
        default_factory=lambda: {
            "/version": {"version": package_version()},
            "/ready": {"status": "ready"},
            "/openapi.json": {},
            "/debug/nodes": {
                "nodes": [
                    {"node_id": "p0", "role": "prefill", "model": "demo", "field of tomorrow": 1},
                    {"node_id": "d0", "role": "decode", "model": "demo"},
                ],
                "pairs": [{"prefill": "p0", "decode": "d0", "state": "ready"}],
            },
            "/debug/ledger": {"nodes": {"p0": {"pool": {}}, "d0": None}},
            "/debug/requests": {"requests": [{"rid": "cmpl-1"}]},
            "/debug/requests/cmpl-1": {
                "requests": [{"choices": [{"parts": [{"node": "d0", "pull_times": {"transport": "cuda"}}, {}]}]}]
            },
        }
    )


@pytest.fixture
def router() -> Iterator[Router]:
    state, over = Router(), threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if state.drops_large and any(name.startswith("X-Padding") for name in self.headers):
                over.wait()
                return
            state.keys.append(self.headers["Authorization"])
            found = state.answers.get(self.path.partition("?")[0])
            body = json.dumps({"error": {"message": "no such thing"}} if found is None else found).encode()
            self.send_response(404 if found is None else state.statuses.get(self.path, state.status))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate(time.time() + state.ahead_s, usegmt=True)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        state.url = f"http://127.0.0.1:{http_server.server_address[1]}"
        yield state
        over.set()
        http_server.shutdown()
        thread.join()


def doctor(router: Router, *more: str) -> int:
    return cli.main(["doctor", "--cluster", "--url", router.url, "--admin-key", "k", *more])


def test_a_router_is_asked_with_the_key_and_its_words_are_read(
    router: Router, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(router, "--json") == 0
    found = {each["check"]: each for each in json.loads(capsys.readouterr().out)}
    assert set(router.keys) == {"Bearer k"}
    assert "d0 sends heartbeats, but" in found["heartbeats"]["what"]
    assert found["handoff"]["what"] == "pages come to d0 by cuda"
    assert found["clock"]["level"] == found["MTU"]["level"] == "ok"


def test_a_clock_that_is_off_and_frames_that_are_lost_are_found(
    router: Router, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    router.ahead_s, router.drops_large = 3600, True
    monkeypatch.setattr(cluster, "LARGE_S", 0.1)
    assert doctor(router) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "s ahead of this host's" in text
    assert "answers small requests, but not large ones" in text
    assert "heartbeats" not in text  # nothing is said of what could not be asked


def test_a_missing_key_is_one_sentence(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    router.status = 401
    assert doctor(router) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "--admin-key or BATON_ADMIN_KEY" in line


def test_a_router_that_refuses_for_the_moment_is_told_in_its_own_words(
    router: Router, capsys: pytest.CaptureFixture[str]
) -> None:
    router.statuses["/debug/ledger"] = 503
    router.answers["/debug/ledger"] = {"error": {"message": "the router is shutting down"}}
    assert doctor(router) == 1
    assert capsys.readouterr().err == "baton: error: the router is shutting down (HTTP 503)\n"


@pytest.mark.parametrize("missing", ["/version", "/debug/nodes"])
def test_an_old_or_foreign_server_is_one_sentence(
    router: Router, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    del router.answers[missing]
    assert doctor(router) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"there is no GET {missing}: this is no Baton router, or an older one" in line


def test_a_closed_port_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--cluster", "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothing listens at" in line
