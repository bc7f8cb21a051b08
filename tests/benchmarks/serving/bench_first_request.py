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
from bench_router import Stream, completion
from bench_system import count_wrong, tokens_of
from harness import flags, report

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


async def run(options: argparse.Namespace) -> tuple[list[Stream], list[Window]]:
    """Run the streams and the requests beside them. The streams are as far as they came when the last request ended."""
    config = json.loads((options.model / "config.json").read_text())
    context_len = config["max_position_embeddings"]
    loop = asyncio.get_running_loop()

    async def ask(prompt: list[int], num_tokens: int, fields: dict[str, Any]) -> tuple[Any, Stream]:
        common = {"model": options.model_name, "prompt": prompt, "max_tokens": num_tokens}
        request = completion(common | {"ignore_eos": True, "return_token_ids": True} | fields)
        return await loop.create_connection(lambda: Stream(request), "127.0.0.1", options.port)

    prompts = [_prompt(index, options) for index in range(options.streams)]
    num_tokens = min(_MOST_TOKENS, context_len - options.prompt_len)
    others = [await ask(prompt, num_tokens, {"temperature": 0}) for prompt in prompts]
    await asyncio.sleep(4 * _REST_S)
    windows: list[Window] = []
    try:
        for index, kind in enumerate([kind for kind in options.kinds for _ in range(options.times)]):
            start_s = perf_counter()
            fields = KINDS[kind] | ({"ignore_eos": False} if kind in ("regex", "JSON") else {})
            transport, stream = await ask(_prompt(options.streams + index, options), options.tokens, fields)
            try:
                await asyncio.wait_for(stream.done, 120)
            except RuntimeError as error:
                print(f"{kind} is left out: {error}", file=sys.stderr)
                continue
            finally:
                transport.close()
            windows.append(Window(kind, start_s, perf_counter()))
            await asyncio.sleep(_REST_S)
        for _, stream in others:
            if stream.done.done():
                stream.done.result()
                sys.exit("a stream ended before the last request: use a model with a longer context, or fewer --kinds")
    finally:
        for transport, stream in others:
            stream.done.cancel()  # nobody waits for its end
            transport.close()
    return [stream for _, stream in others], windows


def _prompt(index: int, options: argparse.Namespace) -> list[int]:
    return [7 + (index + place) % 200 for place in range(options.prompt_len)]


def main() -> None:
    options = _options()
    gc.disable()  # a collection would hold up all streams, and the figures would blame Baton
    streams, windows = asyncio.run(run(options))
    outputs = [tokens_of(stream) for stream in streams]
    found = rows([[at for at, ids in output if ids] for output in outputs], windows)
    report(options, "first-request", found, unit="ms")
    config = json.loads((options.model / "config.json").read_text())
    if config.get("_planted"):
        prompts = [_prompt(index, options) for index in range(options.streams)]
        lens = [sum(len(ids) for _, ids in output) for output in outputs]
        wrong = sum(
            count_wrong([prompt], [output], num_tokens, config["vocab_size"])
            for prompt, output, num_tokens in zip(prompts, outputs, lens, strict=True)
        )
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
