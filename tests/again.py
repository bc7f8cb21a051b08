"""Run pytest; run the tests that failed again, alone, one after the other.

    python tests/again.py PYTEST_ARGUMENT ... [--beside PYTEST_ARGUMENT ...]

A machine that is busy with other work delays processes, and tests about time then fail without a defect. So a test that
fails gets another chance: it must pass alone NUM_REPEATS times. A test that is skipped then has not passed. The last
line names these tests, so that nobody overlooks a test that fails often.

`--beside` begins the arguments of a second run, for tests that mostly wait. Both run at the same time. The first run
uses the processor time that the second one leaves, so tests of the second run are hardly delayed. The output of the
second run is printed when the first run has ended.

The runs fail without a repetition if pytest could not collect all tests, was interrupted, or stopped early (-x).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

NUM_REPEATS = 3
BESIDE = "--beside"
YIELDING = ("nice", "-n", "5")  # three quarters of a contested processor go to the other run
CACHE = Path(".pytest_cache")
LAST_FAILED = Path("v/cache/lastfailed")  # in a cache; pytest writes it: {node id: true}
TESTS_FAILED, INTERNAL_ERROR, NO_TESTS = 1, 3, 5  # exit statuses of pytest


def main(arguments: list[str]) -> int:
    (CACHE / LAST_FAILED).unlink(missing_ok=True)
    if BESIDE in arguments:
        place = arguments.index(BESIDE)
        statuses = _run_both(arguments[:place], arguments[place + 1 :])
    else:
        statuses = [_checked(_pytest(arguments), _last_failed(CACHE))]
    statuses = [status for status in statuses if status not in (0, NO_TESTS)]
    if not statuses:
        return 0
    if set(statuses) != {TESTS_FAILED} or _stops_early(arguments):
        return max(statuses)
    failed = sorted(_last_failed(CACHE))
    if any("::" not in node_id for node_id in failed):  # a file's name: pytest could not collect it
        return TESTS_FAILED
    names = " ".join(failed)
    for count in range(NUM_REPEATS):
        status, has_skipped = _repeat(failed)
        if status or has_skipped:
            what = "failed alone as well" if status else "was skipped alone"
            print(f"Failed, and at least one {what} (repetition {count + 1}): {names}")
            return status or TESTS_FAILED
    print(f"Failed at first, then passed alone {NUM_REPEATS} times: {names}")
    return 0


def _run_both(first: list[str], second: list[str]) -> list[int]:
    """Run both at the same time. Return pytest's exit statuses, and leave the failures of both in the cache."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        command = [*_command(second), "-o", f"cache_dir={folder}"]
        beside = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        statuses = [subprocess.run([*YIELDING, *_command(first)], check=False).returncode, beside.wait()]
        output.seek(0)
        print(output.read().decode(errors="replace"), end="")
        failures = _last_failed(CACHE), _last_failed(Path(folder))
        statuses = [_checked(status, failed) for status, failed in zip(statuses, failures, strict=True)]
        if failed := failures[1]:
            (CACHE / LAST_FAILED).parent.mkdir(parents=True, exist_ok=True)
            (CACHE / LAST_FAILED).write_text(json.dumps(_last_failed(CACHE) | failed))
    return statuses


def _checked(status: int, failed: dict[str, bool]) -> int:
    """Return the exit status of a run. One that failed without a failed test has had another error."""
    return INTERNAL_ERROR if status == TESTS_FAILED and not failed else status


def _last_failed(cache: Path) -> dict[str, bool]:
    return json.loads((cache / LAST_FAILED).read_text()) if (cache / LAST_FAILED).exists() else {}


def _repeat(failed: list[str]) -> tuple[int, bool]:
    """Run these tests alone. Return pytest's exit status, and whether a test was skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # without the cache, so that `pytest --last-failed` still finds the failures of the whole run
        status = _pytest([*failed, "-x", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report}"])
        skipped = ElementTree.parse(report).iter("skipped") if not status else ()
        return status, any(each.get("type") != "pytest.xfail" for each in skipped)


def _pytest(arguments: list[str]) -> int:
    return subprocess.run(_command(arguments), check=False).returncode


def _command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", *arguments]


def _stops_early(arguments: list[str]) -> bool:
    given = [*arguments, *shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))]
    return any(re.match(r"-[a-zA-Z]*x|--exitfirst|--maxfail", argument) for argument in given)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C ends pytest, which stops the processes of its tests
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # pytest's own lines keep their place
    sys.exit(main(sys.argv[1:]))
