"""Compare `--local-prefill auto` with `never` and with decode nodes alone in simulated cells of lengths and rates.

    python tests/benchmarks/serving/bench_places.py --prefill 1 --decode 1 [--seeds 3] [--seconds 60] [--json FILE]

Each cell has prompts of one length, outputs of one length and Poisson arrivals. The rate is a share of what the GPUs
could do if each computed prompts and rounds of the largest batch without a gap. A figure is the mean over seeds. A cell
is worse if `auto` has a smaller share of good requests than the other shape has, by more than 3 % of the latter, for
any of three SLOs. Nothing here is measured: the times are those of a file that `baton plan` reads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_paths  # noqa: F401
from bench_plan import MAX_RUNNING, NAME, SLOS
from harness import flags, report

from baton.deploy.simulation.cluster import ClusterShape, simulate
from baton.deploy.simulation.costs import ChunkPart, Costs
from baton.deploy.simulation.figures import summary
from baton.deploy.simulation.times import Times, find, read
from baton.deploy.simulation.traffic import poisson

PROMPTS, OUTPUTS, SHARES = (64, 256, 1024, 4096, 16384), (128, 512), (0.3, 0.5, 0.7, 0.85)
WORSE = 0.03  # of a share of good requests
_LEAST = 0.005  # of all requests; smaller differences are a few requests
_CHUNK = 1024  # tokens, whose seconds stand for those of a prompt


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over seeds, in milliseconds, and the share of good requests for each SLO."""

    ttft_p50: float
    ttft_p99: float
    tpot_p99: float
    good: tuple[float, ...]
    local_share: float

    @property
    def words(self) -> str:
        good = " ".join(f"{each:.0%}".replace("%", "") for each in self.good)
        return f"{self.ttft_p50:,.0f} / {self.ttft_p99:,.0f}, {self.tpot_p99:.1f}; {good}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One load on the three shapes."""

    prompt_len: int
    num_tokens: int
    rate: float  # requests per second
    never: Figures
    auto: Figures
    alone: Figures  # decode nodes alone, on as many GPUs

    def is_worse_than(self, other: Figures) -> bool:
        return any(
            theirs - ours > max(WORSE * theirs, _LEAST) for ours, theirs in zip(self.auto.good, other.good, strict=True)
        )


def capacity(times: Times, prompt_len: int, num_tokens: int, num_gpus: int) -> float:
    """Return the requests per second of GPUs that never wait."""
    costs = Costs(times, MAX_RUNNING)
    batch = min(MAX_RUNNING, times.pool_tokens // (prompt_len + num_tokens))
    prompt_s = costs.chunk_s([ChunkPart(_CHUNK, 0)]) * prompt_len / _CHUNK
    output_s = costs.round_s(batch, batch * (prompt_len + num_tokens // 2)) / batch * num_tokens
    return num_gpus / (prompt_s + output_s)


def figures(shape: ClusterShape, times: Times, load: tuple[float, int, int], seeds: int, seconds: float) -> Figures:
    """Simulate a load (requests per second, prompt, output) with several seeds."""
    rate, prompt_len, num_tokens = load
    rows: list[dict[str, float]] = []
    for seed in range(seeds):
        outcome = simulate(shape, times, poisson(rate, seconds, prompt_len, num_tokens, seed), MAX_RUNNING)
        row = summary(outcome.records, outcome.took_s, SLOS)
        rows.append(row | {"local": outcome.num_local / len(outcome.records)})
    mean = {name: fmean(row[name] for row in rows) for name in rows[0]}
    good = tuple(mean[f"good_share_{slo.ttft_ms:g}_{slo.tpot_ms:g}"] for slo in SLOS)
    return Figures(mean["ttft_ms_p50"], mean["ttft_ms_p99"], mean["tpot_ms_p99"], good, mean["local"])


def cells(times: Times, num_prefill: int, num_decode: int, seeds: int, seconds: float) -> Iterator[Cell]:
    """Yield all cells."""
    num_gpus = num_prefill + num_decode
    shapes = [ClusterShape(num_prefill, num_decode, mode) for mode in ("never", "auto")]
    shapes.append(ClusterShape(0, num_gpus, "always"))
    for prompt_len in PROMPTS:
        for num_tokens in OUTPUTS:
            for share in SHARES:
                rate = share * capacity(times, prompt_len, num_tokens, num_gpus)
                load = rate, prompt_len, num_tokens
                yield Cell(
                    prompt_len, num_tokens, rate, *(figures(each, times, load, seeds, seconds) for each in shapes)
                )


def row_of(cell: Cell) -> dict[str, Any]:
    """Return the row of a cell."""
    others = {"never": cell.never, "decode nodes alone": cell.alone}
    return {
        "prompt + output, requests/s": f"{cell.prompt_len:,} + {cell.num_tokens}, {cell.rate:.1f}",
        "never": cell.never.words,
        "auto": cell.auto.words,
        "local": f"{cell.auto.local_share:.0%}",
        "decode nodes alone": cell.alone.words,
        "auto is worse than": ", ".join(name for name, other in others.items() if cell.is_worse_than(other)),
    }


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals")
    parser.add_argument("--times", type=Path, default=find(NAME), help="file of measured times")
    options = parser.parse_args()
    times = read(options.times)
    found = list(cells(times, options.prefill, options.decode, options.seeds, options.seconds))
    report(options, "places", map(row_of, found), unit="ms", about={"cells": [asdict(each) for each in found]})
    for name in ("never", "alone"):
        print(f"auto is worse than {name} in {sum(each.is_worse_than(getattr(each, name)) for each in found)} cells")


if __name__ == "__main__":
    main()
