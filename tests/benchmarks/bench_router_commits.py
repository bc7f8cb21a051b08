"""Compare the router of this tree with that of an earlier commit: what each adds to a chat completion.

    python tests/benchmarks/bench_router_commits.py --before 4940770 [--requests 1000]

Each router is a process of its own with fake nodes that answer at once, all from the code of its commit. One client
sends the same requests to both in turns, one at a time. Three kinds:

    first    a whole answer of one token, which needs no decode node
    whole    a whole answer
    stream   the same as a stream, one token per event

Prints one JSON object: for each kind, the medians of the latency and of the time that the router's main thread
computed, and their ratios, this tree over the commit.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 64
NUM_WARM = 100  # requests before those that count
TOKEN_ID = 300
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant. " * 4},
    *({"role": role, "content": "the quick brown fox"} for role in ("user", "assistant", "user")),
]
KINDS: dict[str, dict[str, Any]] = {
    "first": {"max_tokens": 1},
    "whole": {"max_tokens": NUM_TOKENS},
    "stream": {"max_tokens": NUM_TOKENS, "stream": True},
}


class Served(NamedTuple):
    """A running router."""

    connection: http.client.HTTPConnection
    pid: int


def run_nodes(address: str) -> None:
    """Run a prefill and a decode node."""
    from router.fake_nodes import FakeCluster  # of the commit's own tests

    cluster = FakeCluster(address, lambda prompt, choice: [TOKEN_ID] * NUM_TOKENS, context_len=1024)
    for role in ("prefill", "decode"):
        cluster.add(role)
    for node in cluster.nodes:
        node.join()


def serve() -> None:
    """Run one router and its nodes. Write its URL and its process id to standard output once it is ready."""
    from bench_router import run_router, wait_ready

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    config = {"port": 0, "node_address": "tcp://127.0.0.1:*", "canary_interval_s": 3600.0}
    router = context.Process(target=run_router, args=(config, theirs), daemon=True)
    router.start()
    url, address, _ = ours.recv()
    context.Process(target=run_nodes, args=(address,), daemon=True).start()
    wait_ready(url)
    print(json.dumps({"url": url, "pid": router.pid}), flush=True)
    sys.stdin.read()  # until the parent ends


@contextmanager
def served(tree: Path, directory: Path) -> Iterator[Served]:
    """Run the router of a tree. `directory` is empty."""
    (directory / "baton").symlink_to(tree)
    tests = tree / "tests"
    rooms = (tests, tests / "benchmarks", tests / "benchmarks" / "serving")
    path = os.pathsep.join(map(str, (directory, *rooms)))
    child = subprocess.Popen(
        [sys.executable, "-P", __file__, "--serve"],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        told = json.loads(child.stdout.readline())
        host, port = told["url"].removeprefix("http://").rsplit(":", 1)
        yield Served(http.client.HTTPConnection(host, int(port), timeout=30), told["pid"])
    finally:
        child.communicate()


def timed(router: Served, body: bytes) -> tuple[float, float]:
    """Send one request and return the seconds that it took and that the router's main thread computed."""
    cpu, begun = _cpu_s(router.pid), time.perf_counter()
    router.connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = router.connection.getresponse()
    data = response.read()
    took = time.perf_counter() - begun
    if response.status != 200:
        raise RuntimeError(f"the router refused: {data[:400]!r}")
    return took, _cpu_s(router.pid) - cpu


def compared(before: Served, after: Served, fields: dict[str, Any], num_requests: int) -> dict[str, Any]:
    """Return the figures of one kind of request."""
    body = json.dumps({"model": "fake", "messages": MESSAGES, **fields}).encode()
    times: dict[str, list[tuple[float, float]]] = {"before": [], "after": []}
    routers = {"before": before, "after": after}
    for index in range(NUM_WARM + num_requests):
        for name in routers if index % 2 else reversed(routers):
            times[name].append(timed(routers[name], body))
    figures: dict[str, Any] = {}
    for place, figure in enumerate(("latency", "cpu")):
        p50 = {name: statistics.median(each[place] for each in found[NUM_WARM:]) for name, found in times.items()}
        figures |= {f"{figure}_ms_{name}": round(value * 1e3, 3) for name, value in p50.items()}
        figures[f"{figure}_ratio"] = round(p50["after"] / p50["before"], 3)
    return figures


def _cpu_s(pid: int) -> float:
    """Return the seconds that the main thread of a process has run."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("--requests", type=int, default=1000, help="of each kind, to each router")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    if args.before is None:
        parser.error("--before: the commit to compare with")
    with tempfile.TemporaryDirectory() as name:
        tree, links = Path(name) / "tree", [Path(name) / "before", Path(name) / "after"]
        for each in (tree, *links):
            each.mkdir()
        archive = subprocess.run(["git", "archive", args.before], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
        with served(tree, links[0]) as before, served(ROOT, links[1]) as after:
            kinds = {kind: compared(before, after, fields, args.requests) for kind, fields in KINDS.items()}
    print(json.dumps({"before": args.before, "requests": args.requests, **kinds}, indent=2))


if __name__ == "__main__":
    main()
