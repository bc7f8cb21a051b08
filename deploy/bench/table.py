"""Figures as text for a terminal: 80 columns, and fewer columns of figures on a narrower one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from statistics import median

from .charts import Panel, bars, lines
from .figures import TIMES, LoadFigures, Percentiles, Report

COLUMNS = ("p50", "p90", "p95", "p99", "max")
_LABEL, _CELL = 11, 10  # characters of a line's name, and of a figure
_MOST_TURNS = 10
_FEWEST = ("p50", "p99", "max")  # where not all columns fit


def load_text(load: LoadFigures, width: int) -> str:
    """Return one load as lines of at most `width` characters."""
    return "\n".join(_wrapped(_lines(load, width), width))


def head_text(report: Report, width: int) -> str:
    """Return what is measured, before the first load."""
    return "\n".join(_wrapped([f"{report.url}: {report.server}, model {report.model}", report.prompts], width))


def _wrapped(texts: Iterator[str] | Sequence[str], width: int) -> Iterator[str]:
    for text in texts:
        yield from textwrap.wrap(text, width, subsequent_indent="  ", drop_whitespace=True) or [""]


def _lines(load: LoadFigures, width: int) -> Iterator[str]:
    again = f", repeat {load.repeat}" if load.repeat > 1 else ""
    yield ""
    what = "conversations" if load.turns else "requests"
    yield (
        f"{load.rate:.2f} {what}/s{again}: {load.sent:,} sent, {load.answered:,} answered in {load.took_s:.1f} s"
        + ("" if load.is_complete else f"; stopped, {load.unfinished:,} not finished")
    )
    if load.answered:
        yield from _table(load, width)
        yield from _sums(load)
    for each in load.failures:
        yield f"failed: {each.count:,} x {each.kind}: {each.message}"
    yield from _client(load)


def _table(load: LoadFigures, width: int) -> Iterator[str]:
    shown = COLUMNS if _LABEL + _CELL * len(COLUMNS) <= width else _FEWEST
    cell = min(_CELL, (width - _LABEL) // len(shown))

    def line(name: str, cells: Sequence[str]) -> str:
        return f"{name:<{_LABEL}}" + "".join(f"{each:>{cell}}" for each in cells)

    yield line("ms", shown)
    rows = {name: getattr(load, name) for name in TIMES}
    for each in load.turns[:_MOST_TURNS]:
        rows[f"ttft, {each.turn}."] = each.ttft
    for name, times in rows.items():
        yield line(name, [_ms(times, column) for column in shown])
    if load.turns:
        yield "(ttft, 1. is that of the first turn of each conversation, and so on)"


def _ms(times: Percentiles | None, column: str) -> str:
    return "-" if times is None else f"{getattr(times, column):,.1f}"


def _sums(load: LoadFigures) -> Iterator[str]:
    cached = f" ({load.cached_tokens / load.prompt_tokens:.0%} cached)" if load.cached_tokens else ""
    prompts = f"{load.prompt_tokens / load.answered:,.0f} prompt tokens{cached} and " if load.prompt_tokens else ""
    yield (
        f"{load.requests_per_s:.2f} requests/s and {load.tokens_per_s:,.1f} tokens/s; on average {prompts}"
        f"{load.tokens / load.answered:,.1f} tokens of answer"
    )
    for each in load.goodput:
        yield (
            f"good: {each.per_s:.2f} requests/s, {each.share:.0%} of all, with ttft <= {each.ttft_ms:g} ms and tpot <= "
            f"{each.tpot_ms:g} ms"
        )


def _client(load: LoadFigures) -> Iterator[str]:
    client = load.client
    late, stalls = (each.p99 if each else 0.0 for each in (client.late, client.stalls))
    yield f"client: sent {late:.1f} ms late, read {stalls:.1f} ms late (p99), {client.cpu_share:.0%} of a core"
    if load.doubts:
        yield (
            f"WARNING: the client was too busy for these figures: {', '.join(load.doubts)}; lower --rate, or run it on "
            "an idle machine"
        )


def chart(report: Report) -> str:
    """Return the figures as SVG: lines over the rates, or bars of the percentiles of one. A value is the median of the
    repeats."""
    rates = sorted({load.rate for load in report.loads})
    panels: list[Panel] = []
    for name in ("ttft", "tpot", "gap"):
        series: dict[str, list[tuple[str, float]]] = {}
        for rate in rates:
            times = [found for load in report.loads if load.rate == rate and (found := getattr(load, name))]
            for column in COLUMNS if times else ():
                value = median(getattr(each, column) for each in times)
                if len(rates) == 1:
                    series.setdefault(report.model, []).append((column, value))
                elif column in ("p50", "p99"):
                    series.setdefault(column, []).append((f"{rate:g}", value))
        if series:
            panels.append(Panel(f"{name}, ms", "requests/s" if len(rates) > 1 else "percentile", series))
    return (lines if len(rates) > 1 else bars)(panels, f"{report.server}, {report.model}, {report.started}")
