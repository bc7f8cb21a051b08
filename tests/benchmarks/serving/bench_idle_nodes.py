"""Measure what nodes without work cost the router: its processor time per second, by their number.

    python tests/benchmarks/serving/bench_idle_nodes.py [--nodes 2 64 256] [--seconds 20]

The router is a process of its own. The nodes have the real membership (link, session, heartbeat thread), and no engine
behind it. Half of them are of each role. They report that all pairs were ready, as they do to a router that has started
again, so no canary runs. Prints one row per number of nodes: what the router takes until all have joined and all pairs
are ready, and then per second.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import zlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

sys.path[:0] = [str(parent) for parent in Path(__file__).parents[1:3]]  # the rooms, and the fake nodes of tests/router

from bench_router import cpu_s, run_router
from harness import Row, flags, report

STEP_S = 0.5  # of an idle node's loop
SETTLE_S = 3.0


def run_nodes(address: str, num_nodes: int, pipe: Any) -> None:
    """Run nodes that have joined and are idle."""
    import msgspec
    import xxhash
    from router.fake_nodes import make_tokenizer
    from router.hellos import make_hello

    from baton.engine.state.pages import PagePool
    from baton.engine.state.prefix_cache import PrefixCache
    from baton.metadata.bus.membership import Membership
    from baton.metadata.wire.membership import IDLE, TokenizerFile
    from baton.metadata.wire.node_info import Load, NodeStats

    tokenizer = make_tokenizer()
    digest = xxhash.xxh3_128_hexdigest(tokenizer)
    file = TokenizerFile(digest, zlib.compress(tokenizer))
    epochs = [f"{index:032x}" for index in range(num_nodes)]
    nodes: list[Membership] = []
    for index in range(num_nodes):
        role = ("prefill", "decode")[index % 2]
        hello = make_hello(role, f"{role}-{index}", epoch=epochs[index], tokenizer=digest)
        hello = msgspec.structs.replace(hello, protocol=0)
        node = Membership(hello, address, lambda: file, None, 1.0)
        for channel in node._channels:
            channel.session.remember(tuple(epochs[1 - index % 2 :: 2]))
        node.member = SimpleNamespace(  # type: ignore[assignment]
            cache=PrefixCache(PagePool(8, 16)),
            links=SimpleNamespace(allow_for=lambda _: None),
            load=lambda: Load(free_pages=8, running=0, waiting=0),
            stats=NodeStats,
            num_units=Counter,
        )
        node.start()
        nodes.append(node)
    is_told = False
    while True:
        for node in nodes:
            node.receive()
            node.report()
            node.enter(IDLE, 10.0)
        if not is_told and all(node.routers for node in nodes):
            is_told = True
            pipe.send(None)
        time.sleep(STEP_S if is_told else 0.02)


def measure(num_nodes: int, seconds: float) -> Row:
    """Start a router and idle nodes, and return what the router takes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    config = {"port": 0, "node_address": "tcp://127.0.0.1:*", "canary_interval_s": 3600.0}
    router = context.Process(target=run_router, args=(config, theirs), daemon=True)
    router.start()
    _, address, _ = ours.recv()
    pipe, end = context.Pipe()
    nodes = context.Process(target=run_nodes, args=(address, num_nodes, end), daemon=True)
    process = psutil.Process(router.pid)
    joining = -cpu_s(process)
    nodes.start()
    try:
        pipe.recv()
        time.sleep(SETTLE_S)
        begun, cpu = time.perf_counter(), cpu_s(process)
        joining += cpu
        time.sleep(seconds)
        cpu, wall = cpu_s(process) - cpu, time.perf_counter() - begun
    finally:
        for each in (nodes, router):
            each.kill()
            each.join()
    row = {"nodes": num_nodes, "router_cpu_ms_to_join": round(joining * 1000)}
    return row | {"router_cpu_ms_per_s": round(cpu / wall * 1000, 1)}


def main() -> None:
    parser: argparse.ArgumentParser = flags(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 64, 256])
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    report(args, "idle-nodes", (measure(number, args.seconds) for number in args.nodes), unit="ms per s")


if __name__ == "__main__":
    main()
