"""Calls in the harmony format of gpt-oss, as its reasoning parser hands them on (reasoning_parsers/harmony.py):

    <|channel|>commentary to=functions.NAME<|message|>{...}<|call|>

A message to anything but a function is content. A broken call reaches to the mark that ends its message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from .base import Schema, ToolParser
from .json_calls import arguments_rule
from .json_text import JsonStatus, JsonValue

CHANNEL, CONSTRAIN, MESSAGE, CALL = "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"
_NAME = re.compile(r"\sto=functions\.([^\s<]{1,256})")


class HarmonyParser(ToolParser):
    """Parser of the harmony format's calls."""

    markers = (CHANNEL, CONSTRAIN, MESSAGE, CALL)

    def __init__(self, tools: Mapping[str, Schema], new_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, new_id)
        self._in_head = False
        self._arguments: JsonValue | None = None  # of the present call
        self._is_behind = False  # the mark that ends the last call may follow

    @classmethod
    def grammar(cls, tools: Mapping[str, Schema], *, may_repeat: bool, literal: Callable[[str], str]) -> str:
        """Return the rules of one call: a call ends the model's turn."""
        del may_repeat
        between = f'" " {literal(CONSTRAIN)} "json" {literal(MESSAGE)}'
        calls = [
            f"{literal(CHANNEL)} {json.dumps(f'commentary to=functions.{name}')} {between} arguments_{index}"
            for index, name in enumerate(tools)
        ]
        rules = [arguments_rule(index, schema) for index, schema in enumerate(tools.values())]
        return "\n".join([f"calls: {' | '.join(calls)}", *rules])

    def _advance(self) -> bool:
        if self._arguments is not None:
            return self._read_arguments(self._arguments)
        if self._is_open:
            return self._end_broken(CALL) is not None
        if self._in_head:
            return self._read_head()
        if self._is_behind:
            if not self._pass_end(CALL):
                return False
            self._is_behind = False
            return True
        if self._content_until(CHANNEL) is None:
            return False
        self._raw, self._in_head = CHANNEL, True
        return True

    def _read_head(self) -> bool:
        at = self._text.find(MESSAGE)
        if at < 0:
            return False
        name = _NAME.search(self._text, 0, at)
        self._consume(at + len(MESSAGE))
        self._in_head = False
        if name is None:
            self._content(self._raw)
            self._raw = ""
        else:
            self._call_begins(name[1])
            self._arguments = JsonValue()
        return True

    def _read_arguments(self, arguments: JsonValue) -> bool:
        if arguments.is_untouched:
            self._skip_space()
            if self._text[:1] not in ("", "{"):
                self._arguments = None
                return True
        end, piece = arguments.read(self._text, 0)
        self._consume(end)
        self._call_arguments(piece)
        if arguments.status is JsonStatus.DONE:
            self._call_ends()
            self._is_behind = True
        if arguments.status is not JsonStatus.OPEN:
            self._arguments = None
        return True
