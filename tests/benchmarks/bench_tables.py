"""Turn reports of the GPU benchmarks into the Markdown tables of docs/performance.md, beside the best peer's figures.

A report is what bench_gpu, bench_handoff and bench_system write with --json: `heading`, more facts, and lists of rows
by what was measured. Each model, drafter and number of GPUs has its own row or column, so that reports can be compared.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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

Report = Mapping[str, Any]


def heading(commit: str | None) -> dict[str, Any]:
    """Return the first fields of every report. If `commit` is None, git names the commit."""
    import torch

    describe = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    found = subprocess.run(describe, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "commit": commit or found.stdout.strip() or "unknown",
    }


def tables(reports: Mapping[str, Report]) -> str:
    """Return one line per report, by its name, then each table for which a report has rows."""
    lines = [f"{name}: {_facts(report)}" for name, report in reports.items()]
    for table in _TABLES:
        cells = [cell for report in reports.values() for cell in table.cells(report)]
        lines += ["", *_pivot(table.corner, cells)] if cells else []
    return "\n".join(lines)


class _Cell(NamedTuple):
    row: tuple[str, ...]  # as many words as the table's corner has
    column: str
    text: str


class _Table(NamedTuple):
    corner: tuple[str, ...]
    cells: Callable[[Report], Iterable[_Cell]]  # none where the report has no such rows


def _pivot(corner: tuple[str, ...], cells: list[_Cell]) -> Iterator[str]:
    rows, columns = dict.fromkeys(cell.row for cell in cells), dict.fromkeys(cell.column for cell in cells)
    texts = {(cell.row, cell.column): cell.text for cell in cells}
    yield f"| {' | '.join((*corner, *columns))} |"
    yield "|" + "---|" * (len(corner) + len(columns))
    for row in rows:
        yield f"| {' | '.join((*row, *(texts.get((row, column), '') for column in columns)))} |"


def _facts(report: Report) -> str:
    facts = {name: value for name, value in report.items() if value is not None and not isinstance(value, list)}
    words = {name: f"{value:.3f}" if isinstance(value, float) else f"{value}" for name, value in facts.items()}
    return ", ".join(f"{name.replace('_', ' ')} {word}" for name, word in words.items())


def _shape(report: Report) -> tuple[int, int]:
    return report["num_layers"], report["hidden_size"]


def _decode(report: Report) -> Iterator[_Cell]:
    for row in report.get("decode", ()):
        point, model, peer = (f"batch {row['batch']}",), report["model"], _DECODE_MS.get(_shape(report), {})
        yield _Cell(point, f"{model} ms", f"{row['step_ms']:.2f}")
        if row["batch"] in peer:
            yield _Cell(point, f"best peer of {model} ms", f"{peer[row['batch']]:.2f}")
        yield _Cell(point, f"{model} of the floor", f"{row['x_floor']:.2f}")


def _mixed(report: Report) -> Iterator[_Cell]:
    for row in report.get("mixed", ()):
        point, model = (f"{row['batch']}", f"{row['longest']:,}"), report["model"]
        yield _Cell(point, f"{model} ms", f"{row['step_ms']:.2f}")
        yield _Cell(point, f"{model} of the floor", f"{row['x_floor']:.2f}")


def _sampling(report: Report) -> Iterator[_Cell]:
    for row in report.get("sampling", ()):
        point = (report["model"], f"{row['batch']}", f"{row['steps']}")
        yield _Cell(point, "greedy ms", f"{row['greedy_ms']:.2f}")
        for name, rate in row["rates"].items():
            yield _Cell(point, name, f"{rate:.2f}")


def _prompts(report: Report) -> Iterator[_Cell]:
    for row in report.get("prefill", ()):
        peer = _PREFILL.get(_shape(report), {}).get((row["prompts"], row["tokens"]))
        yield from _rate(report, f"{row['prompts']} x {row['tokens']:,}", row["tokens_per_s"], peer)
    for row in report.get("offline", ()):
        point = "256 requests of 1,024 in and 256 out, output tokens/s"
        yield from _rate(report, point, row["output_tokens_per_s"], _OFFLINE.get(_shape(report)))


def _rate(report: Report, point: str, ours: float, peer: int | None) -> Iterator[_Cell]:
    yield _Cell((point,), report["model"], f"{ours:,.0f}")
    if peer is not None:
        yield _Cell((point,), f"best peer of {report['model']}", f"{peer:,}")


def _long(report: Report) -> Iterator[_Cell]:
    for row in report.get("long", ()):
        point, model = (f"{row['tokens']:,}",), report["model"]
        yield _Cell(point, f"{model} s", f"{row['ms'] / 1e3:.2f}")
        yield _Cell(point, f"{model} of the floor", f"{row['x_floor']:.2f}")


def _small_prompts(report: Report) -> Iterator[_Cell]:
    for row in report.get("small-prompts", ()):
        point, model = (f"{row['tokens']:,}",), report["model"]
        yield _Cell(point, f"{model} ms", f"{row['wall_ms']:.2f}")
        yield _Cell(point, f"{model} kernels ms", f"{row['kernels_ms']:.2f}")


def _joint(report: Report) -> Iterator[_Cell]:
    for row in report.get("joint", ()):
        point = (report["model"], f"{row['batch']}", f"{row['steps']}", f"{row['tokens']}")
        for name in ("round", "chunk", "apart", "joint"):
            yield _Cell(point, f"{name} ms", f"{row[f'{name}_ms']:.2f}")
        yield _Cell(point, "one forward", "yes" if row["is_joint"] else "no")


def _turns(report: Report) -> Iterator[_Cell]:
    for row in report.get("turns", ()):
        yield _Cell((f"{row['tokens']:,}", f"{row['prefix']:,}"), f"{report['model']} ms", f"{row['ms']:.2f}")


def _idle(report: Report) -> Iterator[_Cell]:
    for row in report.get("idle", ()):
        point, model = (f"{row['batch']}",), report["model"]
        yield _Cell(point, f"{model} between rounds", f"{row['idle_share_between_rounds']:.1%}")
        yield _Cell(point, f"{model} in all", f"{row['idle_share']:.1%}")
        yield _Cell(point, f"{model} longest gap us", f"{row['longest_gap_us']:.0f}")


def _rounds(report: Report) -> Iterator[_Cell]:
    for row in report.get("rounds", ()):
        kind = "" if report["topk"] == 1 else f"trees of {report['topk']} branches, "
        for steps in (int(name[1:-8]) for name in row if name.endswith("_speedup")):
            text = f"{row[f'k{steps}_over_plain']:.2f}: {row[f'k{steps}_speedup']:.2f}"
            yield _Cell((report["drafter"], f"{row['batch']}"), f"{kind}K = {steps}", text)


def _adaptive(report: Report) -> Iterator[_Cell]:
    for row in report.get("adaptive", ()):
        text = f"{row['adaptive']:.3f} ({row['adaptive_first']:.3f}, {row['least']:.3f})"
        yield _Cell((row["kind"], f"{row['batch']}"), report["drafter"], text)


def _handoff(report: Report) -> Iterator[_Cell]:
    columns = {"device copy": "plain copy on the device", "checksums alone": "checksums alone, one side,"}
    for row in report.get("handoff", ()):
        transport = row["transport"]
        column = columns.get(transport, f"checksums {'on' if row['checksums'] else 'off'}")
        shown = report["transports"][0] if transport in columns else transport
        point = (shown, f"{len(set(report['devices']))}", f"{report['page_size']}", f"{row['tokens']:,}")
        yield _Cell(point, f"{column} ms", f"{row['s'] * 1e3:.3g}")
        if transport not in columns:
            yield _Cell(point, f"{column} GB/s", f"{row['gb_s']:.3g}")


def _system(report: Report) -> Iterator[_Cell]:
    for row in report.get("system", ()):
        point = (report["model"], row["kind"], f"{row['streams']}")
        yield _Cell(point, "tokens/s, prompts included", f"{row['tokens_per_s']:,.0f}")
        yield _Cell(point, "first token ms, p50 / last", f"{row['ttft_ms_p50']:,.0f} / {row['ttft_ms_max']:,.0f}")
        yield _Cell(point, "between tokens ms, p50 / p99", f"{row['itl_ms_p50']:.2f} / {row['itl_ms_p99']:.1f}")
        if "share" in row:
            yield _Cell(point, "share", f"{row['share']:.2f}")


_TABLES = (
    _Table(("decode step, context 1,024",), _decode),
    _Table(("decode step, one long sequence, batch", "its tokens"), _mixed),
    _Table(("rounds a second over greedy's", "batch", "K"), _sampling),
    _Table(("prefill, tokens/s",), _prompts),
    _Table(("a long prompt, tokens",), _long),
    _Table(("a short prompt, tokens",), _small_prompts),
    _Table(("a round and a chunk", "batch", "K", "its tokens"), _joint),
    _Table(("new tokens", "behind"), _turns),
    _Table(("idle in decode steps, batch",), _idle),
    _Table(("a round over a plain step: tokens/s over plain", "batch"), _rounds),
    _Table(("adaptive K over none (first turn, least turn)", "batch"), _adaptive),
    _Table(("handoff by", "GPUs", "page size", "tokens"), _handoff),
    _Table(("whole system", "sampling", "streams"), _system),
)
