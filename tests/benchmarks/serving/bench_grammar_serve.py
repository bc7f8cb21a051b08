"""Measure what a grammar costs the whole system over HTTP on a CPU: the demo model's own text, free and bound.

    python tests/benchmarks/serving/bench_grammar_serve.py [--streams 1 8] [--speculative eagle] [--rounds 7]

A grammar that allows every text leaves the model's text as it is, and drafts are as right as before. So all that
differs is the work for masks. Free and bound requests take turns, and their texts are compared. Prints the ratio of
their times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_paths  # noqa: F401
from bench_serve import DEMO, TEXT, complete_all
from cluster import Cluster
from harness import alternate, flags, report
from tokenizers import Tokenizer

FIELDS = {"temperature": 0, "ignore_eos": False}
EVERY_TEXT = {"structured_outputs": {"regex": r"[\s\S]*"}}


def measure(cluster: Cluster, prompts: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of free and bound requests, which take turns."""
    texts: dict[str, list[list[int]]] = {}

    def asked(name: str, fields: dict[str, Any]) -> Callable[[int], float]:
        def seconds(number: int) -> float:
            took, texts[name] = complete_all(cluster, prompts, max_tokens=options.tokens, **fields)
            if len(texts) == 2 and texts["free"] != texts["bound"]:
                sys.exit("a grammar that allows every text changed one")
            return took

        return seconds

    # the first round compiles the grammar
    found = alternate({"free": asked("free", FIELDS), "bound": asked("bound", FIELDS | EVERY_TEXT)}, options.rounds)
    ratios = [free / bound for free, bound in zip(found["free"], found["bound"], strict=True)]
    row = {"drafter": options.speculative, "streams": len(prompts), "bound, of free": statistics.median(ratios)}
    return row | {"least": min(ratios), "most": max(ratios)}


def main() -> None:
    parser = flags(__doc__, rounds=7)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--speculative", default="none")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    node_flags = ["--threads", "1", "--speculative", options.speculative, "--no-draft-adaptive"]
    prompts = [tokenizer.encode(f"{TEXT}# {index}\n").ids for index in range(max(options.streams))]
    with tempfile.TemporaryDirectory() as directory, Cluster(Path(directory), options.model) as cluster:
        cluster.start(node_flags=node_flags)
        rows = (measure(cluster, prompts[:num_streams], options) for num_streams in options.streams)
        report(options, "grammar-serve", rows, unit="of free requests' speed")


if __name__ == "__main__":
    main()
