"""What `baton up` says, and how it listens to signals."""

from __future__ import annotations

import json
import select
import shutil
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from .client import Client

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Counts the signals that ask to stop, and sleeps until any signal (a child's death is one) arrives."""

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
        """Returns at the next signal or after `timeout_s`, whichever comes first."""
        if select.select([self._reader], [], [], timeout_s)[0]:
            self._reader.recv(4096)

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self.stops += 1


class Status:
    """Progress of the start: one line, rewritten, on a terminal; else every log line as it comes."""

    def __init__(self, names: Iterable[str]) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last = dict.fromkeys(names, "starting")

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def take(self, name: str, lines: list[str]) -> None:
        """New log lines of one process; on a terminal only of those named at the start."""
        if self._is_terminal and lines and name in self._last:
            self._last[name] = _message(name, lines[-1])
        elif not self._is_terminal:
            for line in lines:
                say(f"  {name}: {line}")

    def tell(self, line: str) -> None:
        """A line that stays."""
        say(f"\r\033[K{line}" if self._is_terminal else line)

    def draw(self, age_s: float) -> None:
        """Shows the last line of each process, `age_s` seconds after the start. Does nothing without a terminal."""
        if self._is_terminal:
            room = max(20, (shutil.get_terminal_size().columns - 8) // len(self._last))
            parts = [f"{name}: {text}"[: room - 3].ljust(room) for name, text in self._last.items()]
            print(f"\r\033[K{age_s:4.0f} s  {''.join(parts).rstrip()}", end="", file=sys.stderr, flush=True)


def _message(name: str, line: str) -> str:
    """What a log line says, without its time, level and process."""
    if line.startswith("{"):
        try:
            return str(json.loads(line)["message"])
        except (ValueError, KeyError):
            return line
    return line.partition(f" {name} ")[2] or line


def say(text: Any) -> None:
    """One event of the launcher, for the person who started it."""
    print(text, file=sys.stderr, flush=True)


def banner(client: Client, run_dir: Path, *, has_key: bool) -> str:
    """What to do now: the URL, a request to paste, and where the logs are."""
    model = client.model_names()[0]
    key = ' -H "Authorization: Bearer $BATON_API_KEY"' if has_key else ""
    return f"""
Baton is ready: {client.url}/v1   (model {model})

  curl {client.url}/v1/completions{key} -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "prompt": "import os\\n\\ndef ", "max_tokens": 64, "temperature": 0}}'

  baton chat --url {client.url}

Logs: {run_dir}    Ctrl-C stops everything.
"""
