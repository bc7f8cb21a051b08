"""Logging of one process: text lines for people, or one JSON object per line with `--log-format json`.

Fields passed as `extra={"rid": ...}` appear in both formats. The code logs one line per lifecycle event, never one line
per token, and nothing of a prompt or an output. A `Throttle` limits lines that the outside world could multiply.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import TextIO

from .config import ProcessConfig
from .errors import BatonError

_RECORD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_WITHOUT_TEXTS = (BatonError, ImportError, OSError, RuntimeError)  # errors about the device or the system, and Baton's
_COLOURS = {"D": "\x1b[2m", "W": "\x1b[33m", "E": "\x1b[31m", "C": "\x1b[31;1m"}


def setup_logging(config: ProcessConfig, process_name: str) -> None:
    """Send this process's log to stderr, in the format and from the level that `config` names.

    Other packages log from WARNING on. A second call replaces what the first one set up.
    """
    is_json = config.log_format == "json"
    is_terminal = not is_json and sys.stderr.isatty()
    handler = TerminalHandler(sys.stderr) if is_terminal else LogHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process_name) if is_json else TextFormatter(process_name, is_terminal))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, LogHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("baton").setLevel(config.log_level.upper())
    logging.getLogger("asyncio").addFilter(_FIRST_LINE)


def log_uncaught() -> None:
    """From now on, log the exceptions that end this process or one of its threads, in place of Python's own report."""
    sys.excepthook = _log_fatal
    threading.excepthook = lambda ended: _log_fatal(ended.exc_type, ended.exc_value, ended.exc_traceback)


def _log_fatal(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Log an exception that nobody caught. Its message is left out, unless it is Baton's own or is about the device or
    the system."""
    if isinstance(error, (*_WITHOUT_TEXTS, KeyboardInterrupt)):
        sys.__excepthook__(kind, error, trace)
    elif not issubclass(kind, SystemExit):
        logging.getLogger("baton").critical("ended by a defect", exc_info=error)


def error_in_words(error: BaseException) -> str:
    """Return the type of an error, and its message if `log_uncaught` would show it, or else the place of the error."""
    name = type(error).__name__
    if isinstance(error, _WITHOUT_TEXTS):
        return f"{name}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{name} at {frames[-1].filename}:{frames[-1].lineno}" if frames else name


class _FirstLine(logging.Filter):
    """Leaves of a message its first line. The other lines of asyncio's quote exceptions, and these may quote texts."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = str(record.msg).partition("\n")[0]
        return True


_FIRST_LINE = _FirstLine()


class LogHandler(logging.StreamHandler[TextIO]):
    """The handler of `setup_logging`. Its own type lets a second call find and replace the first call's handler."""


class TerminalHandler(LogHandler):
    """Writes lines to a terminal, and below them one line that is redrawn in place (engine/progress.py draws it).

    The next log line replaces the drawn line.
    """

    _is_drawn = False

    def draw(self, line: str) -> None:
        """Write `line` without a line end, over the line drawn before."""
        self.stream.write(f"\r\x1b[K{line}")
        self.stream.flush()
        self._is_drawn = True

    def end_line(self) -> None:
        """Leave the drawn line on the screen. The next output starts a new line."""
        if self._is_drawn:
            self.stream.write("\n")
            self.stream.flush()
            self._is_drawn = False

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_drawn:
            self.draw("")
            self._is_drawn = False
        super().emit(record)


class TextFormatter(logging.Formatter):
    """Formats `2026-01-31T12:34:56.789+01:00 I decode-0 rid=abc admitted pages=7`: local time with its offset from UTC,
    level, process, rid, message, other fields."""

    def __init__(self, process_name: str, coloured: bool = False) -> None:
        super().__init__()
        self._process_name = process_name
        self._coloured = coloured

    def format(self, record: logging.LogRecord) -> str:
        fields = _extra_fields(record)
        words = [f"rid={_one_line(str(fields.pop('rid')))}"] if "rid" in fields else []
        words.append(_one_line(record.getMessage()))
        words += [f"{key}={_one_line(str(value))}" for key, value in fields.items()]
        level = record.levelname[0]
        clock = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        line = f"{clock} {level} {self._process_name} {' '.join(words)}"
        if self._coloured and level in _COLOURS:
            line = f"{_COLOURS[level]}{line}\x1b[0m"
        if record.exc_info and record.exc_info[1]:
            line += "\n" + _where_raised(record.exc_info[1])
        return line


class JsonFormatter(logging.Formatter):
    """Formats one JSON object: time (UTC), level, node (the process), logger, event, extra fields such as rid, and
    `exception` if there is one."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "node": self._process_name,
            "logger": record.name,
            "event": record.getMessage(),
        }
        for key, value in _extra_fields(record).items():
            is_number_of_json = not isinstance(value, float) or math.isfinite(value)
            entry.setdefault(key, value if is_number_of_json else str(value))
        if record.exc_info and record.exc_info[1]:
            entry["exception"] = _where_raised(record.exc_info[1])
        return json.dumps(entry, default=str)


def _extra_fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _RECORD_FIELDS}


def _where_raised(error: BaseException) -> str:
    """Return the traceback of an exception, and of those that caused it, without their messages: these may quote a
    prompt or an output."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    before = "" if cause is None else f"{_where_raised(cause)}\n"
    frames = "".join(traceback.format_tb(error.__traceback__))
    return f"{before}Traceback (most recent call last):\n{frames}{type(error).__qualname__}"


def _one_line(text: str) -> str:
    # text from a peer or a client must not look like a log line of this process
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class Throttle:
    """Allows something at most `most` times in `interval_s` seconds."""

    def __init__(self, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic, *, most: int = 1) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._most = most
        self._num_left = 0
        self._next = -math.inf  # when the count starts anew

    def is_due(self) -> bool:
        """Return True if it may happen now, and count it. The count starts anew `interval_s` after the first of `most`
        times."""
        now = self._clock()
        if now >= self._next:
            self._next, self._num_left = now + self._interval_s, self._most
        self._num_left -= 1
        return self._num_left >= 0


def size_in_words(num_bytes: float) -> str:
    """Return "1.5 GB"."""
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.{0 if num_bytes >= 10 or unit == 'bytes' else 1}f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} GB"
