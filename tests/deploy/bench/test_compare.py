"""Two reports side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.deploy.bench.compare import compared_text, differences, read_report
from baton.deploy.bench.figures import Report
from baton.metadata.errors import ConfigError

from .test_figures import answered, figures_of


def report(*ttft_s: float, rate: float = 4.0, **settings: Any) -> Report:
    loads = [msgspec.structs.replace(figures_of(answered(each, 0.01)), rate=rate) for each in ttft_s]
    return Report("1", "baton bench", 0, settings, "today", "http://x", "fake 7", "toy", "ids", "3.11", 2, loads)


def verdicts(a: Report, b: Report) -> dict[str, str]:
    return {each.name: each.verdict for each in differences(a.loads, b.loads)}


def test_a_difference_within_the_range_of_the_repeats_is_noise() -> None:
    a = report(0.10, 0.12, 0.11)
    assert verdicts(a, report(0.119, 0.15, 0.16))["ttft p50, ms"] == "noise"
    assert verdicts(a, report(0.121, 0.15, 0.16))["ttft p50, ms"] == "higher"
    assert verdicts(a, report(0.08, 0.09))["ttft p50, ms"] == "lower"
    assert set(verdicts(a, report(0.09)).values()) == {""}, "one run shows no noise"


def test_the_text_has_medians_ratios_and_the_chance_of_an_error() -> None:
    text = compared_text(report(0.10, 0.12, 0.11), report(0.22, 0.21, 0.23))
    (line,) = [line for line in text.splitlines() if line.startswith("ttft p50")]
    assert line.split() == ["ttft", "p50,", "ms", "110.00", "220.00", "2.000", "higher"]
    assert "in 10.0% of the lines" in text and all(len(line) <= 80 for line in text.splitlines())
    assert "--repeat" in compared_text(report(0.1), report(0.1))


def test_loads_that_differ_are_named() -> None:
    assert "WARNING: the loads differ: --prompt-len" in compared_text(
        report(0.1, prompt_len="512", url="a"), report(0.1, prompt_len="64", url="b")
    )
    with pytest.raises(ConfigError, match="no rate in common: 4 requests/s in the first, 8 in the second"):
        compared_text(report(0.1), report(0.1, rate=8.0))


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(msgspec.json.encode(report(0.1)))
    assert read_report(path) == report(0.1)
    path.write_text('{"baton": 1}')
    with pytest.raises(ConfigError, match=r"a\.json was not written by `baton bench --json`"):
        read_report(path)
