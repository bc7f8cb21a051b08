"""Run the fuzz targets for a long time: `python tests/fuzz/run.py --minutes 20 [--target server] [--seed 0]`.

Each target in turn gets inputs for a second, each input from its own seed, and now and then a new life. If a target
crashes, the program prints its name and the seed, and exits with status 1. `--target NAME --seed N --minutes 0` repeats
that input alone.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path[:0] = [*map(str, (Path(__file__).parents[1] / "support").glob("*")), str(Path(__file__).parent)]

from test_fuzz import TARGETS  # noqa: E402 - found by the line above

LIFE = 20_000  # inputs that one target takes before it is closed, checked and made anew
SLICE_S = 1.0


@dataclass
class Tally:
    """The results of one target."""

    inputs: int = 0
    accepted: int = 0
    lives: int = 0
    crashes: int = 0
    grown: int = 0  # bytes of this process while the target ran


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    names = args.target or list(TARGETS)
    runs = {name: Run(name, args.seed) for name in names}
    end = time.monotonic() + 60 * args.minutes
    while True:
        for run in runs.values():
            run.go(SLICE_S if args.minutes else 0.0)
        if time.monotonic() >= end:
            break
    for run in runs.values():
        run.renew()
    print(f"{'target':<12}{'inputs':>10}{'accepted':>10}{'lives':>7}{'crashes':>9}{'MiB grown':>11}")
    for name, run in runs.items():
        tally = run.tally
        print(
            f"{name:<12}{tally.inputs:>10}{tally.accepted:>10}{tally.lives:>7}{tally.crashes:>9}"
            f"{tally.grown / 2**20:>11.1f}"
        )
    return int(any(run.tally.crashes for run in runs.values()))


class Run:
    """One target, its seeds and its tally."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed, self.tally = name, seed, Tally()
        self.target = TARGETS[name]()
        self.age = 0

    def go(self, seconds: float) -> None:
        """Feed the target for a while, at least once."""
        process, until = psutil.Process(), time.monotonic() + seconds
        before = process.memory_info().rss
        while True:
            self._guard(lambda: self.target.feed(random.Random(self.seed)))
            self.seed += 1
            self.tally.inputs += 1
            self.age += 1
            if self.age >= LIFE:
                self.renew()
            if time.monotonic() >= until:
                break
        self.tally.grown += process.memory_info().rss - before

    def renew(self) -> None:
        """End the target's life, check that it leaves nothing behind, and begin a new one."""
        self._guard(self.target.close)
        self.tally.accepted += self.target.num_accepted
        self.tally.lives += 1
        self.target, self.age = TARGETS[self.name](), 0

    def _guard(self, action) -> None:
        try:
            action()
        except Exception:
            self.tally.crashes += 1
            print(f"CRASH of {self.name}, seed {self.seed}, input {self.age} of its life", flush=True)
            traceback.print_exc()
            self.target, self.age = TARGETS[self.name](), 0


if __name__ == "__main__":
    sys.exit(main())
