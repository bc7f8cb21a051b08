"""Measure goodput against offered load, with real processes and requests that arrive independently of the answers.

    python tests/benchmarks/serving/bench_overload.py [--seconds 20] [--bound-s 5] [--json FILE]

The program first measures the sustainable load: requests per second while a fixed number of clients keep all slots
busy. Then requests arrive at random times (Poisson) at multiples of it, up to ten. Goodput is the number of requests
per second that were answered in full within the bound. It is counted for `--seconds` in a steady state: arrivals begin
one bound earlier and continue to the end. All loads are measured several times, and the medians are reported, because
the speed of a machine varies. There are two curves:

    shedding    requests say how long their answer is useful (timeout_s = the bound)
    patient     they do not, and the router lets them wait (--max-queue-s 3600), up to --max-waiting

With --simulated the nodes compute nothing and take a fixed time per token; router and clients are real. Then the speed
of the machine does not matter, and loads can be compared on a shared machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import psutil

sys.path[:0] = [str(parent) for parent in Path(__file__).parents[1:3]]  # the rooms, and the fake nodes of tests/router

import shared_paths  # noqa: F401
from cluster import Cluster
from harness import flags, report

from baton.deploy.bench.client import Target, ask, open_session
from baton.deploy.bench.load import Planned, Vocabulary
from baton.deploy.bench.sender import Sender, joined, run_on_uvloop
from baton.deploy.simulation.traffic import arrival_times

MODES = {"shedding": [], "patient": ["--max-queue-s", "3600"]}


class Answer(NamedTuple):
    """One request: when it was sent and answered (seconds of this process's clock), and how it failed."""

    sent_at: float
    done_at: float
    error: str | None

    @property
    def seconds(self) -> float:
        return self.done_at - self.sent_at


def _prompt(random: Random) -> str:
    return joined(Vocabulary().draw(random, 24))


async def sustainable(target: Target, options: argparse.Namespace) -> float:
    """Return the requests per second with all slots busy and a few requests waiting."""
    random, begun = Random(1), time.perf_counter()
    window = (begun + options.bound_s, begun + options.bound_s + options.seconds)
    done_at: list[float] = []

    async def client() -> None:
        while time.perf_counter() < window[1]:
            done_at.append((await ask(session, target, _prompt(random), options.tokens)).end_s)

    async with open_session(target, timeout_s=300.0) as session:
        await asyncio.gather(*(client() for _ in range(options.slots + 4)))
    return sum(window[0] <= each < window[1] for each in done_at) / options.seconds


async def answers(target: Target, rate: float, options: argparse.Namespace, seed: int) -> tuple[float, list[Answer]]:
    """Send requests at random times and return when the first was due, and what came of all. A request gives up one
    bound after the last arrival."""
    arriving_s, random = options.bound_s + options.seconds, Random(seed)
    times = arrival_times(rate, arriving_s, seed)
    async with open_session(target, timeout_s=300.0) as session:
        sender, begun = Sender(session, target), time.perf_counter()
        task = asyncio.create_task(sender.run([Planned(at_s, _prompt(random), options.tokens) for at_s in times]))
        await asyncio.wait([task], timeout=arriving_s + options.bound_s)
        task.cancel()
        await task
    replies = [each.reply for each in sender.asked]
    return begun, [Answer(each.sent_s, each.end_s, each.error if each.end_s else "unanswered") for each in replies]


async def measure(target: Target, rate: float, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Measure one offered load. All figures but the goodput are of requests that arrived in the window."""
    begun, found = await answers(target, rate, options, seed)
    start, end = begun + options.bound_s, begun + options.bound_s + options.seconds
    arrived = [each for each in found if start <= each.sent_at < end]
    good = [each for each in found if each.error is None and each.seconds <= options.bound_s]
    done = sorted(each.seconds for each in arrived if each.error is None)
    refused = sorted(each.seconds for each in arrived if each.error == "HTTP 429")
    return {
        "offered_per_s": round(len(arrived) / options.seconds, 2),
        "goodput_per_s": round(sum(start <= each.done_at < end for each in good) / options.seconds, 2),
        "done": len(done),
        "late": sum(seconds > options.bound_s for seconds in done),
        "refused": len(refused),
        "timed_out": sum(each.error in ("HTTP 504", "error in the stream") for each in arrived),
        "unanswered": sum(each.error == "unanswered" for each in arrived),
        "other": sum(
            each.error not in (None, "HTTP 429", "HTTP 504", "error in the stream", "unanswered") for each in arrived
        ),
        "done_s_p50": _percentile(done, 50),
        "done_s_p99": _percentile(done, 99),
        "refused_s_p50": _percentile(refused, 50),
    }


def run_mode(mode: str, options: argparse.Namespace, base: float | None) -> dict[str, Any]:
    """Measure all loads on one cluster. `base`: the sustainable load in requests per second, if it is known."""
    fields: dict[str, Any] = {"ignore_eos": True, "stream_options": None}
    points: list[dict[str, Any]] = []
    with ExitStack() as stack:
        cluster = Cluster(Path(stack.enter_context(tempfile.TemporaryDirectory())), None)
        stack.callback(cluster.kill_all)  # how clusters stop is the tests' business
        cluster.node_share = cluster.gpu_share / 2
        cluster.start_router(*MODES[mode])
        if options.simulated:
            nodes = _simulated_nodes(cluster.node_address, options)
            stack.callback(nodes.kill)
        else:
            cluster.start_node("prefill", "prefill-0", "--speculative", "none")
            cluster.start_node("decode", "decode-0", "--speculative", "none", "--max-running", str(options.slots))
        cluster.wait_ready(num_nodes=2)
        if not options.simulated:
            _pin(cluster)
        target = Target(cluster.base_url, cluster.model_name, fields=fields)
        base = base or options.sustainable or run_on_uvloop(sustainable(target, options))
        if mode == "shedding":
            fields["timeout_s"] = options.bound_s
        multiples = options.multiples if mode == "shedding" else options.patient_multiples
        for place, multiple in enumerate(multiples * (options.rounds if mode == "shedding" else 1)):
            rate = multiple * base
            router = psutil.Process(cluster.processes["router"].pid)
            before, begun = sum(router.cpu_times()[:2]), time.monotonic()
            point = run_on_uvloop(measure(target, rate, options, seed=place + 2))
            busy = (sum(router.cpu_times()[:2]) - before) / (time.monotonic() - begun)
            rss = round(router.memory_info().rss / 1e6, 1)
            points.append({"multiple": multiple, **point, "router_cpu": round(busy, 3), "router_rss_mb": rss})
            print(mode, json.dumps(points[-1]), flush=True)
    medians = {
        multiple: statistics.median(point["goodput_per_s"] for point in points if point["multiple"] == multiple)
        for multiple in multiples
    }
    finished = sum(point["done"] for point in points if point["multiple"] == multiples[-1])
    late = sum(point["late"] for point in points if point["multiple"] == multiples[-1])
    return {
        "sustainable_per_s": round(base, 2),
        "goodput_per_s": medians,
        "last_of_peak": round(medians[multiples[-1]] / max(medians.values()), 3),
        "in_time_of_done_at_last": round(1 - late / finished, 3) if finished else None,
        "points": points,
    }


def _simulated_nodes(address: str, options: argparse.Namespace) -> Any:
    context = multiprocessing.get_context("spawn")
    step_s = options.service_s / options.tokens
    process = context.Process(target=simulate, args=(address, options.slots, step_s), daemon=True)
    process.start()
    return process


def simulate(address: str, num_slots: int, step_s: float) -> None:
    """Run a prefill and a decode node that compute nothing: a token takes `step_s` at any load."""
    from router.fake_nodes import FakeCluster

    cluster = FakeCluster(address, lambda prompt, choice: [300] * 512, max_running=num_slots)
    cluster.behaviour.step_s = step_s
    for role in ("prefill", "decode"):
        cluster.add(role)
    for node in cluster.nodes:
        node.join()


def _pin(cluster: Cluster) -> None:
    """Pin the nodes to one core, and the router and all clients to another.

    The nodes are then equally fast at every load.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return
    for name, pid in {**cluster.pids, "clients": 0}.items():
        core = cores[1] if name in ("router", "clients") else cores[0]
        for thread in psutil.Process(pid or os.getpid()).threads():
            os.sched_setaffinity(thread.id, {core})


def _percentile(values: list[float], percent: int) -> float | None:
    return round(statistics.quantiles(values, n=100)[percent - 1], 3) if len(values) > 1 else None


def main() -> None:
    parser = flags(__doc__, rounds=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of measurement for each load")
    parser.add_argument("--bound-s", type=float, default=5.0, help="a later answer is of no use")
    parser.add_argument("--slots", type=int, default=8, help="sequences that the decode node runs at once")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--sustainable", type=float, metavar="X", help="requests per second, if it is known already")
    parser.add_argument("--simulated", action="store_true", help="nodes that compute nothing, at a pace of their own")
    parser.add_argument("--service-s", type=float, default=0.4, help="that a simulated node takes for a request")
    parser.add_argument("--multiples", type=float, nargs="+", default=[0.5, 0.75, 1, 1.25, 1.5, 2, 3, 5, 7.5, 10])
    parser.add_argument("--patient-multiples", type=float, nargs="+", default=[1, 2, 5, 10])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    options = parser.parse_args()
    about: dict[str, Any] = {name: getattr(options, name) for name in ("seconds", "bound_s", "slots", "tokens")}
    about |= {"cpus": os.cpu_count(), "nodes": "simulated" if options.simulated else "demo model", "modes": {}}
    rows: list[dict[str, Any]] = []
    base: float | None = None
    for mode in options.modes:
        about["modes"][mode] = found = run_mode(mode, options, base)
        base = found["sustainable_per_s"]
        rows += [
            {"mode": mode, "offered, of the sustainable load": multiple, "goodput": goodput}
            for multiple, goodput in found["goodput_per_s"].items()
        ]
        print(f"{mode}: at the largest load {found['last_of_peak']} of the peak")
    report(options, "overload", rows, unit="requests/s", about=about)


if __name__ == "__main__":
    main()
