"""Measure rounds of sequences whose text a grammar binds, beside rounds of free ones, on one GPU.

    python tests/benchmarks/synthetic.py llama-3.1-8b models/8b --planted --acceptance 0.8
    python tests/benchmarks/engine_times/bench_grammar.py --model models/8b --draft-model models/8b/eagle3-0.8
        [--streams 32]

The tokens of a planted model get texts for it: ` t17` and the like. Where the low digit, which goes up with each token,
begins or ends a cycle (planted_text.py), `{"text":"` or `"},` stands beside it. So every planted text is a list of JSON
objects, but for its beginning, as the grammar demands. Drafts are then right as often as without the grammar, and the
texts are compared with the known ones. Free and bound rounds take turns. Prints their times, how long the host fills
the masks of a round from the drafts on, and in how many rounds the device waited for them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_paths  # noqa: F401
from bench_sequences import run_rounds, start, stop
from harness import flags, report
from planted_text import PlantedText

from baton.decode_node.config import DecodeConfig
from baton.engine.engine import Engine
from baton.engine.pace.draft_length import DraftShape
from baton.engine.rounds.device_executor import DeviceExecutor, executor_of
from baton.engine.rounds.rounds import Rounds, RoundStats
from baton.engine.sampling.state import SamplingState
from baton.engine.startup import load_engine
from baton.engine.work import Masking
from baton.metadata.config import ProcessConfig
from baton.metadata.logs import setup_logging
from baton.metadata.wire.request import SamplingParams

GRAMMAR = r"""
start: REST? item*
item: "{\"text\":\"" REST
REST: /[^"\\\x00-\x1f]*"},/
"""
FREE = SamplingParams(max_tokens=1 << 16, temperature=0.0)
BOUND = SamplingParams(max_tokens=1 << 16, temperature=0.0, grammar=GRAMMAR)


class Point(NamedTuple):
    """Rounds of one number of sequences and drafts."""

    streams: int
    steps: int  # drafts of a round
    free_ms: float  # of a round
    bound_ms: float
    fill_ms: Sequence[float]  # of each bound round
    late: float  # share of the bound rounds
    num_checked: int  # tokens that were compared with the known text


class NotedStats(RoundStats):
    """Keeps what the masks of each round cost."""

    def __init__(self, num_steps: int) -> None:
        super().__init__([0] * num_steps)
        self.noted: list[Masking] = []

    def count_masks(self, masking: Masking | None) -> None:
        super().count_masks(masking)
        if masking is not None:
            self.noted.append(masking)


def row_of(point: Point) -> dict[str, Any]:
    """Return the point's row of the table."""
    p50, p99 = np.percentile(point.fill_ms, [50, 99]).tolist()
    row = {"streams": point.streams, "drafts": point.steps, "free": point.free_ms, "bound": point.bound_ms}
    row |= {"bound, of free": point.free_ms / point.bound_ms, "masks p50": p50, "masks p99": p99}
    return row | {"late": f"{point.late:.0%}"}


def with_texts(model: Path, directory: Path) -> Path:
    """Return a copy of a planted model, by links, whose tokens are parts of JSON objects."""
    for each in model.iterdir():
        if each.name not in ("tokenizer.json", "config.json"):
            (directory / each.name).symlink_to(each.resolve())
    config = json.loads((model / "config.json").read_text())
    config["eos_token_id"] = write_words(directory / "tokenizer.json", config["vocab_size"])
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_words(path: Path, vocab_size: int) -> int:
    """Write a byte-level tokenizer whose token i is the text ` ti`, with what begins or ends an object around it. Some
    ids that no planted text has are the bytes, without which no tokenizer is, and one more, which is returned, ends a
    text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    text = PlantedText(vocab_size)
    *free, end = np.flatnonzero(text.raw_codes >= text.num_codes)[:257].tolist()
    begins, ends = (text.low == low for low in (0, text.base - 1))
    words = {
        token: ('{"text":"' if begins[token] else "") + f"Ġt{token}" + ('"},' if ends[token] else "")
        for token in range(vocab_size)
    }
    words |= dict(zip(free, sorted(pre_tokenizers.ByteLevel.alphabet()), strict=True))
    tokenizer = Tokenizer(models.BPE(vocab={word: token for token, word in words.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(path), pretty=False)
    return end


def measure(engine: Engine, executor: DeviceExecutor, streams: int, shape: DraftShape, num_rounds: int) -> Point:
    """Time rounds of `streams` sequences, free and bound in turn."""
    stats = NotedStats(executor.shape.num_steps)
    rounds = Rounds(executor)
    rounds.stats = stats
    times: list[tuple[SamplingParams, list[float]]] = [(FREE, []), (BOUND, [])]
    num_checked = 0
    for turn in range(3):
        for params, seconds in times:
            room = (num_rounds + 16) * shape.num_slots
            sequences = start(engine, rounds, streams, room, seed=turn, params=params)
            run_rounds(rounds, sequences, shape, 8)
            seconds.append(run_rounds(rounds, sequences, shape, num_rounds))
            assert all(len(each.token_ids) - each.prompt_len >= num_rounds for each in sequences), "a grammar broke"
            num_checked += stop(engine, rounds, sequences)
    free, bound = (statistics.median(each) * 1e3 for _, each in times)
    fills = [each.fill_s * 1e3 for each in stats.noted]
    late = sum(each.is_late for each in stats.noted) / len(stats.noted)
    return Point(streams, shape.num_steps, free, bound, fills, late, num_checked)


def main() -> None:
    options = _options()
    setup_logging(ProcessConfig(), "bench")
    with tempfile.TemporaryDirectory() as directory:
        model = with_texts(Path(options.model), Path(directory))
        config: dict[str, Any] = {"model": str(model), "device": options.device, "load_format": options.load_format}
        if options.draft_model:
            config |= {"speculative": "eagle3", "draft_model": options.draft_model}
        engine = load_engine(DecodeConfig(**config, num_pages=options.num_pages))
        executor = executor_of(engine, max(options.streams))
        executor.warm_up()
        begun = time.monotonic()
        executor.expect(GRAMMAR)
        engine.grammars.matcher(SamplingState(BOUND, [0], vocab_size=engine.card.vocab_size))
        compile_ms = (time.monotonic() - begun) * 1e3
        device = torch.cuda.get_device_name() if engine.device.type == "cuda" else "CPU"
        print(f"{device}, {engine.card.vocab_size} tokens; the grammar is ready after {compile_ms:.1f} ms")
        points = [
            measure(engine, executor, streams, executor.shape.with_steps(steps), options.rounds)
            for streams in options.streams
            for steps in sorted({0, executor.shape.num_steps})
        ]
        about = {"compile_ms": compile_ms, "checked_tokens": sum(point.num_checked for point in points)}
        report(options, "grammars", map(row_of, points), unit="ms", about=about)


def _options() -> argparse.Namespace:
    parser = flags(__doc__, rounds=48)
    parser.add_argument("--model", required=True, help="its directory; planted")
    parser.add_argument("--draft-model", help="an EAGLE-3 head of it (default: none)")
    parser.add_argument("--load-format", default="safetensors", help="planted:maker: the model has no files of weights")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--num-pages", type=int, help="(default: what fits)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
