"""The terminal of `baton up`: the signals it waits for, the progress line of the start, and the text when ready."""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from .client import Client

KEY_FILE = "api.key"  # in the run directory, for the printed request
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Counts the signals that ask to stop. `wait` returns early on any signal, a child's end included."""

    def __enter__(self) -> Signals:
        self.stops = 0
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, self._count) for number in _STOPS}
        self._old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        self._reader.close()
        self._writer.close()

    def wait(self, timeout_s: float | None) -> None:
        """Return at the next signal or after `timeout_s`, whichever comes first."""
        poll = select.poll()  # select() takes no descriptor from 1,024 on
        poll.register(self._reader, select.POLLIN)
        if poll.poll(None if timeout_s is None else timeout_s * 1000):
            self._reader.recv(4096)

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self.stops += 1


class Status:
    """Progress of the start. On a terminal: one line, redrawn in place. Elsewhere: every log line of every process."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names`: the processes that the progress line shows."""
        self._is_terminal = sys.stderr.isatty()
        self._last = dict.fromkeys(names, "starting")

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def take(self, name: str, lines: list[str]) -> None:
        """Accept new log lines of a process. A terminal shows only the last line, and only of the named processes."""
        if self._is_terminal and lines and name in self._last:
            self._last[name] = _message(name, lines[-1])
        elif not self._is_terminal:
            for line in lines:
                say(f"  {name}: {line}")

    def tell(self, line: str) -> None:
        """Print a line that stays on the screen."""
        say(f"\r\033[K{line}" if self._is_terminal else line)

    def draw(self, age_s: float) -> None:
        """Redraw the progress line, `age_s` seconds after the start. Does nothing if stderr is not a terminal."""
        if self._is_terminal:
            width = max(20, (shutil.get_terminal_size().columns - 8) // len(self._last))
            columns = [f"{name}: {text}"[: width - 3].ljust(width) for name, text in self._last.items()]
            print(f"\r\033[K{age_s:4.0f} s  {''.join(columns).rstrip()}", end="", file=sys.stderr, flush=True)


def _message(name: str, line: str) -> str:
    """Return a log line without its time, level and process name."""
    if line.startswith("{"):
        try:
            return str(json.loads(line)["event"])
        except (ValueError, KeyError):
            return line
    return line.partition(f" {name} ")[2] or line


def say(text: str) -> None:
    """Print one event of the launcher to stderr."""
    print(text, file=sys.stderr, flush=True)


def ready_text(client: Client, run_dir: Path, key: str | None) -> str:
    """Return the text for a system that is ready: the URL, requests to paste, and the place of the logs. `key`: one
    that the router asks for. If the environment lacks it, it is written to `run_dir`, and a command takes it."""
    model = client.model_names()[0]
    header = "" if key is None else ' -H "Authorization: Bearer $BATON_API_KEY"'
    export = ""
    if key is not None and os.environ.get("BATON_API_KEY") != key:
        path = run_dir / KEY_FILE
        path.touch(mode=0o600)
        path.write_text(f"{key}\n")
        export = f'  export BATON_API_KEY="$(cat {shlex.quote(str(path))})"\n\n'
    return f"""
Baton is ready: {client.url}/v1   (model {model})

{export}  curl {shlex.quote(f"{client.url}/v1/completions")}{header} -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "prompt": "import os\\n\\ndef ", "max_tokens": 64, "temperature": 0}}'

  {own_command()} chat --url {shlex.quote(client.url)}

Logs: {run_dir}    Ctrl-C stops everything.
"""


def own_command() -> str:
    """Return what to type for `baton`: the name if it is on PATH, else the path of the script, else the module."""
    script = Path(sys.executable).parent / "baton"
    found = shutil.which("baton")
    if found is not None and (not script.exists() or Path(found).samefile(script)):
        return "baton"
    if not script.exists():
        return shlex.join([sys.executable, "-m", "baton.deploy.cli"])
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))
