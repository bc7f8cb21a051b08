"""Count the files of Baton that one plain streamed chat request enters, in all processes of `baton up`.

    python tests/benchmarks/request_files.py [--json FILE] [-- FLAGS OF `baton up`]

`baton up` serves the demo model on the CPU with EAGLE, one prefill and one decode node. Every process has a profiler
(`sys.setprofile`, in all threads). After a first request, which loads what is loaded late, requests for 12 tokens are
made one by one. A file is entered if one of its functions is called from the start of a request to SETTLE_S after the
end of its stream, in which the nodes close their books. Heartbeats, the router's look at its nodes and the questions
of `baton up` count if they fall into that time. The counts of the request with the median number of files are printed,
then the reading lists of docs/architecture.md, as house.py prints them.

    files, lines     distinct files with a call, and all their lines
    functions        distinct functions (and lambdas, and comprehensions) with a call
    calls            calls of them; a coroutine or generator that goes on counts again
"""

from __future__ import annotations

import argparse
import atexit
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import shared_paths  # noqa: F401

# isort: split
from house import PRODUCT, print_lists

ROOT = Path(__file__).parents[2]
WHERE = "BATON_PROFILE_DIR"  # environment variable: where processes find the number of the window, and write
WINDOW = "window"  # a file of one byte: the number of the request under way, 0 for none
SETTLE_S = 0.1
MODEL = "demo"
READY_S = 180.0
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0, "stream": True}


class Call(NamedTuple):
    """A function, as profiles name it."""

    file: str  # relative to the checkout
    line: int
    name: str


# --- in each process of `baton up` ---


def profile() -> None:
    """Count calls in this process while a window is open, and write the counts when the process ends."""
    where = Path(os.environ[WHERE])
    with (where / WINDOW).open("rb") as file:
        window = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
    counts: dict[tuple[int, Any], int] = {}
    is_ours: dict[str, bool] = {}  # by the name of a code's file

    def count(frame: Any, event: str, _arg: object) -> None:
        number = window[0]
        if not number or event != "call":
            return
        code = frame.f_code
        if code.co_filename not in is_ours:
            is_ours[code.co_filename] = _is_ours(Path(code.co_filename))
        if is_ours[code.co_filename]:
            counts[number, code] = counts.get((number, code), 0) + 1

    def write() -> None:
        sys.setprofile(None)
        rows = [
            (number, *Call(os.path.relpath(code.co_filename, ROOT), code.co_firstlineno, code.co_qualname), calls)
            for (number, code), calls in list(counts.items())
        ]
        if rows:
            (where / f"{os.getpid()}.json").write_text(json.dumps({"argv": sys.argv, "rows": rows}))

    atexit.register(write)
    threading.setprofile(count)
    sys.setprofile(count)


def _is_ours(path: Path) -> bool:
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PRODUCT


# --- in this process ---


class Profile(NamedTuple):
    """The calls of one process in one window."""

    process: str
    calls: dict[Call, int]


def row(name: str, calls: dict[Call, int]) -> str:
    """Return one line of the table."""
    files = {call.file for call in calls}
    lines = sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files)
    return f"{name:<16}{len(files):>6} {lines:>8,} {len(calls):>10,} {sum(calls.values()):>8,}"


def together(profiles: Iterable[Profile]) -> dict[Call, int]:
    """Return the calls of several processes as if they were one."""
    calls: Counter[Call] = Counter()
    for profile in profiles:
        calls.update(profile.calls)
    return dict(calls)


def read_profiles(where: Path) -> dict[int, list[Profile]]:
    """Return the profiles that processes have written, by the number of the window."""
    windows: dict[int, list[Profile]] = defaultdict(list)
    for path in sorted(where.glob("*.json")):
        written = json.loads(path.read_text())
        calls: dict[int, dict[Call, int]] = defaultdict(dict)
        for number, *call, count in written["rows"]:
            calls[number][Call(*call)] = count
        for number, those in calls.items():
            process = next((word for word in ("router", "prefill", "decode") if word in written["argv"]), "baton up")
            windows[number].append(Profile(process, those))
    return windows


def median_window(windows: dict[int, list[Profile]]) -> int:
    """Return the number of the window with the median number of files."""
    by_files = sorted(windows, key=lambda number: len({call.file for call in together(windows[number])}))
    return by_files[len(by_files) // 2]


def ask(url: str, number: int) -> int:
    """Make one request, whose prompt no other number has, and return the number of its events."""
    body = BODY | {"messages": [{"role": "user", "content": f"{number} questions about the sea, please."}]}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return sum(line.startswith(b"data: {") for line in answer)


def measure(times: int, flags: list[str], where: Path) -> dict[int, list[Profile]]:
    """Start `baton up`, make the requests and stop it."""
    hook = where / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text("import request_files\nrequest_files.profile()\n")
    (where / WINDOW).write_bytes(b"\0")
    paths = [str(hook), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {WHERE: str(where), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "baton.deploy.cli", "up", "--port=0", "--device=cpu"]
    command += [f"--model-name={MODEL}", f"--run-dir={where / 'run'}", *flags]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as baton:
        try:
            url = _url(baton)
            ask(url, 0)
            with (where / WINDOW).open("r+b") as file, mmap.mmap(file.fileno(), 1) as window:
                for number in range(1, times + 1):
                    time.sleep(1.0)
                    window[0] = number
                    num_events = ask(url, number)
                    time.sleep(SETTLE_S)
                    window[0] = 0
                    assert num_events > 1, "an answer came as one event: it was not streamed"
        finally:
            baton.send_signal(signal.SIGTERM)
    return read_profiles(where)


def _url(baton: subprocess.Popen[str]) -> str:
    deadline = time.monotonic() + READY_S
    assert baton.stdout is not None
    for line in baton.stdout:
        for word in line.split():
            if word.startswith("http://127.0.0.1:"):
                return word.rstrip("/.,").removesuffix("/v1")
        if time.monotonic() > deadline:
            break
    sys.exit("`baton up` did not become ready; its messages stand above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="requests, of which the median is printed")
    parser.add_argument("--json", type=Path, help="write the median request's calls: process, file, function, number")
    parser.add_argument("flags", nargs="*", help="of `baton up`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as where:
        windows = measure(args.times, args.flags, Path(where))
    number = median_window(windows)
    profiles = windows[number]
    print(f"{'':<16}{'files':>6} {'lines':>8} {'functions':>10} {'calls':>8}")
    for each in profiles:
        print(row(each.process, each.calls))
    print(row("all, distinct", together(profiles)))
    print("files of all requests:", *sorted(len({call.file for call in together(w)}) for w in windows.values()))
    print_lists(ROOT, ROOT / "docs/architecture.md")
    if args.json:
        rows = [(each.process, *call, count) for each in profiles for call, count in each.calls.items()]
        args.json.write_text(json.dumps(rows, indent=0))


if __name__ == "__main__":
    main()
