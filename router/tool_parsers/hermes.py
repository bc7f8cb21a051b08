"""Hermes' format, also of Qwen 2.5 and Qwen 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated.

A mark inside a JSON string is part of the string. The closing mark may be missing. A broken call ends with its closing
mark, or where the next call begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .base import Schema
from .json_calls import JsonCallParser, call_rules

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    """Parser of Hermes' format."""

    markers = (BEGIN, END)

    def __init__(self, tools: Mapping[str, Schema], new_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, new_id)
        self._is_behind = False  # the last call's closing mark may follow

    @classmethod
    def grammar(cls, tools: Mapping[str, Schema], *, may_repeat: bool, literal: Callable[[str], str]) -> str:
        before, after = f'{literal(BEGIN)} "\\n"', f'"\\n" {literal(END)}'
        alternatives, rules = call_rules(tools, before=before, after=after)
        repeated = 'call ("\\n" call)*' if may_repeat else "call"
        return "\n".join([f"calls: {repeated}", f"call: {alternatives}", *rules])

    def _advance(self) -> bool:
        if self._call is not None:
            self._read_call(self._call)
            return True
        if self._is_open:
            return self._end_broken(END, begin=BEGIN) is not None
        if self._is_behind:
            if not self._pass_end(END):
                return False
            self._is_behind = False
            return True
        if self._content_until(BEGIN) is None:
            return False
        self._raw = BEGIN
        self._begin_call()
        return True

    def _after_call(self, *, is_whole: bool) -> None:
        self._is_behind = is_whole
