"""Repeat tests of time that failed, on a busy machine.

A test that compares times (marker `timing`) can fail without a defect on a machine that is busy with other work. It
must then pass NUM_REPEATS times while half of the processors are busy. Every other failure is a defect, however rarely
it shows, and fails the run at once; so do more than MOST_REPEATED tests of time. REPEATED keeps how often each test has
failed at first, over all runs in this tree, so that nobody overlooks a test that fails often.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

NUM_REPEATS = 3
MOST_REPEATED = 3  # tests of one run
REPEATED = Path("build/repeated_tests.json")  # {name of a test: runs in which it failed at first}
_BUSY = "while True: pass"


def repeat(failed: Mapping[str, bool], run_again: Callable[[list[str]], bool]) -> bool:
    """Repeat the tests of time among those that failed. Return whether all failures are forgiven.

    `failed`: by name, whether it is a test of time. `run_again(names)` runs tests alone, one after the other, and
    returns whether all of them passed and none was skipped.
    """
    names = [name for name, is_of_time in failed.items() if is_of_time]
    if others := [name for name in failed if name not in names]:
        print(f"Failed: {' '.join(others)}")
        return False
    counts = _count(names)
    named = " ".join(f"{name} (runs so far: {counts[name]})" for name in names)
    if len(names) > MOST_REPEATED:
        print(f"Failed, and more than {MOST_REPEATED} tests of time are not repeated: {named}")
        return False
    with _busy_processes():
        for count in range(1, NUM_REPEATS + 1):
            if not run_again(names):
                print(f"Failed, and at least one did not pass when repeated (repetition {count}): {named}")
                return False
    print(f"Failed at first, then passed {NUM_REPEATS} times on a busy machine: {named}")
    return True


def _count(names: list[str]) -> Counter[str]:
    """Add these tests to the file of repeated tests, and return its counts."""
    counts = Counter(json.loads(REPEATED.read_text())) if REPEATED.exists() else Counter[str]()
    counts.update(names)
    REPEATED.parent.mkdir(exist_ok=True)
    REPEATED.write_text(json.dumps(dict(counts.most_common()), indent=1) + "\n")
    return counts


@contextmanager
def _busy_processes() -> Iterator[None]:
    """Keep half of the processors busy."""
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(max(1, (os.cpu_count() or 1) // 2))]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
