"""The figures of bench_speculation.py as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def report(about: dict[str, Any], figures: Sequence[dict[str, Any]], http: dict[str, Any] | None) -> str:
    """Return all tables, one per section."""
    shown = {name: value for name, value in about.items() if name != "models"}
    lines = [", ".join(f"{name} {value}" for name, value in shown.items()), ""]
    if all(figure["acceptance"] for figure in figures):
        lines += [*_acceptance(figures), "", *_speed(figures), "", *_bytes(figures), "", *_times(figures)]
    else:
        lines += [
            *_speed(figures),
            "",
            *(f"{figure['drafter']}: streams differ: {_differ(figure)}" for figure in figures),
        ]
    return "\n".join([*lines, "", *_http(http)] if http else lines)


def _acceptance(figures: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table with one row per drafter."""
    temperatures = [row["temperature"] for row in figures[0]["acceptance"]]
    yield _row("drafter", "target", "K", *(f"accept length at T = {each:g}" for each in temperatures), "streams differ")
    yield _rule(3, len(temperatures) + 1)
    for figure in figures:
        lengths = (f"{row['accept_length']:.2f} ± {row['standard_error']:.2f}" for row in figure["acceptance"])
        yield _row(figure["drafter"], figure["target"], _shape(figure["shape"]), *lengths, _differ(figure))


def _speed(figures: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table with one row per drafter, temperature and number of streams."""
    modes = list(figures[0]["speed"][0]["tokens_per_s"])
    ratios = [f"{mode} / off" for mode in modes if mode != "off"]
    head = (*(f"{mode} tok/s" for mode in modes), *ratios, "rounds at K = 0", "rounds")
    yield _row("drafter", "T", "streams", *head)
    yield _rule(1, 2 + len(head))
    for figure in figures:
        for row in figure["speed"]:
            rates = (f"{rate:,.0f}" for rate in row["tokens_per_s"].values())
            ratios = (_with_error(ratio, row["standard_error"][mode]) for mode, ratio in row["ratio"].items())
            spread = "; ".join(f"{min(each):.2f} to {max(each):.2f}" for each in row["ratios"].values())
            spread = f"{len(row['ratios']['fixed'])}: {spread}"
            share = f"{100 * row['share_without_drafts']:.0f} %"
            yield _row(figure["drafter"], f"{row['temperature']:g}", row["streams"], *rates, *ratios, share, spread)


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def _bytes(figures: Sequence[dict[str, Any]]) -> Iterator[str]:
    prompt_len = figures[0]["handoff"]["off"]["prompt_len"]
    yield _row(f"bytes of {prompt_len:,} tokens", "target KV", "draft KV", "hidden state", "rest of the row", "total")
    yield _rule(1, 5)
    for name, handoff in _handoffs(figures):
        yield _row(name, *(f"{count:,}" for count in handoff["bytes"].values()))


def _times(figures: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield _row("first token to decode's first round, ms", "off", "with drafter", "of it in prefill", "in decode")
    yield _rule(1, 4)
    for figure in figures:
        off, on = figure["handoff"]["off"], figure["handoff"]["fixed"]
        times = (off["ms"], on["ms"], on["ms_in_prefill"], on["ms_in_decode"])
        yield _row(figure["drafter"], *(f"{each:.2f}" for each in times))


def _http(http: dict[str, Any]) -> Iterator[str]:
    yield _row("over HTTP, T = 0", "off tok/s", "adaptive tok/s", "ratio", "rounds")
    yield _rule(1, 4)
    for row in http["speed"]:
        rates = (f"{rate:,.0f}" for rate in row["tokens_per_s"].values())
        spread = f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}"
        yield _row(f"{http['drafter']}, {row['streams']} streams", *rates, f"{row['ratio']:.2f}", spread)
    yield ""
    yield _row("ms", "first token", "first to second chunk", "later chunks")
    yield _rule(1, 3)
    for mode, times in http["chunks"].items():
        yield _row(mode, *(f"{each:.2f}" for each in times.values()))
    yield ""
    yield f"Streams that differ over HTTP: {_differ(http)}."


def _handoffs(figures: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A table in which each target without speculation comes before its drafters."""
    seen: set[str] = set()
    for figure in figures:
        if figure["target"] not in seen:
            seen.add(figure["target"])
            yield f"off ({figure['target']})", figure["handoff"]["off"]
        yield figure["drafter"], figure["handoff"]["fixed"]


def _differ(figure: dict[str, Any]) -> str:
    found = figure["differences"]
    return f"{found['num_differing']} of {found['num_streams']}, {found['num_beyond_ties']} beyond ties"


def _shape(shape: dict[str, int]) -> str:
    steps, topk, num_tokens = shape["num_steps"], shape["topk"], shape["num_tokens"]
    return str(steps) if topk == 1 else f"{steps}, tree of {num_tokens}, top-k {topk}"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _rule(num_words: int, num_figures: int) -> str:
    return _row(*["---"] * num_words, *["---:"] * num_figures)
