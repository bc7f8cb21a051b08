"""Processes are started by hand, in any order, late or with wrong settings, and are stopped while they work."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Process, wait_until
from service_manager import ServiceManager

from baton.deploy import cli
from baton.metadata.bus.allow_list import line_of
from baton.metadata.bus.curve import KeyPair

NewCluster = Callable[..., Cluster]


def test_processes_start_in_any_order_and_nodes_join_late(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    with ServiceManager() as manager:
        cluster.environ = lambda name: {"NOTIFY_SOCKET": manager.address} if name == "decode-0" else {}
        cluster.start_node("decode", "decode-0")
        manager.hear("STATUS=looking for the router")
        assert "READY=1" not in manager.said
        cluster.start_router()
        manager.hear("READY=1")
        wait_until(lambda: _status(cluster, "/health") == 200, "the router listens")
        assert _status(cluster, "/ready") == 503
        cluster.start_node("prefill", "prefill-0")
        cluster.wait_ready(num_nodes=2)
        first = cluster.complete("hello", max_tokens=5, temperature=0)["choices"][0]["text"]
        cluster.start_node("decode", "decode-1")
        wait_until(lambda: len(cluster.nodes()) == 3, "the late node has joined")
        assert cluster.complete("hello", max_tokens=5, temperature=0)["choices"][0]["text"] == first
        cluster.processes["decode-0"].send_signal(signal.SIGTERM)
        manager.hear("STOPPING=1")
        assert cluster.processes["decode-0"].wait() == 0
        assert [manager.said.count(line) for line in ("READY=1", "STOPPING=1")] == [1, 1]


def test_a_router_that_is_restarted_needs_no_canaries(new_cluster: NewCluster) -> None:
    """Both nodes of each pair say that it was ready, until one of them is restarted too. A node alone may get a canary
    if its partners come late, and pairs need not wait for that."""
    flags = ["--canary-interval-s", "3600"]
    cluster = new_cluster().start(prefill=2, decode=2, router_flags=flags)
    wait_until(lambda: _num_told(cluster) == [2, 2, 2, 2], "each node knows its partners")
    cluster.ledger()  # nodes answer in order, so they have read what they were told
    cluster.processes["router"].kill()
    cluster.start_router(*flags)
    cluster.wait_ready(4)
    wait_until(lambda: _reported(cluster) == {f"{p} {d}": True for p in (0, 1) for d in (0, 1)}, "all pairs are ready")
    cluster.processes["decode-1"].kill()
    cluster.start_node("decode", "decode-1")
    expected = {"0 0": True, "0 1": False, "1 0": True, "1 1": False}
    wait_until(lambda: _reported(cluster) == expected, "the new node has passed canaries")


def _num_told(cluster: Cluster) -> list[int]:
    return [len(node["proven"]) for node in cluster.nodes()]


def _reported(cluster: Cluster) -> dict[str, bool]:
    """Return, for each pair that is ready, whether its nodes say so and no canary has passed."""
    pairs = cluster.get("/debug/nodes")[1]["pairs"]
    return {
        f"{pair['prefill'][-1]} {pair['decode'][-1]}": pair["is_reported"] for pair in pairs if pair["state"] == "ready"
    }


def test_sigterm_drains_a_node_and_another_goes_on(new_cluster: NewCluster) -> None:
    cluster = new_cluster().start(prefill=1, decode=2)
    answers: list[dict[str, Any]] = []

    def ask(i: int) -> None:
        answers.append(cluster.complete(f"drain {i}", max_tokens=200, ignore_eos=True, seed=i))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: _running(cluster, "decode-0") > 0, "the node has work")
    cluster.processes["decode-0"].send_signal(signal.SIGTERM)
    assert cluster.processes["decode-0"].wait() == 0
    for thread in threads:
        thread.join()
    assert len(answers) == 6 and all(answer["usage"]["completion_tokens"] == 200 for answer in answers)
    cluster.complete("after", max_tokens=3)


def test_sigterm_moves_work_that_is_left_over(new_cluster: NewCluster) -> None:
    """A decode node has no time to finish. Its streams go on at the other node with the same tokens."""
    cluster = new_cluster()
    cluster.start_router()
    for role, name in (("prefill", "prefill-0"), ("decode", "decode-0"), ("decode", "decode-1")):
        cluster.start_node(role, name, "--drain-timeout-s", "0.1")
    cluster.wait_ready(num_nodes=3)
    bodies = [{"prompt": f"hand it on {i}", "seed": i, "max_tokens": 250} for i in range(4)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        expected = list(pool.map(partial(_stream, cluster), bodies))
        streams = [pool.submit(_stream, cluster, body) for body in bodies]
        wait_until(lambda: _running(cluster, "decode-0") > 0, "the node has work")
        cluster.processes["decode-0"].send_signal(signal.SIGTERM)
        assert cluster.processes["decode-0"].wait() == 0
        assert [stream.result(30) for stream in streams] == expected
    router, left = cluster.processes["router"].log, cluster.processes["decode-0"].log
    assert "moves: decode node decode-0: it left" in router and "taking nothing new, finishing" in left, router


def test_a_client_that_disconnects_frees_both_nodes(cluster: Cluster) -> None:
    for is_streaming in (True, False):
        connection = http.client.HTTPConnection("127.0.0.1", cluster.http_port)
        body = {"model": cluster.model_name, "prompt": "x", "max_tokens": 450, "ignore_eos": True, "n": 3}
        before = cluster.num_generated()
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": is_streaming}))
        if is_streaming:
            assert connection.getresponse().readline().startswith(b"data: ")
        wait_until(lambda: _running(cluster, "decode-0") > 0, "decode has work")
        connection.sock.close() if connection.sock else connection.close()
        connection.close()
        wait_until(lambda: _running(cluster, "decode-0") == 0, "everything is free")
        assert cluster.num_generated() - before < 3 * 450, "the request was computed to its end"
    cluster.check_books()


def test_nodes_that_cannot_be_paired_are_refused_and_log_why(
    new_cluster: NewCluster, checkpoint: Callable[..., Path]
) -> None:
    cluster = new_cluster().start()
    pages = cluster.start_node("decode", "pages", "--page-size", "32")
    dtype = cluster.start_node("decode", "dtype", "--dtype", "bfloat16")
    other = cluster.start_node("decode", "other", "--model-name", cluster.model_name, model=checkpoint("llama"))
    for stranger, values in ((pages, ("page_size", "16", "32")), (dtype, ("dtype", "float32", "bfloat16"))):
        assert stranger.wait(30) == 3
        for value in values:
            assert value in stranger.log, stranger.log
    assert other.wait(30) == 3
    assert "weights" in other.log or "layers" in other.log or "fingerprint" in other.log, other.log
    assert other.log.count("the router refused this node: ") == other.log.count("paired with nobody") == 1, other.log
    cluster.complete("still serving", max_tokens=2)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing", "no such directory"),
        ("truncated", "cut short"),
        ("unknown", "architecture"),
    ],
)
def test_model_directories_that_cannot_be_served_are_refused(
    damage: str, words: str, new_cluster: NewCluster, model_dir: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    if damage != "missing":
        broken.mkdir()
        for path in model_dir.iterdir():
            (broken / path.name).write_bytes(path.read_bytes())
    if damage == "truncated":
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
    if damage == "unknown":
        config = json.loads((broken / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchForCausalLM"]}))
    node = new_cluster().start_node("prefill", "prefill-0", model=broken)
    assert node.wait(30) in (1, 2)
    assert words in node.log and "Traceback" not in node.log, node.log


def test_each_node_has_its_own_key_and_can_be_shut_out(
    new_cluster: NewCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, allow_list = new_cluster(), tmp_path / "allow-list"
    for name in ("router", "prefill-0", "decode-0"):
        assert cli.main(["keys", str(tmp_path / f"{name}.key"), "--allow-list", str(allow_list)]) == 0
    theirs = tmp_path / "their-list"
    theirs.write_text(allow_list.read_text())
    assert cli.main(["keys", str(tmp_path / "stranger.key"), "--allow-list", str(theirs)]) == 0
    public = capsys.readouterr().out.split()[-1]

    def keys(name: str, path: Path) -> list[str]:
        return ["--keys", str(tmp_path / f"{name}.key"), "--allow-list", str(path)]

    cluster.start_router(*keys("router", allow_list), "--canary-interval-s", "3600")  # none while a node is shut out
    for role, name in (("prefill", "prefill-0"), ("decode", "decode-0")):
        cluster.start_node(role, name, *keys(name, allow_list), "--transport", "aes")
    strangers = [
        cluster.start_node("decode", "no-keys"),
        cluster.start_node("decode", "stranger", *keys("stranger", theirs)),
    ]
    cluster.wait_ready(2)
    before = cluster.complete("hello", max_tokens=5, temperature=0)
    assert "pages travel by aes" in cluster.processes["decode-0"].log
    for stranger, words in zip(
        strangers, ("does the router there run with --keys?", f"say `stranger {public}`?"), strict=True
    ):
        wait_until(partial(_says, stranger, words), lambda: cluster.tails())  # each side says what is wrong
    router = cluster.processes["router"]
    assert "it does not know the router's key" in router.log
    assert f"its public key {public} is not in allow-list {allow_list}" in router.log
    assert len(cluster.nodes()) == 2

    listed = allow_list.read_text()
    allow_list.write_text("".join(line for line in listed.splitlines(True) if not line.startswith("decode-0 ")))
    wait_until(lambda: len(cluster.nodes()) == 1, "decode-0 is shut out")
    allow_list.write_text(listed)
    wait_until(lambda: len(cluster.nodes()) == 2, "decode-0 is back")
    cluster.wait_ready(2)
    assert cluster.complete("hello", max_tokens=5, temperature=0)["choices"] == before["choices"]
    assert "is taken out" not in router.log and "canary failed" not in router.log, router.log  # nothing failed first

    new = KeyPair.generate()
    new.write(tmp_path / "new-router.key")
    lines = [line for line in listed.splitlines(True) if not line.startswith("router ")]
    allow_list.write_text("".join([*lines, line_of("router", new.public)]))
    router.kill()
    cluster.start_router(*keys("new-router", allow_list))
    cluster.wait_ready(2)
    assert cluster.complete("hello", max_tokens=5, temperature=0)["choices"] == before["choices"]
    for stranger in strangers:
        stranger.send_signal(signal.SIGTERM)
        assert stranger.wait() == 0
        assert "lost" not in stranger.log and "Traceback" not in stranger.log, stranger.log


def _status(cluster: Cluster, path: str) -> int:
    try:
        return cluster.get(path)[0]
    except OSError:
        return 0


def _stream(cluster: Cluster, body: dict[str, Any]) -> tuple[list[int], list[str]]:
    """Return the token ids and the finish reasons of one stream, which must end with [DONE]."""
    more = {"model": cluster.model_name, "ignore_eos": True, "stream": True, "return_token_ids": True}
    status, text = cluster.post("/v1/completions", body | more)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert status == 200 and events[-1] == "[DONE]", text[-2000:]
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    ids = [token for choice in choices for token in choice["token_ids"]]
    return ids, [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


def _says(process: Process, words: str) -> bool:
    return words in process.log


def _running(cluster: Cluster, node: str) -> int:
    return len(cluster.ledger()["nodes"][node]["requests"])
