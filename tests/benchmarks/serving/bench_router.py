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
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import aiohttp
import psutil

sys.path[:0] = [str(parent) for parent in Path(__file__).parents[1:3]]  # the rooms, and the fake nodes of tests/router

from harness import flags, report

from baton.deploy.bench.client import Reply, Target, ask, open_session
from baton.deploy.bench.sender import run_on_uvloop
from baton.metadata.bus.liveness import HeartbeatThread
from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import Load, NodeStats
from baton.metadata.wire.request import Ended, Unit, pack_ids

T = TypeVar("T")
TOKEN_ID = 300
NODE_STREAMS = 256  # of a decode node
NUM_PAGES = 100_000  # of each node
BATCH = 64  # streams of one Tokens message
CONFIG = {
    "port": 0,
    "node_address": "tcp://127.0.0.1:*",
    "canary_interval_s": 3600.0,
    "max_waiting": 20_000,
    "max_queue_s": 600.0,
}  # of each router
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


class Rounds:
    """Decode nodes' rounds, which one thread sends for all of them: threads would wait for each other's turn."""

    def __init__(self, num_streams: int, num_tokens: int, interval_s: float, pipe: Any) -> None:
        self.num_streams, self.num_tokens, self.interval_s, self.pipe = num_streams, num_tokens, interval_s, pipe
        self.num_waiting = 0
        self._batches: list[tuple[Any, list[Unit]]] = []  # a node, and its streams of one message
        self._lock, self._is_over = threading.Lock(), threading.Event()

    def add(self) -> None:
        """A stream waits at its node."""
        with self._lock:
            self.num_waiting += 1

    def take_part(self, node: Any, units: list[Unit]) -> None:
        """Wait until all rounds are sent. The thread of the last node sends them."""
        with self._lock:
            self._batches += [(node, units[i : i + BATCH]) for i in range(0, len(units), BATCH)]
            is_last = sum(len(each) for _, each in self._batches) == self.num_streams
        if is_last:
            self._send()
            self._is_over.set()
        self._is_over.wait()

    def _send(self) -> None:
        """Send a token of each stream per interval, messages evenly in time. Tells when rounds begin, when the last one
        does, and then when each message was sent, with the rids of its streams."""
        times: list[list[float]] = [[] for _ in self._batches]
        time.sleep(1.0)  # the first tokens come from prefill nodes
        self.pipe.send(None)
        begun = time.perf_counter()
        for place in range(1, self.num_tokens):
            if place == self.num_tokens - 1:
                self.pipe.send(None)
            for number, (node, units) in enumerate(self._batches):
                due = begun + (place - 1 + number / len(self._batches)) * self.interval_s
                while (now := time.perf_counter()) < due:
                    time.sleep(due - now)
                times[number].append(self._send_tokens(node, units, place))
        self.pipe.send(
            [([unit.rid for unit in units], at) for (_, units), at in zip(self._batches, times, strict=True)]
        )

    def _send_tokens(self, node: Any, units: list[Unit], place: int) -> float:
        """Send the token of this place of each stream. Return when."""
        rows = range(len(units)) if place == self.num_tokens - 1 else ()
        ended = {row: Ended("length", None, 4, self.num_tokens, 0) for row in rows}
        ids = [pack_ids([each] * len(units)) for each in (place, 1, TOKEN_ID)]
        message = m.Tokens(tuple(units), *ids, ended=ended)
        at = time.perf_counter()
        while not node.link.send(message):
            time.sleep(0.0005)
        return at


def run_nodes(address: str, num_tokens: int, num_streams: int, interval_s: float, num_prefill: int, pipe: Any) -> None:
    """Run prefill nodes and decode nodes in one process. The decode nodes wait for all streams, and then step them
    (`Rounds`)."""
    from router.fake_nodes import FakeCluster, FakeNode, make_tokenizer

    rounds = Rounds(num_streams, num_tokens, interval_s, pipe)

    class Prefill(FakeNode):
        """Its heartbeats have a connection of their own, as those of a real node."""

        poll_ms = 10  # many nodes share the process

        def __init__(self, cluster: FakeCluster, role: str, name: str, changes: dict[str, object]) -> None:
            super().__init__(cluster, role, name, changes)
            self.is_silent = True
            self.heartbeat = HeartbeatThread(address, name, self.epoch, None, load=self.load())
            self.heartbeat.enter("decode", 600.0)
            self.heartbeat.start()

        def take(self, message: m.ToNode) -> None:
            if isinstance(message, m.Welcome):
                self.heartbeat.speak(message.protocol, 1)
            super().take(message)
            self.heartbeat.report(self.load(), NodeStats())

        def output(self, request: Any, prompt: Any, choice: int, *_nodes: Any) -> list[int]:
            return [TOKEN_ID] * request.params.max_tokens

        def load(self) -> Load:
            return Load(free_pages=NUM_PAGES - len(self.reserved), running=len(self.reserved), waiting=0)

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
                    rounds.add()
            if rounds.num_waiting == num_streams and self.waiting:
                rounds.take_part(self, self.waiting)
                self.waiting = []
                self.reserved.clear()

    cluster = FakeCluster(address, lambda prompt, choice: [], tokenizer=make_tokenizer(), num_pages=NUM_PAGES)
    cluster.max_running, cluster.context_len = NODE_STREAMS, 1 << 16
    prefills = [Prefill(cluster, "prefill", f"p{number}", {}) for number in range(num_prefill)]
    num_decode = -(-num_streams // NODE_STREAMS)
    cluster.nodes = [*(Decode(cluster, "decode", f"d{number}", {}) for number in range(num_decode)), *prefills]
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
    """Return the seconds from decode to client of each token, sorted, but for those of the first tokens, which come
    from prefill, and of the last ones, with which all requests end at once."""
    sent_at = {rid: times[:-1] for rids, times in sent for rid in rids}
    return sorted(
        read - at for rid, times in arrived for at, read in zip(sent_at[rid], times[1 : num_tokens - 1], strict=True)
    )


class Measured(NamedTuple):
    """What the processes of a phase have told, and the processor time of all routers. The window begins when the nodes
    of all routers send tokens. It ends before their last tokens, with which requests end, or with the first client."""

    sent: list[tuple[list[str], list[float]]]
    arrived: list[tuple[str, array[float]]]
    cpu_s: float
    window_cpu_s: float
    window: tuple[float, float]
    busiest: float  # cores that the busiest other process used in the window

    @property
    def num_in_window(self) -> int:
        """Tokens that clients read in the window."""
        begun, ended = self.window
        return sum(begun <= at < ended for _, times in self.arrived for at in times)


def collect(
    routers: list[psutil.Process], others: list[psutil.Process], nodes: list[Any], askers: list[Any], *, is_paced: bool
) -> Measured:
    """Wait for what the processes tell by these pipes."""

    def look() -> tuple[float, float, list[float]]:
        return time.perf_counter(), sum(map(cpu_s, routers)), [cpu_s(each) for each in others]

    _, asked_s, _ = look()
    for pipe in nodes:
        pipe.recv()
    begun, begun_s, before = look()
    for pipe in nodes:
        pipe.recv()
    ended, ended_s, after = look()
    while not is_paced and not wait(askers, 0.1):  # nodes are far ahead of clients
        ended, ended_s, after = look()
    sent = [each for pipe in nodes for each in pipe.recv()]
    arrived = [each for pipe in askers for each in pipe.recv()]
    busiest = max(b - a for a, b in zip(before, after, strict=True)) / (ended - begun)
    total_s = sum(map(cpu_s, routers)) - asked_s
    return Measured(sent, arrived, total_s, ended_s - begun_s, (begun, ended), busiest)


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
    """Run all streams once, divided between routers, and of each router between processes of clients. Each router has
    nodes in a process of their own. Viewers of GET /live watch the first router."""
    context = multiprocessing.get_context("spawn")
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
            routers.append(context.Process(target=run_router, args=(CONFIG, theirs), daemon=True))
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
                askers.append(start(run_clients, url, min(of_client, of_router - first), num_tokens))
        watched_others = [psutil.Process(each.pid) for each in others]
        told = asyncio.to_thread(collect, processes, watched_others, pipes, askers, is_paced=interval_s > 0)
        found = run_on_uvloop(watched(urls[0], num_viewers, told))
        wall = time.perf_counter() - begun
        peak_rss = processes[0].memory_info().rss
    finally:
        for each in (*others, *routers):
            each.kill()
            each.join()
    lags, total = added_s(found.sent, found.arrived, num_tokens), of_router * num_routers * num_tokens
    return {
        "routers": num_routers,
        "streams": num_streams,
        "tokens": total,
        "interval_ms": interval_s * 1000,
        **_times(found, lags, total, num_routers),
        "wall_s": round(wall, 3),
        "router_listening_s": round(start_s, 3),
        "router_rss_idle_mb": round(idle_rss / 1e6, 1),
        "router_rss_mb": round(peak_rss / 1e6, 1),
    }


def _times(found: Measured, lags: Sequence[float], num_tokens: int, num_routers: int) -> dict[str, float]:
    """Return the columns of latency and of processor time. `lags`: seconds, ascending. `num_tokens`: of all streams."""
    window_s = found.window[1] - found.window[0]
    return {
        "added_ms_p50": round(lags[len(lags) // 2] * 1000, 3),
        "added_ms_p99": round(lags[len(lags) * 99 // 100] * 1000, 3),
        "router_cpu_us_per_token": round(found.cpu_s / num_tokens * 1e6, 2),
        "router_cpu_us_per_token_of_window": round(found.window_cpu_s / found.num_in_window * 1e6, 2),
        "tokens_per_s_per_core": round(found.num_in_window / found.window_cpu_s),
        "tokens_per_s": round(found.num_in_window / window_s),
        "cores_per_router": round(found.window_cpu_s / window_s / num_routers, 2),
        "cores_of_busiest_other": round(found.busiest, 2),
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
