"""Measure what a grammar costs the whole system over HTTP on a CPU: the demo model's own text, free and bound.

    python tests/benchmarks/bench_grammar_serve.py [--streams 1 8] [--speculative eagle] [--rounds 7]

A grammar that allows every text leaves the model's text as it is, and drafts are as right as before. So all that
differs is the work for masks. Free and bound requests take turns, and their texts are compared. Prints the ratio of
their times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [*map(str, (Path(__file__).parents[1] / "support").glob("*")), str(Path(__file__).parent)]

from bench_serve import DEMO, TEXT, complete_all
from cluster import Cluster
from tokenizers import Tokenizer

FIELDS = {"temperature": 0, "ignore_eos": False}
EVERY_TEXT = {"structured_outputs": {"regex": r"[\s\S]*"}}


def measure(cluster: Cluster, prompts: list[list[int]], num_tokens: int, num_rounds: int) -> list[float]:
    """Return the time of free requests over that of bound ones, for each round."""
    ratios: list[float] = []
    for index in range(num_rounds + 1):
        free_s, free = complete_all(cluster, prompts, max_tokens=num_tokens, **FIELDS)
        bound_s, bound = complete_all(cluster, prompts, max_tokens=num_tokens, **FIELDS, **EVERY_TEXT)
        if free != bound:
            sys.exit("a grammar that allows every text changed one")
        if index:  # the first round compiles the grammar
            ratios.append(free_s / bound_s)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--speculative", default="none")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    flags = ["--threads", "1", "--speculative", options.speculative, "--no-draft-adaptive"]
    with tempfile.TemporaryDirectory() as directory, Cluster(Path(directory), options.model) as cluster:
        cluster.start(node_flags=flags)
        for num_streams in options.streams:
            prompts = [tokenizer.encode(f"{TEXT}# {index}\n").ids for index in range(num_streams)]
            ratios = measure(cluster, prompts, options.tokens, options.rounds)
            about = f"{options.speculative}, {num_streams} streams: bound {statistics.median(ratios):.2f} of free"
            print(f"{about}, {min(ratios):.2f} to {max(ratios):.2f}", flush=True)


if __name__ == "__main__":
    main()
