"""Format of Qwen3-Coder: the arguments of a call are elements, and their values are plain text.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

The outer marks may be missing. A value ends at the first </parameter> that another parameter or the end of the call
follows. So code in a value may hold marks. The JSON schema of the tool says what a value is: a value of a parameter
that is a string only is given as it comes, any other when it is whole. A value that is not of the schema's type, or
whose parameter the schema does not know, is a string. A broken call ends with its closing mark.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, cast

from .base import MAX_NAME, Schema, ToolParser, possible_start, referred
from .json_text import parsed

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_AFTER_VALUE = (PARAMETER, FUNCTION_END, END)
_NAME = re.compile(rf"\s*([^\s<>]{{1,{MAX_NAME}}})\s*>")
_MAY_BE_NAME = re.compile(rf"\s*[^\s<>]{{0,{MAX_NAME}}}\s*")
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
        self._types: frozenset[str] = frozenset()  # that the present value may have; empty: unknown
        self._value: str | None = None  # what has come of it; None: it is a string and given as it comes
        self._is_fresh = False  # nothing of the present value has been read
        self._has_arguments = False

    @classmethod
    def grammar(cls, tools: Mapping[str, Schema], *, may_repeat: bool, literal: Callable[[str], str]) -> str | None:
        """Return the rules of calls whose parameters come in the order of the schema. None if a schema demands what
        plain text between marks cannot tell, such as a pattern of a string."""
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
        properties = self._schema.get("properties")
        known = cast("dict[str, Any]", properties) if isinstance(properties, dict) else {}
        self._types = types_of(known[key[1]], self._schema) if key[1] in known else frozenset({"string"})
        is_string = self._types == frozenset({"string"})
        self._call_arguments(f"{', ' if self._has_arguments else '{'}{json.dumps(key[1])}: {_quote(is_string)}")
        self._has_arguments, self._value = True, None if is_string else ""
        self._is_fresh, self._at = True, _At.VALUE
        return True

    def _read_value(self) -> bool:
        if self._is_fresh and self._text.startswith("\n"):
            self._consume(1)
        self._is_fresh = False
        at = self._text.find(PARAMETER_END)
        while at >= 0:
            rest = self._text[at + len(PARAMETER_END) :].lstrip()
            if rest.startswith(_AFTER_VALUE):
                self._give(self._text[:at].removesuffix("\n"))
                self._consume(at + len(PARAMETER_END))
                self._call_arguments(_quote(True) if self._value is None else json_of(self._value, self._types))
                self._at = _At.BODY
                return True
            if any(mark.startswith(rest) for mark in _AFTER_VALUE):
                break  # what follows decides
            at = self._text.find(PARAMETER_END, at + 1)
        else:
            at = len(self._text) - possible_start(self._text, (PARAMETER_END, "\n" + PARAMETER_END))
        if self._text[:at].endswith("\n"):
            at -= 1
        self._give(self._text[:at])
        self._consume(at)
        return False

    def _give(self, text: str) -> None:
        """Take the next part of the present value."""
        if self._value is None:
            self._call_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value += text

    def _read_broken(self) -> bool:
        ends = [(self._text.find(mark), mark) for mark in (FUNCTION_END, END, BEGIN) if mark in self._text]
        if not ends:
            self._consume(len(self._text) - possible_start(self._text, (FUNCTION_END, END, BEGIN)))
            return False
        at, mark = min(ends)
        self._consume(at + (0 if mark == BEGIN else len(mark)))
        self._call_broken(self._raw)
        self._at = _At.CONTENT if mark == BEGIN else _At.BEHIND
        return True

    def _read_behind(self) -> bool:
        rest = self._text.lstrip()
        if rest.startswith(END):
            self._text = rest[len(END) :]
        elif END.startswith(rest):
            self._text = "" if self._is_last else self._text
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
    if not isinstance(properties, dict) or not isinstance(required, list) or schema.keys() - known:
        return None
    named = cast("dict[str, Any]", properties)
    if any(key not in named for key in cast("list[Any]", required)):
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
    types = types_of(fields, root)
    if types == frozenset({"string"}):
        options = [fields["const"]] if "const" in fields else fields.get("enum")
        if fields.keys() - {"type", "description", "title", "default", "examples", "enum", "const"}:
            return None
        if options is None:
            return f"{name}[suffix={json.dumps(end)}]: /(?s:.*)/"
        if not isinstance(options, list) or not all(isinstance(each, str) for each in cast("list[Any]", options)):
            return None
        return f"{name}: ({' | '.join(map(json.dumps, cast('list[str]', options)))}) {json.dumps(end)}"
    if not types or "string" in types:
        return None
    whole = {**fields, **{key: root[key] for key in _SHARED if key in root}}
    return f"{name}: {name}_json {json.dumps(end)}\n{name}_json: %json {json.dumps(whole)}"


def types_of(schema: object, root: Schema) -> frozenset[str]:
    """Return the JSON types that a schema allows, as far as it says so directly; empty if it does not."""
    types, left = set[str](), [schema]
    for _ in range(_MAX_SCHEMAS):
        if not left:
            return frozenset(types)
        each = left.pop()
        fields = cast("dict[str, Any]", each) if isinstance(each, dict) else {}
        kind, options = fields.get("type"), fields.get("anyOf", fields.get("oneOf"))
        if isinstance(kind, str):
            types.add(kind)
        elif isinstance(kind, list):
            types.update(map(str, cast("list[Any]", kind)))
        elif isinstance(options, list):
            left += cast("list[Any]", options)
        elif isinstance(fields.get("$ref"), str):
            left.append(referred(fields["$ref"], root))
        else:
            break
    return frozenset()


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that the model wrote as plain text. `types`: what it may be; empty: unknown."""
    word = text.strip()
    small = word.lower()
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
