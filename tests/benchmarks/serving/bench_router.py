"""Measure what the router adds: 64 streams through a real router process, fed by fake nodes that answer at once.

    python tests/benchmarks/serving/bench_router.py [--streams 64] [--tokens 500] [--interval-ms 10] [--routers 1]

There are three processes: the router, which is measured, the fake nodes, and this program, a plain client. Two phases:

    paced    every stream gets one token per interval, all streams in one Tokens message, as a decode step sends them;
             the added latency is from just before the node's send to the client's read of that token's event
    blast    the node sends as fast as the router's socket accepts messages; tokens per second of router CPU time

With `--routers 2` there are two routers, each with nodes and half of the streams. Prints one row per phase.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time
from array import array
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import psutil

sys.path[:0] = [str(parent) for parent in Path(__file__).parents[1:3]]  # the rooms, and the fake nodes of tests/router

from harness import flags, report

from baton.deploy.bench.client import Target, ask, open_session
from baton.deploy.bench.sender import run_on_uvloop

T = TypeVar("T")
BEAT_S = 0.2  # between heartbeats of the decode node


def run_router(config: dict[str, Any], ready: Any) -> None:
    """Run the router process."""
    import uvloop

    from baton.router.config import RouterConfig
    from baton.router.main import Router

    async def serve() -> None:
        router = Router(RouterConfig(**config))
        begun = time.perf_counter()
        await router.start()
        ready.send((router.url, router.node_address, time.perf_counter() - begun))
        await asyncio.Event().wait()

    uvloop.run(serve())


def run_nodes(
    address: str, num_tokens: int, num_streams: int, interval_s: float, pipe: Any, num_prefill: int = 1
) -> None:
    """Run prefill nodes and a decode node in one process. Decode waits for all streams, then steps them together."""
    from router.fake_nodes import FakeCluster, FakeNode, make_tokenizer

    from baton.metadata.wire import messages as m
    from baton.metadata.wire.node_info import NodeStats
    from baton.metadata.wire.request import Ended, Unit, pack_ids

    class Prefill(FakeNode):
        def output(self, request: Any, prompt: Any, choice: int, *_nodes: Any) -> list[int]:
            return [300] * request.params.max_tokens

    class Decode(Prefill):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.waiting: list[Unit] = []

        def _admit(self) -> None:
            while not self.handoffs.empty():
                message, choice, output = self.handoffs.get()
                unit = Unit(message.rid, choice, message.attempt)
                self.link.send(m.Admitted(unit, 0.0, 1, 1, 0))
                if message.rid.startswith("canary"):
                    self.running.append((0.0, [self.tokens(unit, message.request, output, 0, len(output))]))
                else:
                    self.waiting.append(unit)
            if len(self.waiting) == num_streams:
                self.rounds(self.waiting)
                self.waiting = []

        def rounds(self, units: list[Unit]) -> None:
            times: list[float] = []
            ids, counts = pack_ids([300] * len(units)), pack_ids([1] * len(units))
            due = beat_at = time.perf_counter() + 0.2
            for place in range(1, num_tokens):
                due += interval_s
                while time.perf_counter() < due:
                    time.sleep(max(0.0, due - time.perf_counter()))
                rows = range(len(units)) if place == num_tokens - 1 else ()
                ended = {row: Ended("length", None, 4, num_tokens, 0) for row in rows}
                message = m.Tokens(tuple(units), pack_ids([place] * len(units)), counts, ids, ended=ended)
                times.append(time.perf_counter())
                while not self.link.send(message):
                    time.sleep(0.0005)
                if times[-1] - beat_at > BEAT_S:
                    beat_at = times[-1]
                    self.link.send(m.Heartbeat(0, "decode", 0.0, 10.0, self.load(), NodeStats()))
            self.reserved.clear()
            pipe.send(times)

    cluster = FakeCluster(address, lambda prompt, choice: [], tokenizer=make_tokenizer(), num_pages=100_000)
    cluster.max_running, cluster.context_len = 4096, 1 << 16
    prefills = [Prefill(cluster, "prefill", f"p{number}", {}) for number in range(num_prefill)]
    cluster.nodes = [Decode(cluster, "decode", "d0", {}), *prefills]
    for node in cluster.nodes:
        node.start()
    while not cluster.nodes[0].refusal:
        time.sleep(1)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def clients(url: str, num_streams: int, num_tokens: int) -> list[array[float]]:
    """Run all streams at once and return the times at which each read its tokens."""
    target = Target(url, "fake", fields={"temperature": None, "stream_options": None})
    async with open_session(target) as session:
        asked = (ask(session, target, "hello", num_tokens) for _ in range(num_streams))
        replies = await asyncio.gather(*asked)
    if failed := [reply.message for reply in replies if reply.error is not None]:
        raise RuntimeError(f"a stream failed: {failed[0]}")
    return [reply.times for reply in replies]


async def clients_of_all(urls: list[str], num_streams: int, num_tokens: int) -> list[list[array[float]]]:
    """Run so many streams at each router at once, and return the times by router."""
    return list(await asyncio.gather(*(clients(url, num_streams, num_tokens) for url in urls)))


async def watched(url: str, num_viewers: int, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of some work, during which viewers read GET /live."""
    num_read = [0] * num_viewers  # bytes

    async def view(session: aiohttp.ClientSession, number: int) -> None:
        async with session.get(f"{url}/live") as answer:
            async for part in answer.content.iter_any():
                num_read[number] += len(part)

    async with aiohttp.ClientSession() as session:
        viewers = [asyncio.ensure_future(view(session, number)) for number in range(num_viewers)]
        result = await work
        assert all(num_read), "nobody was shown anything"
        for viewer in viewers:
            viewer.cancel()
    return result


def added_s(sent: list[list[float]], arrived: list[list[array[float]]], num_tokens: int) -> list[float]:
    """Return the seconds from decode to client of each token, sorted, given times by router. The first token came from
    prefill; the last one's event also holds the finish reason."""
    return sorted(
        read - at
        for theirs, ours in zip(sent, arrived, strict=True)
        for times in ours
        for at, read in zip(theirs, times[1:num_tokens], strict=True)
    )


def phase(
    num_streams: int,
    num_tokens: int,
    interval_s: float,
    *,
    num_viewers: int = 0,
    num_prefill: int = 1,
    num_routers: int = 1,
) -> dict[str, Any]:
    """Start routers, each with nodes in a process of their own, and run all streams once, divided between the routers.
    The first router is watched by so many viewers of GET /live."""
    context = multiprocessing.get_context("spawn")
    config = {"port": 0, "node_address": "tcp://127.0.0.1:*", "canary_interval_s": 3600.0, "max_waiting": 4096}
    routers, nodes, urls, pipes, start_s = [], [], [], [], 0.0
    try:
        for _ in range(num_routers):
            ours, theirs = context.Pipe()
            routers.append(context.Process(target=run_router, args=(config, theirs), daemon=True))
            routers[-1].start()
            url, address, start_s = ours.recv()
            urls.append(url)
            pipe, end = context.Pipe()
            pipes.append(pipe)
            about = address, num_tokens, num_streams // num_routers, interval_s, end, num_prefill
            nodes.append(context.Process(target=run_nodes, args=about, daemon=True))
            nodes[-1].start()
        for url in urls:
            wait_ready(url)
        processes = [psutil.Process(router.pid) for router in routers]
        idle_rss, cpu = processes[0].memory_info().rss, sum(map(cpu_s, processes))
        begun = time.perf_counter()
        asked = clients_of_all(urls, num_streams // num_routers, num_tokens)
        arrived = run_on_uvloop(watched(urls[0], num_viewers, asked))
        sent = [pipe.recv() for pipe in pipes]
        cpu, wall = sum(map(cpu_s, processes)) - cpu, time.perf_counter() - begun
        peak_rss = processes[0].memory_info().rss
    finally:
        for each in (*nodes, *routers):
            each.kill()
            each.join()
    lags, total = added_s(sent, arrived, num_tokens), num_streams // num_routers * num_routers * num_tokens
    return {
        "routers": num_routers,
        "streams": num_streams,
        "tokens": total,
        "interval_ms": interval_s * 1000,
        "added_ms_p50": round(lags[len(lags) // 2] * 1000, 3),
        "added_ms_p99": round(lags[len(lags) * 99 // 100] * 1000, 3),
        "router_cpu_us_per_token": round(cpu / total * 1e6, 2),
        "tokens_per_s_per_core": round(total / cpu),
        "tokens_per_s": round(total / wall),
        "wall_s": round(wall, 3),
        "router_listening_s": round(start_s, 3),
        "router_rss_idle_mb": round(idle_rss / 1e6, 1),
        "router_rss_mb": round(peak_rss / 1e6, 1),
    }


def wait_ready(url: str) -> None:
    import urllib.error
    import urllib.request

    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url + "/ready"):
                return
        except urllib.error.HTTPError as error:
            error.close()
            time.sleep(0.02)
    raise RuntimeError("the router did not get ready")


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--interval-ms", type=float, default=10.0)
    parser.add_argument("--routers", type=int, default=1, help="divide the streams between so many (default: 1)")
    args = parser.parse_args()
    phases = {"paced": args.interval_ms / 1000, "blast": 0.0}
    rows = (
        {"phase": name} | phase(args.streams, args.tokens, interval, num_routers=args.routers)
        for name, interval in phases.items()
    )
    report(args, "router", rows, unit="ms", about={"cpus": os.cpu_count()})


if __name__ == "__main__":
    main()
