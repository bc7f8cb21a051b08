"""Two clusters of real processes side by side, one with speculation off: which is faster over HTTP.

Imported by bench_speculation.py, which puts tests/support on the path.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench_serve import complete_all
from cluster import Cluster
from timed_pair import Case, Differences, Judge, Run, params

from baton.deploy.bench.client import Reply, Target, ask, open_session
from baton.deploy.bench.sender import run_on_uvloop

MODES = ("off", "adaptive")
_FIELDS = {"ignore_eos": True, "return_token_ids": True, "stream_options": None}


def measure_http(
    case: Case,
    judge: Judge,
    prompts: list[list[int]],
    long_prompts: list[list[int]],
    streams: Sequence[int],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Measure greedy tokens per second with prefill and router included, and when the first chunks of a stream come."""
    machine = ["--device", options.device, "--dtype", options.dtype, "--threads", str(options.threads)]
    drafts = [part for name, value in case.settings.items() for part in ("--" + name.replace("_", "-"), str(value))]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clusters: dict[str, Cluster] = {}
        for mode, flags in zip(MODES, ([], drafts), strict=True):
            (directory / mode).mkdir()
            clusters[mode] = Cluster(directory / mode, case.model)
            clusters[mode].gpu_share = 0.35  # beside the other cluster and the judge's engine
            stack.callback(clusters[mode].kill_all)  # how clusters stop is the tests' business
            clusters[mode].start(node_flags=machine + flags)
        speed = [_speed(clusters, judge, prompts, num_streams, options) for num_streams in streams]
        chunks = {mode: _chunk_times(clusters[mode], long_prompts) for mode in MODES}
    differences = Differences.sum(row.pop("differences") for row in speed)
    return {"drafter": case.name, "speed": speed, "chunks": chunks, "differences": differences._asdict()}


def _speed(
    clusters: dict[str, Cluster], judge: Judge, prompts: list[list[int]], num_streams: int, options: argparse.Namespace
) -> dict[str, Any]:
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    parts: list[Differences] = []
    each = [params(options.tokens)] * num_streams
    for index in range(options.rounds + 1):  # the first one warms up
        chosen = [prompts[(index * num_streams + i) % len(prompts)] for i in range(num_streams)]
        runs: dict[str, Run] = {}
        for mode in MODES if index % 2 else MODES[::-1]:
            seconds, outputs = complete_all(clusters[mode], chosen, max_tokens=options.tokens, temperature=0)
            runs[mode] = Run(outputs, [], seconds)
        parts.append(judge.compare(chosen, each, runs["adaptive"], runs["off"]))
        if index:
            for mode in MODES:
                rates[mode].append(num_streams * options.tokens / runs[mode].seconds)
    ratios = [a / b for a, b in zip(rates["adaptive"], rates["off"], strict=True)]
    return {
        "streams": num_streams,
        "tokens_per_s": {mode: statistics.median(rates[mode]) for mode in MODES},
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "differences": Differences.sum(parts),
    }


def _chunk_times(cluster: Cluster, prompts: list[list[int]]) -> dict[str, float]:
    """Return medians in milliseconds of streams that run alone."""
    times = [_arrivals(cluster, prompt) for prompt in prompts]
    return {
        "first": 1e3 * statistics.median(each[0] for each in times),
        "first_to_second": 1e3 * statistics.median(each[1] - each[0] for each in times),
        "later": 1e3 * statistics.median(b - a for each in times for a, b in pairwise(each[1:])),
    }


def _arrivals(cluster: Cluster, prompt: list[int]) -> list[float]:
    """Return the seconds from the request to each chunk with tokens."""
    target = Target(f"http://127.0.0.1:{cluster.http_port}", cluster.model_name, fields=_FIELDS)

    async def run() -> Reply:
        async with open_session(target, timeout_s=60.0) as session:
            return await ask(session, target, prompt, 32)

    reply = run_on_uvloop(run())
    assert reply.error is None, reply.message
    return [at - reply.sent_s for at in reply.times]
