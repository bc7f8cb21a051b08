"""Run pytest; run the tests that failed again, alone, one after the other.

    python tests/again.py PYTEST_ARGUMENT ...

A machine that is busy with other work delays processes, and tests about time then fail without a defect. So a test that
fails gets another chance: it must pass alone NUM_REPEATS times. A test that is skipped then has not passed. The last
line names these tests, so that nobody overlooks a test that fails often.

The run fails without a repetition if pytest could not collect all tests, was interrupted, or stopped early (-x).
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
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")  # pytest writes it: {node id: true}
TESTS_FAILED, NO_TESTS = 1, 5  # exit statuses of pytest


def main(arguments: list[str]) -> int:
    LAST_FAILED.unlink(missing_ok=True)
    status = _pytest(arguments)
    if status == NO_TESTS:
        return 0
    if status != TESTS_FAILED or _stops_early(arguments):
        return status
    failed: list[str] = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if not failed or any("::" not in node_id for node_id in failed):  # a file's name: pytest could not collect it
        return status
    names = " ".join(failed)
    for count in range(NUM_REPEATS):
        status, has_skipped = _repeat(failed)
        if status or has_skipped:
            what = "failed alone as well" if status else "was skipped alone"
            print(f"Failed, and at least one {what} (repetition {count + 1}): {names}")
            return status or TESTS_FAILED
    print(f"Failed at first, then passed alone {NUM_REPEATS} times: {names}")
    return 0


def _repeat(failed: list[str]) -> tuple[int, bool]:
    """Run these tests alone. Return pytest's exit status, and whether a test was skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # without the cache, so that `pytest --last-failed` still finds the failures of the whole run
        status = _pytest([*failed, "-x", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report}"])
        skipped = ElementTree.parse(report).iter("skipped") if not status else ()
        return status, any(each.get("type") != "pytest.xfail" for each in skipped)


def _pytest(arguments: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def _stops_early(arguments: list[str]) -> bool:
    given = [*arguments, *shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))]
    return any(re.match(r"-[a-zA-Z]*x|--exitfirst|--maxfail", argument) for argument in given)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C ends pytest, which stops the processes of its tests
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # pytest's own lines keep their place
    sys.exit(main(sys.argv[1:]))
