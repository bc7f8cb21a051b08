"""Compare the simulation behind `baton plan` with real runs on two H200, and predict what was not run.

    python tests/benchmarks/bench_plan.py [--seeds 40] [--times FILE]

The real runs are one prefill and one decode node with 8B at 07ddb82, measured from outside: Poisson arrivals for 10
seconds, one run per rate. Which arrivals they drew is not known, so each rate is simulated with several seeds: the
error is that of the median run, and the range holds nine of ten runs. The real goodput is known by bounds alone, which
follow from the percentiles. The predictions are for arrivals during ten minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from baton.deploy.simulation.cluster import ClusterShape, simulate
from baton.deploy.simulation.figures import Slo, percentile, summary
from baton.deploy.simulation.times import Times, find, read
from baton.deploy.simulation.traffic import poisson

NAME = "llama-3.1-8b-h200"
SECONDS, MAX_RUNNING = 10.0, 256  # of the real runs
SLO = Slo(200, 12)
SLOS = (SLO, Slo(500, 8), Slo(1000, 15))
SHAPES = (ClusterShape(1, 1, "never"), ClusterShape(1, 1, "auto"), ClusterShape(0, 2, "always"))


class Load(NamedTuple):
    """Requests of one kind."""

    prompt_len: int
    num_tokens: int
    rate: float

    @property
    def name(self) -> str:
        return f"{self.prompt_len:,} + {self.num_tokens}, {self.rate:g}/s"


class Measured(NamedTuple):
    """A real run, in milliseconds."""

    load: Load
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float

    @property
    def good_share(self) -> tuple[float, float]:
        """Bounds of the share of requests that keep SLO, from the percentiles of ttft. All kept the bound on tpot."""
        assert self.tpot_p99 <= SLO.tpot_ms, self
        low = 0.99 if self.ttft_p99 <= SLO.ttft_ms else 0.5 if self.ttft_p50 <= SLO.ttft_ms else 0.0
        high = 1.0 if self.ttft_p99 <= SLO.ttft_ms else 0.99 if self.ttft_p50 <= SLO.ttft_ms else 0.5
        return low, high


MEASURED = (
    Measured(Load(4096, 256, 2), 102, 194, 4.7, 4.9),
    Measured(Load(4096, 256, 4), 103, 260, 5.0, 5.4),
    Measured(Load(4096, 256, 6), 189, 751, 5.9, 6.2),
    Measured(Load(4096, 256, 8), 280, 533, 5.7, 6.2),
    Measured(Load(4096, 256, 10), 463, 1055, 6.4, 6.7),
    Measured(Load(1024, 512, 8), 32, 73, 5.5, 5.5),
    Measured(Load(1024, 512, 16), 38, 80, 7.8, 8.9),
    Measured(Load(1024, 512, 24), 50, 197, 9.8, 10.5),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of several simulated runs."""

    low: float  # nine of ten runs lie between low and high
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Cell:
        ordered = sorted(values)
        return cls(*(percentile(ordered, percent) for percent in (5, 50, 95)))

    def error(self, measured: float) -> float:
        """Return by how much the median differs, as a share of the measured value."""
        return self.middle / measured - 1

    def words(self, measured: float, digits: int) -> str:
        return (
            f"{measured:,.{digits}f} / {self.middle:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f}): "
            f"{self.error(measured):+.0%}"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """A real run beside simulated ones."""

    measured: Measured
    ttft_p50: Cell
    ttft_p99: Cell
    tpot_p50: Cell
    tpot_p99: Cell
    good_share: Cell


def compare(times: Times, measured: Measured, num_seeds: int) -> Comparison:
    """Simulate a real run with several seeds."""
    load, rows = measured.load, []
    for seed in range(num_seeds):
        arrivals = poisson(load.rate, SECONDS, load.prompt_len, load.num_tokens, seed)
        outcome = simulate(SHAPES[0], times, arrivals, MAX_RUNNING)
        rows.append(summary(outcome.records, outcome.took_s, [SLO]))
    names = ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "good_share_200_12")
    return Comparison(measured, *(Cell.of([row[name] for row in rows]) for name in names))


def largest_errors(comparisons: Sequence[Comparison]) -> tuple[float, float]:
    """Return the largest errors of ttft p50 and tpot p99, as shares of the measured values."""
    ttft = max(abs(each.ttft_p50.error(each.measured.ttft_p50)) for each in comparisons)
    return ttft, max(abs(each.tpot_p99.error(each.measured.tpot_p99)) for each in comparisons)


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """Return Markdown; each cell holds the measured value, the simulated one with its range, and the error."""
    lines = ["| prompt + output, requests/s | ttft p50 ms | ttft p99 ms | tpot p50 ms | tpot p99 ms | good, share |"]
    lines.append("|---|---|---|---|---|---|")
    for each in comparisons:
        real, (low, high) = each.measured, each.measured.good_share
        cells = [
            real.load.name,
            each.ttft_p50.words(real.ttft_p50, 0),
            each.ttft_p99.words(real.ttft_p99, 0),
            each.tpot_p50.words(real.tpot_p50, 1),
            each.tpot_p99.words(real.tpot_p99, 1),
            f"{low:.2f} to {high:.2f} / {each.good_share.middle:.2f} ({each.good_share.low:.2f} to "
            f"{each.good_share.high:.2f})",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def prediction_table(times: Times, seconds: float) -> str:
    """Return Markdown: what three shapes of two GPUs make of the real runs' loads, simulated."""
    head = ["prompt + output, requests/s", "shape", "ttft p50 / p99 ms", "tpot p50 / p99 ms", "gap p50 / p99 ms"]
    head += [f"goodput at {slo.ttft_ms:g} / {slo.tpot_ms:g} ms" for slo in SLOS] + ["local"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for load in (each.load for each in MEASURED):
        arrivals = poisson(load.rate, seconds, load.prompt_len, load.num_tokens, seed=0)
        for shape in SHAPES:
            outcome = simulate(shape, times, arrivals, MAX_RUNNING)
            row = summary(outcome.records, outcome.took_s, SLOS)
            cells = [load.name, shape.name]
            cells += [
                f"{row[f'{name}_ms_p50']:,.1f} / {row[f'{name}_ms_p99']:,.1f}" for name in ("ttft", "tpot", "gap")
            ]
            cells += [f"{row[f'goodput_{slo.ttft_ms:g}_{slo.tpot_ms:g}']:.2f}" for slo in SLOS]
            cells.append(f"{outcome.num_local / len(arrivals):.0%}")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=Path, default=find(NAME), help="file of measured times")
    parser.add_argument("--seeds", type=int, default=40, help="simulated runs for each real one")
    parser.add_argument("--seconds", type=float, default=600.0, help="of arrivals, for the predictions")
    options = parser.parse_args()
    times = read(options.times)
    comparisons = [compare(times, measured, options.seeds) for measured in MEASURED]
    print(f"measured / simulated (nine of ten runs): error of the median\n\n{comparison_table(comparisons)}\n")
    ttft, tpot = largest_errors(comparisons)
    print(f"largest error: ttft p50 {ttft:.1%}, tpot p99 {tpot:.1%}\n")
    print(f"simulated, two GPUs, arrivals for {options.seconds:g} s\n\n{prediction_table(times, options.seconds)}")


if __name__ == "__main__":
    main()
