"""Measure what the router adds: streams through a real router process, fed by fake nodes that answer at once.

    python tests/benchmarks/serving/bench_router.py [--streams 64] [--tokens 500] [--interval-ms 10] [--routers 1]

The router, which is measured, the fake nodes, and plain clients are processes of their own: a decode node for 256
streams, a process of clients for 1,000. Two phases:

    paced    every stream gets one token per interval, 64 streams in one Tokens message, as a decode step sends them,
             and messages evenly in time; the added latency is from just before the node's send to the client's read of
             that token's event
    blast    the nodes send as fast as the router's socket accepts messages; tokens per second of router CPU time

To compare numbers of streams, give them equal tokens per second: interval by streams. With `--routers 2` there are two
routers, each with nodes and half of the streams. Prints one row per phase.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import aiohttp
import psutil

sys.path[:0] = [str(parent) for parent in Path(__file__).parents[1:3]]  # the rooms, and the fake nodes of tests/router

from harness import flags, report

from baton.deploy.bench.client import Reply, Target, ask, open_session
from baton.deploy.bench.sender import run_on_uvloop

T = TypeVar("T")
BEAT_S = 0.2  # between heartbeats of a decode node
NODE_STREAMS = 256  # of a decode node
NUM_PAGES = 100_000  # of each node
BATCH = 64  # streams of one Tokens message
CLIENT_STREAMS = 1000  # of a process of clients
START_S = 0.01  # between the starts of two streams of a process


def run_router(config: dict[str, Any], ready: Any) -> None:
    """Run the router process."""
    import uvloop

    from baton.metadata.garbage import Garbage
    from baton.router.config import RouterConfig
    from baton.router.main import Router

    async def serve() -> None:
        router = Router(RouterConfig(**config))
        begun = time.perf_counter()
        await router.start()
        Garbage()  # as the command does
        ready.send((router.url, router.node_address, time.perf_counter() - begun))
        await asyncio.Event().wait()

    uvloop.run(serve())


def run_nodes(address: str, num_tokens: int, num_streams: int, interval_s: float, num_prefill: int, pipe: Any) -> None:
    """Run prefill nodes and decode nodes in one process. The decode nodes wait for all streams, and then step them.
    Sends None when they begin, and before the last tokens; and at the end, for the streams of each message, their rids
    and when it was sent."""
    from router.fake_nodes import FakeCluster, FakeNode, make_tokenizer

    from baton.metadata.wire import messages as m
    from baton.metadata.wire.node_info import Load, NodeStats
    from baton.metadata.wire.request import Ended, Unit, pack_ids

    num_decode = -(-num_streams // NODE_STREAMS)
    lock, num_waiting, sent = threading.Lock(), [0], list[tuple[list[str], list[float]]]()
    begin_at, is_ending = [0.0], threading.Event()

    class Prefill(FakeNode):
        poll_ms = 10  # many nodes share the process

        def output(self, request: Any, prompt: Any, choice: int, *_nodes: Any) -> list[int]:
            return [300] * request.params.max_tokens

        def load(self) -> Load:
            return Load(free_pages=NUM_PAGES - len(self.reserved), running=len(self.reserved), waiting=0)

    class Decode(Prefill):
        number = 0  # of the node

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
                    with lock:
                        num_waiting[0] += 1
                        if num_waiting[0] == num_streams:
                            begin_at[0] = time.perf_counter() + 1.0  # the first tokens come from prefill nodes
                            pipe.send(None)
            if begin_at[0] and self.waiting:
                self.rounds([self.waiting[i : i + BATCH] for i in range(0, len(self.waiting), BATCH)])
                self.waiting = []

        def rounds(self, batches: list[list[Unit]]) -> None:
            """Send a token of each stream per interval, batches one after the other, all nodes evenly in time."""
            times: list[list[float]] = [[] for _ in batches]
            beat_at, per_interval = begin_at[0], num_decode * NODE_STREAMS // BATCH
            for place in range(1, num_tokens):
                with lock:
                    if place == num_tokens - 1 and not is_ending.is_set():
                        is_ending.set()
                        pipe.send(None)
                for number, units in enumerate(batches):
                    part = (number * num_decode + self.number) / per_interval
                    due = begin_at[0] + (place - 1 + part) * interval_s
                    while time.perf_counter() < due:
                        time.sleep(max(0.0, due - time.perf_counter()))
                    rows = range(len(units)) if place == num_tokens - 1 else ()
                    ended = {row: Ended("length", None, 4, num_tokens, 0) for row in rows}
                    ids = [pack_ids([each] * len(units)) for each in (place, 1, 300)]
                    message = m.Tokens(tuple(units), *ids, ended=ended)
                    times[number].append(time.perf_counter())
                    while not self.link.send(message):
                        time.sleep(0.0005)
                    if times[number][-1] - beat_at > BEAT_S:
                        beat_at = times[number][-1]
                        self.link.send(m.Heartbeat(0, "decode", 0.0, 10.0, self.load(), NodeStats()))
            self.reserved.clear()
            with lock:
                sent.extend(([unit.rid for unit in units], at) for units, at in zip(batches, times, strict=True))
                if sum(len(rids) for rids, _ in sent) == num_streams:
                    pipe.send(sent)

    cluster = FakeCluster(address, lambda prompt, choice: [], tokenizer=make_tokenizer(), num_pages=NUM_PAGES)
    cluster.max_running, cluster.context_len = NODE_STREAMS, 1 << 16
    prefills = [Prefill(cluster, "prefill", f"p{number}", {}) for number in range(num_prefill)]
    decodes = [Decode(cluster, "decode", f"d{number}", {}) for number in range(num_decode)]
    for number, node in enumerate(decodes):
        node.number = number
    cluster.nodes = [*decodes, *prefills]
    for node in cluster.nodes:
        node.start()
    while not cluster.nodes[0].refusal:
        time.sleep(1)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def run_clients(url: str, num_streams: int, num_tokens: int, pipe: Any) -> None:
    """Run streams at once in a process of their own. Sends their rids and the times at which each read its tokens."""
    pipe.send(run_on_uvloop(clients(url, num_streams, num_tokens)))


async def clients(url: str, num_streams: int, num_tokens: int) -> list[tuple[str, array[float]]]:
    """Run streams at once, which begin one after the other. Return rids and times of their tokens."""
    target = Target(url, "fake", fields={"temperature": None, "stream_options": None})
    async with open_session(target) as session:

        async def one(number: int) -> Reply:
            await asyncio.sleep(number * START_S)
            return await ask(session, target, "hello", num_tokens)

        replies = await asyncio.gather(*map(one, range(num_streams)))
    if failed := [reply.message for reply in replies if reply.error is not None]:
        raise RuntimeError(f"{len(failed)} streams failed: {failed[0]}")
    return [(reply.rid, reply.times) for reply in replies]


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


def added_s(
    sent: list[tuple[list[str], list[float]]], arrived: list[tuple[str, array[float]]], num_tokens: int
) -> list[float]:
    """Return the seconds from decode to client of each token, sorted. The first token came from prefill; the last one's
    event also holds the finish reason."""
    sent_at = {rid: times for rids, times in sent for rid in rids}
    return sorted(
        read - at for rid, times in arrived for at, read in zip(sent_at[rid], times[1:num_tokens], strict=True)
    )


class Measured(NamedTuple):
    """What processes of a phase have told, and the processor time of all routers: in all, and while nodes sent tokens
    but for the last ones, with which requests end."""

    sent: list[tuple[list[str], list[float]]]
    arrived: list[tuple[str, array[float]]]
    cpu_s: float
    round_cpu_s: float
    rounds_s: float  # how long it took until clients had all tokens that nodes sent


def collect(routers: list[psutil.Process], nodes: list[Any], askers: list[Any]) -> Measured:
    """Wait for what the processes tell by these pipes."""
    begun_at = sum(map(cpu_s, routers))
    for pipe in nodes:
        pipe.recv()
    begun, rounds_at = time.perf_counter(), sum(map(cpu_s, routers))
    for pipe in nodes:
        pipe.recv()
    round_cpu_s = sum(map(cpu_s, routers)) - rounds_at
    sent = [each for pipe in nodes for each in pipe.recv()]
    arrived = [each for pipe in askers for each in pipe.recv()]
    ended = max(times[-1] for _, times in arrived)
    return Measured(sent, arrived, sum(map(cpu_s, routers)) - begun_at, round_cpu_s, ended - begun)


def phase(
    num_streams: int,
    num_tokens: int,
    interval_s: float,
    *,
    num_viewers: int = 0,
    num_prefill: int = 1,
    num_routers: int = 1,
    num_clients: int | None = None,
) -> dict[str, Any]:
    """Start routers, each with nodes in a process of their own, and run all streams once, divided between the routers,
    and of each router between so many processes of clients. The first router is watched by so many viewers of GET
    /live."""
    context = multiprocessing.get_context("spawn")
    config = {"port": 0, "node_address": "tcp://127.0.0.1:*", "canary_interval_s": 3600.0}
    config |= {"max_waiting": 20_000, "max_queue_s": 600.0}
    routers, others, urls, pipes, askers, start_s = [], [], [], [], [], 0.0

    def start(run: Callable[..., None], *about: Any) -> Any:
        """Start a process, and return the pipe by which it tells."""
        ours, theirs = context.Pipe()
        others.append(context.Process(target=run, args=(*about, theirs), daemon=True))
        others[-1].start()
        return ours

    of_router = num_streams // num_routers
    of_client = CLIENT_STREAMS if num_clients is None else -(-of_router // num_clients)
    try:
        for _ in range(num_routers):
            ours, theirs = context.Pipe()
            routers.append(context.Process(target=run_router, args=(config, theirs), daemon=True))
            routers[-1].start()
            url, address, start_s = ours.recv()
            urls.append(url)
            pipes.append(start(run_nodes, address, num_tokens, of_router, interval_s, num_prefill))
        for url in urls:
            wait_ready(url)
        processes = [psutil.Process(router.pid) for router in routers]
        idle_rss, begun = processes[0].memory_info().rss, time.perf_counter()
        for url in urls:
            for first in range(0, of_router, of_client):
                num_asked = min(of_client, of_router - first)
                askers.append(start(run_clients, url, num_asked, num_tokens))
        told = asyncio.to_thread(collect, processes, pipes, askers)
        found = run_on_uvloop(watched(urls[0], num_viewers, told))
        wall = time.perf_counter() - begun
        peak_rss = processes[0].memory_info().rss
    finally:
        for each in (*others, *routers):
            each.kill()
            each.join()
    lags, total = added_s(found.sent, found.arrived, num_tokens), of_router * num_routers * num_tokens
    num_paced = of_router * num_routers * (num_tokens - 2)
    return {
        "routers": num_routers,
        "streams": num_streams,
        "tokens": total,
        "interval_ms": interval_s * 1000,
        "added_ms_p50": round(lags[len(lags) // 2] * 1000, 3),
        "added_ms_p99": round(lags[len(lags) * 99 // 100] * 1000, 3),
        "router_cpu_us_per_token": round(found.cpu_s / total * 1e6, 2),
        "router_cpu_us_per_token_of_rounds": round(found.round_cpu_s / num_paced * 1e6, 2),
        "tokens_per_s_per_core": round(total / found.cpu_s),
        "tokens_per_s": round(total / found.rounds_s),
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
    parser.add_argument("--clients", type=int, help="processes of each router's (default: one per 1,000 streams)")
    parser.add_argument("--phases", nargs="+", choices=("paced", "blast"), default=["paced", "blast"])
    args = parser.parse_args()
    intervals = {"paced": args.interval_ms / 1000, "blast": 0.0}
    rows = (
        {"phase": name}
        | phase(args.streams, args.tokens, intervals[name], num_routers=args.routers, num_clients=args.clients)
        for name in args.phases
    )
    report(args, "router", rows, unit="ms", about={"cpus": os.cpu_count()})


if __name__ == "__main__":
    main()
