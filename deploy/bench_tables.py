"""The report of bench_gpu as the Markdown tables of docs/performance.md, the best peer's figures beside ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# The better of vLLM 0.26.0 and SGLang 0.5.17 on an H200, same shapes, bfloat16: by layers of the model, then by what
# tells rows apart. Milliseconds of a decode step at context 1,024; tokens a second of prompts, and offline of output.
_DECODE_MS = {16: {1: 1.22, 8: 1.39, 64: 2.09, 256: 4.50}, 32: {1: 4.74, 8: 5.16, 64: 7.53, 256: 17.19}}
_PREFILL = {
    16: {(1, 1024): 145_800, (1, 8192): 213_000, (16, 2048): 267_300},
    32: {(1, 1024): 36_700, (1, 8192): 38_300, (16, 2048): 42_900},
}
_OFFLINE = {16: 30_200, 32: 6_240}
_HIDDEN_SIZES = {16: 2048, 32: 4096}  # of the models that peers were measured with: Llama-3.2-1B, Llama-3.1-8B


def tables(report: dict[str, Any]) -> str:
    """Every part as a table, a row a point; what is no part is said in a line before."""
    parts = {name: rows if isinstance(rows, list) else [rows] for name, rows in report.items() if _is_part(rows)}
    about = ", ".join(f"{name} {_cell(value)}" for name, value in report.items() if name not in parts)
    lines = [about]
    for name, rows in parts.items():
        shown = [row | _beside(name, row, report) for row in rows]
        lines += ["", f"**{name}**", "", *_table(shown)]
    return "\n".join(lines)


def _is_part(value: Any) -> bool:
    return isinstance(value, list | dict)


def _beside(name: str, row: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """The best peer's figure at the same point, where there is one, and ours over it."""
    layers = report.get("num_layers", 0)
    if report.get("hidden_size") != _HIDDEN_SIZES.get(layers):
        return {}
    match name:
        case "decode":
            ours, theirs = "step_ms", _DECODE_MS[layers].get(row["batch"])
        case "prefill":
            ours, theirs = "tokens_per_s", _PREFILL[layers].get((row["prompts"], row["tokens"]))
        case "offline":
            ours, theirs = "output_tokens_per_s", _OFFLINE[layers]
        case _:
            return {}
    return {} if theirs is None else {"best_peer": theirs, "of_best_peer": row[ours] / theirs}


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    yield "| " + " | ".join(name.replace("_", " ") for name in names) + " |"
    yield "|" + "---|" * len(names)
    for row in rows:
        yield "| " + " | ".join(_cell(row.get(name, "")) for name in names) + " |"


def _cell(value: Any) -> str:
    """Three digits behind the point, none of what is larger than a thousand."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
