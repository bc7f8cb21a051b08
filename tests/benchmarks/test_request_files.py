"""The profiler of request_files.py in a process of its own, and the choice of the median request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from request_files import WHERE, WINDOW, Call, Profile, median_window, read_profiles

PROGRAM = f"""
import os, pathlib, threading
import request_files
request_files.profile()
from baton.metadata.wire.protocol import known  # not in a window
window = pathlib.Path(os.environ["{WHERE}"], "{WINDOW}")
def call(): known(1); os.path.join("a", "b")
with window.open("r+b") as file:
    for number in (1, 0, 2):
        file.seek(0); file.write(bytes([number])); file.flush()
        threads = [threading.Thread(target=call) for _ in range(number + 1)]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
"""


def test_calls_of_all_threads_count_while_a_window_is_open(tmp_path: Path) -> None:
    (tmp_path / WINDOW).write_bytes(b"\0")
    environ = os.environ | {WHERE: str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", PROGRAM, "router"], env=environ, check=True, timeout=60)
    windows = read_profiles(tmp_path)
    assert sorted(windows) == [1, 2]
    for number, (profile,) in windows.items():
        assert (profile.process, {call.file for call in profile.calls}) == ("router", {"metadata/wire/protocol.py"})
        assert list(profile.calls.values()) == [number + 1]


def test_the_median_window_is_that_of_the_files_of_all_processes() -> None:
    def window(*names: str) -> list[Profile]:
        return [Profile("router", {Call(name, 1, "f"): 1}) for name in names]

    assert median_window({1: window("a", "b", "c"), 2: window("a", "a", "a", "a"), 3: window("a", "b")}) == 3
