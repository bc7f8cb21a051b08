"""A measured table as a file: docs/figures/NAME.json. docs/figures/README.md describes the format.

write_figure(
    out, "decode-step", method="python tests/benchmarks/bench_gpu.py --model models/8b --only decode",
    unit="ms", columns=["model", "batch 1", "batch 8"], rows=[["Llama-3.1-8B", 3.8, 4.42]],
)
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Figure:
    """A table that one command measured at one commit on one device."""

    name: str
    commit: str
    date: str  # YYYY-MM-DD
    device: str
    method: str  # the command
    unit: str  # of every column that names no unit of its own: "first token, s"
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]  # None: not measured

    def __post_init__(self) -> None:
        if wrong := [row for row in self.rows if len(row) != len(self.columns)]:
            raise ValueError(f"{self.name}: row {wrong[0]} has {len(wrong[0])} cells for {len(self.columns)} columns")


def write_figure(
    folder: Path,
    name: str,
    *,
    method: str,
    unit: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    device: str | None = None,
    commit: str | None = None,
) -> Path:
    """Write a table to FOLDER/NAME.json and return the path.

    The default device is the first GPU, or the CPU if there is none. The default commit is that of the checkout, with
    `-dirty` behind it if files differ from it: such a table is no figure of a release.
    """
    figure = Figure(
        name=name,
        commit=commit or _commit(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        device=device or _device(),
        method=method,
        unit=unit,
        columns=tuple(columns),
        rows=tuple(tuple(row) for row in rows),
    )
    path = folder / f"{name}.json"
    path.write_text(_text(figure), encoding="utf-8")
    return path


def read_figure(path: Path) -> Figure:
    """Read a table. Raises ValueError if a field is missing or unknown, or a row has too few or too many cells."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    if fields.keys() != (wanted := set(Figure.__dataclass_fields__)):
        raise ValueError(f"{path}: fields {sorted(fields)}, but a figure has {sorted(wanted)}")
    rows = tuple(tuple(row) for row in fields["rows"])
    return Figure(**{**fields, "columns": tuple(fields["columns"]), "rows": rows})


def _text(figure: Figure) -> str:
    """Return the JSON with one line per row, so that a comparison of two files shows which rows differ."""
    fields = asdict(figure)
    head = [f" {json.dumps(key)}: {json.dumps(fields[key])}," for key in fields if key != "rows"]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in figure.rows)
    return "\n".join(["{", *head, ' "rows": [', rows, " ]", "}"]) + "\n"


def _commit() -> str:
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude", "*"]
    found = subprocess.run(describe, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return found.stdout.strip() or "unknown"


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        return f"{num_gpus} x {torch.cuda.get_device_name()}" if num_gpus > 1 else torch.cuda.get_device_name()
    return f"CPU, {os.cpu_count()} cores, {platform.machine()}"
