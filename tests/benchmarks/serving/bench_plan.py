"""Compare the simulation behind `baton plan` with real runs on two H200, and predict longer ones.

    python tests/benchmarks/serving/bench_plan.py [--times FILE]

The real runs are those of bench_shapes.py with 8B (docs/performance.md, "Two GPUs over HTTP"): a prefill and a decode
node at db407d34, and two decode nodes at d4bec8ad. bench_load.py draws arrivals from a rate and a seed, so each run is
simulated with its own arrivals. The predictions are for arrivals during ten minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import flags, report, table

from baton.deploy.simulation.cluster import ClusterShape, simulate
from baton.deploy.simulation.figures import Slo, summary
from baton.deploy.simulation.times import Times, find, read
from baton.deploy.simulation.traffic import poisson

NAME = "llama-3.1-8b-h200"
SECONDS, MAX_RUNNING = 10.0, 256  # of the real runs
SLOS = (Slo(200, 12), Slo(500, 8), Slo(1000, 15))
NEVER, AUTO, ALONE = ClusterShape(1, 1, "never"), ClusterShape(1, 1, "auto"), ClusterShape(0, 2, "always")


class Load(NamedTuple):
    """Requests of one kind, and the seed from which bench_load.py draws their arrivals."""

    prompt_len: int
    num_tokens: int
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.prompt_len:,} + {self.num_tokens}, {self.rate:g}/s"


class Measured(NamedTuple):
    """A run, real or simulated. Times in milliseconds."""

    shape: ClusterShape
    load: Load
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    good: tuple[float, ...]  # shares of the requests that keep each of SLOS


MEASURED = (
    Measured(NEVER, Load(4096, 256, 2, 800), 104.7, 243.7, 4.76, 5.00, (0.913, 1, 1)),
    Measured(NEVER, Load(4096, 256, 4, 801), 104.2, 205.1, 4.98, 5.15, (0.971, 1, 1)),
    Measured(NEVER, Load(4096, 256, 6, 802), 126.4, 490.2, 5.19, 6.16, (0.732, 0.982, 1)),
    Measured(NEVER, Load(4096, 256, 8, 803), 356.0, 798.6, 6.26, 6.47, (0.187, 0.725, 1)),
    Measured(NEVER, Load(4096, 256, 10, 804), 383.5, 868.8, 6.43, 6.49, (0.231, 0.637, 1)),
    Measured(NEVER, Load(1024, 512, 8, 900), 32.5, 65.4, 5.50, 5.64, (1, 1, 1)),
    Measured(NEVER, Load(1024, 512, 16, 901), 36.8, 129.7, 6.83, 7.01, (1, 1, 1)),
    Measured(NEVER, Load(1024, 512, 24, 902), 51.9, 131.9, 9.51, 10.18, (1, 0.178, 1)),
    Measured(AUTO, Load(4096, 256, 2, 800), 103.8, 149.1, 4.97, 5.35, (1, 1, 1)),
    Measured(AUTO, Load(4096, 256, 4, 801), 104.5, 171.8, 5.01, 5.41, (1, 1, 1)),
    Measured(AUTO, Load(4096, 256, 6, 802), 107.6, 278.6, 5.72, 7.74, (0.929, 1, 1)),
    Measured(AUTO, Load(4096, 256, 8, 803), 184.9, 512.9, 7.67, 9.14, (0.549, 0.604, 1)),
    Measured(AUTO, Load(4096, 256, 10, 804), 202.6, 556.4, 8.43, 9.09, (0.495, 0.352, 1)),
    Measured(AUTO, Load(1024, 512, 8, 900), 29.0, 60.6, 5.40, 5.57, (1, 1, 1)),
    Measured(AUTO, Load(1024, 512, 16, 901), 33.5, 104.8, 6.78, 6.96, (1, 1, 1)),
    Measured(AUTO, Load(1024, 512, 24, 902), 45.1, 144.7, 9.51, 10.22, (1, 0.187, 1)),
    Measured(ALONE, Load(4096, 256, 2, 800), 107.5, 198.3, 4.76, 5.44, (0.957, 1, 1)),
    Measured(ALONE, Load(4096, 256, 4, 801), 108.9, 170.2, 5.19, 6.06, (1, 1, 1)),
    Measured(ALONE, Load(4096, 256, 6, 802), 110.7, 199.3, 5.91, 8.66, (0.982, 0.857, 1)),
    Measured(ALONE, Load(4096, 256, 8, 803), 118.8, 308.4, 8.89, 12.02, (0.89, 0.286, 1)),
    Measured(ALONE, Load(4096, 256, 10, 804), 118.0, 255.3, 9.79, 12.20, (0.901, 0.198, 1)),
    Measured(ALONE, Load(1024, 512, 8, 900), 40.5, 56.2, 5.05, 5.24, (1, 1, 1)),
    Measured(ALONE, Load(1024, 512, 16, 901), 44.4, 66.4, 6.13, 6.39, (1, 1, 1)),
    Measured(ALONE, Load(1024, 512, 24, 902), 44.1, 88.0, 8.58, 9.59, (1, 0.344, 1)),
)


class Comparison(NamedTuple):
    """A real run and the simulated one with the same arrivals."""

    real: Measured
    simulated: Measured

    def error(self, name: str) -> float:
        """Return the difference of a figure as a share of the real value."""
        return getattr(self.simulated, name) / getattr(self.real, name) - 1


def compare(times: Times, real: Measured) -> Comparison:
    """Simulate a real run."""
    load = real.load
    arrivals = poisson(load.rate, SECONDS, load.prompt_len, load.num_tokens, load.seed)
    outcome = simulate(real.shape, times, arrivals, MAX_RUNNING)
    row = summary(outcome.records, outcome.took_s, SLOS)
    names = ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99")
    good = tuple(row[f"good_share_{slo.ttft_ms:g}_{slo.tpot_ms:g}"] for slo in SLOS)
    return Comparison(real, Measured(real.shape, load, *(row[name] for name in names), good))


def largest_errors(comparisons: Sequence[Comparison]) -> tuple[float, float]:
    """Return the largest errors of ttft p50 and tpot p99, as shares of the real values."""
    ttft, tpot = (max(abs(each.error(name)) for each in comparisons) for name in ("ttft_p50", "tpot_p99"))
    return ttft, tpot


def comparison_row(comparison: Comparison) -> dict[str, str]:
    """Return the row of a comparison. A cell holds the real value, the simulated one and the error."""
    real, simulated = comparison
    row = {"prompt + output, requests/s": real.load.name, "shape": real.shape.name}
    for name, digits in (("ttft_p50", 0), ("ttft_p99", 0), ("tpot_p50", 1), ("tpot_p99", 1)):
        values = (f"{getattr(run, name):,.{digits}f}" for run in comparison)
        row[name] = f"{' / '.join(values)}: {comparison.error(name):+.0%}"
    for slo, ours, theirs in zip(SLOS, real.good, simulated.good, strict=True):
        row[f"good at {slo.ttft_ms:g} / {slo.tpot_ms:g} ms"] = f"{ours:.0%} / {theirs:.0%}"
    return row


def predictions(times: Times, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the figures of three shapes of two GPUs under the real runs' loads, simulated."""
    for load in dict.fromkeys(each.load for each in MEASURED):
        arrivals = poisson(load.rate, seconds, load.prompt_len, load.num_tokens, seed=0)
        for shape in (NEVER, AUTO, ALONE):
            outcome = simulate(shape, times, arrivals, MAX_RUNNING)
            row = summary(outcome.records, outcome.took_s, SLOS)
            found: dict[str, Any] = {"prompt + output, requests/s": load.name, "shape": shape.name}
            found |= {
                f"{name} {share}": row[f"{name}_ms_{share}"]
                for name in ("ttft", "tpot", "gap")
                for share in ("p50", "p99")
            }
            found |= {
                f"goodput at {slo.ttft_ms:g} / {slo.tpot_ms:g} ms": row[f"goodput_{slo.ttft_ms:g}_{slo.tpot_ms:g}"]
                for slo in SLOS
            }
            yield found | {"local": f"{outcome.num_local / len(arrivals):.0%}"}


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--times", type=Path, default=find(NAME), help="file of measured times")
    parser.add_argument("--seconds", type=float, default=600.0, help="of arrivals, for the predictions")
    options = parser.parse_args()
    times = read(options.times)
    comparisons = [compare(times, real) for real in MEASURED]
    print(f"real / simulated: error\n\n{table([comparison_row(each) for each in comparisons])}\n")
    ttft, tpot = largest_errors(comparisons)
    print(f"largest error: ttft p50 {ttft:.1%}, tpot p99 {tpot:.1%}\n")
    print(f"simulated, two GPUs, arrivals for {options.seconds:g} s\n")
    report(options, "plan", predictions(times, options.seconds), unit="ms")


if __name__ == "__main__":
    main()
