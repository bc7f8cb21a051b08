"""The report of chaos runs: faults by kind, phase and direction; outcomes of streams; defects. As JSON and as a table.

    python tests/chaos/tally.py A.json B.json ... --out ALL.json

adds up the reports of several runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[:0] = [str(Path(__file__).parent), *map(str, (Path(__file__).parents[1] / "support").glob("*"))]

from scenarios import PHASES  # noqa: E402

if TYPE_CHECKING:
    from play import Result

WAYS = ("in", "out")  # as seen by the DEALER: the node on its link to the router, the decode node on data links
MOST_SETTLE = 10  # how many of the longest times are kept


class Tally:
    """Adds up the results of scenarios."""

    def __init__(self) -> None:
        self.faults: Counter[tuple[str, str]] = Counter()
        self.ways: Counter[tuple[str, str]] = Counter()
        self.seeds: list[int] = []
        self.seconds = 0.0
        self.outcomes: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.defects: list[str] = []
        self.num_scenarios: Counter[str] = Counter()
        self.settle_s: list[float] = []
        self.longest_stream_s = self.longest_orphan_s = 0.0
        self.killed: Counter[str] = Counter()  # outcomes of streams in scenarios that killed a node

    def add(self, algorithm: str, result: Result) -> None:
        self.num_scenarios[algorithm] += 1
        self.faults += result.faults
        self.ways += result.ways
        self.outcomes += result.outcomes
        self.failures.update(_without_names(words) for words in result.failures)
        self.defects += [f"{algorithm}, {result.scenario}: {words}" for words in result.defects]
        self.settle_s.append(result.settle_s)
        self.longest_stream_s = max(self.longest_stream_s, result.longest_stream_s)
        if any(kind == "kill" for kind, _ in result.faults) and not result.scenario.kind.startswith("router"):
            self.killed += result.outcomes

    def add_report(self, report: dict[str, Any]) -> None:
        """Add the report that `to_json` returned in another run."""
        self.num_scenarios.update(report["scenarios"])
        self.faults.update(_by_pair(report["faults"]))
        self.ways.update(_by_pair(report["ways"]))
        self.outcomes.update(report["streams"])
        self.killed.update(report["streams_with_a_killed_node"])
        self.failures.update(report["failures"])
        self.longest_stream_s = max(self.longest_stream_s, report["longest_stream_s"])
        self.longest_orphan_s = max(self.longest_orphan_s, report["longest_orphan_s"])
        self.settle_s += report["settle_s"]
        self.defects += report["defects"]
        self.seeds += report["seeds"]
        self.seconds += report["seconds"]

    def to_json(self) -> dict[str, Any]:
        return {
            "seeds": self.seeds,
            "seconds": round(self.seconds),
            "scenarios": dict(self.num_scenarios),
            "num_faults": self.faults.total(),
            "num_faults_of_messages": {way: self.num_on_way(way) for way in WAYS},
            "faults": _by_name(self.faults),
            "ways": _by_name(self.ways),
            "streams": dict(self.outcomes),
            "streams_with_a_killed_node": dict(self.killed),
            "failures": dict(self.failures),
            "longest_stream_s": round(self.longest_stream_s, 1),
            "longest_orphan_s": round(self.longest_orphan_s, 2),
            "settle_s": sorted(round(seconds, 2) for seconds in self.settle_s)[-MOST_SETTLE:],
            "defects": self.defects,
        }

    def num_on_way(self, way: str) -> int:
        """Return the number of message faults in one direction."""
        return sum(count for (_, each), count in self.ways.items() if each == way)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1))

    def table(self) -> str:
        """Return a Markdown table: one row per kind, one column per phase, and one column per direction of messages."""
        kinds = sorted({kind for kind, _ in self.faults})
        heads = [*PHASES, "all", *WAYS]
        rows = ["| fault | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
        for kind in kinds:
            counts = [self.faults[kind, phase] for phase in PHASES]
            counts += [sum(counts), *(self.ways[kind, way] for way in WAYS)]
            rows.append(f"| {kind} | " + " | ".join(str(count or "") for count in counts) + " |")
        counts = [sum(self.faults[kind, phase] for kind in kinds) for phase in PHASES]
        counts += [sum(counts), *(self.num_on_way(way) for way in WAYS)]
        rows.append("| all | " + " | ".join(str(count) for count in counts) + " |")
        streams = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        killed = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.killed.items()))
        words = [
            f"{self.faults.total()} faults in {self.num_scenarios.total()} scenarios; of messages "
            + " and ".join(f"{self.num_on_way(way)} {way}" for way in WAYS)
            + f". Streams: {streams}. Where a node was killed: {killed or 'none'}.",
            f"Longest stream {self.longest_stream_s:.1f} s, longest orphan {self.longest_orphan_s:.2f} s. "
            f"Defects: {len(self.defects)}.",
        ]
        return "\n".join([*rows, "", *words])


def _by_name(counts: Counter[tuple[str, str]]) -> dict[str, int]:
    return {f"{first} / {second}": count for (first, second), count in sorted(counts.items())}


def _by_pair(counts: dict[str, int]) -> dict[tuple[str, str], int]:
    pairs = ((name.partition(" / "), count) for name, count in counts.items())
    return {(first, second): count for (first, _, second), count in pairs}


def _without_names(words: str) -> str:
    """Return the reason without the request's name, so that equal reasons are counted together."""
    return words.partition("): ")[2] or words


def merged(reports: Iterable[Path]) -> Tally:
    """Return the sum of several reports."""
    tally = Tally()
    for path in reports:
        tally.add_report(json.loads(path.read_text()))
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="file for the sum as JSON; a table (.md) is written beside it")
    args = parser.parse_args()
    tally = merged(args.reports)
    if args.out is not None:
        tally.write(args.out)
        args.out.with_suffix(".md").write_text(tally.table() + "\n")
    print(tally.table())
    print("\n".join(tally.defects))
    return 1 if tally.defects else 0


if __name__ == "__main__":
    sys.exit(main())
