"""Render the tables and charts of the pages from docs/figures/*.json.

    python tests/benchmarks/render_figures.py            # after a figure has changed; --check only says what differs

A page shows the table docs/figures/NAME.json between two lines, with all columns or with those that are named:

    <!-- table NAME | column | column -->
    <!-- end -->

CHARTS lists the charts. Each is written to docs/figures/NAME.svg, which a page shows as a picture.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from figures import Cell, Figure, read_figure

from baton.deploy.bench.charts import Panel, bars, lines

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs/figures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_COLUMNS = 100

_TABLE = re.compile(r"<!-- table ([\w-]+)((?: *\|[^|\n]+)*) -->\n(.*?)<!-- end -->\n", re.S)


class Chart(NamedTuple):
    """Some columns of a table, drawn over another one: a panel per column."""

    figure: str
    x: str  # numbers for lines, words for bars
    ys: tuple[str, ...]
    by: str | None = None  # a column: one line or colour per value
    only: tuple[str, str] | None = None  # a column and the value of the rows that are drawn
    is_bars: bool = False  # all columns then share a panel, a colour for each


_LOAD = ("first token p50", "per token p50", "largest gap p50")
CHARTS = {
    "decode-step": Chart("decode-step-8b-peers", "batch", ("Baton", "vLLM", "SGLang", "floor"), is_bars=True),
    "load-4096": Chart("load-two-gpus", "requests/s", _LOAD, "engine", ("prompt + output", "4,096 + 256")),
    "load-1024": Chart("load-two-gpus", "requests/s", _LOAD, "engine", ("prompt + output", "1,024 + 512")),
    "speculation": Chart("speculation-served", "streams", ("greedy, ratio", "top_p 0.9, ratio"), is_bars=True),
    "overload": Chart("overload", "offered load", ("goodput",), "clients"),
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Write the pages and charts that differ, and name them. With --check, only name them; the status is then 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    stale = {path: text for path, text in rendered().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(path.relative_to(ROOT))
        if not options.check:
            path.write_text(text)
    return 1 if options.check and stale else 0


def rendered() -> dict[Path, str]:
    """Return the text of every page and chart as the figures want it."""
    found = {path.stem: read_figure(path) for path in sorted(FIGURES.glob("*.json"))}
    texts = {page: with_tables(page.read_text(encoding="utf-8"), found) for page in PAGES}
    return texts | {FIGURES / f"{name}.svg": draw(chart, found[chart.figure]) for name, chart in CHARTS.items()}


# Tables


def with_tables(page: str, found: dict[str, Figure]) -> str:
    """Return the page with all tables rendered anew."""

    def one(match: re.Match[str]) -> str:
        shown = [name.strip() for name in match[2].split("|")[1:]]
        head = match[0].split("\n", 1)[0]
        return f"{head}\n{table(found[match[1]], shown)}\n<!-- end -->\n"

    return _TABLE.sub(one, page)


def table(figure: Figure, shown: list[str]) -> str:
    """Return the table in Markdown, and below it where its figures come from."""
    places = [_place(figure, name) for name in shown] or list(range(len(figure.columns)))
    rows = [[figure.columns[i] for i in places], *([word(row[i]) for i in places] for row in figure.rows)]
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join(["", head, "|" + "---|" * len(places), *body, "", *_source(figure), ""])


def _place(figure: Figure, column: str) -> int:
    if column not in figure.columns:
        raise ValueError(f"{figure.name} has no column {column!r}; it has {', '.join(figure.columns)}")
    return figure.columns.index(column)


def _source(figure: Figure) -> Iterator[str]:
    is_command = figure.method.startswith(("python ", "baton "))
    said = f"Unit: {figure.unit}. Device: {figure.device}. Commit {figure.commit}, {figure.date}"
    yield from textwrap.wrap(
        f"{said}:" if is_command else f"{said}. {figure.method}", MAX_COLUMNS, break_on_hyphens=False
    )
    if is_command:
        yield from ("", f"    {figure.method}")


def word(cell: Cell) -> str:
    """Return a cell as the page shows it."""
    if cell is None:
        return ""
    return f"{cell:,}" if isinstance(cell, int | float) else cell


# Charts


def draw(chart: Chart, figure: Figure) -> str:
    """Return the chart as SVG."""
    rows = [row for row in figure.rows if chart.only is None or row[_place(figure, chart.only[0])] == chart.only[1]]
    panels: list[Panel] = []
    for ys in [chart.ys] if chart.is_bars else [(y,) for y in chart.ys]:
        series: dict[str, list[tuple[str, float]]] = {}
        for row in rows:
            for y in ys:
                name = y if chart.by is None else word(row[_place(figure, chart.by)])
                value = row[_place(figure, y)]
                if isinstance(value, int | float):
                    series.setdefault(name, []).append((word(row[_place(figure, chart.x)]), float(value)))
        panels.append(Panel(figure.unit if chart.is_bars else f"{ys[0]}, {figure.unit}", chart.x, series))
    title = f"{figure.device}, commit {figure.commit}, {figure.date}"
    return bars(panels, title) if chart.is_bars else lines(panels, title)


if __name__ == "__main__":
    sys.exit(main())
