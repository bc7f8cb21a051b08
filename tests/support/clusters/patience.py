"""Time limits of tests, on a machine that may be busy with other things.

If several times as many threads want to run as there are processors, everything takes so many times longer. Time counts
against a limit by the share of the machine that one of them gets. On an idle machine a limit is what it says, so that
what hangs is found soon.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
LOOK_S = 0.01  # between two looks at the load
MOST = 10.0  # a limit is stretched by this at most, because something may hang on a busy machine, too
_LOADS = Path("/proc/loadavg")  # "4.05 3.71 2.92 9/1234 5678": threads that want to run: over 1, 5, 15 minutes, and now


def load_factor(loads: str | None = None) -> float:
    """Return by how much longer than on an idle machine things take now, from 1 to MOST. `loads`: text for _LOADS."""
    if loads is None:
        loads = _LOADS.read_text() if _LOADS.exists() else "0 0 0 0/0 0"
    mean, _, _, counts, *_ = loads.split()
    num_runnable = max(float(mean), float(counts.partition("/")[0]))
    return min(max(1.0, num_runnable / len(os.sched_getaffinity(0))), MOST)


class Patience:
    """A time limit in seconds, of which less is used up while the machine is busy."""

    def __init__(self, limit_s: float) -> None:
        self._left_s = limit_s
        self._looked_at = time.monotonic()

    def is_over(self) -> bool:
        """Return whether the limit is used up. Call it often."""
        now = time.monotonic()
        if now < self._looked_at + LOOK_S:
            return False
        self._left_s -= (now - self._looked_at) / load_factor()
        self._looked_at = now
        return self._left_s < 0


def wait_until(
    condition: Callable[[], T], what: str | Callable[[], str] = "", timeout_s: float = 30.0, *, pause_s: float = 0.02
) -> T:
    """Poll `condition()` until it is true, and return its value. After `timeout_s`, or longer on a busy machine, fail
    with `what`, a text or a function that returns it."""
    patience = Patience(timeout_s)
    while not (value := condition()):
        if patience.is_over():
            raise AssertionError(f"not within {timeout_s:g} s: {what() if callable(what) else what}")
        time.sleep(pause_s)
    return value


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Poll `condition()` until it is true, while the event loop runs."""
    patience = Patience(timeout_s)
    while not condition():
        assert not patience.is_over(), f"not within {timeout_s:g} s"
        await asyncio.sleep(0.002)
