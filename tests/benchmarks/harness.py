"""The frame of every measurement here: a program is cases, each case gives rows, and the harness does the rest.

    options = flags(__doc__, rounds=9).parse_args()
    report(options, "cpu-serve", rows(options), unit="tokens/s")

A row is a mapping from columns to text and numbers. Rows are printed as they come; at the end they are one table, and
with `--json FILE` and `--figures DIR` one file each (figures.py). Importing this module makes those of the other rooms
importable, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import shared_paths

Row = Mapping[str, Any]


def flags(doc: str | None, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the flags that all programs have; `--rounds` if a number of them is given."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--commit", help="of this tree, for the report (default: what git says)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all rows, and where they were measured")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="the table, as docs/figures holds it")
    return parser


def report(
    options: argparse.Namespace, figure: str, rows: Iterable[Row], *, unit: str, about: Row | None = None
) -> list[Row]:
    """Print each row as it comes, then all as one table. Write what the flags ask for, and return the rows. The JSON
    file is there after the first row, so that a run that is cut off leaves what it has measured."""
    found: list[Row] = []
    for row in rows:
        found.append(row)
        print(", ".join(f"{name} {_word(value)}" for name, value in row.items() if value is not None), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(heading(options.commit) | dict(about or {}) | {"rows": found}, indent=1))
    print("\n" + table(found))
    if options.figures is not None:
        from figures import write_figure

        columns = columns_of(found)
        cells = [[row.get(name) for name in columns] for row in found]
        method = " ".join(["python", *sys.argv])
        write_figure(options.figures, figure, method=method, unit=unit, columns=columns, rows=cells)
    return found


def columns_of(rows: Iterable[Row]) -> list[str]:
    """Return the columns of all rows, in the order in which they first come."""
    return list(dict.fromkeys(name for row in rows for name in row))


def table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table; a cell that a row lacks is empty."""
    columns = columns_of(rows)
    lines = [columns, ["---"] * len(columns), *([_word(row.get(name, "")) for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(reports: Mapping[str, Row]) -> str:
    """Return one line per report, by its name, then a table of each list of rows that some of them have."""
    lines = [f"{name}: {_facts(report)}" for name, report in reports.items()]
    parts = dict.fromkeys(part for report in reports.values() for part, value in report.items() if _are_rows(value))
    for part in parts:
        having = [(name, report) for name, report in reports.items() if report.get(part)]
        rows = [
            {part: name} | {key: _flat(value) for key, value in row.items()}
            for name, report in having
            for row in report[part]
        ]
        lines += ["", table(rows)]
    return "\n".join(lines)


def _are_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) for each in value)


def _facts(report: Row) -> str:
    facts = {name: value for name, value in report.items() if value is not None and not isinstance(value, list)}
    return ", ".join(f"{name.replace('_', ' ')} {_word(value)}" for name, value in facts.items())


def _flat(value: Any) -> Any:
    return " ".join(f"{key}: {_word(each)}" for key, each in value.items()) if isinstance(value, Mapping) else value


def alternate(subjects: Mapping[str, Callable[[int], float]], rounds: int, warm_ups: int = 1) -> dict[str, list[float]]:
    """Measure all subjects in every round, one after the other, so that a disturbance hits all of them. Each gets the
    number of the round. The first `warm_ups` are not counted."""
    found: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(rounds + warm_ups):
        for name, measured in subjects.items():
            value = measured(number)
            found[name] += [value] if number >= warm_ups else []
    return found


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median of the ratios within rounds."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def heading(commit: str | None = None) -> dict[str, str]:
    """Return where and when a report was measured."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return {"device": device, "torch": torch.__version__, "commit": commit or _commit(), "date": date}


def _commit() -> str:
    """Return the commit of this tree, with a mark if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, cwd=shared_paths.HERE, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _word(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else "" if value is None else str(value)
