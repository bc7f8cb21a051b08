"""Two models behind one router, another loopback address, and processes that stop while they have work."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cluster import Cluster, held, wait_until

NODE_FLAGS = ["--page-size", "8", "--num-pages", "300"]


def test_two_models_behind_one_router_on_another_loopback_address(
    new_cluster: Callable[..., Cluster], checkpoint: Callable[..., Path]
) -> None:
    cluster = new_cluster()
    address = f"tcp://127.0.0.2:{cluster.node_port}"
    cluster.start_process("router", "router", "--port", str(cluster.http_port), "--node-address", address)
    for name, model in (("a", None), ("b", checkpoint("qwen3"))):
        flags = ["--router", address, "--model-name", name, *NODE_FLAGS]
        cluster.start_node("prefill", f"prefill-{name}", *flags, "--bind-host", "127.0.0.3", model=model)
        cluster.start_node("decode", f"decode-{name}", *flags, "--transport", "zmq", model=model)
    wait_until(lambda: _num_ready(cluster) == 2, lambda: cluster.tails(), 40)
    assert {node["data_address"].rpartition(":")[0] for node in cluster.nodes()} == {
        "tcp://127.0.0.3",
        "tcp://127.0.0.1",
    }
    assert {model["id"] for model in cluster.get("/v1/models")[1]["data"]} == {"a", "b"}
    texts = {}
    for name in ("a", "b"):
        body = {"model": name, "prompt": "hello " * 9, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
        status, answer = cluster.post("/v1/completions", body)
        assert (status, answer["model"], answer["usage"]["completion_tokens"]) == (200, name, 9)
        texts[name] = answer["choices"][0]["text"]
    assert texts["a"] != texts["b"]
    status, answer = cluster.post("/tokenize", {"prompt": "hello"})
    assert status == 400 and answer["error"]["param"] == "model"

    for name in ("prefill-a", "decode-a"):
        cluster.processes[name].send_signal(signal.SIGTERM)
        assert cluster.processes[name].wait(10) == 0
    assert cluster.post("/v1/completions", {"model": "a", "prompt": "x"})[0] == 503
    assert cluster.post("/v1/completions", {"model": "b", "prompt": "x", "max_tokens": 2})[0] == 200
    assert not held(cluster.ledger())


def test_processes_stopped_under_load_finish_their_requests(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster().start(node_flags=NODE_FLAGS, router_flags=["--drain-timeout-s", "30"])
    with ThreadPoolExecutor(16) as threads:
        running = _load(cluster, threads)
        for name in ("prefill-0", "decode-0"):
            cluster.processes[name].send_signal(signal.SIGTERM)
        for name in ("prefill-0", "decode-0"):
            assert cluster.processes[name].wait(30) == 0
        _all_well(running)
        assert cluster.get("/ready")[0] == 503
        assert cluster.post("/v1/completions", {"model": "tiny-llama", "prompt": "x"})[0] == 503
        assert not held(cluster.ledger())

        for role in ("prefill", "decode"):
            cluster.start_node(role, f"{role}-0", *NODE_FLAGS)
        cluster.wait_ready(num_nodes=2)
        running = _load(cluster, threads)
        router = cluster.processes["router"]
        router.send_signal(signal.SIGTERM)
        assert router.wait(40) == 0
        _all_well(running)
    cluster.start_router()
    cluster.wait_ready(num_nodes=2)
    cluster.complete("and again", max_tokens=3)


def _num_ready(cluster: Cluster) -> int:
    try:
        return [pair["state"] for pair in cluster.get("/debug/nodes")[1]["pairs"]].count("ready")
    except OSError:
        return 0


def _load(cluster: Cluster, threads: ThreadPoolExecutor) -> list[Future[tuple[int, Any]]]:
    """Start requests of two choices, half of them streams. Return when the decode node works on all choices."""
    fields = {"model": cluster.model_name, "max_tokens": 400, "ignore_eos": True, "n": 2}
    bodies = [{**fields, "prompt": f"{i} times " * 5, "seed": i, "stream": i % 2 == 0} for i in range(8)]
    running = [threads.submit(cluster.post, "/v1/completions", body) for body in bodies]
    wait_until(lambda: len(cluster.ledger()["nodes"]["decode-0"]["requests"]) >= 16, "decode works on all", 20)
    return running


def _all_well(running: list[Future[tuple[int, Any]]]) -> None:
    """Check that every request is complete: answers with all tokens, and streams with one [DONE]."""
    for index, future in enumerate(running):
        status, answer = future.result(60)
        assert status == 200, answer
        if index % 2:
            assert answer["usage"]["completion_tokens"] == 800
        else:
            events = [line.removeprefix("data: ") for line in answer.split("\n\n") if line]
            assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
            ends = [choice["finish_reason"] for event in events[:-1] for choice in json.loads(event)["choices"]]
            assert ends.count("length") == 2, ends
