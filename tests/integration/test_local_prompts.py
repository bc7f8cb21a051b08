"""Real processes without a prefill node: decode nodes compute prompts, with the text of a cluster that has one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cluster import Cluster, wait_until
from thinned import is_whole

from .test_up import DEMO, up

BODIES: list[dict[str, Any]] = [
    {"max_tokens": 24, "temperature": 0},
    {"max_tokens": 24, "temperature": 1.0, "seed": 7, "n": 2},
    {"max_tokens": 12, "temperature": 0.8, "seed": 3, "top_p": 0.9, "logprobs": 2},
    {"max_tokens": 1, "temperature": 0, "logprobs": 1},
    {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True},
    {"max_tokens": 8, "temperature": 1.0, "seed": 5, "n": 2, "logprobs": 2, "echo": True},
]
PROMPT = "def main(arguments):\n    for each in arguments:\n        print(each)\n    return 0\n\n\nclass Each:\n"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A prefill node that computes all prompts, and a decode node."""
    with Cluster(tmp_path_factory.mktemp("reference"), DEMO, is_forked=True) as cluster:
        yield cluster.start()


class Answer(NamedTuple):
    """A text, its tokens, and their log-probabilities, as far as they were asked for."""

    text: str
    tokens: list[str]
    logprobs: list[float | None]  # the first token of a prompt has none


def answers(ask: Any) -> list[list[Answer]]:
    """Return what the bodies get, by choice."""
    found: list[list[Answer]] = []
    for body in BODIES:
        answer = ask({"model": "demo", "prompt": PROMPT, "ignore_eos": True, **body})
        assert answer["usage"]["prompt_tokens"] > 10, answer
        own = [each["logprobs"] or {"tokens": [], "token_logprobs": []} for each in answer["choices"]]
        texts = [each["text"] for each in answer["choices"]]
        found.append(
            [Answer(text, each["tokens"], each["token_logprobs"]) for text, each in zip(texts, own, strict=True)]
        )
    return found


def test_baton_up_without_prefill_nodes_serves_the_same_text(tmp_path: Path, reference: Cluster) -> None:
    with up(tmp_path, DEMO, "--prefill", "0", "--decode", "1", "--no-draft-adaptive") as running:
        assert len(running.family()) == 2

        def ask(body: Any) -> Any:
            status, answer = running.request("POST", "/v1/completions", body)
            assert status == 200, answer
            return answer

        local = answers(ask)
        usage = ask({"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0})["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0, usage
        assert usage["speculation"]["accepted_tokens"] > 0, usage
        assert running.request("GET", "/ready")[1]["local_prefill"]
    remote = answers(lambda body: reference.post("/v1/completions", body)[1])
    for ours, theirs in zip(itertools.chain(*local), itertools.chain(*remote), strict=True):
        assert ours[:2] == theirs[:2]
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
    assert "local_prefill" not in reference.get("/ready")[1]


def test_requests_go_on_when_the_only_prefill_node_is_killed_and_return_when_one_joins(cluster: Cluster) -> None:
    body = {"model": "tiny-llama", "prompt": "hello there", "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    def text() -> str:
        status, answer = cluster.post("/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["text"]

    first = text()
    cluster.processes["prefill-0"].kill()
    wait_until(lambda: len(cluster.nodes()) == 1, "the router has noticed")
    assert text() == first
    wait_until(lambda: cluster.get("/ready")[1].get("local_prefill"), "the router says so")
    assert "decode nodes compute prompts, since no prefill node is here" in cluster.processes["router"].log
    cluster.start_node("prefill", "prefill-1")
    wait_until(lambda: "local_prefill" not in cluster.get("/ready")[1], "prompts go to a prefill node again")
    assert text() == first
    page = cluster.get("/metrics")[1]
    assert 'place="local",reason="no prefill node"} 1.0' in page and 'place="remote",reason="never"} 2.0' in page


@pytest.mark.parametrize("flags", [[], pytest.param(["--max-gap-ms", "1"], marks=pytest.mark.whole)])
def test_auto_gives_the_text_of_never_wherever_a_prompt_is_computed(
    flags: list[str], new_cluster: Callable[..., Cluster], reference: Cluster
) -> None:
    """Conversations of three turns run side by side, with prompts of several lengths."""
    num = 6 if is_whole() else 4
    cluster = new_cluster(DEMO)
    cluster.start_router("--local-prefill", "auto")
    cluster.start_node("prefill", "prefill-0")
    for name in ("decode-0", "decode-1"):
        cluster.start_node("decode", name, *flags)
    cluster.wait_ready(num_nodes=3)
    wait_until(lambda: cluster.get("/ready")[1].get("local_prefill"), "decode nodes may compute prompts")

    def converse(index: int) -> list[str]:
        """Return the outputs of the turns of one conversation."""
        text, outputs = f"# {index}\n" + PROMPT * (1 + 3 * (index % 3)), []
        for turn in range(3):
            sampling: dict[str, Any] = {"temperature": 1.0, "seed": index} if turn % 2 else {"temperature": 0}
            body = {"model": "demo", "prompt": text, "max_tokens": 24, "ignore_eos": True, **sampling}
            status, answer = cluster.post("/v1/completions", body)
            assert status == 200, answer
            outputs.append(answer["choices"][0]["text"])
            text += outputs[-1] + "\n"
        return outputs

    with ThreadPoolExecutor(num) as pool:
        found = list(pool.map(converse, range(num)))
    places = placed(cluster)
    assert sum(places.values()) == 3 * num and {place for place, _ in places} <= {"local", "remote"}, places
    if not flags:  # the decode nodes have the history, and room
        assert places.get(("local", "sooner"), 0) > 0, places
    cluster = reference
    assert list(map(converse, range(num))) == found
    assert set(placed(reference)) == {("remote", "never")}


def placed(cluster: Cluster) -> dict[tuple[str, str], float]:
    """Return the number of prompts by place and reason."""
    page = cluster.get("/metrics")[1]
    found = re.findall(r'baton_placed_prompts_total\{.*place="(\w+)",reason="([^"]+)"\} (\S+)', page)
    return {(place, reason): float(count) for place, reason, count in found}
