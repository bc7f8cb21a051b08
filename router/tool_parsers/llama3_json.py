"""JSON format of Llama 3: the whole output is {"name": ..., "parameters": {...}}, or several, divided by ; or space.

The mark <|python_tag|> may stand before a call and is dropped. Nothing else marks a call: so only an output that begins
with an object is one, if the object holds nothing but a call, and names a tool of the request. All else is content,
such as text after a call. A broken call reaches to the end of the output.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from .base import Schema
from .json_calls import JsonCallParser, arguments_rule

TAG = "<|python_tag|>"
_BETWEEN = " SPACE? "
_SPACE = r"SPACE: /\x20|\r?\n(\x20{0,4}|\t)/"  # what a compact or an indented form needs


class Llama3JsonParser(JsonCallParser):
    """Parser of the JSON format of Llama 3."""

    markers = (TAG,)
    _is_strict = True

    def __init__(self, tools: Mapping[str, Schema], new_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, new_id)
        self._may_begin = True  # a call may begin here

    @classmethod
    def grammar(cls, tools: Mapping[str, Schema], *, may_repeat: bool, literal: Callable[[str], str]) -> str:
        """Return rules whose fixed texts end where those of a JSON schema end: llguidance reads the longest text of a
        rule, and an answer may begin as a call does."""
        del literal
        calls = list[str]()
        for index, name in enumerate(tools):
            marks = ("{", '"name"', ":", json.dumps(name), ",", '"parameters"', ":")
            items = [*map(json.dumps, marks), f"arguments_{index}", '"}"']
            calls.append(_BETWEEN.join(items))
        rules = [arguments_rule(index, schema) for index, schema in enumerate(tools.values())]
        repeated = 'call ("; " call)*' if may_repeat else "call"
        return "\n".join([f"calls: {repeated}", f"call: {' | '.join(calls)}", *rules, _SPACE])

    def _advance(self) -> bool:
        if self._call is not None:
            self._read_call(self._call)
            return True
        if self._is_open:
            self._consume(len(self._text))
            return False
        if not self._may_begin:
            self._content(self._text)
            self._text = ""
            return False
        rest = self._text.lstrip()
        if self._num_calls and rest.startswith(";"):
            rest = rest[1:].lstrip()
        if rest.startswith(TAG):
            self._text = rest[len(TAG) :]
            return True
        if rest.startswith("{"):
            self._raw, self._text = self._text[: len(self._text) - len(rest)], rest
            self._begin_call()
            return True
        if not self._is_last and TAG.startswith(rest):
            return False
        self._may_begin = False
        return True

    def _after_call(self, *, is_whole: bool) -> None:
        self._may_begin = is_whole
