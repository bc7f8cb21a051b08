"""Processes with `--dp-attention`: every request has the tokens of nodes with one rank, found in the prefix cache,
preempted, or moved because a rank died, which ends its group alone. BATON_WHOLE_MATRIX=1 runs all drafters and
pairs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import drafters
import pytest
from cluster import Cluster, Process, wait_until
from heads import ALGORITHM

PAGES = ["--page-size", "8", "--num-pages", "28", "--chunk-tokens", "16"]
BODIES: list[dict[str, Any]] = [
    {"prompt": "def main(" * 5, "temperature": 0},
    {"prompt": "for i in range(10):\n" * 2, "temperature": 0.8, "seed": 3, "n": 2, "frequency_penalty": 0.3},
    {"prompt": "x", "temperature": 0, "logprobs": 2, "echo": True},
    {"prompt": "while True:", "temperature": 1.0, "seed": 8, "top_p": 0.9},
    {"prompt": "import os, sys, " * 3, "temperature": 0.7, "seed": 5},
]


class Case(NamedTuple):
    """The drafter of all nodes, and the ranks of a prefill node and of one of two decode nodes."""

    drafter: str
    prefill: int
    decode: int

    @property
    def strike(self) -> signal.Signals:
        """The signal to a rank of the decode node, or of the prefill node if the decode node has no ranks."""
        return signal.SIGSTOP if (self.prefill, self.decode) == (1, 2) else signal.SIGKILL

    def __str__(self) -> str:
        return f"{self.drafter}-{self.prefill}-to-{self.decode}"


DRAFTERS = ("eagle", "none", "standalone", "eagle3", "mtp3-deepseek")
WHOLE = [Case(drafter, *pair) for drafter in DRAFTERS for pair in ((2, 2), (1, 2), (2, 1))]
CASES = WHOLE if "BATON_WHOLE_MATRIX" in os.environ else WHOLE[:1]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafters.make_bigram(checkpoint("llama"), tmp_path_factory.mktemp("model") / "tiny", 0.5)


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The tokens of nodes with one rank, no drafter and pages for all."""
    flags = ["--page-size", "8", "--num-pages", "200", "--speculative", "none"]
    with Cluster(tmp_path_factory.mktemp("cluster"), model, is_forked=True) as cluster:
        return answers(cluster.start(node_flags=flags))


def answers(cluster: Cluster) -> list[Any]:
    """Send all requests at once. Return the tokens of each choice."""
    with ThreadPoolExecutor(len(BODIES)) as threads:
        return [each.result() for each in [threads.submit(answer, cluster, body) for body in BODIES]]


def answer(cluster: Cluster, body: dict[str, Any]) -> list[Any]:
    asked = {"max_tokens": 60, "ignore_eos": True, "return_token_ids": True, **body}
    status, found = cluster.post("/v1/completions", {"model": "tiny", **asked})
    assert status == 200, found
    return [choice["token_ids"] for choice in found["choices"]]


def flags_of(drafter: str, model: Path, directory: Path) -> list[str]:
    """Return the flags of a drafter that is right if its kind can be."""
    if drafter in ("none", "eagle"):
        head = drafters.make_right(drafter, model, directory / drafter) if drafter != "none" else None
        return ["--speculative", ALGORITHM.get(drafter, drafter)] + (["--draft-model", str(head)] if head else [])
    if drafter == "standalone":
        draft = drafters.perturbed(model, directory / "standalone", 0.1)
        return ["--speculative", "standalone", "--draft-model", str(draft)]
    chosen = drafters.settings(drafter, model, directory, steps=3)
    return [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture
def start(new_cluster: Callable[..., Cluster], model: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`start(case)`: a cluster, and a function that starts a node of it."""

    def make(case: Case) -> tuple[Cluster, Callable[[str, str, int], Process]]:
        cluster, flags = new_cluster(model), flags_of(case.drafter, model, tmp_path)
        cluster.start_router()

        def node(role: str, name: str, num_ranks: int) -> Process:
            more = ["--dp-attention", str(num_ranks)] if num_ranks > 1 else ["--num-pages", "56"]
            return cluster.start_node(role, name, "--model-name", "tiny", *PAGES, *more, *flags)

        return cluster, node

    yield make


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_is_that_of_one_rank(case: Case, start: Callable[..., Any], expected: list[Any]) -> None:
    cluster, node = start(case)
    prefill, decode = node("prefill", "prefill-0", case.prefill), node("decode", "decode-0", case.decode)
    cluster.wait_ready(num_nodes=case.prefill + case.decode)
    assert (len(prefill.ranks), len(decode.ranks)) == (case.prefill - 1, case.decode - 1)
    assert answers(cluster) == answers(cluster) == expected
    books = cluster.ledger()["nodes"]
    assert set(books) == {"prefill-0", "prefill-0/rank-1", "decode-0", "decode-0/rank-1"} - {
        f"{role}-0/rank-1" for role, num in (("prefill", case.prefill), ("decode", case.decode)) if num == 1
    }
    ours = [each["stats"] for name, each in books.items() if name.startswith("decode-0")]
    assert all(each["generated_tokens"] > 0 for each in ours), "the router uses all ranks"
    assert case.decode == 1 or sum(each["preemptions"] for each in ours) > 0
    assert sum(each["stats"]["cached_tokens"] for name, each in books.items() if name.startswith("prefill")) > 0
    for each in cluster.nodes():
        is_rank = case.decode > 1 if each["role"] == "decode" else case.prefill > 1
        assert each["capacity"]["num_pages"] == (27 if is_rank else 55)
    struck, role = (decode, "decode") if case.decode > 1 else (prefill, "prefill")
    node(role, f"{role}-1", 1)
    cluster.wait_ready(num_nodes=case.prefill + case.decode + 1)
    [rank] = struck.ranks
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(answers, cluster)
        if role == "decode":
            wait_until(lambda: cluster.ledger()["nodes"]["decode-0/rank-1"]["requests"], cluster.tails)
        rank.send_signal(case.strike)
        assert struck.wait(20) == 1
        assert running.result() == expected
    silent = ": it was silent for 3 s" if case.strike == signal.SIGSTOP else ""
    words = f"rank 1 (process {rank.pid}) ended with exit code -9{silent}; all ranks were ended, start the node again"
    errors = [line for line in struck.log.splitlines() if "error" in line]
    assert errors == [f"baton: error: {words}"], struck.log
    assert not rank.is_running()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dp-attention", "3"], "has 128 hidden units, which 3 ranks cannot divide; let --dp-attention be a divisor"),
        (["--dp-attention", "2", "--tp", "2"], "tp is 2 and dp_attention is 2: ranks have either some heads of all"),
    ],
)
def test_what_ranks_cannot_do_is_refused_in_words(
    flags: list[str], words: str, new_cluster: Callable[..., Cluster]
) -> None:
    cluster = new_cluster()
    for role in ("prefill", "decode"):
        node = cluster.start_node(role, role, *PAGES, *flags)
        assert node.wait(20) == 2 and words in node.log, node.log
