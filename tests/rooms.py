"""Run all tests: those of each folder in a process of its own, several at a time.

    python tests/rooms.py [PATH ...] [OPTION_OF_PYTEST ...]

A process imports only its folder's files. It is forked from this one, which has imported torch, pytest and Baton, and
has computed with a small model once. So it starts at once, as do most processes that tests start
(support/clusters/forked.py). Tests in PROCESS_FOLDERS mostly wait for them. There each file has a process of its own,
two of them at a time, and the folders use the processor time that they leave.

A process is one line of output, with the processor time that it took; all that pytest said is printed if a test
failed. Time of processes that outlive the tests that started them counts as well. At last, tests of time that failed
are repeated (again.py).
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing.util
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import again

ROOT = Path(__file__).parents[1]
PROCESS_FOLDERS = ("tests/integration", "tests/chaos", "tests/hosts")
MOST_AT_A_TIME = 10  # each has its own memory of torch
NICENESS = 5  # of folders: three quarters of a contested processor go to tests of processes
EXIT_S = 60  # for processes that tests have left behind, before the kernel ends the room
LEAVE_S = 30.0  # for processes whose parents have ended
OPTIONS = [
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-p",
    "no:xdist.looponfail",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
]
PASSED, TESTS_FAILED, INTERNAL_ERROR, NO_TESTS = 0, 1, 3, 5  # exit statuses of pytest
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")  # for `pytest --last-failed`: {node id: true}
_PR_SET_CHILD_SUBREAPER = 36
_IMPORTED = [
    *("_hypothesis_pytestplugin", "anyio.pytest_plugin", "hypothesis", "numba", "pdb", "pytest_asyncio.plugin"),
    *("pytest_timeout", "scipy.stats", "torch"),
    *("triton_device", "transformers.models.llama.modeling_llama"),  # triton_device comes before transformers
    # clients, which twelve rooms use
    *("anthropic.resources.messages", "openai.resources.chat.completions", "openai.resources.responses"),
    *("cluster", "node_pair", "quantized", "served", "solo", "ties"),  # of tests/support
]
sys.path += map(str, (ROOT / "tests/support").iterdir())


@dataclass(frozen=True, slots=True)
class Room:
    """Test files for one process."""

    name: str
    files: tuple[str, ...]
    starts_processes: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(_file(file).stat().st_size for file in self.files)


@dataclass(slots=True)
class Result:
    """What one process of pytest did."""

    status: int
    core_s: float = 0.0  # with its children
    output: str = ""
    counts: Counter[str] = field(default_factory=Counter)  # by outcome
    reasons: Counter[str] = field(default_factory=Counter)  # of skipped tests
    failed: list[str] = field(default_factory=list)  # names of tests
    timing: list[str] = field(default_factory=list)  # those of them that are marked `timing`

    @property
    def has_passed(self) -> bool:
        return self.status in (PASSED, NO_TESTS)


class Recorder:
    """A plugin of pytest that counts outcomes and keeps the names of tests that fail."""

    def __init__(self) -> None:
        self._counts, self._reasons = Counter[str](), Counter[str]()
        self._timing: set[str] = set()
        self.failed: dict[str, None] = {}
        self.has_stopped_early = False

    def pytest_itemcollected(self, item: Any) -> None:
        if item.get_closest_marker("timing"):
            self._timing.add(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed[report.nodeid] = None
        is_xfailed = report.skipped and hasattr(report, "wasxfail")
        if report.when == "call" or not report.passed:
            self._counts["xfailed" if is_xfailed else report.outcome] += 1
        if report.skipped and not is_xfailed:
            self._reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self, session: Any) -> None:
        self.has_stopped_early = bool(session.shouldfail or session.shouldstop)

    def write(self, path: Path) -> None:
        failed = list(self.failed)
        timing = [name for name in failed if name in self._timing]
        path.write_text(json.dumps([self._counts, self._reasons, failed, timing]))


class Pytest:
    """Pytest in a forked process."""

    def __init__(self, arguments: Sequence[str], *, niceness: int = 0) -> None:
        self._folder = tempfile.TemporaryDirectory()  # of its output and of its tests' files
        self._output, self._record = Path(self._folder.name, "output"), Path(self._folder.name, "record")
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            status = INTERNAL_ERROR
            try:
                os.nice(niceness)
                status = self._run(arguments)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)

    def _run(self, arguments: Sequence[str]) -> int:
        """Run pytest in the child. Return its exit status."""
        import pytest
        from forked import fork_server

        signal.signal(signal.SIGINT, signal.default_int_handler)
        fd = os.open(self._output, os.O_WRONLY | os.O_CREAT)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        fork_server()
        recorder = Recorder()
        status = int(pytest.main([*OPTIONS, f"--basetemp={self._folder.name}/tmp", *arguments], plugins=[recorder]))
        recorder.write(self._record)
        if status == TESTS_FAILED and (recorder.has_stopped_early or not recorder.failed):
            status = INTERNAL_ERROR  # not all tests have run, or something else failed
        sys.stdout.flush()
        sys.stderr.flush()
        signal.alarm(EXIT_S)
        multiprocessing.util._exit_function()  # it ends processes of this one, as at the end of an interpreter
        with suppress(FileNotFoundError):  # its socket is gone by now
            forkserver._forkserver._stop()  # type: ignore[attr-defined]  # it waits, so that the time of its children counts
        return status

    def result(self, status: int, core_s: float) -> Result:
        """Return its result when it has ended. `status`: as by os.wait4."""
        output = self._output.read_text(errors="replace") if self._output.exists() else ""
        result = Result(os.waitstatus_to_exitcode(status), core_s, output)
        if self._record.exists():
            counts, reasons, result.failed, result.timing = json.loads(self._record.read_text())
            result.counts, result.reasons = Counter(counts), Counter(reasons)
        self._folder.cleanup()
        return result


class Children:
    """The processes under way. Everything that they start and leave behind becomes a child of this process."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[Room, Pytest]] = {}
        self.stray_core_s = 0.0  # of processes that outlived their parents
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def __len__(self) -> int:
        return len(self._running)

    @property
    def num_starting_processes(self) -> int:
        return sum(room.starts_processes for room, _ in self._running.values())

    def start(self, room: Room, options: Sequence[str]) -> None:
        process = Pytest([*options, *room.files], niceness=0 if room.starts_processes else NICENESS)
        self._running[process.pid] = room, process

    def wait(self) -> tuple[Room, Result]:
        """Wait until one of the rooms ends."""
        while True:
            pid, status, usage = os.wait4(-1, 0)
            if pid in self._running:
                room, process = self._running.pop(pid)
                return room, process.result(status, usage.ru_utime + usage.ru_stime)
            self.stray_core_s += usage.ru_utime + usage.ru_stime

    def wait_for_strays(self) -> None:
        """Wait for processes that rooms have left behind, at most LEAVE_S, or longer on a busy machine."""
        from patience import Patience

        patience = Patience(LEAVE_S)
        with suppress(ChildProcessError):
            while not patience.is_over():
                pid, _, usage = os.wait4(-1, os.WNOHANG)
                self.stray_core_s += usage.ru_utime + usage.ru_stime
                time.sleep(0 if pid else 0.1)
            print("Processes that tests have started still run.")


def rooms(paths: Iterable[str]) -> list[Room]:
    """Return the rooms of the tests below these paths (pytest's: `::` and a test's name may follow a file): tests of
    processes first, then much text first."""
    folders: dict[str, set[str]] = {}
    for path in paths:
        for file in _file(path).rglob("test_*.py") if _file(path).is_dir() else [path]:
            folders.setdefault(str(_file(file).parent), set()).add(str(file))
    found = []
    for folder, files in folders.items():
        if folder in PROCESS_FOLDERS:
            found += [Room(file, (file,), starts_processes=True) for file in files]
        else:
            found.append(Room(folder, tuple(sorted(files))))
    return sorted(found, key=lambda room: (not room.starts_processes, -room.num_bytes, room.name))


def _file(path: str | Path) -> Path:
    return Path(str(path).partition("::")[0])


def run(waiting: list[Room], options: Sequence[str]) -> list[Result]:
    """Run the tests of all rooms, and print what happened."""
    at_a_time = min(len(os.sched_getaffinity(0)) + 2, MOST_AT_A_TIME)
    children, results = Children(), list[Result]()
    while waiting or len(children):
        while len(children) < at_a_time and (room := _next(waiting, children.num_starting_processes)) is not None:
            waiting.remove(room)
            children.start(room, options)
        room, result = children.wait()
        results.append(result)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in result.counts.items()) or "no test"
        print(f"{room.name:<60} {result.core_s:6.1f} s  {counts}")
        if not result.has_passed:
            print(result.output)
    children.wait_for_strays()
    for reason, count in sum((result.reasons for result in results), Counter[str]()).most_common():
        print(f"{count} skipped: {reason}")
    counts = sum((result.counts for result in results), Counter[str]())
    core_s = sum(result.core_s for result in results) + children.stray_core_s
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()), f"in {core_s / 60:.2f} core-minutes")
    return results


def _next(waiting: list[Room], num_starting_processes: int) -> Room | None:
    """Return the room to start next. None: wait."""
    others = [room for room in waiting if not room.starts_processes]
    if waiting and waiting[0].starts_processes and num_starting_processes < 2:
        return waiting[0]
    return others[0] if others else None


def main(arguments: list[str]) -> int:
    """Return the exit status of pytest over all rooms."""
    paths = [argument for argument in arguments if _file(argument).exists()]
    options = [argument for argument in arguments if argument not in paths]
    results = run(rooms(paths or ["tests"]), options)
    failed = {name: name in result.timing for result in results for name in result.failed}
    LAST_FAILED.parent.mkdir(parents=True, exist_ok=True)
    LAST_FAILED.write_text(json.dumps(dict.fromkeys(failed, True)))
    statuses = {result.status for result in results if not result.has_passed}
    if statuses - {TESTS_FAILED}:  # pytest could not collect all tests, was interrupted, or stopped early
        return max(statuses)
    if not statuses or again.repeat(failed, lambda names: _run_again(names, options)):
        return PASSED
    return TESTS_FAILED


def _run_again(names: list[str], options: Sequence[str]) -> bool:
    """Run these tests alone. Return whether all have passed; one that is skipped has not."""
    children = Children()
    children.start(Room("again", tuple(names), starts_processes=True), options)
    _, result = children.wait()
    print(result.output)
    return result.has_passed and result.counts["passed"] + result.counts["xfailed"] == len(names)


def _import_all() -> None:
    """Import what most tests and their processes import, before the first process starts."""
    from forked import preload

    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the other way, forked processes could not use a GPU
    for name in _IMPORTED:
        importlib.import_module(name)
    preload()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C ends pytest, which stops the processes of its tests
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(ROOT)
    _import_all()
    sys.exit(main(sys.argv[1:]))
