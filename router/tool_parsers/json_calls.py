"""Calls that are JSON objects with a name and arguments. Several families write them, each between its own marks."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from .base import MAX_NAME, Schema, ToolParser
from .json_text import JsonStatus, JsonValue, parsed

_ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """Reads one object {"name": ..., "arguments": {...}}, in any order of keys. `parameters` are arguments too.

    Arguments may also be a string that holds the object, null, or absent, which is an empty object. Other keys are
    passed over, unless `is_strict`: then they break the call.
    """

    __slots__ = ("_expects", "_given", "_has_arguments", "_is_empty", "_is_strict", "_key", "_part", "_tail", "_value",
                 "name", "status")  # fmt: skip

    def __init__(self, *, is_strict: bool = False) -> None:
        self.status = JsonStatus.OPEN
        self.name: str | None = None  # when it is known
        self._is_strict = is_strict
        self._expects: Literal["{", "key", ":", "value", ","] = "{"
        self._is_empty = True
        self._value: JsonValue | None = None  # the present key or value
        self._part = ""  # what has been read of it, unless it is an object of arguments
        self._key: str | None = None  # of the present value; None while a key is read
        self._given = ""  # arguments that `take` has not returned
        self._tail = ""  # the last character of the arguments, given when the whole object has ended
        self._has_arguments = False

    def read(self, text: str, start: int = 0) -> int:
        """Read `text` from `start` on, and return where the object ends or the first wrong character is."""
        at = start
        while at < len(text) and self.status is JsonStatus.OPEN:
            if self._value is not None:
                at = self._read_value(self._value, text, at)
            elif text[at] in " \t\r\n":
                at += 1
            elif self._begins_value(text[at]):
                self._value, self._part = JsonValue(), ""
            elif self._takes(text[at]):
                at += 1
            else:
                self.status = JsonStatus.BROKEN
        return at

    def take(self) -> str:
        """Return the arguments that have come since the last call of this method."""
        given, self._given = self._given, ""
        return given

    def _begins_value(self, char: str) -> bool:
        return self._expects == "value" or (self._expects == "key" and char == '"')

    def _takes(self, char: str) -> bool:
        """Take a mark of the object itself. Return whether it may stand here."""
        if char == "{" and self._expects == "{":
            self._expects = "key"
        elif char == ":" and self._expects == ":":
            self._expects = "value"
        elif char == "," and self._expects == ",":
            self._expects, self._is_empty = "key", False
        elif char == "}" and (self._expects == "," or (self._expects == "key" and self._is_empty)):
            return self._ends()
        else:
            return False
        return True

    def _ends(self) -> bool:
        if self.name is None:
            return False
        self._given += self._tail if self._has_arguments else "{}"
        self.status = JsonStatus.DONE
        return True

    def _read_value(self, value: JsonValue, text: str, at: int) -> int:
        is_object = self._key in _ARGUMENTS and (self._part or text[at]).startswith("{")
        end, piece = value.read(text, at)
        if is_object:
            self._part = "{"
            self._given += piece
        else:
            self._part += piece
        if value.status is JsonStatus.BROKEN:
            self.status = JsonStatus.BROKEN
        elif value.status is JsonStatus.DONE:
            self._value = None
            if self._key is None:
                self._take_key()
            else:
                self._take_value(self._key, is_object=is_object)
        return end

    def _take_key(self) -> None:
        key = str(parsed(self._part))
        is_known = key in ("name", *_ARGUMENTS, *(() if not self._is_strict else ("type", "id")))
        is_double = (key == "name" and self.name is not None) or (key in _ARGUMENTS and self._has_arguments)
        if is_double or (self._is_strict and not is_known):
            self.status = JsonStatus.BROKEN
        self._key, self._expects = key, ":"

    def _take_value(self, key: str, *, is_object: bool) -> None:
        self._key, self._expects = None, ","
        if key == "name":
            name = parsed(self._part)
            if isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable():
                self.name = name
            else:
                self.status = JsonStatus.BROKEN
        elif key in _ARGUMENTS:
            self._has_arguments = True
            if not is_object:
                self._take_other_arguments(parsed(self._part))
            self._given, self._tail = self._given[:-1], self._given[-1:]

    def _take_other_arguments(self, value: object) -> None:
        if value is None:
            self._given = "{}"
            return
        try:
            is_object = isinstance(value, str) and bool(value.encode()) and isinstance(parsed(value), dict)
        except ValueError:
            is_object = False
        if is_object:
            self._given = str(value).strip()
        else:
            self.status = JsonStatus.BROKEN


class JsonCallParser(ToolParser):
    """Parser of a family whose calls are such objects. A subclass says what stands around them.

    `_call` is the present call. It is None between calls.
    """

    _is_strict: ClassVar[bool] = False  # only objects that hold nothing but a call of a known tool are calls

    def __init__(self, tools: Mapping[str, Schema], new_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, new_id)
        self._call: JsonCall | None = None

    @abstractmethod
    def _after_call(self, *, is_whole: bool) -> None:
        """The present call has ended, or (not `is_whole`) its text cannot be a call."""

    def _begin_call(self) -> None:
        """A call's object may follow."""
        self._call = JsonCall(is_strict=self._is_strict)

    def _read_call(self, call: JsonCall) -> None:
        """Read the present call as far as possible."""
        self._consume(call.read(self._text))
        name = call.name
        if name is not None and not self._is_open:  # also if the text after the name is broken
            if self._is_strict and name not in self._tools:
                call.status = JsonStatus.BROKEN
            else:
                self._call_begins(name)
        if self._is_open:
            self._call_arguments(call.take())
        if call.status is JsonStatus.OPEN:
            return
        self._call = None
        is_whole = call.status is JsonStatus.DONE
        if is_whole:
            self._call_ends()
        elif not self._is_open:
            self._content(self._raw)
            self._raw = ""
        self._after_call(is_whole=is_whole)


def call_rules(tools: Mapping[str, Schema], *, before: str = "", after: str = "") -> tuple[str, list[str]]:
    """Return Lark rules of one call as a JSON object: the alternatives of a rule, and the rules that they name.

    `before` and `after` are Lark items around the object.
    """
    alternatives, rules = list[str](), list[str]()
    for index, (name, schema) in enumerate(tools.items()):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        alternatives.append(" ".join(part for part in (before, head, f"arguments_{index}", '"}"', after) if part))
        rules.append(arguments_rule(index, schema))
    return " | ".join(alternatives), rules


def arguments_rule(index: int, schema: Schema) -> str:
    """Return the Lark rule `arguments_INDEX` of a tool's arguments."""
    return f"arguments_{index}: %json {json.dumps(schema)}"
