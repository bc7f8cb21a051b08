"""The repetition of tests of time that failed: it forgives a delay and nothing else."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("again", Path(__file__).with_name("again.py"))
assert _spec is not None and _spec.loader is not None
again = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(again)


class Runs:
    """Repetitions whose results are given."""

    def __init__(self, *passes: bool) -> None:
        self._passes = list(passes)
        self.names: list[list[str]] = []

    def __call__(self, names: list[str]) -> bool:
        self.names.append(names)
        return self._passes.pop(0)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_test_of_time_that_passes_again_is_forgiven_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs(True, True, True)
    assert again.repeat({"a": True}, runs)
    assert runs.names == [["a"]] * 3
    said = "Failed at first, then passed 3 times on a busy machine: a (runs so far: 1)\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("passes", [(False,), (True, True, False)])
def test_a_test_of_time_that_fails_again_is_not_forgiven(passes: tuple[bool, ...]) -> None:
    runs = Runs(*passes)
    assert not again.repeat({"a": True}, runs)
    assert len(runs.names) == len(passes)


def test_any_other_failure_is_a_defect_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A race that shows in one run of ten would pass three repetitions."""
    assert not again.repeat({"a": True, "race": False}, Runs())
    assert capsys.readouterr().out == "Failed: race\n"


def test_more_tests_of_time_than_the_budget_are_a_defect() -> None:
    names = list("abcd")
    assert again.repeat(dict.fromkeys(names[:3], True), Runs(True, True, True))
    assert not again.repeat(dict.fromkeys(names, True), Runs())


def test_a_file_counts_the_runs_in_which_a_test_failed(capsys: pytest.CaptureFixture[str]) -> None:
    for names in ("ab", "b"):
        again.repeat(dict.fromkeys(names, True), Runs(True, True, True))
    assert json.loads(Path("build/repeated_tests.json").read_text()) == {"b": 2, "a": 1}
    assert capsys.readouterr().out.endswith("b (runs so far: 2)\n")
