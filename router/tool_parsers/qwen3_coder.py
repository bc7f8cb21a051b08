"""Format of Qwen3-Coder: the arguments of a call are elements, and their values are plain text.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

The outer marks may be missing. A value ends at the first </parameter> that another parameter or the end of the call
follows. So code in a value may hold marks. If </parameter> is missing, a value ends before the next parameter that the
schema knows and the call has not had, and before the end of the call. In a text this holds at the beginning of a line.

The JSON schema of the tool says what a value is, by its types or the values that it names. A value of a parameter that
is a string only is given as it comes, any other when it is whole. A value that is not of the schema's type, or whose
parameter the schema does not know, is a string. A broken call ends with its closing mark.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, cast

from ..text.json_schema import referred
from .base import MAX_NAME, Schema, ToolParser
from .json_text import parsed

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_AFTER_VALUE = (PARAMETER, FUNCTION_END, END)
_NAME = re.compile(rf"\s*([^\s<>]{{1,{MAX_NAME}}})\s*>")
_MAY_BE_NAME = re.compile(rf"\s*[^\s<>]{{0,{MAX_NAME}}}\s*")
_NEXT = re.compile(rf"{PARAMETER}\s*([^\s<>]{{1,{MAX_NAME}}})\s*>")
_UNDECIDED = -1
_OF_STRINGS = frozenset({"format", "maxLength", "minLength", "pattern"})
_KEY = re.compile(rf"[^\s<>]{{1,{MAX_NAME}}}")
_SHARED = ("$defs", "definitions", "x-guidance")  # of a schema, also for the parts of it
_MAX_SCHEMAS = 64  # that are looked at for the type of one value


class _At(Enum):
    CONTENT = auto()
    CALL = auto()  # after <tool_call>
    NAME = auto()  # after <function=
    BODY = auto()  # between parameters
    KEY = auto()  # after <parameter=
    VALUE = auto()
    BROKEN = auto()
    BEHIND = auto()  # after </function>


class Qwen3CoderParser(ToolParser):
    """Parser of Qwen3-Coder's format."""

    markers = (BEGIN, END)

    def __init__(self, tools: Mapping[str, Schema], new_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, new_id)
        self._at = _At.CONTENT
        self._schema: Schema = {}  # of the present call's arguments
        self._known: Schema = {}  # parameters of the present call, by their names
        self._seen = set[str]()  # those that have come
        self._types: frozenset[str] = frozenset()  # that the present value may have; empty: unknown
        self._values: list[object] = []  # that the schema names for the present value
        self._value: str | None = None  # what has come of it; None: it is a string and given as it comes
        self._is_fresh = False  # nothing of the present value has been read
        self._is_empty = False  # nothing of the present value has been given
        self._has_arguments = False

    @classmethod
    def grammar(cls, tools: Mapping[str, Schema], *, may_repeat: bool, literal: Callable[[str], str]) -> str | None:
        """Return the rules of calls whose parameters come in the order of the schema. None if a schema has a demand
        that plain text between marks cannot show, such as a pattern of a string."""
        calls, rules = list[str](), list[str]()
        for index, (name, schema) in enumerate(tools.items()):
            parameters = _parameter_rules(index, schema)
            if parameters is None:
                return None
            items, more = parameters
            head, tail = json.dumps(f"\n{FUNCTION}{name}>\n"), json.dumps(f"{FUNCTION_END}\n")
            calls.append(" ".join([literal(BEGIN), head, *items, tail, literal(END)]))
            rules += more
        repeated = 'call ("\\n" call)*' if may_repeat else "call"
        return "\n".join([f"calls: {repeated}", f"call: {' | '.join(calls)}", *rules])

    def _advance(self) -> bool:
        return _STEPS[self._at](self)

    def _read_content(self) -> bool:
        mark = self._content_until(BEGIN, FUNCTION)
        if mark is None:
            return False
        self._raw = mark
        self._at = _At.CALL if mark == BEGIN else _At.NAME
        return True

    def _read_call(self) -> bool:
        self._skip_space()
        if self._text.startswith(FUNCTION):
            self._consume(len(FUNCTION))
            self._at = _At.NAME
            return True
        return self._wait_or_break(FUNCTION)

    def _read_name(self) -> bool:
        name = _NAME.match(self._text)
        if name is None:
            return self._wait_or_break() if _MAY_BE_NAME.fullmatch(self._text) is None else False
        self._consume(name.end())
        self._call_begins(name[1])
        self._schema = self._tools.get(name[1], {})
        properties = self._schema.get("properties")
        self._known = cast("dict[str, Any]", properties) if isinstance(properties, dict) else {}
        self._seen.clear()
        self._has_arguments = False
        self._at = _At.BODY
        return True

    def _read_body(self) -> bool:
        self._skip_space()
        if self._text.startswith(PARAMETER):
            self._consume(len(PARAMETER))
            self._at = _At.KEY
            return True
        if self._text.startswith(FUNCTION_END):
            self._consume(len(FUNCTION_END))
            self._call_arguments("}" if self._has_arguments else "{}")
            self._call_ends()
            self._at = _At.BEHIND
            return True
        return self._wait_or_break(PARAMETER, FUNCTION_END)

    def _read_key(self) -> bool:
        key = _NAME.match(self._text)
        if key is None:
            return self._wait_or_break() if _MAY_BE_NAME.fullmatch(self._text) is None else False
        self._consume(key.end())
        is_known = key[1] in self._known
        self._types = types_of(self._known[key[1]], self._schema) if is_known else frozenset({"string"})
        self._values = values_of(self._known[key[1]], self._schema) if is_known else []
        self._seen.add(key[1])
        is_string = self._types == frozenset({"string"})
        self._call_arguments(f"{', ' if self._has_arguments else '{'}{json.dumps(key[1])}: {_quote(is_string)}")
        self._has_arguments, self._value = True, None if is_string else ""
        self._is_fresh = self._is_empty = True
        self._at = _At.VALUE
        return True

    def _read_value(self) -> bool:
        if self._is_fresh and self._text.startswith("\n"):
            self._consume(1)
        self._is_fresh = False
        mark_len, at = None, self._text.find("<")
        while at >= 0:
            mark_len = self._end_at(at)
            if mark_len is not None:
                break
            at = self._text.find("<", at + 1)
        if mark_len is not None and mark_len is not _UNDECIDED:
            self._give(self._text[:at].removesuffix("\n"))
            self._consume(at + mark_len)
            self._call_arguments(
                _quote(True) if self._value is None else json_of(self._value, self._types, self._values)
            )
            self._at = _At.BODY
            return True
        at = len(self._text) if at < 0 else at
        if self._text[:at].endswith("\n"):
            at -= 1
        self._give(self._text[:at])
        self._consume(at)
        return False

    def _end_at(self, at: int) -> int | None:
        """Return the length of the closing mark if the present value ends here, where a < stands: 0 if the mark is
        missing. None: it does not end. _UNDECIDED: what follows decides."""
        rest = self._text[at:]
        if rest.startswith(PARAMETER_END):
            behind = rest[len(PARAMETER_END) :].lstrip()
            if behind.startswith(_AFTER_VALUE):
                return len(PARAMETER_END)
            return _UNDECIDED if any(mark.startswith(behind) for mark in _AFTER_VALUE) else None
        if PARAMETER_END.startswith(rest):
            return _UNDECIDED
        if self._value is None and (self._text[at - 1 : at] != "\n" if at else not self._is_empty):
            return None  # code in a text may hold marks, but not at the beginning of a line
        if rest.startswith(FUNCTION_END):
            behind = rest[len(FUNCTION_END) :].lstrip()
            if behind.startswith(END) or (self._is_last and not behind):
                return 0
            return _UNDECIDED if END.startswith(behind) else None
        following = _NEXT.match(rest)
        if following is not None:
            return 0 if following[1] in self._known and following[1] not in self._seen else None
        may_follow = rest.startswith(PARAMETER) and _MAY_BE_NAME.fullmatch(rest[len(PARAMETER) :]) is not None
        return _UNDECIDED if may_follow or any(mark.startswith(rest) for mark in (FUNCTION_END, PARAMETER)) else None

    def _give(self, text: str) -> None:
        """Take the next part of the present value."""
        self._is_empty = self._is_empty and not text
        if self._value is None:
            self._call_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value += text

    def _read_broken(self) -> bool:
        mark = self._end_broken(FUNCTION_END, END, begin=BEGIN)
        if mark is None:
            return False
        self._at = _At.CONTENT if mark == BEGIN else _At.BEHIND
        return True

    def _read_behind(self) -> bool:
        if not self._pass_end(END):
            return False
        self._at = _At.CONTENT
        return True

    def _wait_or_break(self, *expected: str) -> bool:
        """Return False if the text may become one of these marks. Otherwise the call is broken."""
        if not self._is_last and any(mark.startswith(self._text) for mark in expected):
            return False
        if self._is_open:
            self._at = _At.BROKEN
        else:
            self._content(self._raw)
            self._raw, self._at = "", _At.CONTENT
        return True


_STEPS: dict[_At, Callable[[Qwen3CoderParser], bool]] = {
    _At.CONTENT: Qwen3CoderParser._read_content,  # pyright: ignore[reportPrivateUsage]
    _At.CALL: Qwen3CoderParser._read_call,  # pyright: ignore[reportPrivateUsage]
    _At.NAME: Qwen3CoderParser._read_name,  # pyright: ignore[reportPrivateUsage]
    _At.BODY: Qwen3CoderParser._read_body,  # pyright: ignore[reportPrivateUsage]
    _At.KEY: Qwen3CoderParser._read_key,  # pyright: ignore[reportPrivateUsage]
    _At.VALUE: Qwen3CoderParser._read_value,  # pyright: ignore[reportPrivateUsage]
    _At.BROKEN: Qwen3CoderParser._read_broken,  # pyright: ignore[reportPrivateUsage]
    _At.BEHIND: Qwen3CoderParser._read_behind,  # pyright: ignore[reportPrivateUsage]
}


def _parameter_rules(index: int, schema: Schema) -> tuple[list[str], list[str]] | None:
    """Return the Lark items of all parameters of a tool, and the rules that they name; None if there are none."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    known = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema", *_SHARED}
    if not isinstance(properties, dict) or not isinstance(required, list):
        return None
    named = cast("dict[str, Any]", properties)
    if not _is_loose(schema) and (
        schema.keys() - known or any(key not in named for key in cast("list[Any]", required))
    ):
        return None
    items, rules = list[str](), list[str]()
    for place, (key, value) in enumerate(named.items()):
        rule = _value_rule(f"value_{index}_{place}", value, schema)
        if rule is None or _KEY.fullmatch(key) is None:
            return None
        rules.append(rule)
        item = f"{json.dumps(f'{PARAMETER}{key}>')} {json.dumps(chr(10))} value_{index}_{place}"
        items.append(f"({item})" if key in required else f"({item})?")
    return items, rules


def _value_rule(name: str, schema: object, root: Schema) -> str | None:
    """Return the Lark rule of a value and its closing mark; None if there is none."""
    if not isinstance(schema, dict):
        return None
    fields, end = cast("dict[str, Any]", schema), f"\n{PARAMETER_END}\n"
    types, anything = types_of(fields, root), f"{name}[suffix={json.dumps(end)}]: /(?s:.*)/"
    if types == frozenset({"string"}):
        options = [fields["const"]] if "const" in fields else fields.get("enum")
        if fields.keys() - {"type", "description", "title", "default", "examples", "enum", "const"}:
            return anything if _is_loose(root) else None
        if options is None:
            return anything
        if not isinstance(options, list) or not all(isinstance(each, str) for each in cast("list[Any]", options)):
            return None
        return f"{name}: ({' | '.join(map(json.dumps, cast('list[str]', options)))}) {json.dumps(end)}"
    if not types or "string" in types:
        return anything if _is_loose(root) else None
    whole = {**fields, **{key: root[key] for key in _SHARED if key in root}}
    return f"{name}: {name}_json {json.dumps(end)}\n{name}_json: %json {json.dumps(whole)}"


def _is_loose(schema: Schema) -> bool:
    """Return whether the grammar may allow more than a schema (json_schema.py)."""
    options = schema.get("x-guidance")
    return isinstance(options, dict) and cast("dict[str, Any]", options).get("lenient") is True


def types_of(schema: object, root: Schema) -> frozenset[str]:
    """Return the JSON types that a schema allows, by its types or its values; empty if it does not tell."""
    return _types(schema, root, [_MAX_SCHEMAS]) or frozenset()


def _types(schema: object, root: Schema, left: list[int]) -> frozenset[str] | None:
    """Return the same, None if the schema does not tell. `left`: how many schemas may be looked at."""
    left[0] -= 1
    if left[0] < 0 or not isinstance(schema, dict):
        return None
    fields = cast("dict[str, Any]", schema)
    kind, options = fields.get("type"), fields.get("anyOf", fields.get("oneOf"))
    types: frozenset[str] | None = None
    if isinstance(kind, str):
        types = frozenset({kind})
    elif isinstance(kind, list):
        types = frozenset(map(str, cast("list[Any]", kind)))
    elif values := _listed(fields):
        types = frozenset(map(_type_of, values))
    elif isinstance(options, list):
        several = [_types(each, root, left) for each in cast("list[Any]", options)]
        known = [each for each in several if each is not None]
        types = frozenset[str]().union(*known) if len(known) == len(several) else None
    elif isinstance(fields.get("$ref"), str):
        types = _types(referred(fields["$ref"], root), root, left)
    elif isinstance(fields.get("allOf"), list):
        several = [_types(each, root, left) for each in cast("list[Any]", fields["allOf"])]
        known = [each for each in several if each is not None]
        types = known[0].intersection(*known) if known else None
    elif fields.keys() & _OF_STRINGS:
        types = frozenset({"string"})
    return types | {"null"} if types and fields.get("nullable") is True else types


def values_of(schema: object, root: Schema) -> list[object]:
    """Return the values that a schema names, there or in its alternatives."""
    found, left = list[object](), [schema]
    for _ in range(_MAX_SCHEMAS):
        if not left:
            break
        each = left.pop(0)
        if isinstance(each, dict):
            fields = cast("dict[str, Any]", each)
            found += _listed(fields)
            for key in ("anyOf", "oneOf", "allOf"):
                left += cast("list[Any]", fields[key]) if isinstance(fields.get(key), list) else []
            if isinstance(fields.get("$ref"), str):
                left.append(referred(fields["$ref"], root))
    return found


def _listed(fields: Mapping[str, Any]) -> list[object]:
    """Return the values of `const` or `enum`."""
    if "const" in fields:
        return [fields["const"]]
    return cast("list[object]", fields["enum"]) if isinstance(fields.get("enum"), list) else []


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def json_of(text: str, types: frozenset[str], values: Sequence[object] = ()) -> str:
    """Return the JSON of a value that the model wrote as plain text. `types`: what it may be; empty: unknown. `values`:
    some that the schema names."""
    word = text.strip()
    small = word.lower()
    for value in values:
        if value in (text, word) if isinstance(value, str) else json.dumps(value).lower() == small:
            return json.dumps(value, ensure_ascii=False)
    if small in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    if small in ("true", "false") and ("boolean" in types or not types):
        return small
    try:
        value = parsed(word)
        plain = word
    except ValueError:
        value = _literal(word)
        plain = "" if value is None else json.dumps(value, ensure_ascii=False)
    for kind, classes in _CLASSES.items():
        if (kind in types or not types) and isinstance(value, classes) and not isinstance(value, bool):
            return plain
    return json.dumps(text, ensure_ascii=False)


_CLASSES: dict[str, type | tuple[type, ...]] = {"integer": int, "number": (int, float), "object": dict, "array": list}


def _literal(text: str) -> object:
    """Return a dictionary or list that is written in Python's way and can be JSON; else None."""
    if not text.startswith(("{", "[")):
        return None
    value: object
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False).encode()
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return value


def _quote(is_string: bool) -> str:
    return '"' if is_string else ""
