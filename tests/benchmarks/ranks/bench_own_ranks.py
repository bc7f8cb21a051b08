"""Measure rounds of two ranks with sequences of their own on two GPUs, beside rounds of one GPU.

    python tests/benchmarks/synthetic.py llama-3.1-8b models/8b --planted
    python tests/benchmarks/ranks/bench_own_ranks.py --model models/8b [--streams 64 256] [--one-gpu] [--json FILE]

Prints, for each number of streams, milliseconds per round and tokens per second of one GPU, of two ranks with half of
the streams each, and of two ranks of which one is idle. Sequences have 1024 tokens of prompt, and draft nothing. If the
model is planted, the text is compared with the known text; a difference ends the program with an error.

A round begins before the one before has been read, as nodes do it.
With `--one-gpu` both ranks share a GPU, which shows that they work and nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_paths  # noqa: F401
from bench_sequences import CHUNK, CONTEXT, check, run_rounds, start, stop
from own_ranks import OwnRanks

from baton.decode_node.config import DecodeConfig
from baton.engine.ranks.own_work_executor import OwnWorkExecutor
from baton.engine.ranks.ranked_engine import RankedEngine, executor_of
from baton.engine.rounds.draft_shape import NO_DRAFTS
from baton.engine.rounds.graphs import graph_sizes
from baton.engine.rounds.rounds import Rounds
from baton.engine.startup import load_engine
from baton.metadata.config import ProcessConfig
from baton.metadata.logs import setup_logging
from baton.metadata.wire.request import SamplingParams

PAGE_SIZE = 64
NUM_CHECKED = 16  # sequences of each kind


class Point(NamedTuple):
    """A measured kind of round."""

    kind: str
    streams: int
    round_ms: float
    num_checked: int = 0  # tokens that were compared with the known text


def table(points: Sequence[Point]) -> str:
    """Return one line per point, beside one GPU with as many streams."""
    alone = {point.streams: point for point in points if point.kind == "one GPU"}
    lines = ["| streams | | ms per round | tokens/s | of one GPU | checked tokens |", "|---|---|---|---|---|---|"]
    for kind, streams, round_ms, num_checked in points:
        ratio = alone[streams].round_ms / round_ms if streams in alone else float("nan")
        rate = 1e3 * streams / round_ms
        lines.append(f"| {streams} | {kind} | {round_ms:.2f} | {rate:.0f} | {ratio:.2f} | {num_checked} |")
    return "\n".join(lines)


def config_of(model: str, num_sequences: int, num_rounds: int) -> DecodeConfig:
    """Return a node with room for so many sequences in each pool."""
    num_pages = 2 + num_sequences * -(-(CONTEXT + num_rounds + 64) // PAGE_SIZE)
    return DecodeConfig(
        model=model,
        device="cuda",
        speculative="none",
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        max_running=num_sequences,
        transport="cuda",
    )


def of_one_gpu(model: str, streams: Sequence[int], num_rounds: int) -> list[Point]:
    engine = load_engine(config_of(model, max(streams), num_rounds))
    executor = executor_of(engine, max(streams))
    executor.warm_up()
    rounds, points = Rounds(executor), list[Point]()
    for count in streams:
        sequences = start(engine, rounds, count, num_rounds)
        seconds = run_rounds(rounds, sequences, NO_DRAFTS, num_rounds)
        points.append(Point("one GPU", count, 1e3 * seconds, stop(engine, rounds, sequences)))
    return points


def of_ranks(model: str, streams: Sequence[int], num_rounds: int, devices: list[int] | None) -> list[Point]:
    most, points = max(-(-max(streams) // 2), min(streams)), list[Point]()
    config = config_of(model, most, num_rounds)
    with RankedEngine(config, 2, num_slots=most, divides_sequences=True, devices=devices) as ranked:
        executor = OwnWorkExecutor(ranked, graph_sizes(ranked.engine.kv, most))
        executor.warm_up()
        kinds = [("two ranks", count, (count // 2, count - count // 2)) for count in streams]
        kinds.append(("two ranks, one idle", min(streams), (min(streams), 0)))
        for kind, count, of_rank in kinds:
            points.append(_rounds_of(executor, config, kind, of_rank, num_rounds))
            assert points[-1].streams == count
    return points


def _rounds_of(
    executor: OwnWorkExecutor, config: DecodeConfig, kind: str, of_rank: tuple[int, int], num_rounds: int
) -> Point:
    assert config.num_pages is not None
    world, draw = OwnRanks(executor, num_pages=config.num_pages), torch.Generator().manual_seed(sum(of_rank))
    vocab_size, sequences = executor.own.executor.vocab_size, []
    params = SamplingParams(max_tokens=num_rounds + 3, temperature=0.0)
    for number in range(max(of_rank)):
        prompts = torch.randint(0, vocab_size, (2, CONTEXT), generator=draw).tolist()
        requests = {rank: (prompts[rank], params) for rank in range(2) if number < of_rank[rank]}
        sequences += world.start(requests, chunk=CHUNK)
    world.round(0)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    submitted = world.submit(0)
    for _ in range(num_rounds - 1):
        ahead = world.submit(0)
        world.collect(submitted)
        submitted = ahead
    world.collect(submitted)
    seconds = (time.perf_counter() - begun) / num_rounds
    engine = executor.own.executor.engine
    every = max(1, len(sequences) // NUM_CHECKED)
    checked = [check(engine, each.token_ids[: each.prompt_len], each.generated) for each in sequences[::every]]
    world.run(0)  # to their ends, which gives slots and pages back
    return Point(kind, sum(of_rank), 1e3 * seconds, sum(checked))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="its directory")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=64, help="of each kind")
    parser.add_argument("--one-gpu", action="store_true", help="both ranks share a GPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    setup_logging(ProcessConfig(), "bench")
    points = of_one_gpu(options.model, options.streams, options.rounds)
    gc.collect()
    torch.cuda.empty_cache()
    points += of_ranks(options.model, options.streams, options.rounds, [0, 0] if options.one_gpu else None)
    print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {Path(options.model).name}\n")
    print(table(points))
    if options.json is not None:
        options.json.write_text(json.dumps([each._asdict() for each in points], indent=2))


if __name__ == "__main__":
    main()
