"""Format of Gemma 4: keys stand without quotes, and a mark of its own stands around each string.

    <|tool_call>call:NAME{city:<|"|>Paris<|"|>,days:3,tags:[<|"|>a<|"|>],place:{x:null}}<tool_call|>

A text between two marks is what it says: nothing in it is escaped. The arguments become JSON while they come. A key
ends at the first colon, and holds neither brackets nor commas. A broken call ends with its closing mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from enum import Enum, auto

from .base import MAX_NAME, Schema, ToolParser, possible_start
from .json_text import MAX_WORD, JsonStatus, JsonValue

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(rf"\s*call:([^\s{{}}<>]{{1,{MAX_NAME}}})(?=\{{)")
_MAY_BE_NAME = re.compile(rf"\s*(?:c|ca|cal|call|call:[^\s{{}}<>]{{0,{MAX_NAME}}})?")
_KEY = re.compile(rf"[^:{{}}\[\],\n]{{1,{MAX_NAME}}}")
_WORD = re.compile(rf"[A-Za-z0-9+.\-]{{1,{MAX_WORD}}}")
_WORDS = {"None": "null", "True": "true", "False": "false"}  # as templates write values of Python


class _At(Enum):
    CONTENT = auto()
    NAME = auto()  # after <|tool_call>
    ARGUMENTS = auto()
    STRING = auto()  # in a text of the arguments
    BROKEN = auto()
    BEHIND = auto()  # after the arguments


class Gemma4Parser(ToolParser):
    """Parser of Gemma 4's format."""

    markers = (BEGIN, END, QUOTE)

    def __init__(self, tools: Mapping[str, Schema], new_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, new_id)
        self._at = _At.CONTENT
        self._json = JsonValue()  # the arguments of the present call

    def _advance(self) -> bool:
        match self._at:
            case _At.CONTENT:
                return self._read_content()
            case _At.NAME:
                return self._read_name()
            case _At.ARGUMENTS:
                return self._read_arguments()
            case _At.STRING:
                return self._read_string()
            case _At.BROKEN:
                return self._read_broken()
            case _At.BEHIND:
                return self._read_behind()

    def _read_content(self) -> bool:
        mark = self._content_until(BEGIN)
        if mark is None:
            return False
        self._raw, self._at = mark, _At.NAME
        return True

    def _read_name(self) -> bool:
        name = _NAME.match(self._text)
        if name is not None:
            self._consume(name.end())
            self._call_begins(name[1])
            self._json, self._at = JsonValue(), _At.ARGUMENTS
            return True
        if not self._is_last and _MAY_BE_NAME.fullmatch(self._text):
            return False
        self._content(self._raw)
        self._raw, self._at = "", _At.CONTENT
        return True

    def _read_arguments(self) -> bool:
        text = self._text
        if text.startswith(QUOTE):
            return self._give('"', len(QUOTE), _At.STRING)
        if QUOTE.startswith(text) and not self._is_last:
            return False
        if text[0] in "{}[],: \t\r\n":
            return self._give(text[0], 1, _At.ARGUMENTS)
        part = (_KEY if self._json.expects_key else _WORD).match(text)
        if part is None:
            self._at = _At.BROKEN
            return True
        if part.end() == len(text):
            return self._break_if_last()
        if not self._json.expects_key:
            return self._give(_WORDS.get(part[0], part[0]), part.end(), _At.ARGUMENTS)
        if text[part.end()] != ":" or any(mark in part[0] for mark in self.markers):
            self._at = _At.BROKEN
            return True
        return self._give(json.dumps(part[0].strip(), ensure_ascii=False), part.end(), _At.ARGUMENTS)

    def _read_string(self) -> bool:
        at = self._text.find(QUOTE)
        end = at if at >= 0 else len(self._text) - possible_start(self._text, (QUOTE,))
        if end:
            self._give(json.dumps(self._text[:end], ensure_ascii=False)[1:-1], end, _At.STRING)
        return at >= 0 and self._give('"', len(QUOTE), _At.ARGUMENTS)

    def _give(self, text: str, length: int, at: _At) -> bool:
        """Move `length` characters to the present call, which are `text` in JSON. Return True."""
        self._consume(length)
        self._call_arguments(self._json.read(text, 0)[1])
        self._at = _At.BROKEN if self._json.status is JsonStatus.BROKEN else at
        if self._json.status is JsonStatus.DONE:
            self._call_ends()
            self._at = _At.BEHIND
        return True

    def _break_if_last(self) -> bool:
        if self._is_last:
            self._at = _At.BROKEN
        return self._is_last

    def _read_broken(self) -> bool:
        if self._end_broken(END, begin=BEGIN) is None:
            return False
        self._at = _At.CONTENT
        return True

    def _read_behind(self) -> bool:
        if not self._pass_end(END):
            return False
        self._at = _At.CONTENT
        return True
