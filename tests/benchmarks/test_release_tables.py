"""Reports of bench_all.py's parts as the tables of docs/figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_all
from release_tables import TABLES, write_release_tables

ABOUT = {"commit": "0123abcd", "device": "H200"}


def tensor_parallel(tp: int, step_ms: float, prompt_ms: float) -> dict[str, Any]:
    prompts = [{"prompts": 1, "tokens": 8192, "ms": prompt_ms}, {"prompts": 16, "tokens": 2048, "ms": 4 * prompt_ms}]
    return ABOUT | {"tp": tp, "decode": [{"batch": 8, "step_ms": step_ms}], "prefill": prompts}


def served(kind: str, *speeds: float) -> dict[str, Any]:
    points = [
        {"kind": sampling, "streams": streams, "steady_tokens_per_s": speed}
        for sampling in ("greedy", "top_p")
        for streams, speed in zip((1, 64), speeds, strict=True)
    ]
    return ABOUT | {"speculative": kind, "system": points}


def test_every_table_is_made_of_parts_that_are_measured() -> None:
    known = {part.name for part in bench_all.parts(Path("m"), 4)}
    assert {part for table in TABLES.values() for part in table.parts} <= known
    assert set(bench_all.ENGINES) <= known


def test_a_table_is_written_when_all_its_parts_are_of_one_commit(tmp_path: Path) -> None:
    one, two = tensor_parallel(1, 4.37, 206.7), tensor_parallel(2, 2.77, 119.7)
    four = tensor_parallel(4, 1.9, 70.0) | {"commit": "4567cdef"}
    reports = {"engine-8b-tp1": one, "engine-8b-tp2": two, "engine-8b-tp4": four}
    left = write_release_tables(tmp_path / "figures", reports, "python bench_all.py")
    assert set(left) == set(TABLES) - {"tensor-parallel-two"}
    (path,) = (tmp_path / "figures").iterdir()
    figure = json.loads(path.read_text())
    assert figure["columns"] == ["", "one GPU", "2 ranks", "ratio"] and figure["device"] == "2 x H200"
    assert figure["method"] == "python bench_all.py --only engine-8b-tp1 engine-8b-tp2"
    assert figure["rows"] == [
        ["decode step, batch 8", 4.37, 2.77, 0.634],
        ["prompt of 8,192 tokens", 206.7, 119.7, 0.579],
        ["16 prompts of 2,048 tokens", 826.8, 478.8, 0.579],
    ]


def test_streams_that_never_all_ran_have_no_speed(tmp_path: Path) -> None:
    reports = {"system-8b": served("none", 265.5, 10800.0), "system-8b-eagle3": served("eagle3", 626.4, 0.0)}
    write_release_tables(tmp_path, reports, "python bench_all.py")
    figure = json.loads((tmp_path / "speculation-served.json").read_text())
    assert [row[:4] for row in figure["rows"]] == [["1", 265.5, 626.4, 2.36], ["64", 10800, None, None]]
