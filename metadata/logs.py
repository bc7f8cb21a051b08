"""Logging of a process: short lines for people, or one JSON object a line by flag.

Fields given with `extra={"rid": ...}` appear in both. One line per lifecycle event, never one per token.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from datetime import UTC, datetime
from typing import TextIO

from .config import ProcessConfig

_RECORD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_COLOURS = {"D": "\x1b[2m", "W": "\x1b[33m", "E": "\x1b[31m", "C": "\x1b[31;1m"}


def setup_logging(config: ProcessConfig, process_name: str) -> None:
    """Sends this process's log to stderr, in the form and from the level that `config` says; other packages' lines
    from WARNING. May be called again: the last call wins."""
    handler = LogHandler(sys.stderr)
    handler.is_for_people = not config.log_json and sys.stderr.isatty()
    formatter = JsonFormatter(process_name) if config.log_json else TextFormatter(process_name, handler.is_for_people)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, LogHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("baton").setLevel(config.log_level.upper())


class LogHandler(logging.StreamHandler[TextIO]):  # a type of its own, so that a second set-up finds the first
    """Writes lines, and on a terminal also one that is drawn in place, which the next line of the log replaces."""

    is_for_people = False  # text on a terminal
    _is_drawn = False

    def draw(self, line: str) -> None:
        """Without an end of its line, over what was drawn before."""
        self.stream.write(f"\r\x1b[K{line}")
        self.stream.flush()
        self._is_drawn = True

    def end_line(self) -> None:
        """What was drawn stays on the screen."""
        if self._is_drawn:
            self.stream.write("\n")
            self.stream.flush()
            self._is_drawn = False

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_drawn:
            self.draw("")
            self._is_drawn = False
        super().emit(record)


def terminal_log() -> LogHandler | None:
    """Of this process, where people read it as it is written."""
    handlers = logging.getLogger().handlers
    return next((each for each in handlers if isinstance(each, LogHandler) and each.is_for_people), None)


class TextFormatter(logging.Formatter):
    """`12:34:56.789 I decode-0 rid=abc admitted pages=7`: time, level, process, rid, message, other fields."""

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
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock}.{int(record.msecs):03d} {level} {self._process_name} {' '.join(words)}"
        if self._coloured and level in _COLOURS:
            line = f"{_COLOURS[level]}{line}\x1b[0m"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, process, logger, message, the extra fields, and `exception` if any."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in _extra_fields(record).items():
            is_number_of_json = not isinstance(value, float) or math.isfinite(value)
            entry.setdefault(key, value if is_number_of_json else str(value))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _extra_fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _RECORD_FIELDS}


def _one_line(text: str) -> str:
    # what a peer or a client wrote must not look like lines of ours
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
