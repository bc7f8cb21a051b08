"""Measure what a viewer of GET /live costs the router: its CPU time per token with and without one, in turns.

    python tests/benchmarks/serving/bench_live.py [--rounds 12] [--streams 64] [--tokens 1500] [--interval-ms 10]

The router, the fake nodes and the clients are those of bench_router.py, with ten nodes in all. The streams are paced,
so that both kinds of rounds take equally long. Prints one row per run, and then the medians and the spread.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from typing import Any

from bench_router import phase
from harness import flags, report

NUM_PREFILL = 9  # nodes, besides the decode node


def rows(rounds: int, num_streams: int, num_tokens: int, interval_s: float) -> Iterator[dict[str, Any]]:
    """Yield a row per run, then the medians of both kinds and the share of a core that a viewer takes."""
    costs: dict[int, list[float]] = {0: [], 1: []}
    shares: list[float] = []
    for number in range(rounds):
        pair: dict[int, float] = {}
        for num_viewers in (0, 1) if number % 2 else (1, 0):
            row = phase(num_streams, num_tokens, interval_s, num_viewers=num_viewers, num_prefill=NUM_PREFILL)
            cost = pair[num_viewers] = row["router_cpu_us_per_token"]
            costs[num_viewers].append(cost)
            yield {"round": number, "viewers": num_viewers, "router_cpu_us_per_token": cost, "wall_s": row["wall_s"]}
        shares.append((pair[1] - pair[0]) * row["tokens"] / row["wall_s"] / 1e4)  # percent of a core
    for num_viewers, found in costs.items():
        spread = f"{min(found)} to {max(found)}"
        yield {"viewers": num_viewers, "median_us": statistics.median(found), "spread_us": spread}
    ratios = [with_one / without for without, with_one in zip(costs[0], costs[1], strict=True)]
    yield {"median_ratio": round(statistics.median(ratios), 4), "core_percent": round(statistics.median(shares), 2)}


def main() -> None:
    parser = flags(__doc__, rounds=12)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--interval-ms", type=float, default=10.0)
    args = parser.parse_args()
    found = rows(args.rounds, args.streams, args.tokens, args.interval_ms / 1000)
    report(args, "live", found, unit="us", about={"cpus": os.cpu_count()})


if __name__ == "__main__":
    main()
