"""Measure handoffs between hosts by each transport: one page, and the pause between the first and the second token.

    python tests/benchmarks/serving/bench_hosts.py [--requests 9] [--tokens 1024 8192]

Router (with the client), prefill node and decode node are on hosts of their own: network namespaces joined by the
switch of tests/support/hosts. The switch is a program of this machine: it bounds the rate, to less than a network does.
The model has random weights and 8 KiB of KV per token. Prompts have no common prefix. One page is the mean transfer of
prompts of one page, as the decode node reports it, without what the prompt and the round take. Prints one row per
transport.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]  # the rooms

from harness import Row, flags, report
from host_cluster import HOSTS, HostCluster
from network import Network, reason_against
from synthetic import ARCHITECTURES, write_random

from baton.metadata.bus.curve import KeyPair
from baton.metadata.handoff.nixl_agents import has_nixl

MODEL = ARCHITECTURES["llama-3.2-1b"] | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 16_384,
    "dtype": "float32",
}
PAGE_TOKENS = 16
WAYS = {
    "zmq under CURVE": ["--transport", "zmq"],
    "aes": ["--transport", "aes"],
    "plain": ["--transport", "plain", "--plain-pages"],
    **({"nixl": ["--transport", "nixl", "--plain-pages"]} if has_nixl() else {}),
}


def pause_s(cluster: HostCluster, prompt: list[int]) -> float:
    """Send one request, and return the seconds between its first and its second token."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 4, "stream": True, "ignore_eos": True}
    connection, times = cluster.connection(120.0), list[float]()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        while line := response.readline():
            if line.startswith(b'data: {"'):
                times.append(time.perf_counter())
    finally:
        connection.close()
    return times[1] - times[0]


def transfers(cluster: HostCluster) -> tuple[float, float]:
    """Return the seconds of all transfers so far, and their number."""
    connection = cluster.connection(10.0)
    connection.request("GET", "/metrics")
    lines = [line.split() for line in connection.getresponse().read().decode().splitlines()]
    connection.close()
    found = {words[0].partition("{")[0]: float(words[1]) for words in lines if words and not words[0].startswith("#")}
    return found["baton_transfer_seconds_sum"], found["baton_transfer_seconds_count"]


def measure(num_requests: int, lengths: list[int]) -> Iterator[Row]:
    """Yield a row per transport."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        model = write_random(directory / "model", MODEL)
        with Network(directory / "network", HOSTS) as network:
            for number, (name, more) in enumerate(WAYS.items()):
                logs = directory / str(number)
                logs.mkdir()
                cluster = HostCluster(logs, model, network)
                cluster.nodes_wanted = ["prefill-0", "decode-0"]
                cluster.node_flags = ["--num-pages", "2048", "--page-size", str(PAGE_TOKENS), *more]
                KeyPair.create(cluster.keys)
                with cluster.begin():
                    yield {"transport": name} | row_of(cluster, num_requests, lengths, rng)


def row_of(cluster: HostCluster, num_requests: int, lengths: list[int], rng: random.Random) -> Row:
    row: dict[str, float] = {}
    for length in (PAGE_TOKENS, *lengths):
        before, pauses = (0.0, 0.0), list[float]()
        for each in range(-1, num_requests):  # the first one warms up
            pauses.append(pause_s(cluster, [rng.randrange(1, 500) for _ in range(length)]))
            before = transfers(cluster) if each < 0 else before
        if length == PAGE_TOKENS:
            after = transfers(cluster)
            row["one page, ms"] = round((after[0] - before[0]) / (after[1] - before[1]) * 1000, 2)
        row[f"after {length:,} tokens"] = round(statistics.median(pauses[1:]) * 1000, 1)
    return row


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--requests", type=int, default=9)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192])
    args = parser.parse_args()
    if reason := reason_against():
        parser.error(f"no hosts here: {reason}")
    report(args, "hosts", measure(args.requests, args.tokens), unit="ms between the first and the second token")


if __name__ == "__main__":
    main()
