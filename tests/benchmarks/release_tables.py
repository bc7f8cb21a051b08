"""The tables of docs/figures that bench_all.py measures, made from the reports of its parts.

A table is written when all its parts are measured, at one commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from figures import write_figure
from harness import columns_of

Report = Mapping[str, Any]
Row = dict[str, Any]

# Peers on an H200, Llama-3.1-8B in bfloat16: milliseconds of a decode step at context 1,024, by batch.
_VLLM_MS = {1: 4.92, 8: 5.21, 64: 7.55, 256: 17.34}
_SGLANG_MS = {1: 4.74, 8: 5.16, 64: 7.53, 256: 17.19}

_SHAPES = {
    "never": "Baton 1P1D",
    "auto": "Baton 1P1D, auto",
    "0p2d": "Baton 2D",
    "dp2": "a group of 2 data-parallel ranks",
    "dp4": "1D of 4 data-parallel ranks",
    "tp2-2d": "1P of 2 ranks, 2D",
    "2p2d": "2P, 2D",
}
_TIMES = ("first token", "per token", "largest gap")
_LOADS = {"4096": "4,096 + 256", "1024": "1,024 + 512", "ranks-4096": "4,096 + 256", "ranks-1024": "1,024 + 512"}
_SECOND = {
    "idle-64": "64 tokens, idle",
    "idle-1024": "1,024 tokens, idle",
    "idle-8192": "8,192 tokens, idle",
    "busy-64": "64 tokens, 32 streams",
}
_SAMPLING = {
    "temperature 1": "temperature 1",
    "top_p": "top_p 0.9",
    "top_k": "top_k 50",
    "penalties": "top_p, top_k, penalty",
    "logprobs": "5 log-probabilities",
}


class Table(NamedTuple):
    """A table, the parts that it shows, and how their reports become its rows."""

    parts: tuple[str, ...]
    unit: str
    rows: Callable[..., Iterator[Row]]
    num_gpus: int = 1


def write_release_tables(folder: Path, reports: Mapping[str, Report], command: str) -> list[str]:
    """Write each table whose parts are in `reports`. Returns the names of those that lack a part, or whose parts are
    of several commits. `command`: what measures a part; the names of the parts follow it."""
    folder.mkdir(parents=True, exist_ok=True)
    left: list[str] = []
    for name, table in TABLES.items():
        found = [reports[part] for part in table.parts if part in reports]
        if len(found) < len(table.parts) or len({report["commit"] for report in found}) > 1:
            left.append(name)
            continue
        rows = list(table.rows(*found))
        columns = columns_of(rows)
        device = found[0]["device"]
        write_figure(
            folder,
            name,
            method=f"{command} --only {' '.join(table.parts)}",
            unit=table.unit,
            columns=columns,
            rows=[[_rounded(row.get(column)) for column in columns] for row in rows],
            commit=found[0]["commit"],
            device=device if table.num_gpus == 1 else f"{table.num_gpus} x {device}",
        )
    return left


def _beside_peers(report: Report) -> Iterator[Row]:
    for row in report["decode"]:
        vllm, sglang = _VLLM_MS[row["batch"]], _SGLANG_MS[row["batch"]]
        ours = {"batch": str(row["batch"]), "Baton": row["step_ms"], "vLLM": vllm, "SGLang": sglang}
        yield ours | {"floor": row["floor_ms"], "Baton, of the better peer": row["step_ms"] / min(vllm, sglang)}


def _loads(*reports: Report) -> Iterator[Row]:
    rows = [row for report in reports for row in report["rows"] if row["load"] in _LOADS]
    for row in sorted(rows, key=lambda row: (list(_LOADS).index(row["load"]), row["rate"])):
        yield {
            "prompt + output": _LOADS[row["load"]],
            "requests/s": round(row["rate"], 1),
            "engine": _SHAPES[row["shape"]],
            **{f"{what} {at}": row[f"{what} {at}"] for what in _TIMES for at in ("p50", "p99")},
        }


def _second_tokens(report: Report) -> Iterator[Row]:
    for row in report["rows"]:
        if row["load"] in _SECOND:
            yield {"prompt": _SECOND[row["load"]], "median": row["second p50"]}


def _served(plain: Report, drafting: Report) -> Iterator[Row]:
    """Yield the speed of both while all streams run; none where they never all ran for long."""
    points = {
        (kind, row["kind"], row["streams"]): row["steady_tokens_per_s"]
        for kind, report in (("plain", plain), ("drafts", drafting))
        for row in report["system"]
    }
    for streams in sorted({streams for _, _, streams in points}):
        row: Row = {"streams": str(streams)}
        for kind, word in (("greedy", "greedy"), ("top_p", "top_p 0.9")):
            without, drafts = points["plain", kind, streams], points["drafts", kind, streams]
            row |= {f"{word}, no drafts": without, f"{word}, EAGLE-3": drafts or None}
            row[f"{word}, ratio"] = drafts / without if drafts else None
        yield row


def _adaptive(often: Report, seldom: Report) -> Iterator[Row]:
    for batch in dict.fromkeys(row["batch"] for row in often["adaptive"]):
        row: Row = {"batch": str(batch)}
        least: list[float] = []
        for word, report in (("0.8", often), ("0.2", seldom)):
            for kind, suffix in (("greedy", ""), ("top_p", ", top_p 0.9")):
                point = next(p for p in report["adaptive"] if (p["batch"], p["kind"]) == (batch, kind))
                row[f"head right for {word}" if not suffix else f"{word}{suffix}"] = round(point["adaptive"], 3)
                least.append(point["least"])
        yield row | {"worst of all turns": round(min(least), 3)}


def _sampling(plain: Report, drafting: Report) -> Iterator[Row]:
    rows = [("no drafts", plain["sampling"][0]), ("EAGLE-3, 5 steps", drafting["sampling"][-1])]
    for word, point in rows:
        rates = {column: round(point["rates"][kind], 3) for kind, column in _SAMPLING.items()}
        yield {"64 sequences": word, "greedy, ms": point["greedy_ms"], **rates}


def _grammars(report: Report) -> Iterator[Row]:
    for row in report["rows"]:
        word = f"EAGLE-3, {row['drafts']} steps" if row["drafts"] else "no drafts"
        yield {
            "32 streams": word,
            "free": row["free"],
            "with a grammar": row["bound"],
            "speed, of the free": round(row["bound, of free"], 3),
        }


def _long_prompts(report: Report) -> Iterator[Row]:
    for row in report["long"]:
        yield {"prompt tokens": row["tokens"], "first token": row["ms"] / 1e3, "of the floor": row["x_floor"]}


def _handoffs(one: Report, two: Report) -> Iterator[Row]:
    rates = [{row["tokens"]: row for row in _checked(report)} for report in (one, two)]
    for tokens in rates[0]:
        row: Row = {"prompt tokens": f"{tokens:,}"}
        for word, found in zip(("one GPU", "two GPUs"), rates, strict=True):
            row |= {word: found[tokens]["s"] * 1e3, f"{word}, GB/s": round(found[tokens]["gb_s"])}
        yield row


def _checked(report: Report) -> Sequence[Report]:
    return [row for row in report["handoff"] if row["transport"] == "cuda" and row["checksums"]]


def _tensor_parallel(*reports: Report) -> Iterator[Row]:
    columns = [f"{report['tp']} ranks" if report["tp"] > 1 else "one GPU" for report in reports]
    for index, point in enumerate(reports[0]["decode"]):
        times = [report["decode"][index]["step_ms"] for report in reports]
        yield {"": f"decode step, batch {point['batch']}", **_compared(columns, times)}
    for index, point in enumerate(reports[0]["prefill"]):
        many = point["prompts"] > 1
        word = f"{point['prompts']} prompts of" if many else "prompt of"
        times = [report["prefill"][index]["ms"] for report in reports]
        yield {"": f"{word} {point['tokens']:,} tokens", **_compared(columns, times)}


def _compared(columns: Sequence[str], times: Sequence[float]) -> Row:
    return dict(zip(columns, times, strict=True)) | {"ratio": times[-1] / times[0]}


def _rounded(cell: Any) -> Any:
    """Return a number as the pages show it: whole from 1,000 on, one digit from 10 on, two below, three of a ratio."""
    if not isinstance(cell, float):
        return cell
    return round(cell) if cell >= 1000 else round(cell, 1) if cell >= 10 else round(cell, 3 if cell < 1 else 2)


_PAIR = ("loads-never", "loads-auto", "loads-0p2d")
TABLES = {
    "decode-step-8b-peers": Table(("engine-8b",), "ms", _beside_peers),
    "load-two-gpus-baton": Table(_PAIR, "ms", _loads, 2),
    "load-dp-attention": Table(("loads-dp2",), "ms", _loads, 2),
    "load-four-gpus": Table(("loads-tp2-2d", "loads-2p2d", "loads-dp4"), "ms", _loads, 4),
    "second-token": Table(("loads-never",), "ms after the first", _second_tokens, 2),
    "speculation-served": Table(("system-8b", "system-8b-eagle3"), "output tokens/s while all streams run", _served),
    "adaptive-drafts": Table(("adaptive-8b-0.8", "adaptive-8b-0.2"), "tokens/s over those without drafts", _adaptive),
    "sampling": Table(("sampling-8b", "sampling-8b-eagle3"), "rounds/s over greedy's", _sampling),
    "grammars": Table(("grammars-8b",), "ms per round", _grammars),
    "long-prompts": Table(("long-8b",), "s", _long_prompts),
    "handoff": Table(("handoff", "handoff-two-gpus"), "ms", _handoffs, 2),
    "tensor-parallel-two": Table(("engine-8b-tp1", "engine-8b-tp2"), "ms", _tensor_parallel, 2),
    "tensor-parallel": Table(("engine-8b-tp1", "engine-8b-tp4"), "ms", _tensor_parallel, 4),
}
