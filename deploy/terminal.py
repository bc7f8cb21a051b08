"""What `baton up` says, and how it listens to signals."""

from __future__ import annotations

import select
import shutil
import signal
import socket
import sys
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

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last: dict[str, str] = {}

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def show(self, name: str, lines: list[str], age_s: float) -> None:
        """Takes the new log lines of one process."""
        if not self._is_terminal:
            for line in lines:
                say(f"  {name}: {line}")
            return
        if lines:
            self._last[name] = lines[-1]
        width = shutil.get_terminal_size().columns - 1
        text = f"{age_s:4.0f} s  " + " | ".join(f"{name}: {line[-50:]}" for name, line in self._last.items())
        print(f"\r\033[K{text[:width]}", end="", file=sys.stderr, flush=True)


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
    -d '{{"model": "{model}", "prompt": "def main(", "max_tokens": 64}}'

  baton chat --url {client.url}

Logs: {run_dir}    Ctrl-C stops everything.
"""
