"""The pages show the figures of docs/figures, and no other ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from figures import Figure, read_figure
from render_figures import CHARTS, FIGURES, ROOT, draw, main, table, with_tables, word

FOUND = {path.stem: read_figure(path) for path in sorted(FIGURES.glob("*.json"))}
PLAIN = Figure("plain", "0ac1f00d", "2026-11-28", "H200", "python x.py", "ms", ("n", "Baton"), ((1, 1200), (8, None)))

_NUMBER = re.compile(r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?!\w|[.,]\d)")
_VERSION = re.compile(r"\d+\.\d+\.\d+")


def _numbers(text: str) -> set[str]:
    return set(_NUMBER.findall(_VERSION.sub("", text)))


def _said(page: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page's own text: no rendered table, code, heading or address of a link."""
    page = re.sub(r"<!-- table .*?<!-- end -->", lambda part: "\n" * part[0].count("\n"), page, flags=re.S)
    for number, line in enumerate(page.splitlines(), 1):
        if not line.startswith(("    ", "#")):
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", "", line)


def _known() -> set[str]:
    cells = [word(cell) for figure in FOUND.values() for row in figure.rows for cell in row]
    texts = [text for figure in FOUND.values() for text in (*figure.columns, figure.method, figure.device)]
    return _numbers(" ".join([*cells, *texts]))


def _shown(page: Path) -> str:
    """Return the part of a page whose numbers must be figures: all of performance.md, the marked part of README.md."""
    text = page.read_text(encoding="utf-8")
    if page.name == "performance.md":
        return text
    marked = re.search(r"<!-- figures -->\n(.*?)<!-- end -->\n", text, re.S)
    assert marked is not None
    return marked[1]


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_every_number_of_the_text_is_a_figure(page: str) -> None:
    known = _known() | {"50", "99"}  # names of percentiles
    unknown = [(line, sorted(_numbers(text) - known)) for line, text in _said(_shown(ROOT / page))]
    assert [fault for fault in unknown if fault[1]] == []


def test_pages_and_charts_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--check"])
    assert status == 0, f"run tests/benchmarks/render_figures.py; it would change {capsys.readouterr().out.split()}"


def test_every_figure_is_shown_or_listed_and_none_is_of_a_changed_checkout() -> None:
    pages = "".join((ROOT / page).read_text() for page in ("docs/performance.md", "docs/reliability.md"))
    shown = set(re.findall(r"<!-- table ([\w-]+)", pages)) | {chart.figure for chart in CHARTS.values()}
    listed = set(re.findall(r"\]\(([\w-]+)\.json\)", (FIGURES / "README.md").read_text()))
    assert shown | listed == FOUND.keys() and not shown & listed
    assert [figure.name for figure in FOUND.values() if not re.fullmatch(r"[0-9a-f]{8}", figure.commit)] == []
    assert [path for path in FIGURES.glob("*.json") if read_figure(path).name != path.stem] == []


def test_a_table_shows_the_named_columns_and_where_it_comes_from() -> None:
    page = "a\n<!-- table plain | Baton | n -->\nold\n<!-- end -->\nb\n"
    shown = with_tables(page, {"plain": PLAIN})
    assert "| Baton | n |\n|---|---|\n| 1,200 | 1 |\n|  | 8 |\n" in shown and "old" not in shown
    assert "Unit: ms. Device: H200. Commit 0ac1f00d, 2026-11-28:\n\n    python x.py\n" in shown
    assert shown.startswith("a\n<!-- table") and shown.endswith("<!-- end -->\nb\n")
    assert with_tables(shown, {"plain": PLAIN}) == shown
    with pytest.raises(ValueError, match="plain has no column 'vLLM'"):
        table(PLAIN, ["vLLM"])


def test_a_chart_has_a_mark_for_every_number() -> None:
    for name, chart in CHARTS.items():
        root = ElementTree.fromstring(draw(chart, FOUND[chart.figure]))
        tag = "rect" if chart.is_bars else "circle"
        marks = [mark for mark in root.iter(f"{{http://www.w3.org/2000/svg}}{tag}") if chart.is_bars or mark.get("r")]
        columns = [FOUND[chart.figure].columns.index(y) for y in chart.ys]
        rows = FOUND[chart.figure].rows
        if chart.only is not None:
            where = FOUND[chart.figure].columns.index(chart.only[0])
            rows = tuple(row for row in rows if row[where] == chart.only[1])
        extra = 1 + len(chart.ys) if chart.is_bars else 0  # the card, and the colours in the legend
        assert len(marks) - extra == sum(row[i] is not None for row in rows for i in columns), name
