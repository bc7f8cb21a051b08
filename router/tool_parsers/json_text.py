"""Incremental reading of JSON: where a value ends, and whether what has come so far can still become valid."""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Any

MAX_DEPTH = 100
MAX_WORD = 400  # characters of a number
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\r\n]+")
_WORD_PART = re.compile(r"[A-Za-z0-9+.\-]+")
_WORD = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


class JsonStatus(Enum):
    """Whether a value goes on, is whole, or can never be valid."""

    OPEN = auto()
    DONE = auto()
    BROKEN = auto()


class _Expects(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()  # after [
    KEY = auto()
    KEY_OR_END = auto()  # after {
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()  # after a backslash
    HEX = auto()  # after \u
    WORD = auto()  # in a number, true, false or null


class JsonValue:
    """Reads one JSON value, part by part, and checks every character. A word (number, true, ...) is given whole."""

    __slots__ = ("_closers", "_expects", "_is_key", "_num_hex", "_word", "status")

    def __init__(self) -> None:
        self.status = JsonStatus.OPEN
        self._expects = _Expects.VALUE
        self._closers: list[str] = []  # of the open objects and lists
        self._is_key = False  # the present string is a key
        self._num_hex = 0
        self._word = ""

    def read(self, text: str, start: int) -> tuple[int, str]:
        """Read `text` from `start` on, up to the end of the value or the first wrong character.

        Returns where it stopped, and the valid JSON that it has read: raw control characters in strings are escaped.
        """
        at, parts = start, list[str]()
        while at < len(text) and self.status is JsonStatus.OPEN:
            at = self._read_string(text, at, parts) if self._in_string else self._read_other(text, at, parts)
        return at, "".join(parts)

    @property
    def is_untouched(self) -> bool:
        """Whether the value has not begun."""
        return self._expects is _Expects.VALUE and not self._closers and self.status is JsonStatus.OPEN

    @property
    def expects_key(self) -> bool:
        """Whether the next item is a key of an object, if the object goes on."""
        return self._expects in _KEYS

    @property
    def _in_string(self) -> bool:
        return self._expects in (_Expects.STRING, _Expects.ESCAPE, _Expects.HEX)

    def _read_string(self, text: str, at: int, parts: list[str]) -> int:
        char = text[at]
        if self._expects is _Expects.STRING:
            plain = _PLAIN.match(text, at)
            if plain is not None:
                parts.append(plain[0])
                return plain.end()
            if char == '"':
                if self._is_key:
                    self._expects = _Expects.COLON
                else:
                    self._end_value()
            elif char == "\\":
                self._expects = _Expects.ESCAPE
            else:
                char = json.dumps(char)[1:-1]
        elif self._expects is _Expects.ESCAPE:
            if char == "u":
                self._expects, self._num_hex = _Expects.HEX, 4
            elif char in '"\\/bfnrt':
                self._expects = _Expects.STRING
            else:
                self.status = JsonStatus.BROKEN
                return at
        elif char in "0123456789abcdefABCDEF":
            self._num_hex -= 1
            if self._num_hex == 0:
                self._expects = _Expects.STRING
        else:
            self.status = JsonStatus.BROKEN
            return at
        parts.append(char)
        return at + 1

    def _read_other(self, text: str, at: int, parts: list[str]) -> int:
        if self._expects is _Expects.WORD:
            part = _WORD_PART.match(text, at)
            if part is not None:
                self._word += part[0]
                if len(self._word) > MAX_WORD:
                    self.status = JsonStatus.BROKEN
                return part.end()
            if _WORD.fullmatch(self._word) is None:
                self.status = JsonStatus.BROKEN
                return at
            parts.append(self._word)
            self._end_value()
            return at
        space = _SPACE.match(text, at)
        if space is not None:
            parts.append(space[0])
            return space.end()
        char, expects = text[at], self._expects
        if self._closers and char == self._closers[-1] and expects in _MAY_END:
            self._closers.pop()
            self._end_value()
        elif char == '"' and expects in (*_VALUES, *_KEYS):
            self._is_key = expects in _KEYS
            self._expects = _Expects.STRING
        elif char in "{[" and expects in _VALUES and len(self._closers) < MAX_DEPTH:
            self._closers.append("}" if char == "{" else "]")
            self._expects = _Expects.KEY_OR_END if char == "{" else _Expects.VALUE_OR_END
        elif char == ":" and expects is _Expects.COLON:
            self._expects = _Expects.VALUE
        elif char == "," and expects is _Expects.COMMA_OR_END:
            self._expects = _Expects.KEY if self._closers[-1] == "}" else _Expects.VALUE
        elif expects in _VALUES and _WORD_PART.match(char):
            self._expects, self._word = _Expects.WORD, ""
            return at
        else:
            self.status = JsonStatus.BROKEN
            return at
        parts.append(char)
        return at + 1

    def _end_value(self) -> None:
        if self._closers:
            self._expects = _Expects.COMMA_OR_END
        else:
            self.status = JsonStatus.DONE


_VALUES = (_Expects.VALUE, _Expects.VALUE_OR_END)
_KEYS = (_Expects.KEY, _Expects.KEY_OR_END)
_MAY_END = (_Expects.VALUE_OR_END, _Expects.KEY_OR_END, _Expects.COMMA_OR_END)


def parsed(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for NaN and Infinity, and for one nested too deeply."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
