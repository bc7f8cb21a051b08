"""The repetition of failed tests: it forgives a delay and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from thinned import thinned

AGAIN = Path(__file__).with_name("again.py")
PASSES = "def test_passes():\n    pass\n"
FAILS = "def test_fails():\n    assert 0\n"
FAILS_ONCE = """
from pathlib import Path
def test_fails_once(mark=Path(__file__).with_suffix(".mark")):
    was_there = mark.exists()
    mark.touch()
    assert was_there
"""
FAILS_TWICE = """
from pathlib import Path
def test_fails_twice(mark=Path(__file__).with_suffix(".mark")):
    with mark.open("a") as file:
        file.write("x")
    assert mark.stat().st_size not in (1, 4)  # the run and the last repetition
"""
SKIPS_AFTERWARDS = """
import pytest
from pathlib import Path
def test_skips_afterwards(mark=Path(__file__).with_suffix(".mark")):
    if mark.exists():
        pytest.skip("its device is gone")
    mark.touch()
    assert 0
"""
XFAILS_AFTERWARDS = """
import pytest
from pathlib import Path
@pytest.mark.xfail(strict=True)
def test_xfails_afterwards(mark=Path(__file__).with_suffix(".mark")):
    was_there = mark.exists()
    mark.touch()
    assert not was_there
"""


def _run(folder: Path, text: str, *arguments: str) -> tuple[int, str]:
    """Return the exit status and the last line of a run over one test file."""
    status, lines = _run_whole(folder, text, *arguments)
    return status, lines[-1]


def _run_whole(folder: Path, text: str, *arguments: str) -> tuple[int, list[str]]:
    """Return the exit status and the output's lines."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, str(AGAIN), "-q", *arguments]
    # pytest starts faster without its other plugins
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout.rstrip().splitlines()


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_test_that_passes_alone_is_forgiven_and_named(tmp_path: Path, processes: str) -> None:
    status, last = _run(tmp_path, PASSES + FAILS_ONCE, "-n", processes)
    assert (status, last) == (0, "Failed at first, then passed alone 3 times: test_it.py::test_fails_once")


@pytest.mark.parametrize("text", [FAILS, FAILS_TWICE])
def test_a_test_that_fails_alone_fails_the_run(tmp_path: Path, text: str) -> None:
    status, last = _run(tmp_path, PASSES + text)
    assert status == 1
    assert last.startswith("Failed, and at least one failed alone as well")


@pytest.mark.parametrize("processes", thinned(["0", "2"], lambda i, _: i == 0))
def test_a_test_that_is_skipped_alone_fails_the_run(tmp_path: Path, processes: str) -> None:
    """Its failure is not refuted."""
    status, last = _run(tmp_path, PASSES + FAILS_ONCE.replace(".mark", ".other") + SKIPS_AFTERWARDS, "-n", processes)
    names = "test_it.py::test_fails_once test_it.py::test_skips_afterwards"
    assert (status, last) == (1, f"Failed, and at least one was skipped alone (repetition 1): {names}")


def test_a_test_that_fails_alone_as_it_is_marked_to_is_forgiven(tmp_path: Path) -> None:
    status, last = _run(tmp_path, PASSES + XFAILS_AFTERWARDS)
    assert (status, last) == (0, "Failed at first, then passed alone 3 times: test_it.py::test_xfails_afterwards")


@pytest.mark.parametrize("processes", thinned(["0", "2"], lambda i, _: i == 0))
def test_an_error_of_collection_fails_the_run(tmp_path: Path, processes: str) -> None:
    assert _run(tmp_path, PASSES + "import nothing_of_that_name\n", "-n", processes)[0] not in (0, 5)


def test_old_failures_and_runs_that_stop_early_are_not_repeated(tmp_path: Path) -> None:
    cache = tmp_path / ".pytest_cache/v/cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text('{"test_it.py::test_gone": true}')
    assert _run(tmp_path, PASSES)[0] == 0
    assert [_run(tmp_path, FAILS, flag)[0] for flag in ("-x", "-vx", "--maxfail=1")] == [1, 1, 1]


def test_a_run_without_tests_passes(tmp_path: Path) -> None:
    assert _run(tmp_path, PASSES, "-k", "nothing")[0] == 0


MEETS = """
import time
from pathlib import Path
def _meet(own, other):
    Path(own).touch()
    deadline = time.monotonic() + 60
    while not Path(other).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
def test_first():
    _meet("first", "second")
def test_second():
    _meet("second", "first")
"""


def test_two_runs_share_the_time_and_the_second_is_printed_last(tmp_path: Path) -> None:
    status, lines = _run_whole(tmp_path, MEETS, "-k", "first", "--beside", "-v", "-k", "second")
    assert status == 0
    first, second = (index for index, line in enumerate(lines) if "1 passed, 1 deselected" in line)
    assert first < next(index for index, line in enumerate(lines) if "test_second PASSED" in line) < second


@pytest.mark.parametrize("names", [("fails_once", "fails and not once"), ("fails and not once", "fails_once")])
def test_failures_of_both_runs_are_repeated_and_kept_for_last_failed(tmp_path: Path, names: tuple[str, str]) -> None:
    status, last = _run(tmp_path, PASSES + FAILS_ONCE + FAILS, "-k", names[0], "--beside", "-k", names[1])
    assert status == 1
    assert last.startswith("Failed, and at least one failed alone as well")
    kept = json.loads((tmp_path / ".pytest_cache/v/cache/lastfailed").read_text())
    assert kept.keys() == {"test_it.py::test_fails", "test_it.py::test_fails_once"}


def test_a_failure_of_either_run_that_passes_alone_is_forgiven(tmp_path: Path) -> None:
    for index, (first, second) in enumerate([("passes", "fails_once"), ("fails_once", "passes")]):
        folder = tmp_path / str(index)
        folder.mkdir()
        status, last = _run(folder, PASSES + FAILS_ONCE, "-k", first, "--beside", "-k", second)
        assert (status, last) == (0, "Failed at first, then passed alone 3 times: test_it.py::test_fails_once")


def test_an_error_of_collection_in_either_run_fails_the_runs(tmp_path: Path) -> None:
    for first, second in (("test_it.py", "nothing.py"), ("nothing.py", "test_it.py")):
        assert _run(tmp_path, PASSES, first, "--beside", second)[0] not in (0, 1, 5)


def test_a_run_that_fails_without_a_failed_test_is_not_forgiven_for_the_failure_of_the_other(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_sessionfinish(session):\n    if session.testscollected == 1:\n        session.exitstatus = 1\n"
    )
    runs = ["-k", "passes", "--beside", "-k", "passes or once"]
    assert _run(tmp_path, PASSES + FAILS_ONCE, *runs)[0] == 3
    assert _run(tmp_path, PASSES, "-k", "passes")[0] == 3
