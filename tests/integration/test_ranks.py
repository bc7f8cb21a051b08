"""Nodes whose model several processes share: any numbers of ranks hand over to each other, and a lost rank ends its
node alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from cluster import Cluster, Process, free_port, wait_until
from own_mtp import with_mtp

from baton.deploy import cli
from baton.metadata.bus.addresses import PAGE_PORTS
from baton.metadata.wire.data_link import Renew
from baton.metadata.wire.frames import encode
from baton.metadata.wire.protocol import PROTOCOL_MAX

FLAGS = ["--page-size", "8", "--num-pages", "200", "--speculative", "ngram", "--no-draft-adaptive"]
BODIES: list[dict[str, Any]] = [
    {"prompt": "def main(" * 5, "temperature": 0},
    {"prompt": "for i in range(10):\n" * 2, "temperature": 0.8, "seed": 3, "n": 2, "frequency_penalty": 0.3},
    {"prompt": "x", "temperature": 0, "logprobs": 2, "echo": True},
]


def answers(cluster: Cluster, bodies: list[dict[str, Any]]) -> list[Any]:
    """Send all requests at once. Return the tokens of each choice."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        return [each.result() for each in [threads.submit(tokens, cluster, body) for body in bodies]]


def tokens(cluster: Cluster, body: dict[str, Any]) -> list[list[int]]:
    asked = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True, **body}
    status, answer = cluster.post("/v1/completions", {"model": "tiny", **asked})
    assert status == 200, answer
    return [choice["token_ids"] for choice in answer["choices"]]


def start(cluster: Cluster, role: str, name: str, tp: int, *flags: str) -> Process:
    return cluster.start_node(role, name, "--model-name", "tiny", "--tp", str(tp), *FLAGS, *flags)


def stop(cluster: Cluster, name: str) -> None:
    ranks = cluster.processes[name].ranks
    cluster.processes[name].send_signal(signal.SIGTERM)
    assert cluster.processes[name].wait(20) == 0
    assert not psutil.wait_procs(ranks, 5)[1], "ranks leave with their node"


@pytest.mark.timeout(300)
def test_any_numbers_of_ranks_hand_over_to_each_other(new_cluster: Callable[..., Cluster]) -> None:
    """The prompts of the second run are in the prefix cache of the first node only."""
    cluster = new_cluster()
    cluster.start_router()
    start(cluster, "prefill", "prefill-1", 1)
    start(cluster, "decode", "decode-1", 1)
    cluster.wait_ready(num_nodes=2)
    expected = answers(cluster, BODIES)
    stop(cluster, "decode-1")

    decode = start(cluster, "decode", "decode-2", 2)
    cluster.wait_ready(num_nodes=2)
    [rank] = decode.ranks
    assert rank.pid not in (decode.pid, os.getpid())
    assert answers(cluster, BODIES) == answers(cluster, BODIES) == expected
    assert "decode-2/rank-1 tiny ready on cpu" in decode.log
    sizes = {node["node_id"]: node["capacity"]["num_ranks"] for node in cluster.nodes()}
    assert sizes["decode-2"] == 2 and sizes["prefill-1"] == 1
    assert 'baton_node_ranks{model="tiny",node="decode-2",role="decode"} 2.0' in cluster.get("/metrics")[1]

    for name in ("prefill-1", "decode-2"):
        stop(cluster, name)
    start(cluster, "prefill", "prefill-2", 2)
    start(cluster, "decode", "decode-1", 1)
    cluster.wait_ready(num_nodes=2)
    assert answers(cluster, BODIES) == expected
    stop(cluster, "decode-1")
    start(cluster, "decode", "decode-2", 2)
    cluster.wait_ready(num_nodes=2)
    assert answers(cluster, BODIES) == expected


FAMILIES: dict[str, dict[str, Any]] = {  # with heads that two and three ranks share
    "deepseek_v32": {},
    "glm_moe_dsa": {},
    "gemma3_text": {"num_key_value_heads": 6},
    "gemma4_text": {"num_key_value_heads": 6, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "gpt_oss": {"num_key_value_heads": 6},
    "mimo_v2_flash": {"num_attention_heads": 12, "num_key_value_heads": 6},
    "deepseek_v4": {"o_groups": 6},
}
OWN_DRAFTER = ("deepseek_v32", "glm_moe_dsa", "mimo_v2_flash", "deepseek_v4")


@pytest.mark.timeout(300)
@pytest.mark.whole
@pytest.mark.parametrize(("of_prefill", "of_decode"), [(2, 3), (3, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_unlike_numbers_of_ranks_hand_pools_beside_that_of_kv_over(
    family: str,
    of_prefill: int,
    of_decode: int,
    checkpoint: Callable[..., Path],
    new_cluster: Callable[..., Cluster],
    tmp_path: Path,
) -> None:
    sizes = {"num_attention_heads": 6, "hidden_size": 96, "intermediate_size": 96} | FAMILIES[family]
    model = checkpoint(family, **sizes)
    drafts = ["--speculative", "mtp"] if family in OWN_DRAFTER else []
    cluster = new_cluster(with_mtp(model, tmp_path / "mtp") if drafts else model)
    cluster.start_router()
    for num_ranks in ((1, 1), (of_prefill, of_decode)):
        for role, num in zip(("prefill", "decode"), num_ranks, strict=True):
            start(cluster, role, f"{role}-{num}", num, *drafts)
        cluster.wait_ready(num_nodes=2)
        if num_ranks == (1, 1):
            expected = answers(cluster, BODIES)
            for role in ("prefill", "decode"):
                stop(cluster, f"{role}-1")
    assert answers(cluster, BODIES) == answers(cluster, BODIES) == expected
    stats = cluster.ledger()["nodes"][f"decode-{of_decode}"]["stats"]
    assert stats["num_drafted"] > 0 and stats["pages_moved"] > 0


@pytest.mark.timeout(300)
@pytest.mark.whole
@pytest.mark.parametrize(("of_prefill", "of_decode"), [(2, 3), (3, 2)])
def test_unlike_numbers_of_ranks_borrow_the_answers_of_earlier_turns(
    of_prefill: int, of_decode: int, checkpoint: Callable[..., Path], new_cluster: Callable[..., Cluster]
) -> None:
    """Prefill nodes have never seen the answers. Whether a loan is in time depends on this machine, the text does
    not."""
    cluster = new_cluster(
        checkpoint("llama", num_attention_heads=6, num_key_value_heads=6, hidden_size=96, intermediate_size=96)
    )
    cluster.start_router("--local-prefill", "never")
    texts = list[list[list[int]]]()
    for num_ranks in ((1, 1), (of_prefill, of_decode)):
        for role, num in zip(("prefill", "decode"), num_ranks, strict=True):
            start(cluster, role, f"{role}-{num}", num)
        cluster.wait_ready(num_nodes=2)
        prompts = [[seed + 8 * place for place in range(20)] for seed in range(4)]
        for _ in range(4):
            turns = answers(cluster, [{"prompt": prompt, "temperature": 0} for prompt in prompts])
            prompts = [[*prompt, *answer[0], 7, 8] for prompt, answer in zip(prompts, turns, strict=True)]
        texts.append(prompts)
        stats = cluster.ledger()["nodes"][f"prefill-{num_ranks[0]}"]["stats"]
        for role, num in zip(("prefill", "decode"), num_ranks, strict=True):
            stop(cluster, f"{role}-{num}")
    assert texts[0] == texts[1]
    assert stats["borrowed_tokens"] > 0 and stats["checksum_failures"] == 0


@pytest.mark.timeout(300)
@pytest.mark.whole
@pytest.mark.parametrize("transport", ["aes", "zmq"])
def test_keys_protect_the_links_of_ranks(transport: str, new_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """Each node has a key of its own, which its ranks share. Who has none gets no answer of any rank."""
    cluster, allow_list = new_cluster(), tmp_path / "allow-list"
    names = ("router", "prefill-1", "decode-1", "prefill-2", "decode-2")
    assert not any(cli.main(["keys", str(tmp_path / f"{each}.key"), "--allow-list", str(allow_list)]) for each in names)

    def keys(name: str) -> list[str]:
        return ["--keys", str(tmp_path / f"{name}.key"), "--allow-list", str(allow_list), "--transport", transport]

    cluster.start_router(*keys("router")[:-2])
    for role in ("prefill", "decode"):
        start(cluster, role, f"{role}-1", 1, *keys(f"{role}-1"))
    cluster.wait_ready(num_nodes=2)
    expected = answers(cluster, BODIES)
    for role in ("prefill", "decode"):
        stop(cluster, f"{role}-1")
    port = free_port()
    prefill = start(cluster, "prefill", "prefill-2", 2, *keys("prefill-2"), "--bind-host", f"tcp://127.0.0.1:{port}")
    decode = start(cluster, "decode", "decode-2", 2, *keys("decode-2"))
    cluster.wait_ready(num_nodes=2)
    assert answers(cluster, BODIES) == expected
    for rank in (0, 1):
        assert f"decode-2{'/rank-1' * rank} linked to node prefill-2, pages travel by {transport}" in decode.log
        assert not is_answered(port + rank)
        assert transport != "aes" or not is_answered(port + PAGE_PORTS + rank)
    assert f"prefill-2/rank-1 node decode-2 linked, pages travel by {transport}" in prefill.log


def is_answered(port: int) -> bool:
    """Return whether somebody without a key who says nothing of use gets an answer from a data link."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(encode(Renew(units=()), PROTOCOL_MAX))
        return bool(socket.poll(1000))


@pytest.mark.timeout(300)
def test_a_lost_rank_ends_its_node_and_requests_go_on_elsewhere(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster()
    cluster.start_router()
    for role in ("prefill", "decode"):
        start(cluster, role, f"{role}-0", 1)
        start(cluster, role, f"{role}-1", 2)
    cluster.wait_ready(num_nodes=4)
    bodies = [{**body, "max_tokens": 200} for body in BODIES * 2]
    expected = answers(cluster, bodies)
    strikes = (
        ("decode", signal.SIGKILL, "ended with exit code -9;"),
        ("decode", signal.SIGSTOP, "ended with exit code -9: it was silent for 3 s;"),
        ("prefill", signal.SIGKILL, "ended with exit code -9;"),
    )
    for role, number, words in strikes:
        node = cluster.processes[f"{role}-1"]
        [rank] = node.ranks
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(answers, cluster, bodies)
            if role == "decode":
                wait_until(lambda: cluster.ledger()["nodes"]["decode-1"]["requests"], cluster.tails)
            rank.send_signal(number)
            assert node.wait(20) == 1
            assert running.result() == expected
        assert not rank.is_running(), "no rank outlives its node"
        errors = [line for line in node.log.splitlines() if "error" in line]
        assert errors == [
            f"baton: error: rank 1 (process {rank.pid}) {words} all ranks were ended, start the node again"
        ], node.log
        start(cluster, role, f"{role}-1", 2)
        cluster.wait_ready(num_nodes=4)
