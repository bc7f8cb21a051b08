"""bench_coupling.py, with the fewest tokens that it measures, on the demo model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("bench_coupling.py")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.whole
def test_the_fewest_tokens_are_measured(tmp_path: Path) -> None:
    """No id is expected often enough to be compared alone."""
    report = tmp_path / "report.json"
    done = run("--windows", "2", "--window", "69", "--draws", "1", "--json", str(report))
    assert done.returncode == 0, done.stderr
    written = json.loads(report.read_text())
    assert written["positions"] == 2 and len(written["rows"]) == 15
    assert all(1 >= row["optimum"] >= row["expected"] > 0 for row in written["rows"])
    assert all(row["num_ids"] == 0 and "rms_z" not in row for row in written["marginals"].values())
    assert "draws of target: no id came often enough to be compared; z of their log-probability" in done.stdout


@pytest.mark.whole
@pytest.mark.parametrize(
    ("flag", "value", "least"), [("windows", 1, 2), ("window", 68, 69), ("draws", 0, 1), ("threads", 0, 1)]
)
def test_too_few_are_refused_in_words(flag: str, value: int, least: int) -> None:
    done = run(f"--{flag}", str(value))
    assert done.returncode == 2
    assert f"argument --{flag}: {value} is too small: give {least} or more" in done.stderr
