"""Run pytest; run the tests that failed again, alone, one after the other.

    python tests/again.py PYTEST_ARGUMENT ...

A machine that is busy with other work delays processes, and tests about time then fail without a defect. So a test that
fails gets another chance: it must pass alone NUM_REPEATS times. The last line names these tests, so that nobody
overlooks a test that fails often.

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
from pathlib import Path

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
        # without the cache, so that `pytest --last-failed` still finds the failures of the whole run
        if status := _pytest([*failed, "-x", "-n", "0", "-p", "no:cacheprovider"]):
            print(f"Failed, and at least one failed alone as well (repetition {count + 1}): {names}")
            return status
    print(f"Failed at first, then passed alone {NUM_REPEATS} times: {names}")
    return 0


def _pytest(arguments: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def _stops_early(arguments: list[str]) -> bool:
    given = [*arguments, *shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))]
    return any(re.match(r"-[a-zA-Z]*x|--exitfirst|--maxfail", argument) for argument in given)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C ends pytest, which stops the processes of its tests
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # pytest's own lines keep their place
    sys.exit(main(sys.argv[1:]))
