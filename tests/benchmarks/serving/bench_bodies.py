"""Measure what large bodies cost the router's event loop: CPU per body, and the longest pause of the loop.

    python tests/benchmarks/serving/bench_bodies.py [--bytes 8388000] [--route /v1/chat/completions] [--worst 30]

A router with fake nodes gets one body after the other: one for each list, table, text and JSON value of each route
(tests/router/http/limit_bodies.py), well-formed and with an unknown field at its end. Each line has

    cpu_ms      CPU time of the event loop's thread from before the request until after its answer
    pause_ms    longest time in which the loop did nothing else, as a timer of 1 ms in the loop saw it
    answer_ms   until the answer
    status

The fake nodes and the client run in the same process, so pauses include the time that they hold the interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

os.chdir(Path(__file__).parents[2])  # not the repository's root, whose `router` would hide that of the tests
sys.path[:0] = [str(parent) for parent in Path(__file__).parents[1:3]]  # the rooms, and the fake nodes of tests/router


class Cost(NamedTuple):
    """What one body cost."""

    cpu_ms: float
    pause_ms: float
    answer_ms: float
    status: str
    route: str
    name: str


class LoopTimer:
    """Records the longest pause of an event loop since it was last asked."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = time.monotonic()
        self._longest_s = 0.0
        self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        self._longest_s = max(self._longest_s, now - self._last - 0.001)
        self._last = now
        self._loop.call_later(0.001, self._tick)

    def take(self) -> tuple[float, float]:
        """Return the CPU time of the loop's thread so far and the longest pause, in seconds."""
        longest, self._longest_s = self._longest_s, 0.0
        return time.thread_time(), longest


def send(port: int, route: str, body: bytes) -> bytes:
    """Send a request and return its answer."""
    head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=120) as client:
        client.sendall(head.encode())
        client.sendall(body)
        answer = b""
        while part := client.recv(1 << 20):
            answer += part
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=8_388_000)
    parser.add_argument("--route", default="", help="only bodies of this route")
    parser.add_argument("--worst", type=int, default=30)
    args = parser.parse_args()

    from router.conftest import RunningRouter, System
    from router.fake_nodes import make_tokenizer
    from router.http.limit_bodies import limit_bodies

    from baton.router.text.tokenizer import TextTokenizer

    data, router, costs = make_tokenizer(), RunningRouter(), list[Cost]()
    system = System(router, TextTokenizer(data), data, context_len=1 << 20, num_pages=1 << 20).up()
    timer: LoopTimer = router.call(LoopTimer)
    port = int(router.url.rsplit(":", 1)[1])
    for each in limit_bodies(args.bytes, args.route):
        before, _ = router.call(timer.take)
        begun = time.monotonic()
        answer = send(port, each.route, each.data)
        took = time.monotonic() - begun
        after, pause = router.call(timer.take)
        milliseconds = (round(1000 * each, 1) for each in (after - before, pause, took))
        costs.append(Cost(*milliseconds, answer[9:12].decode(), each.route, each.name))
    costs.sort(reverse=True)
    print("cpu_ms pause_ms answer_ms status body")
    for cost in costs[: args.worst]:
        print(*cost)
    print(f"{len(costs)} bodies; the dearest took {costs[0].cpu_ms} ms, the longest pause was ", end="")
    print(f"{max(cost.pause_ms for cost in costs)} ms")
    system.cluster.close()
    router.close()


if __name__ == "__main__":
    main()
