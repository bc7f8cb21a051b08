"""The pages in docs/ and beside the code: their tables are whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])


def _tables(text: str) -> Iterator[tuple[int, list[str]]]:
    """Each run of lines that begin with a bar, outside of fenced code, with the number of its first line."""
    rows: list[str] = []
    is_code = False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_code ^= line.lstrip().startswith("```")
        if line.lstrip().startswith("|") and not is_code:
            rows.append(line.strip())
        elif rows:
            yield number - len(rows), rows
            rows = []


def _num_cells(row: str) -> int:
    return len(re.split(r"(?<!\\)\|", row)) - 2


def _faults(text: str) -> list[str]:
    """Tables that a blank line has cut in two (the second half has no heading), and rows of another width."""
    faults = []
    for first, rows in _tables(text):
        if len(rows) < 2 or not re.fullmatch(r"[|:\- ]+", rows[1]):
            faults.append(f"line {first}: these rows have no heading; a blank line before them cuts their table in two")
            continue
        wide = _num_cells(rows[0])
        faults += [
            f"line {first + place}: {_num_cells(row)} cells; the heading has {wide}"
            for place, row in enumerate(rows)
            if _num_cells(row) != wide
        ]
    return faults


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    assert not _faults(page.read_text(encoding="utf-8"))


def test_a_cut_table_is_found() -> None:
    table = "| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert _faults(table) == []
    assert _faults(f"```\n{table}\n| 3 | 4 |\n```\n") == []
    assert "line 5" in _faults(f"{table}\n| 3 | 4 |\n| 5 | 6 |\n")[0]
    assert "line 4" in _faults(f"{table}| 3 |\n")[0]
