"""The main tables of the engine on a GPU, made from reports of bench_gpu.py, beside the best peer's figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# The better of vLLM 0.26.0 and SGLang 0.5.17 on an H200, same shapes, bfloat16, by (layers, hidden size) of the model:
# Llama-3.2-1B and Llama-3.1-8B. Milliseconds of a decode step at context 1,024 by batch; tokens a second of prompts by
# (prompts, tokens), and of output where 256 requests of 1,024 tokens make 256 each.
_DECODE_MS = {
    (16, 2048): {1: 1.22, 8: 1.39, 64: 2.09, 256: 4.50},
    (32, 4096): {1: 4.74, 8: 5.16, 64: 7.53, 256: 17.19},
}
_PREFILL = {
    (16, 2048): {(1, 1024): 145_800, (1, 8192): 213_000, (16, 2048): 267_300},
    (32, 4096): {(1, 1024): 36_700, (1, 8192): 38_300, (16, 2048): 42_900},
}
_OFFLINE = {(16, 2048): 30_200, (32, 4096): 6_240}
_NAMES = {
    "llama-3.2-1b": "Llama-3.2-1B",
    "llama-3.1-8b": "Llama-3.1-8B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
    "gpt-oss-20b": "gpt-oss-20b, weights in MXFP4",
}
_BATCHES, _PROMPTS = (1, 8, 64, 256), ((1, 1024), (1, 8192), (16, 2048))
_OUTPUT = "256 requests of 1,024 + 256, output"

Report = Mapping[str, Any]


def write_gpu_figures(folder: Path, reports: Sequence[Report], method: str) -> None:
    """Write decode-step.json and prompts.json, a row for each report that has such rows, and for its peer."""
    from figures import write_figure

    folder.mkdir(parents=True, exist_ok=True)
    batches = [f"batch {batch}" for batch in _BATCHES]
    tables = {
        "decode-step": ("ms", [*batches, *(f"{each}, of the floor" for each in batches)], _decode_rows(reports)),
        "prompts": ("tokens/s", [*(f"{num} x {size:,}" for num, size in _PROMPTS), _OUTPUT], _prompt_rows(reports)),
    }
    for name, (unit, columns, rows) in tables.items():
        if found := [[_rounded(cell) for cell in row] for row in rows]:
            measured = {name: reports[0][name] for name in ("commit", "device")}
            write_figure(folder, name, method=method, unit=unit, columns=["model", *columns], rows=found, **measured)


def _rounded(cell: Any) -> Any:
    """Return a number as the pages show it: rates in tens, times and ratios with two digits."""
    if not isinstance(cell, float):
        return cell
    return round(cell / 10) * 10 if cell > 1000 else round(cell, 2)


def name_of(report: Report) -> str:
    """Return the model's name, with the formats of its weights and of its pages."""
    formats = [f"{what} in FP8" for what in ("weights", "KV") if report.get(f"{what}_format") == "fp8"]
    return ", ".join([_shown(report), *formats])


def _shown(report: Report) -> str:
    return _NAMES.get(report["model"], report["model"])


def _decode_rows(reports: Sequence[Report]) -> Iterator[list[Any]]:
    for report in (each for each in reports if each.get("decode")):
        steps = {row["batch"]: row for row in report["decode"]}
        times = [steps[batch]["step_ms"] if batch in steps else None for batch in _BATCHES]
        yield [name_of(report), *times, *(steps[batch]["x_floor"] if batch in steps else None for batch in _BATCHES)]
        if peer := _peer(_DECODE_MS, report):
            yield [f"best peer of {_shown(report)}", *peer.values(), *[None] * len(peer)]


def _prompt_rows(reports: Sequence[Report]) -> Iterator[list[Any]]:
    for report in (each for each in reports if each.get("prefill")):
        rates = {(row["prompts"], row["tokens"]): row["tokens_per_s"] for row in report["prefill"]}
        output = next((row["output_tokens_per_s"] for row in report.get("offline", ())), None)
        yield [name_of(report), *(rates.get(size) for size in _PROMPTS), output]
        if peer := _peer(_PREFILL, report):
            yield [f"best peer of {_shown(report)}", *peer.values(), _peer(_OFFLINE, report)]


def _peer(figures: Mapping[tuple[int, int], Any], report: Report) -> Any:
    """Return the peer's figures of this model in 16 bits, if they were measured."""
    is_plain = report.get("weights_format") != "fp8"
    return figures.get((report["num_layers"], report["hidden_size"])) if is_plain else None
