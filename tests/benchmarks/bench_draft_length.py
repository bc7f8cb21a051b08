"""Simulate decode nodes that choose their draft length, and compare them with the best fixed length.

    python tests/benchmarks/bench_draft_length.py [--seeds 6]

The nodes are those of support/oracles/adaptive_world.py: their rounds take given times, and their drafts are right with
given chances. Each of five machines runs 1, 8 and 32 streams with five chances and two spreads of measured times. Its
first 256 tokens and the 512 after them are compared with a node without drafts (1.0) and with the best fixed length.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [*map(str, (Path(__file__).parents[1] / "support").glob("*"))]

from adaptive_world import Machine, World

MACHINES = {
    "waits for weights": Machine(1.0, 0.15, 0.001, call=0.3, row_missed=0.005),
    "CPU": Machine(4.0, 0.75, 0.2, call=1.0, row_missed=0.25),
    "small model": Machine(1.0, 0.25, 0.02, call=3.0, row_missed=0.02),
    "the node's own work is most": Machine(1.0, 0.5, 0.01, call=3.0, row_missed=0.02, beside=2.5),
    "8B with EAGLE-3": Machine(4.4, 0.25, 0.05, call=0.6, row_missed=0.02),
}
BATCHES, CHANCES, SPREADS = (1, 8, 32), (0.0, 0.2, 0.4, 0.6, 0.8), (0.02, 0.15)


class Result(NamedTuple):
    """The speeds of one node."""

    first: float  # over no drafts
    later: float
    best: float  # of the best fixed length, over no drafts


def simulate(machine: Machine, batch: int, chance: float, seed: int) -> Result:
    world = World(machine, lambda stream, token: chance, batch, length=256, seed=seed)
    first, later = world.run(256), world.run(512)
    plain = machine.seconds(batch, 0)
    speeds = [sum(chance**i for i in range(k + 1)) * plain / machine.seconds(batch, k) for k in range(6)]
    return Result(first, later, max(speeds))


def table(results: dict[float, Sequence[Result]]) -> str:
    """Return rows of Markdown, one per spread of times."""
    lines = ["| spread | first 256 tokens, worst | 1 % | below 0.98 | of the best | later, of the best |"]
    lines.append("|---|---|---|---|---|---|")
    for spread, found in results.items():
        firsts = sorted(each.first for each in found)
        below = sum(first < 0.98 for first in firsts) / len(firsts)
        shares = [statistics.mean(speed / each.best for speed, each in zip(speeds, found, strict=True))
                  for speeds in ([each.first for each in found], [each.later for each in found])]  # fmt: skip
        lines.append(
            f"| {spread:.0%} | {firsts[0]:.3f} | {firsts[len(firsts) // 100]:.3f} | {below:.1%} | {shares[0]:.3f} "
            f"| {shares[1]:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    results: dict[float, Sequence[Result]] = {}
    for spread in SPREADS:
        cases = itertools.product(MACHINES.values(), BATCHES, CHANCES, range(options.seeds))
        results[spread] = [
            simulate(replace(machine, noise=spread, pauses=0.01), batch, chance, seed)
            for machine, batch, chance, seed in cases
        ]
    print(table(results))


if __name__ == "__main__":
    main()
