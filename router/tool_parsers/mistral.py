"""Mistral's format, in its two forms:

    [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]         up to tokenizer version 7
    [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[CALL_ID]x[ARGS]{...}   from version 11 on; [ARGS] may be missing

The parser gives new ids of 9 characters, as the templates demand, and passes over those that the model writes. A broken
call reaches to the next [TOOL_CALLS] or to the end.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping

from .base import Schema
from .json_calls import JsonCallParser, arguments_rule, call_rules
from .json_text import JsonStatus, JsonValue

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_HEAD = re.compile(r"([A-Za-z0-9_.:/\-]{1,256})\s*(?:\[CALL_ID\]\s*([A-Za-z0-9_\-]{0,256})\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_MAX_HEAD = 600  # characters before the arguments
_ID_CHARACTERS = string.ascii_letters + string.digits


class MistralParser(JsonCallParser):
    """Parser of Mistral's format."""

    markers = (BEGIN, CALL_ID, ARGS)

    def __init__(self, tools: Mapping[str, Schema], new_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, new_id)
        self._is_marked = False  # the mark has been read, and what follows it has not
        self._in_list = False
        self._arguments: JsonValue | None = None  # of a call in the newer form

    @staticmethod
    def make_id() -> str:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))

    @classmethod
    def grammar(cls, tools: Mapping[str, Schema], *, may_repeat: bool, literal: Callable[[str], str]) -> str:
        if literal(ARGS) == json.dumps(ARGS):  # not a special token: the older form
            alternatives, rules = call_rules(tools)
            repeated = 'call (", " call)*' if may_repeat else "call"
            return "\n".join([f'calls: {literal(BEGIN)} " "? "[" {repeated} "]"', f"call: {alternatives}", *rules])
        calls = [
            f"{literal(BEGIN)} {json.dumps(name)} {literal(ARGS)} arguments_{index}" for index, name in enumerate(tools)
        ]
        rules = [arguments_rule(index, schema) for index, schema in enumerate(tools.values())]
        return "\n".join([f"calls: call{'+' if may_repeat else ''}", f"call: {' | '.join(calls)}", *rules])

    def _advance(self) -> bool:
        if self._call is not None:
            self._read_call(self._call)
            return True
        if self._arguments is not None:
            self._read_arguments(self._arguments)
            return True
        if self._is_open:
            return self._end_broken(begin=BEGIN) is not None
        if self._in_list:
            return self._read_list()
        if self._is_marked:
            return self._read_mark()
        if self._content_until(BEGIN) is None:
            return False
        self._raw, self._is_marked = BEGIN, True
        return True

    def _after_call(self, *, is_whole: bool) -> None:
        self._in_list = self._in_list and is_whole

    def _read_mark(self) -> bool:
        """Read what follows the mark: a list, an object, or the name of a tool."""
        rest = self._text.lstrip()
        if not rest:
            return False
        if rest[0] in "[{":
            self._skip_space()
            self._in_list, self._is_marked = rest[0] == "[", False
            if self._in_list:
                self._consume(1)
            self._begin_call()
            return True
        may_be_head = rest[:_MAX_HEAD]
        head = _HEAD.match(may_be_head)
        if head is not None:
            self._skip_space()
            self._consume(head.end())
            self._call_begins(head[1])
            self._arguments, self._is_marked = JsonValue(), False
            return True
        if "{" not in may_be_head and BEGIN not in may_be_head and len(rest) < _MAX_HEAD:
            return False
        self._is_marked = False
        self._content(self._raw)
        self._raw = ""
        return True

    def _read_list(self) -> bool:
        """Read what follows a call in a list."""
        rest = self._text.lstrip()
        if not rest:
            return False
        if rest[0] == ",":
            self._text = rest[1:]
            self._begin_call()
        else:
            self._in_list = False
            self._text = rest[1:] if rest[0] == "]" else self._text
        return True

    def _read_arguments(self, arguments: JsonValue) -> None:
        end, piece = arguments.read(self._text, 0)
        self._consume(end)
        self._call_arguments(piece)
        if arguments.status is JsonStatus.DONE:
            self._call_ends()
        if arguments.status is not JsonStatus.OPEN:
            self._arguments = None
