"""Reports of bench_gpu.py as the main tables."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gpu_figures import write_gpu_figures


def report(**more: Any) -> dict[str, Any]:
    return {
        "commit": "c1",
        "device": "H200",
        "model": "8b",
        "num_layers": 32,
        "hidden_size": 4096,
        "decode": [{"batch": 1, "step_ms": 4.08, "x_floor": 1.16}, {"batch": 3, "step_ms": 4.2, "x_floor": 1.2}],
        "prefill": [{"prompts": 1, "tokens": 8192, "tokens_per_s": 39713.2}],
        "offline": [{"output_tokens_per_s": 6130.0}],
        **more,
    }


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Take the place of figures.py, and keep what it is asked to write."""
    found: dict[str, dict[str, Any]] = {}
    module = ModuleType("figures")
    module.write_figure = lambda folder, name, **figure: found.__setitem__(name, figure)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "figures", module)
    return found


def test_each_model_stands_above_its_best_peer(written: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    in_fp8 = report(weights_format="fp8", KV_format="fp8")
    write_gpu_figures(tmp_path / "figures", [report(), in_fp8, report(hidden_size=5120)], "bench_all.py")
    steps, prompts = written["decode-step"], written["prompts"]
    assert steps["columns"][:3] == ["model", "batch 1", "batch 8"]
    assert (steps["commit"], steps["device"]) == ("c1", "H200")
    assert steps["rows"][0] == ["8b", 4.08, None, None, None, 1.16, None, None, None]  # batch 3 is no column
    assert steps["rows"][1][:5] == ["best peer of 8b", 4.74, 5.16, 7.53, 17.19]
    assert [row[0] for row in steps["rows"][2:]] == ["8b, weights in FP8, KV in FP8", "8b"]
    assert prompts["rows"][0] == ["8b", None, 39710, None, 6130]
    assert prompts["rows"][1] == ["best peer of 8b", 36_700, 38_300, 42_900, 6_240]
    assert all(len(row) == len(figure["columns"]) for figure in written.values() for row in figure["rows"])


def test_a_report_without_such_rows_writes_nothing(written: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    write_gpu_figures(tmp_path, [{"commit": "c1", "handoff": []}], "bench_all.py")
    assert not written
