"""Draw small charts as SVG text that is readable on light and on dark pages: grouped bars, or lines over a number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 320, 240  # of a panel; one that is alone is twice as wide
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 30, 44  # around its axes
HEAD, FOOT = 34, 28  # above and below all panels: the names of the series, and where the figures come from
COLOURS = ("#3b82c4", "#d9702b", "#4e9a45", "#9a63c4", "#8a8a8a")
DASHES = ("", "7 4", "2 3", "9 3 2 3", "1 2")

_STYLE = """<style>
  .card { fill: #fbfaf7 } .grid { stroke: #d8d5cc }
  text { fill: #1f2530; font: 12px Helvetica, Arial, sans-serif }
  @media (prefers-color-scheme: dark) { .card { fill: #1c2128 } .grid { stroke: #3a424d } text { fill: #e2e6eb } }
</style>"""


class Panel(NamedTuple):
    """One pair of axes."""

    y: str  # its name and unit
    x: str
    series: dict[str, list[tuple[str, float]]]  # points (x, y) by the name of the series


class _Axes(NamedTuple):
    """The scales of a panel: they turn values into positions."""

    width: int
    top: float  # the largest value of the y axis

    def height_of(self, y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / self.top

    def place_of(self, share: float) -> float:
        return LEFT + (self.width - LEFT - RIGHT) * share


def bars(panels: Sequence[Panel], source: str) -> str:
    """Draw one group of bars per x, with one bar per series."""
    return _picture(panels, source, are_bars=True)


def lines(panels: Sequence[Panel], source: str) -> str:
    """Draw one line per series. Every x is a number."""
    return _picture(panels, source, are_bars=False)


def _picture(panels: Sequence[Panel], source: str, *, are_bars: bool) -> str:
    panel_width = WIDTH * (2 if len(panels) == 1 else 1)
    width, height = panel_width * len(panels), HEAD + HEIGHT + FOOT
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        _STYLE,
        f'<rect class="card" width="{width}" height="{height}" rx="8"/>',
        *_names(names, are_bars=are_bars),
    ]
    for i, panel in enumerate(panels):
        axes = _Axes(panel_width, _ceiling(max(y for points in panel.series.values() for _, y in points)))
        body = _bars(panel, names, axes) if are_bars else _lines(panel, names, axes)
        parts += [f'<g transform="translate({i * panel_width} {HEAD})">', *_grid(panel, axes), *body, "</g>"]
    parts.append(f'<text x="{LEFT}" y="{height - 10}" opacity="0.7">{escape(source)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _names(names: list[str], *, are_bars: bool) -> Iterator[str]:
    x = LEFT
    for i, name in enumerate(names):
        if are_bars:
            yield f'<rect x="{x}" y="12" width="20" height="11" fill="{COLOURS[i]}"/>'
        else:
            yield f'<path d="M{x} 18 h22" stroke="{COLOURS[i]}" stroke-width="2.5" stroke-dasharray="{DASHES[i]}"/>'
        yield f'<text x="{x + 28}" y="22">{escape(name)}</text>'
        x += 50 + round(6.2 * len(name))


def _grid(panel: Panel, axes: _Axes) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="{TOP - 10}">{escape(panel.y)}</text>'
    middle = axes.place_of(0.5)
    yield f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(panel.x)}</text>'
    for tick in range(5):
        value = axes.top * tick / 4
        y = axes.height_of(value)
        yield f'<path class="grid" d="M{LEFT} {y:.1f} H{axes.width - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,g}</text>'


def _bars(panel: Panel, names: list[str], axes: _Axes) -> Iterator[str]:
    groups = list(dict.fromkeys(x for points in panel.series.values() for x, _ in points))
    bar = 0.8 / len(names)
    for i, group in enumerate(groups):
        middle = axes.place_of((i + 0.5) / len(groups))
        yield f'<text x="{middle:.0f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{escape(group)}</text>'
    for j, name in enumerate(names):
        for x, y in panel.series.get(name, []):
            left = axes.place_of((groups.index(x) + 0.1 + bar * j) / len(groups))
            right = axes.place_of((groups.index(x) + 0.1 + bar * (j + 0.92)) / len(groups))
            top, size = (
                axes.height_of(y),
                f'width="{right - left:.1f}" height="{HEIGHT - BOTTOM - axes.height_of(y):.1f}"',
            )
            yield f'<rect x="{left:.1f}" y="{top:.1f}" {size} fill="{COLOURS[j]}"/>'


def _lines(panel: Panel, names: list[str], axes: _Axes) -> Iterator[str]:
    numbers = sorted({_number(x) for points in panel.series.values() for x, _ in points})
    low, high = numbers[0], numbers[-1]

    def place(x: float) -> float:
        return axes.place_of(0.04 + 0.92 * (x - low) / (high - low or 1))

    for x in numbers:
        yield f'<text x="{place(x):.0f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{x:g}</text>'
    for j, name in enumerate(names):
        points = [(place(_number(x)), axes.height_of(y)) for x, y in panel.series.get(name, [])]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        stroke = f'stroke="{COLOURS[j]}" stroke-width="2.5" stroke-dasharray="{DASHES[j]}"'
        yield f'<polyline points="{path}" fill="none" {stroke}/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{COLOURS[j]}"/>' for x, y in points)


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _ceiling(value: float) -> float:
    """Return a round number above 0 that is not below the value and has round quarters."""
    power = 10 ** math.floor(math.log10(value)) if value > 0 else 1
    return next(power * step for step in (1, 1.2, 1.6, 2, 2.4, 3, 4, 6, 8, 10) if power * step >= value)
