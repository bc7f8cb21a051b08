"""Speculation over HTTP changes no token in real processes, and nodes that cannot be paired are refused."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, wait_until
from thinned import is_whole

DEMO = Path(__file__).parents[2] / "deploy" / "demo"
ALWAYS = "--no-draft-adaptive"
GROUPS = {
    "off": ["--speculative", "none"],
    "standalone": ["--speculative", "standalone", "--draft-steps", "4", ALWAYS],
    "eagle-tree": ["--speculative", "eagle", "--draft-steps", "4", "--draft-topk", "3", ALWAYS],
    "eagle3": ["--speculative", "eagle3", "--draft-steps", "5", ALWAYS],
    "mtp3": ["--speculative", "mtp", "--draft-steps", "3", ALWAYS],
}
IN_GATE = ("off", "eagle-tree")  # decode_node/test_matrix.py has all algorithms
TEXTS = [
    "import os\n\n\ndef main(",
    "class Node:\n    def __init__(self, left, right):\n        self.left = left\n",
    "for i in range(10):\n    print(i)\n" * 6,
    "x",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n",
]


def bodies() -> list[dict[str, Any]]:
    """Return greedy and seeded requests, some with a stop string, penalties or several choices."""
    common = {"max_tokens": 48 if is_whole() else 32, "return_token_ids": True}
    greedy = [{**common, "prompt": text, "temperature": 0} for text in TEXTS]
    seeded = [{**common, "prompt": text, "temperature": 0.8, "top_p": 0.95, "seed": i} for i, text in enumerate(TEXTS)]
    greedy[4]["stop"] = ["return"]
    seeded[2] |= {"n": 2, "frequency_penalty": 0.3, "logprobs": 2}
    seeded[1]["draft_steps"] = 1
    never = [body | {"draft_steps": 0} for body in (greedy[2], seeded[0])]
    return greedy + seeded + never


def outputs(cluster: Cluster, name: str) -> tuple[list[Any], list[dict[str, Any]]]:
    """Send all requests at once. Return tokens, text and reason of each choice, and the usages."""
    with ThreadPoolExecutor(len(bodies())) as threads:
        asked = [{"model": name, "return_metrics": True, **body} for body in bodies()]
        answers = list(threads.map(lambda body: cluster.post("/v1/completions", body), asked))
    assert [status for status, _ in answers] == [200] * len(answers), answers
    for _, answer in answers:
        check_histogram(answer)
    seen = [
        [(choice["token_ids"], choice["text"], choice["finish_reason"]) for choice in answer["choices"]]
        for _, answer in answers
    ]
    return seen, [answer["usage"] for _, answer in answers]


@pytest.mark.timeout(400)
def test_output_is_that_of_speculation_off(new_cluster: Callable[..., Cluster]) -> None:
    """Groups of the demo model run behind one router, one after the other. No score in these texts is a tie."""
    cluster = new_cluster(DEMO)
    cluster.start_router()
    names = [name for name in GROUPS if is_whole() or name in IN_GATE]
    start_group(cluster, names[0])
    plain, usages = outputs(cluster, names[0])
    assert not any(drafted(usage) for usage in usages)
    for previous, name in pairwise(names):
        stop_group(cluster, previous)
        start_group(cluster, name)
        for _ in range(2):  # the second time from the prefix caches
            speculated, usages = outputs(cluster, name)
            assert speculated == plain, name
            assert sum(accepted(usage) for usage in usages) > 50, (name, usages)
            for body, usage in zip(bodies(), usages, strict=True):
                assert drafted(usage) == 0 or body.get("draft_steps") != 0, (name, body, usage)


def start_group(cluster: Cluster, name: str) -> None:
    """Start a prefill and a decode node that serve the model under this name, and wait until they are ready."""
    for role in ("prefill", "decode"):
        flags = ["--model-name", name, "--num-pages", "400", "--chunk-tokens", "20", *GROUPS[name]]
        cluster.start_node(role, f"{role}-{name}", *flags)
    wait_until(lambda: name in ready_models(cluster), cluster.tails, 60)


def stop_group(cluster: Cluster, name: str) -> None:
    for role in ("prefill", "decode"):
        cluster.processes[f"{role}-{name}"].send_signal(signal.SIGTERM)
    for role in ("prefill", "decode"):
        assert cluster.processes[f"{role}-{name}"].wait(15) == 0


def check_histogram(answer: dict[str, Any]) -> None:
    """Check that the histogram of accepted drafts fits the totals, and is there if and only if something was drafted
    for the only output."""
    totals = answer["usage"].get("speculation")
    if totals is None or len(answer["choices"]) > 1:
        assert "metrics" not in answer
        return
    counts = answer["metrics"]["speculative_decoding"]["acceptance_histogram"]
    assert sum(counts) == totals["verify_count"], answer
    assert sum(place * count for place, count in enumerate(counts)) == totals["accepted_tokens"], answer


def drafted(usage: dict[str, Any]) -> int:
    return usage.get("speculation", {}).get("drafted_tokens", 0)


def accepted(usage: dict[str, Any]) -> int:
    return usage.get("speculation", {}).get("accepted_tokens", 0)


def ready_models(cluster: Cluster) -> list[str]:
    for process in cluster.processes.values():
        assert not process.is_expected_to_run or process.popen.poll() is None, process.log
    try:
        status, answer = cluster.get("/v1/models")
    except OSError:
        return []
    return [model["id"] for model in answer["data"]] if status == 200 else []


def test_nodes_of_different_speculation_settings_refuse_each_other_by_name(new_cluster: Callable[..., Cluster]) -> None:
    """Promise P5: a prefill node without speculation and a decode node with it are refused."""
    cluster = new_cluster()
    cluster.start_router()
    cluster.start_node("prefill", "prefill-0")
    wait_until(lambda: has_joined(cluster), cluster.tails, 30)
    decode = cluster.start_node("decode", "decode-0", "--speculative", "ngram")
    assert decode.wait(30) == 3
    router = cluster.processes["router"].log
    for log in (decode.log, router):
        assert "algorithm: ngram here, none there" in log, log
    assert cluster.get("/ready")[0] == 503


def has_joined(cluster: Cluster) -> bool:
    try:
        return bool(cluster.nodes())
    except OSError:
        return False
