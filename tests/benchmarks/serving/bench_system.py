"""Compare the whole system on one GPU (HTTP, router, a prefill and a decode process) with the engine in this process.

    python tests/benchmarks/synthetic.py llama-3.2-1b models/1b --planted
    python tests/benchmarks/serving/bench_system.py --model models/1b [--streams 1 16 64] [--prompt-len 1024]
        [--tokens 512]
    python tests/benchmarks/serving/bench_system.py --model models/8b --speculative eagle3 \
        --draft-model models/8b/eagle3-0.8 \
        --kinds greedy top_p

All streams of a round start at once. Times to first token (ttft) and between tokens (itl) are measured by the client.
Tokens per second are those of the whole round, prompts included. `engine` is a decode step of as many sequences in this
process, measured after both nodes have ended. `share` is the part of that speed that the system keeps while all streams
generate: from the last stream's first token to the first stream's last token, if that is at least 32 tokens of each.
With a planted model every greedy token is compared with the known text; the exit status is 1 if one differs.
`--kinds` are the kinds of sampling with which the streams are asked for, one after the other. Prints a table;
all figures go to --json FILE.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_paths  # noqa: F401

# isort: split
import bench_sequences
from cluster import Cluster
from harness import heading, tables
from planted_text import PlantedText, planted_in
from sampling_kinds import KINDS

from baton.deploy.bench.client import Reply, Target, ask, open_session
from baton.deploy.bench.sender import run_on_uvloop
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.rounds.device_executor import DeviceExecutor
from baton.engine.rounds.rounds import Rounds
from baton.metadata.garbage import Garbage

PAGE_SIZE = 64
_FEWEST_STEPS = 32  # over which a speed is one
_TIMED_STEPS = 48


def main() -> None:
    options = _options()
    said = ("prompt_len", "tokens", "transport", "speculative")
    report: dict[str, Any] = {"model": options.model.name} | {name: getattr(options, name) for name in said}
    with tempfile.TemporaryDirectory() as directory, Cluster(Path(directory), options.model) as cluster:
        started = time.monotonic()
        cluster.start(node_flags=_flags(options), wait=False)
        cluster.wait_ready(num_nodes=2, timeout_s=240)
        report["ready_s"] = round(time.monotonic() - started, 1)
        points = [measure(cluster, options, kind, streams) for kind in options.kinds for streams in options.streams]
        if options.logs:
            for path in Path(directory).glob("*.log"):
                (options.logs / path.name).write_bytes(path.read_bytes()[-200_000:])
    report = heading(options.commit) | report  # asks the device, which the nodes had for themselves
    if options.device == "cuda" and options.engine:
        add_engine(options, [point for point in points if point["kind"] == "greedy"])
    for name in ("checked_tokens", "wrong_streams"):
        report[name] = sum(point[name] for point in points)
    report["system"] = points
    print(tables({"system": report}))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    if report["wrong_streams"]:
        sys.exit(f"{report['wrong_streams']} streams are not the planted text")


def _flags(options: argparse.Namespace) -> list[str]:
    num_pages = options.num_tokens // PAGE_SIZE + 1
    flags = ["--device", options.device, "--page-size", str(PAGE_SIZE), "--num-pages", str(num_pages)]
    flags += ["--max-running", str(max(options.streams))]
    flags += ["--transport", options.transport, "--speculative", options.speculative, "--context-len", "16384"]
    flags += ["--load-format", options.load_format]
    return flags if options.draft_model is None else [*flags, "--draft-model", str(options.draft_model)]


def measure(cluster: Cluster, options: argparse.Namespace, kind: str, num_streams: int) -> dict[str, Any]:
    """Return the middle one of three rounds by tokens per second. A first round warms up and is only checked."""
    rounds = [one_round(cluster, options, kind, num_streams, index) for index in range(options.rounds + 1)]
    middle = sorted(rounds[1:], key=lambda row: row["tokens_per_s"])[options.rounds // 2]
    return middle | {name: sum(row[name] for row in rounds) for name in ("checked_tokens", "wrong_streams")}


def one_round(cluster: Cluster, options: argparse.Namespace, kind: str, num_streams: int, index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * num_streams + index)
    config = json.loads((options.model / "config.json").read_text())
    vocab_size = config["vocab_size"]
    prompts = torch.randint(0, vocab_size, (num_streams, options.prompt_len), generator=generator).tolist()
    started = time.perf_counter()
    replies = run_on_uvloop(ask_all(cluster, prompts, options.tokens, kind))
    wall_s = time.perf_counter() - started
    assert all(len(reply.ids) == options.tokens for reply in replies)
    is_known = kind == "greedy" and bool(config.get("_planted"))
    num_wrong = count_wrong(prompts, [reply.ids for reply in replies], planted_in(config)) if is_known else 0
    times = [np.array(reply.id_times) for reply in replies]
    begun = max(float(each[0]) for each in times)  # from when all have their first token
    ended = min(float(each[-1]) for each in times)  # until the first has its last
    together = [np.flatnonzero((each > begun) & (each <= ended)) for each in times]
    num_together = sum(len(each) for each in together)
    ttft = sorted(float(each[0] - started) for each in times)
    gaps = np.concatenate([np.diff(each) for each in times]) * 1e3
    return {
        "kind": kind,
        "streams": num_streams,
        "tokens_per_s": num_streams * options.tokens / wall_s,
        "ttft_ms_p50": ttft[len(ttft) // 2] * 1e3,
        "ttft_ms_max": ttft[-1] * 1e3,
        "itl_ms_p50": float(np.percentile(gaps, 50)),
        "itl_ms_p99": float(np.percentile(gaps, 99)),
        "steady_tokens_per_s": num_together / (ended - begun) if ended > begun else 0.0,
        "steady_steps": num_together / num_streams,
        "steady_at": float(np.concatenate(together).mean()) if num_together else 0.0,  # of a stream's tokens
        "wrong_streams": num_wrong,
        "checked_tokens": num_streams * options.tokens if is_known else 0,
    }


async def ask_all(cluster: Cluster, prompts: Sequence[list[int]], num_tokens: int, kind: str) -> list[Reply]:
    """Send all prompts at once and return their answers. Raises RuntimeError if one fails."""
    params = {"logprobs" if name == "num_logprobs" else name: value for name, value in KINDS[kind].items()}
    fields = {"temperature": None, "stream_options": None, "ignore_eos": True, "return_token_ids": True, **params}
    target = Target(f"http://127.0.0.1:{cluster.http_port}", cluster.model_name, fields=fields)
    async with open_session(target, timeout_s=300.0) as session:
        replies = await asyncio.gather(*(ask(session, target, prompt, num_tokens) for prompt in prompts))
    if failed := [reply for reply in replies if reply.error is not None]:
        raise RuntimeError(f"a stream failed, {failed[0].error}: {failed[0].message}")
    return replies


def count_wrong(prompts: Sequence[list[int]], outputs: Sequence[list[int]], text: PlantedText) -> int:
    """Count the streams that differ from the planted text, as far as they came."""
    return sum(ids != text.continuation(prompt, len(ids)) for prompt, ids in zip(prompts, outputs, strict=True))


def add_engine(options: argparse.Namespace, points: list[dict[str, Any]]) -> None:
    """Add `engine_tokens_per_s` of a decode step in this process, and the share of it that the system keeps."""
    config = EngineConfig(
        model=str(options.model),
        device="cuda",
        page_size=PAGE_SIZE,
        num_pages=options.num_tokens // PAGE_SIZE + 1,
        context_len=16384,
        chunk_tokens=8192,
        prefix_cache=False,
        speculative="none",
        load_format=options.load_format,
    )
    engine = Engine(config)
    rounds = Rounds(DeviceExecutor(engine, max(options.streams), buckets=options.streams))
    rounds.executor.warm_up()
    Garbage()  # as a node
    for point in points:
        sequences = bench_sequences.start(engine, rounds, point["streams"], options.tokens + 4 * _TIMED_STEPS)
        shape = rounds.shape.with_steps(0)
        before = max(8, int(point["steady_at"]) - 3 * _TIMED_STEPS // 2)  # as long as the streams were
        bench_sequences.run_rounds(rounds, sequences, shape, before)
        step_s = statistics.median(bench_sequences.run_rounds(rounds, sequences, shape, _TIMED_STEPS) for _ in range(3))
        point["checked_tokens"] += bench_sequences.stop(engine, rounds, sequences)
        point["engine_step_ms"] = step_s * 1e3
        point["engine_tokens_per_s"] = point["streams"] / step_s
        if point["steady_steps"] >= _FEWEST_STEPS:
            point["share"] = point["steady_tokens_per_s"] / point["engine_tokens_per_s"]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--load-format", default="safetensors", help="dummy, or planted:maker")
    parser.add_argument("--no-engine", dest="engine", action="store_false", help="measure the system alone")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--speculative", default="none")
    parser.add_argument("--draft-model", type=Path, help="directory of the drafter")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["greedy"], help="of sampling")
    parser.add_argument("--num-tokens", type=int, default=131_072, help="KV tokens of each node's pool")
    parser.add_argument("--logs", type=Path, help="directory that takes the processes' logs")
    parser.add_argument("--commit", help="of this tree, for the report (default: what git says)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
