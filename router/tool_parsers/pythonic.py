"""Pythonic format (Llama 4, Llama 3.2): the whole output is a list of calls, [f(city='Paris', days=3), g()].

<|python_start|> and <|python_end|> may stand around it. Nothing else marks calls: so only an output that begins with a
list whose first element calls a tool of the request is one. Values are Python's or JSON's literals. A part of the
arguments is given when its value is whole. A broken call reaches to the end of the output.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from enum import Enum, auto

from .base import Schema, ToolParser
from .json_text import MAX_DEPTH, parsed
from .pythonic_grammar import pythonic_grammar

START, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.\-]{0,255})\s*\(")
_MAY_BE_NAME = re.compile(r"\s*(?:[A-Za-z_][A-Za-z0-9_.\-]{0,255}\s*)?")
_KEY = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]{0,255})\s*=")
_MAY_BE_KEY = re.compile(r"\s*(?:[A-Za-z_][A-Za-z0-9_]{0,255}\s*)?")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


class _At(Enum):
    BEGIN = auto()
    NAME = auto()  # before the name of a tool
    KEY = auto()  # before the name of an argument, or the end of the call
    VALUE = auto()
    BEHIND = auto()  # after a call
    BROKEN = auto()
    CONTENT = auto()


class _Literal:
    """Finds the end of one Python literal: a comma or closing parenthesis outside of its own strings and brackets."""

    __slots__ = ("_closers", "_is_escaped", "_quote", "is_broken", "text")

    def __init__(self) -> None:
        self.text = ""  # what has been read; raw line breaks in strings are escaped, since Python forbids them
        self.is_broken = False
        self._quote = ""  # that ends the present string
        self._is_escaped = False  # the character before was a backslash
        self._closers: list[str] = []  # of its open brackets

    def read(self, text: str) -> int:
        """Read the beginning of a text and return how long it is. The literal has ended if that is not all of it."""
        parts = [self.text]
        at = 0
        for char in text:
            if not self._quote and not self._closers and char in ",)":
                break
            if self.is_broken:
                break
            parts.append(self._read_char(char))
            at += 1
        self.text = "".join(parts)
        return at

    def _read_char(self, char: str) -> str:
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._quote = ""
            elif char in "\r\n":
                return "\\r" if char == "\r" else "\\n"
        elif char in "'\"":
            self._quote = char
        elif char in _CLOSERS:
            self._closers.append(_CLOSERS[char])
            self.is_broken = len(self._closers) > MAX_DEPTH
        elif char in ")]}":
            self.is_broken = not self._closers or self._closers.pop() != char
        return char


class PythonicParser(ToolParser):
    """Parser of the pythonic format."""

    markers = (START, END)

    def __init__(self, tools: Mapping[str, Schema], new_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, new_id)
        self._at = _At.BEGIN
        self._literal = _Literal()
        self._has_arguments = False

    @classmethod
    def grammar(cls, tools: Mapping[str, Schema], *, may_repeat: bool, literal: Callable[[str], str]) -> str | None:
        del literal  # no marks stand around a list that is forced
        return pythonic_grammar(tools, may_repeat=may_repeat)

    def _advance(self) -> bool:
        match self._at:
            case _At.BEGIN:
                return self._read_begin()
            case _At.NAME:
                return self._read_name()
            case _At.KEY:
                return self._read_key()
            case _At.VALUE:
                return self._read_value()
            case _At.BEHIND:
                return self._read_behind()
            case _At.BROKEN:
                self._consume(len(self._text))
                return False
            case _At.CONTENT:
                self._content(self._text)
                self._text = ""
                return False

    def _read_begin(self) -> bool:
        rest = self._text.lstrip()
        if rest.startswith(START):
            self._text = rest[len(START) :]
        elif rest.startswith("["):
            self._raw = self._text[: len(self._text) - len(rest) + 1]
            self._text = rest[1:]
            self._at = _At.NAME
        elif not self._is_last and START.startswith(rest):
            return False
        else:
            self._at = _At.CONTENT
        return True

    def _read_name(self) -> bool:
        name = _NAME.match(self._text)
        if name is None and _MAY_BE_NAME.fullmatch(self._text) is not None:
            return False
        if name is None or name[1] not in self._tools:
            self._content(self._raw)
            self._raw, self._at = "", _At.CONTENT
            return True
        self._consume(name.end())
        self._call_begins(name[1])
        self._has_arguments, self._at = False, _At.KEY
        return True

    def _read_key(self) -> bool:
        self._skip_space()
        if self._text.startswith(")"):
            self._consume(1)
            self._end_call()
            return True
        key = _KEY.match(self._text)
        if key is None and _MAY_BE_KEY.fullmatch(self._text) is not None:
            return False
        if key is None:
            self._at = _At.BROKEN
            return True
        self._consume(key.end())
        self._call_arguments(f"{', ' if self._has_arguments else '{'}{json.dumps(key[1])}: ")
        self._has_arguments, self._literal, self._at = True, _Literal(), _At.VALUE
        return True

    def _read_value(self) -> bool:
        self._consume(self._literal.read(self._text))
        if self._literal.is_broken:
            self._at = _At.BROKEN
            return True
        if not self._text:
            return False
        value = json_of(self._literal.text)
        if value is None:
            self._at = _At.BROKEN
            return True
        self._call_arguments(value)
        is_end = self._text[0] == ")"
        self._consume(1)
        if is_end:
            self._end_call()
        else:
            self._at = _At.KEY
        return True

    def _end_call(self) -> None:
        self._call_arguments("}" if self._has_arguments else "{}")
        self._call_ends()
        self._at = _At.BEHIND

    def _read_behind(self) -> bool:
        """Read what follows a call: a comma, or the end of the list."""
        rest = self._text.lstrip()
        if not rest:
            return False
        if rest[0] == ",":
            self._raw, self._text = ",", rest[1:]
            self._at = _At.NAME
            return True
        if rest[0] == "]":
            behind = rest[1:].lstrip()
            if END.startswith(behind) and behind != END:
                self._text = "" if self._is_last else self._text
                return False
            self._text = behind.removeprefix(END) if behind.startswith(END) else rest[1:]
        self._at = _At.CONTENT
        return True


def json_of(text: str) -> str | None:
    """Return the JSON of a literal of JSON or Python; None if it is none, or if JSON has no such value."""
    try:
        parsed(text)
        return text.strip()
    except ValueError:
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = ast.literal_eval(text.strip())
        made = json.dumps(value, ensure_ascii=False, allow_nan=False)
        made.encode()
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return made
