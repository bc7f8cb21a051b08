"""Simulate decode nodes that choose their draft length, and compare them with the best fixed length.

    python tests/benchmarks/engine_times/bench_draft_length.py [--seeds 6]

The nodes are those of support/oracles/adaptive_world.py: their rounds take given times, and their drafts are right with
given chances. Each of five machines runs 1, 8 and 32 streams with five chances and two spreads of measured times. Its
first 256 tokens and the 512 after them are compared with a node without drafts (1.0) and with the best fixed length.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_paths  # noqa: F401
from adaptive_world import Machine, World
from harness import flags, report

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
    return Result(first, later, machine.best_speed(batch, chance))


def row_of(spread: float, found: Sequence[Result]) -> dict[str, Any]:
    """Return the row of all nodes whose measured times spread so."""
    firsts = sorted(each.first for each in found)
    return {
        "spread": f"{spread:.0%}",
        "first 256 tokens, worst": firsts[0],
        "1 %": firsts[len(firsts) // 100],
        "below 0.98": f"{sum(first < 0.98 for first in firsts) / len(firsts):.1%}",
        "of the best": statistics.mean(each.first / each.best for each in found),
        "later, of the best": statistics.mean(each.later / each.best for each in found),
    }


def rows(num_seeds: int) -> Iterator[dict[str, Any]]:
    for spread in SPREADS:
        cases = itertools.product(MACHINES.values(), BATCHES, CHANCES, range(num_seeds))
        found = [
            simulate(replace(machine, noise=spread, pauses=0.01), batch, chance, seed)
            for machine, batch, chance, seed in cases
        ]
        yield row_of(spread, found)


if __name__ == "__main__":
    parser = flags(__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    report(options, "draft-length", rows(options.seeds), unit="of no drafts")
