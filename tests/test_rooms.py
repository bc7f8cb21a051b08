"""The program that runs all tests: what fails is seen, and all processor time is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import rooms
sys.exit(rooms.main(sys.argv[1:]))
"""
PASSES = "import pytest\nfrom pathlib import Path\ndef test_passes():\n    print('unseen')\n"
FAILS = "def test_fails():\n    assert 0, 'the reason'\n"
FAILS_ONCE = """
{mark}
def test_fails_once(tmp_path, mark=Path(__file__).with_suffix(".mark")):
    was_there = mark.exists()
    mark.touch()
    assert was_there
    {then}
"""
TIMING = "@pytest.mark.timing"
LEAVES_A_PROCESS = """
import subprocess, sys
def test_leaves_a_process():
    burn = "import time\\nwhile time.process_time() < 1.5: pass"
    subprocess.run(["sh", "-c", '"$0" -c "$1" &', sys.executable, burn], check=True)
"""


def _run(folder: Path, texts: dict[str, str], *arguments: str) -> tuple[int, list[str]]:
    """Write these test files. Return the exit status and the output's lines of a run over them."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts=--import-mode=importlib\nmarkers=timing:\n")
    for name, text in texts.items():
        path = folder / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PASSES + text)
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # pytest starts faster
    command = [sys.executable, "-c", RUN, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout.rstrip().splitlines()


def test_each_folder_is_a_line_and_failures_show_what_pytest_said(tmp_path: Path) -> None:
    texts = {"a/test_a.py": FAILS, "b/test_b.py": "", "integration/test_c.py": "", "integration/test_d.py": ""}
    status, lines = _run(tmp_path, texts)
    assert status == 1
    named = sorted(line.split()[0] for line in lines if line.startswith("tests/"))
    assert named[:5] == [
        "tests/a",
        "tests/a/test_a.py:6:",
        "tests/b",
        "tests/integration/test_c.py",
        "tests/integration/test_d.py",
    ]
    assert any("the reason" in line for line in lines)
    assert lines[-1] == "Failed: tests/a/test_a.py::test_fails"
    assert lines[-2].startswith("4 passed, 1 failed in 0.")
    kept = json.loads((tmp_path / ".pytest_cache/v/cache/lastfailed").read_text())
    assert kept == {"tests/a/test_a.py::test_fails": True}


@pytest.mark.parametrize(
    ("mark", "then", "status", "said"),
    [
        (TIMING, "", 0, "Failed at first, then passed 3 times"),
        ("", "", 1, "Failed: tests/test_it.py::test_fails_once"),
        (TIMING, "pytest.skip('its device is gone')", 1, "Failed, and at least one did not pass when repeated"),
    ],
)
def test_only_tests_of_time_are_repeated_and_must_pass(
    tmp_path: Path, mark: str, then: str, status: int, said: str
) -> None:
    got, lines = _run(tmp_path, {"test_it.py": FAILS_ONCE.format(mark=mark, then=then)})
    assert got == status
    assert lines[-1].startswith(said)


def test_paths_and_options_pick_tests(tmp_path: Path) -> None:
    texts = {"a/test_a.py": FAILS, "b/test_b.py": FAILS}
    assert _run(tmp_path, texts, "tests/b", "-k", "passes")[1][-1].startswith("1 passed in")
    assert _run(tmp_path, texts, "tests/a/test_a.py::test_passes")[1][-1].startswith("1 passed in")
    assert _run(tmp_path, texts, "-k", "nothing")[0] == 0


def test_a_run_that_could_not_run_all_tests_is_not_forgiven(tmp_path: Path) -> None:
    fails_once = FAILS_ONCE.format(mark=TIMING, then="")
    assert _run(tmp_path, {"test_it.py": fails_once}, "-x")[0] == 3
    assert _run(tmp_path, {"a/test_it.py": "import nothing_of_that_name\n"})[0] not in (0, 1, 5)


def test_processes_that_tests_leave_behind_count(tmp_path: Path) -> None:
    status, lines = _run(tmp_path, {"test_it.py": LEAVES_A_PROCESS})
    assert status == 0
    alone = float(next(line for line in lines if line.startswith("tests")).split()[1])
    whole = float(lines[-1].rpartition(" in ")[2].split()[0]) * 60
    assert whole > alone + 0.8
