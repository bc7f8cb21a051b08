"""Measure the gap that the first request of each kind of sampling causes in greedy streams that run beside it.

    baton up --model models/8b ...                                                # in another terminal, just started
    python tests/benchmarks/serving/bench_first_request.py --model models/8b --streams 32

Whatever a node or the router prepares when it first meets a kind (a kernel to compile, a graph to capture, memory to
allocate, a package to import) holds up all streams. So the router and the nodes must be new. Greedy streams run first;
then each kind is asked `--times` times, one request at a time. Greedy comes before all others: its gap is that of a
handoff alone.

    step      median time between two reads of a stream in the half second after each request, milliseconds
    first     largest gap of any stream from the sending of the first request of the kind to the end of its answer
    later     the same for the other requests of the kind

A kind that the router refuses is left out: the tokenizer of synthetic.py takes no grammar. With a planted model
(synthetic.py --planted) the text of every stream is compared with the known one; the exit status is 1 if one differs.
All figures go to --json FILE.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_paths  # noqa: F401
from bench_system import count_wrong
from harness import flags, report

from baton.deploy.bench.client import Reply, Target, ask, open_session
from baton.deploy.bench.sender import run_on_uvloop

_REST_S = 0.5  # between two requests
_SETTLED_S = 0.1  # of it, after which only the streams run
_MOST_TOKENS = 12_000  # of a stream
_SAMPLED = {"temperature": 0.8, "seed": 7}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": _SAMPLED,
    "top_p": _SAMPLED | {"top_p": 0.9},
    "top_k": _SAMPLED | {"top_k": 50},
    "min_p": _SAMPLED | {"min_p": 0.05},
    "penalties": _SAMPLED | {"top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "logit_bias": {"temperature": 0, "logit_bias": {"11": -100}},
    "min_tokens": {"temperature": 0, "min_tokens": 8},
    "logprobs": {"temperature": 0, "logprobs": 5},
    "n = 4": _SAMPLED | {"n": 4},
    "regex": _SAMPLED | {"structured_outputs": {"regex": "[a-z0-9 ]+"}},
    "JSON": _SAMPLED | {"response_format": {"type": "json_object"}},
}


class Window(NamedTuple):
    """The time of one request beside the streams, in seconds of `time.perf_counter`."""

    kind: str
    start_s: float
    end_s: float


def largest_gap_s(reads: Sequence[Sequence[float]], start_s: float, end_s: float) -> float:
    """Return the largest time between two reads of a stream that overlaps a window. `reads`: the times of each stream's
    reads, in order."""
    return max((b - a for times in reads for a, b in pairwise(times) if b > start_s and a < end_s), default=0.0)


def step_s(reads: Sequence[Sequence[float]], windows: Sequence[Window]) -> float:
    """Return the median time between two reads of a stream in the rests after the windows."""
    gaps = [
        b - a
        for window in windows
        for times in reads
        for a, b in pairwise(times)
        if window.end_s + _SETTLED_S <= a and b <= window.end_s + _REST_S
    ]
    return statistics.median(gaps)


def rows(reads: Sequence[Sequence[float]], windows: Sequence[Window]) -> list[dict[str, Any]]:
    """Return the gaps of each kind in milliseconds, and those of the first request in steps."""
    found: list[dict[str, Any]] = []
    for kind in dict.fromkeys(window.kind for window in windows):
        those = [window for window in windows if window.kind == kind]
        gaps = [largest_gap_s(reads, each.start_s, each.end_s) for each in those]
        step = step_s(reads, those)
        figures = {"first_ms": gaps[0] * 1e3, "later_ms": max(gaps[1:], default=0.0) * 1e3, "steps": gaps[0] / step}
        found.append({"kind": kind, "step_ms": step * 1e3} | figures)
    return found


async def run(options: argparse.Namespace) -> tuple[list[Reply], list[Window]]:
    """Run the streams and the requests beside them. The streams are as far as they came when the last request ended."""
    config = json.loads((options.model / "config.json").read_text())
    url, common = f"http://127.0.0.1:{options.port}", {"ignore_eos": True, "return_token_ids": True}
    target = Target(url, options.model_name, fields=common)
    num_tokens = min(_MOST_TOKENS, config["max_position_embeddings"] - options.prompt_len)
    replies, windows = [Reply() for _ in range(options.streams)], list[Window]()
    async with open_session(target) as session, asyncio.TaskGroup() as tasks:
        others = [
            tasks.create_task(ask(session, target, _prompt(index, options), num_tokens, reply))
            for index, reply in enumerate(replies)
        ]
        await asyncio.sleep(4 * _REST_S)
        for index, kind in enumerate([kind for kind in options.kinds for _ in range(options.times)]):
            start_s = perf_counter()
            fields = common | KINDS[kind] | ({"ignore_eos": False} if kind in ("regex", "JSON") else {})
            asked = Target(url, options.model_name, fields={"temperature": None, **fields})
            reply = await ask(session, asked, _prompt(options.streams + index, options), options.tokens)
            if reply.error is not None:
                print(f"{kind} is left out, {reply.error}: {reply.message}", file=sys.stderr)
                continue
            windows.append(Window(kind, start_s, perf_counter()))
            await asyncio.sleep(_REST_S)
        if any(other.done() for other in others):
            sys.exit("a stream ended before the last request: use a model with a longer context, or fewer --kinds")
        for other in others:
            other.cancel()
    return replies, windows


def _prompt(index: int, options: argparse.Namespace) -> list[int]:
    return [7 + (index + place) % 200 for place in range(options.prompt_len)]


def main() -> None:
    options = _options()
    gc.disable()  # a collection would hold up all streams, and the figures would blame Baton
    replies, windows = run_on_uvloop(run(options))
    found = rows([reply.times for reply in replies], windows)
    report(options, "first-request", found, unit="ms")
    config = json.loads((options.model / "config.json").read_text())
    if config.get("_planted"):
        prompts = [_prompt(index, options) for index in range(options.streams)]
        outputs = [reply.ids for reply in replies]
        lens, wrong = list(map(len, outputs)), count_wrong(prompts, outputs, config["vocab_size"])
        print(f"{sum(lens)} tokens of {len(lens)} streams compared with the planted text, {wrong} streams differ")
        sys.exit(wrong > 0)


def _options() -> argparse.Namespace:
    parser = flags(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="its directory")
    parser.add_argument("--model-name", help="under which the router serves it (default: the directory's name)")
    parser.add_argument("--port", type=int, default=8000, help="of the router")
    parser.add_argument("--streams", type=int, default=32, help="greedy streams, whose gaps are measured")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="that each request beside the streams asks for")
    parser.add_argument("--times", type=int, default=2, help="that each kind is asked")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    options = parser.parse_args()
    for name in ("streams", "prompt_len", "tokens", "times"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; use 1 or more")
    options.model_name = options.model_name or options.model.resolve().name
    return options


if __name__ == "__main__":
    main()
