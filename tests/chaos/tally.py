"""The report: faults by kind and phase, streams saved and failed and why, as JSON and as a table."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from play import Result
from scenarios import PHASES


class Tally:
    """Adds up results, by algorithm."""

    def __init__(self) -> None:
        self.faults: Counter[tuple[str, str]] = Counter()
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
        self.outcomes += result.outcomes
        self.failures.update(_without_names(words) for words in result.failures)
        self.defects += [f"{algorithm}, {result.scenario}: {words}" for words in result.defects]
        self.settle_s.append(result.settle_s)
        self.longest_stream_s = max(self.longest_stream_s, result.longest_stream_s)
        if any(kind == "kill" for kind, _ in result.faults) and not result.scenario.kind.startswith("router"):
            self.killed += result.outcomes

    def to_json(self) -> dict[str, Any]:
        return {
            "scenarios": dict(self.num_scenarios),
            "num_faults": self.faults.total(),
            "faults": {f"{kind} / {phase}": count for (kind, phase), count in sorted(self.faults.items())},
            "streams": dict(self.outcomes),
            "streams_with_a_killed_node": dict(self.killed),
            "failures": dict(self.failures),
            "longest_stream_s": round(self.longest_stream_s, 1),
            "longest_orphan_s": round(self.longest_orphan_s, 2),
            "settle_s": sorted(round(seconds, 2) for seconds in self.settle_s)[-10:],
            "defects": self.defects,
        }

    def write(self, path: Path, **more: Any) -> None:
        path.write_text(json.dumps(self.to_json() | more, indent=1))

    def table(self) -> str:
        """Markdown: a row a kind, a column a phase."""
        kinds = sorted({kind for kind, _ in self.faults})
        rows = ["| fault | " + " | ".join(PHASES) + " | all |", "|---" * (len(PHASES) + 2) + "|"]
        for kind in kinds:
            counts = [self.faults[kind, phase] for phase in PHASES]
            rows.append(f"| {kind} | " + " | ".join(str(count or "") for count in [*counts, sum(counts)]) + " |")
        counts = [sum(self.faults[kind, phase] for kind in kinds) for phase in PHASES]
        rows.append("| all | " + " | ".join(str(count) for count in [*counts, sum(counts)]) + " |")
        streams = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        return "\n".join([*rows, "", f"Streams: {streams}. Defects: {len(self.defects)}."])


def _without_names(words: str) -> str:
    """The reason alone, so that equal ones are counted together."""
    return words.partition("): ")[2] or words
