"""The terminal of `baton up`: the signals it waits for, the block of lines that it redraws, and the text when ready."""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

_NO_BREAK = "\xa0"
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
    """A block of lines at the end of a terminal's text, redrawn in place. Elsewhere nothing is drawn.

    The cursor rests on an empty line above the block. So a line that somebody else prints stays whole, and drawing
    anew needs no count of the rows that a narrower terminal now shows.
    """

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._lines: list[str] = []

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *exc: object) -> None:
        self._erase()

    @property
    def width(self) -> int:
        """Number of characters that a line may have."""
        return max(10, _size().columns - 1)

    def draw(self, lines: Iterable[str]) -> None:
        """Draw these lines instead of those before, as far as they fit."""
        self._lines = [printable(line)[: self.width] for line in lines][: max(1, _size().lines - 2)]
        if self.is_terminal:
            block = "".join(f"\n{line}" for line in self._lines)
            print(f"\r\033[J{block}\033[{len(self._lines)}A\r", end="", file=sys.stderr, flush=True)

    def tell(self, line: str) -> None:
        """Print a line that stays on the screen, above the block."""
        self._erase()
        say(line)
        if self._lines:
            self.draw(self._lines)

    def _erase(self) -> None:
        if self.is_terminal:
            print("\r\033[J", end="", file=sys.stderr, flush=True)


class StartProgress:
    """The start of the processes. A terminal shows the last message of each; elsewhere each line of a log is told."""

    def __init__(self, names: Iterable[str], status: Status) -> None:
        """`names`: the processes that a terminal shows."""
        self._status = status
        self._last = dict.fromkeys(names, "starting")

    def take(self, name: str, lines: list[str]) -> None:
        """Accept new lines of a process's log."""
        if not self._status.is_terminal:
            for line in lines:
                say(f"  {name}: {line}")
        elif lines and name in self._last:
            self._last[name] = _message(name, lines[-1])

    def draw(self, age_s: float) -> None:
        """Draw the block, `age_s` seconds after the start."""
        self._status.draw(f"{age_s:4.0f} s  {name}: {text}" for name, text in self._last.items())


def _message(name: str, line: str) -> str:
    """Return a log line without its time, level and process name."""
    if line.startswith("{"):
        try:
            return str(json.loads(line)["event"])
        except (ValueError, KeyError):
            return line
    return line.partition(f" {name} ")[2] or line


def _size() -> os.terminal_size:
    try:
        return os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):  # no terminal
        return shutil.get_terminal_size()


def printable(text: str) -> str:
    """Return the text without characters that a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)


def flow(words: Iterable[str], width: int) -> list[str]:
    """Return the texts side by side, in lines of at most `width` characters. A text is broken only if it is longer."""
    row = "   ".join(text.replace(" ", _NO_BREAK) for text in words)
    return [line.replace(_NO_BREAK, " ") for line in textwrap.wrap(row, width, break_on_hyphens=False)]


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 token` or `2,000 tokens`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    """Return a time as `1.20 s` or `3.4 ms`."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def say(text: str) -> None:
    """Print one event of the launcher to stderr."""
    print(text, file=sys.stderr, flush=True)


def make_key_file(run_dir: Path, key: str | None) -> Path | None:
    """Write a key that the router asks for to a new file that only the user can read. None: nobody needs it, because
    the router asks for none or the environment has it."""
    if key is None or os.environ.get("BATON_API_KEY") == key:
        return None
    descriptor, path = tempfile.mkstemp(".key", f"api-{os.getpid()}-", run_dir)  # never the file of somebody else
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{key}\n")
    return Path(path)


def ready_text(address: str, model: str, run_dir: Path, *, asks_key: bool, key_file: Path | None) -> str:
    """Return the text for a system that is ready: the URL, commands to paste, and the place of the logs. `key_file`:
    holds the key that the router asks for, if the environment lacks it; a command takes it."""
    url = shlex.quote(address)
    header = ' -H "Authorization: Bearer $BATON_API_KEY"' if asks_key else ""
    export = "" if key_file is None else f'  export BATON_API_KEY="$(cat {shlex.quote(str(key_file))})"\n\n'
    return f"""
Baton is ready: {address}/v1   (model {model})

  {address}/
    the live page: nodes, requests, and a chat

{export}  {own_command()} chat --url {url}
  {own_command()} top --url {url}
  curl {shlex.quote(f"{address}/v1/completions")}{header} \\
    -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "prompt": "import os\\n\\ndef ",
         "max_tokens": 64, "temperature": 0}}'

Logs: {run_dir}
Ctrl-C stops everything.
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
