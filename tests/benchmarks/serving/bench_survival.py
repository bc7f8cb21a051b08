"""Measure how long a client waits for its next token if its decode node is killed or stopped.

    python tests/benchmarks/serving/bench_survival.py [--model DIR] [--kills 40] [--stops 10] [--streams 4]
        [--json FILE]

The cluster is one router, one prefill and three decode nodes, all real processes, with greedy streams. Each time, a
decode node that has streams gets SIGKILL (a new node then takes its place) or SIGSTOP (SIGCONT follows later). For each
of its streams, the program measures the time from the signal to the next token. The tokens of every stream are compared
with those of a run without faults.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_paths  # noqa: F401
from cluster import Cluster, wait_until
from harness import flags, report

from baton.deploy.bench.client import Reply, Target, ask, open_session
from baton.deploy.bench.sender import run_on_uvloop

DEMO = Path(__file__).parents[3] / "deploy" / "demo"
TEXT = "import os\nimport sys\n\n\ndef main(argv):\n    "
MAX_TOKENS = 200
BEFORE_S = 0.05  # tokens may be on their way when the signal is sent


class Stream(threading.Thread):
    """One streamed completion, which may be watched meanwhile."""

    def __init__(self, cluster: Cluster, prompt: str) -> None:
        super().__init__(daemon=True)
        self.reply = Reply()
        fields = {"ignore_eos": True, "return_token_ids": True}
        self._target = Target(f"http://127.0.0.1:{cluster.http_port}", cluster.model_name, fields=fields)
        self._prompt = prompt
        self.start()

    def run(self) -> None:
        run_on_uvloop(self._ask())

    async def _ask(self) -> None:
        async with open_session(self._target, timeout_s=60.0) as session:
            await ask(session, self._target, self._prompt, MAX_TOKENS, self.reply)

    def wait_after(self, moment: float) -> float:
        """Return the seconds from `moment` to the end of the longest pause that began around then or later."""
        times = [each for each in self.reply.times if each > moment - BEFORE_S]
        pauses = [(later - earlier, later) for earlier, later in pairwise(times)]
        return max(pauses)[1] - moment


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster(Path(directory), options.model)
        try:
            cluster.start(1, 3, wait=False).wait_ready(num_nodes=4, timeout_s=240)
            clean = [_ask(cluster, place) for place in range(options.streams)]
            for stream in clean:
                stream.join()
            rows = [
                _measure(cluster, clean, signal.SIGKILL, options.kills),
                _measure(cluster, clean, signal.SIGSTOP, options.stops),
            ]
        finally:
            cluster.kill_all()
    about = {"machine": platform.platform(), "cpus": os.cpu_count(), "model": options.model.name}
    report(options, "survival", rows, unit="ms", about=about)


def _measure(cluster: Cluster, clean: list[Stream], number: signal.Signals, times: int) -> dict[str, Any]:
    waits: list[float] = []
    num_streams = num_equal = num_failed = num_faults = 0
    while num_faults < times:
        _wait_for_pairs(cluster)
        streams = [_ask(cluster, place) for place in range(len(clean))]
        wait_until(lambda: all(len(each.reply.ids) >= 10 or not each.is_alive() for each in streams), "tokens", 30)  # noqa: B023
        victim, held = _busiest(cluster, streams)
        if victim is not None:
            process = cluster.processes[victim]
            moment = time.perf_counter()
            process.send_signal(number)
            num_faults += 1
        for stream in streams:
            stream.join()
        if victim is None:
            continue
        num_streams += len(held)
        num_failed += sum(stream.reply.error is not None for stream in held)
        num_equal += sum(stream.reply.ids == clean[streams.index(stream)].reply.ids for stream in held)
        waits += [stream.wait_after(moment) for stream in held if stream.reply.error is None]
        if number is signal.SIGKILL:
            process.wait(10)
            cluster.start_node("decode", victim)
        else:
            process.send_signal(signal.SIGCONT)
    cuts = statistics.quantiles(waits, n=100, method="inclusive")
    return {
        "signal": number.name,
        "faults": num_faults,
        "streams": num_streams,
        "failed": num_failed,
        "equal": num_equal,
        "p50_ms": round(1000 * cuts[49], 1),
        "p99_ms": round(1000 * cuts[98], 1),
        "max_ms": round(1000 * max(waits), 1),
    }


def _ask(cluster: Cluster, place: int) -> Stream:
    prompt = TEXT + " ".join(["args"] * (1 + 7 * place))
    return Stream(cluster, prompt)


def _busiest(cluster: Cluster, streams: list[Stream]) -> tuple[str | None, list[Stream]]:
    """Return the decode node with most of these streams, and its streams that are far from their end."""
    held: dict[str, list[Stream]] = {}
    for name, books in cluster.ledger()["nodes"].items():
        if name.startswith("decode") and books is not None:
            rids = {unit.rpartition("/")[0] for unit in books["requests"]}
            held[name] = [each for each in streams if each.reply.rid in rids and len(each.reply.ids) < MAX_TOKENS // 2]
    name = max(held, key=lambda each: len(held[each]))
    return (name, held[name]) if held[name] else (None, [])


def _wait_for_pairs(cluster: Cluster) -> None:
    def two_are_ready() -> bool:
        pairs = cluster.get("/debug/nodes")[1]["pairs"]
        return sum(pair["state"] == "ready" for pair in pairs) >= 2

    wait_until(two_are_ready, "two pairs are ready", 120)


def _options() -> argparse.Namespace:
    parser = flags(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--streams", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
