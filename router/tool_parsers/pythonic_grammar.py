"""Grammar of calls in the pythonic format: [f(city='Paris', days=3), g()].

Keyword arguments come in the order of the tool's schema, and optional ones may be left out. Values are literals of
Python. An argument whose schema these rules cannot tell, such as a pattern of a string, is JSON, which the parser reads
as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping
from typing import Any, cast

from ..text.json_schema import referred
from .base import MAX_NAME, Schema

_NAME = re.compile(rf"[A-Za-z_][A-Za-z0-9_.\-]{{0,{MAX_NAME - 1}}}")
_KEY = re.compile(rf"[A-Za-z_][A-Za-z0-9_]{{0,{MAX_NAME - 1}}}")
_MAX_DEPTH = 50  # of a literal of Python
_CHARACTER = r"""([^'\\\x00-\x1f]|\\[\\'"nrt])"""
_INTEGER = "-?(0|[1-9][0-9]{0,17})"
_NUMBER = _INTEGER + r"(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?"  # finite
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})  # bind nothing
_DEFINITIONS = ("$defs", "definitions")
_OPTIONS = "x-guidance"  # of llguidance
_DEFINED = ("#/$defs/", "#/definitions/")
_REFERENCE = re.compile(r'"\$ref": "([^"]*)"')
_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties"})
_KEYWORDS: dict[str, frozenset[str]] = {
    "array": frozenset({"items", "minItems", "maxItems"}),
    "boolean": frozenset(),
    "integer": _OF_NUMBERS,
    "null": frozenset(),
    "number": _OF_NUMBERS,
    "object": _OF_OBJECTS,
    "string": frozenset({"minLength", "maxLength"}),
}


class _Untold(Exception):
    """The rules cannot tell what a schema demands."""


def pythonic_grammar(tools: Mapping[str, Schema], *, may_repeat: bool) -> str | None:
    """Return Lark rules whose rule `calls` is a list of one call of one of the tools, or more if `may_repeat`. None: a
    tool or an argument has a name that Python cannot have, or the arguments of a tool are no plain object."""
    calls, rules = list[str](), list[str]()
    try:
        for index, (name, schema) in enumerate(tools.items()):
            if _NAME.fullmatch(name) is None:
                return None
            calls.append(f'{json.dumps(f"{name}(")} arguments_{index} ")"')
            rules += _arguments(f"arguments_{index}", schema)
    except _Untold:
        return None
    repeated = 'call (", " call)*' if may_repeat else "call"
    return "\n".join([f'calls: "[" {repeated} "]"', f"call: {' | '.join(calls)}", *rules])


def _arguments(rule: str, schema: Schema) -> list[str]:
    """Return the rule of the keyword arguments that a schema demands, and the rules that it names."""
    if (
        schema.keys() - _OF_OBJECTS - _NOTES - {"type", "$schema", _OPTIONS, *_DEFINITIONS}
        or schema.get("type") != "object"
    ):
        raise _Untold
    items, rules = dict[str, str](), list[str]()
    for index, (key, value) in enumerate(_properties(schema).items()):
        if _KEY.fullmatch(key) is None:
            raise _Untold
        values = _Values(f"{rule}_{index}", schema)
        try:
            item = values.item(value)
            rules += values.rules
        except _Untold:
            item = f"{rule}_{index}_json"
            rules.append(f"{item}: %json {_json(value, schema)}")
        items[key] = f"{json.dumps(f'{key}=')} {item}"
    return [*_listed(rule, items, schema.get("required", ())), *rules]


class _Values:
    """Rules of the literals of one argument."""

    def __init__(self, rule: str, root: Schema) -> None:
        """`rule`: what the names of the rules begin with. `root`: the schema in which references are looked up."""
        self.rules: list[str] = []
        self._rule, self._root = rule, root
        self._num_rules = 0
        self._depth = 0
        self._references: dict[str, str] = {}  # -> its rule

    def item(self, schema: object) -> str:
        """Return the Lark item of the literals that a schema allows. Raises _Untold."""
        if not isinstance(schema, dict) or self._depth == _MAX_DEPTH:
            raise _Untold
        fields = {key: value for key, value in cast("dict[str, Any]", schema).items() if key not in _NOTES}
        self._depth += 1
        try:
            match fields:
                case {"$ref": str(reference), **others} if not others:
                    return self._reference(reference)
                case {"anyOf": [_, *_] as options, **others} if not others:
                    return _any(map(self.item, cast("list[Any]", options)))
                case {"const": value, **others}:
                    return _option(value, others)
                case {"enum": [_, *_] as values, **others}:
                    return _any(_option(value, others) for value in cast("list[Any]", values))
                case {"type": str(kind), **others}:
                    return self._of_type(kind, others)
                case {"type": [_, *_] as kinds, **others}:
                    return _any(self._of_types(cast("list[Any]", kinds), others))
                case _:
                    raise _Untold
        finally:
            self._depth -= 1

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            rule = self._references[reference] = self._new_rule()
            self.rules.append(f"{rule}: {self.item(referred(reference, self._root))}")
        return self._references[reference]

    def _of_types(self, kinds: list[Any], others: dict[str, Any]) -> Iterable[str]:
        known = [_KEYWORDS.get(str(kind), frozenset[str]()) for kind in kinds]
        if others.keys() - frozenset[str]().union(*known):
            raise _Untold
        for kind, keywords in zip(kinds, known, strict=True):
            yield self._of_type(str(kind), {key: value for key, value in others.items() if key in keywords})

    def _of_type(self, kind: str, others: dict[str, Any]) -> str:
        """Return the item of the values of one type that these other keywords allow."""
        if kind not in _KEYWORDS or others.keys() - _KEYWORDS[kind]:
            raise _Untold
        match kind:
            case "null":
                return '"None"'
            case "boolean":
                return '("True" | "False")'
            case "string":
                least, most = _bounds(others, "minLength", "maxLength")
                return f"/'{_CHARACTER}{{{least},{'' if most is None else most}}}'/"
            case "array":
                return self._array(others)
            case "object":
                return self._object(others)
            case _ if others:
                rule = self._new_rule()
                self.rules.append(f"{rule}: %json {json.dumps({'type': kind, **others})}")
                return rule
            case _:
                return f"/{_INTEGER if kind == 'integer' else _NUMBER}/"

    def _array(self, others: dict[str, Any]) -> str:
        rule, item = self._new_rule(), self.item(others.get("items"))
        self.rules.append(f"{rule}: {item}")
        least, most = _bounds(others, "minItems", "maxItems")
        if most == 0:
            return '"[]"'
        more = "" if most == 1 else f'(", " {rule}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return f'"[" {rule} {more} "]"' if least else f'("[]" | "[" {rule} {more} "]")'

    def _object(self, others: dict[str, Any]) -> str:
        items = {
            key: f"{json.dumps(f'{quoted(key)}: ')} {self.item(each)}" for key, each in _properties(others).items()
        }
        if not items and others.get("additionalProperties") is not False:
            raise _Untold  # an object of any keys
        rule = self._new_rule()
        self.rules += _listed(rule, items, others.get("required", ()))
        return f'"{{" {rule} "}}"'

    def _new_rule(self) -> str:
        self._num_rules += 1
        return f"{self._rule}_{self._num_rules}"


def quoted(text: str) -> str:
    """Return a text as a literal of Python in single quotes."""
    inner = json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"')
    return "'" + inner.replace("'", "\\'") + "'"


def _listed(rule: str, items: Mapping[str, str], required: Container[object]) -> list[str]:
    """Return a rule of items with commas between them, in this order, and the rules that it names. Those whose key is
    not required may be left out."""
    rules, starts, may_begin = list[str](), list[str](), True
    for index, (key, item) in enumerate(items.items()):
        is_required = key in required
        rules.append(f"{rule}_item_{index}: {item}")
        rules.append(
            f'{rule}_from_{index}: (", " {rule}_item_{index}){"" if is_required else "?"} {rule}_from_{index + 1}'
        )
        if may_begin:
            starts.append(f"{rule}_item_{index} {rule}_from_{index + 1}")
        may_begin = may_begin and not is_required
    if may_begin:
        starts.append('""')
    return [f"{rule}: {' | '.join(starts)}", *rules, f'{rule}_from_{len(items)}: ""']


def _properties(fields: Schema) -> dict[str, object]:
    """Return the schemas of an object's values. Raises _Untold if another value is required."""
    properties, required = fields.get("properties", {}), fields.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise _Untold
    named = cast("dict[str, object]", properties)
    if any(key not in named for key in cast("list[object]", required)):
        raise _Untold
    return named


def _option(value: object, others: Mapping[str, Any]) -> str:
    """Return the item of one value that a schema names. `others`: its other keywords."""
    match value:
        case None:
            kinds, literal = ("null",), "None"
        case bool():
            kinds, literal = ("boolean",), str(value)
        case int():
            kinds, literal = ("integer", "number"), json.dumps(value)
        case float():
            kinds, literal = ("number",), json.dumps(value)
        case str():
            kinds, literal = ("string",), quoted(value)
        case _:
            raise _Untold
    if others and (set(others) != {"type"} or others["type"] not in kinds):
        raise _Untold
    return json.dumps(literal)


def _any(items: Iterable[str]) -> str:
    return f"({' | '.join(items)})"


def _bounds(fields: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    """Return the least and the largest number that two keywords give; None: there is no largest."""
    low, high = fields.get(least, 0), fields.get(most)
    if type(low) is not int or low < 0 or not (high is None or (type(high) is int and low <= high)):
        raise _Untold
    return low, high


def _json(schema: object, root: Schema) -> str:
    """Return a schema as text, with the definitions of its root. Raises _Untold if it needs more of the root."""
    if not isinstance(schema, dict):
        raise _Untold
    definitions = {name: root[name] for name in (*_DEFINITIONS, _OPTIONS) if name in root}
    text = json.dumps({**cast("dict[str, Any]", schema), **definitions})
    if not all(each.startswith(_DEFINED) for each in _REFERENCE.findall(text)):
        raise _Untold
    return text
