"""Qwen3-Coder's format: values by the schema, marks inside values, and missing marks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.router.tool_parsers.qwen3_coder import Qwen3CoderParser, json_of, types_of

from .calls import TOOLS, Call, Parsed, parse_all_ways

NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
CODE = "a\n</parameter>\n<b>\n</tool_call>\n<function=f>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<function=now></function>", "", [Call("now", "{}")]),
        (f"{NOW}{NOW} bye", "bye", [Call("now", "{}")] * 2),
        ("<tool_call>x", "<tool_call>x", []),
        ("<tool_call><function=a b>", "<tool_call><function=a b>", []),
        ("<parameter=a>", "<parameter=a>", []),
        (
            f"<function=write_file><parameter=text>\n{CODE}\n</parameter>\n</function>",
            "",
            [Call("write_file", json.dumps({"text": CODE}))],
        ),
        ("<function=write_file><parameter=text></parameter></function>", "", [Call("write_file", '{"text": ""}')]),
        (f"<tool_call>\n<function=now>\nboo\n</function>\n</tool_call>{NOW}", "",
         [Call("now", "", "<tool_call>\n<function=now>\nboo\n</function>"), Call("now", "{}")]),
        (f"<function=now>boo{NOW}", "", [Call("now", "", "<function=now>boo"), Call("now", "{}")]),
    ],
)  # fmt: skip
def test_unusual_texts(text: str, content: str, calls: list[Call]) -> None:
    assert parse_all_ways(Qwen3CoderParser, text) == Parsed(content, calls)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "5.5", 5.5),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
        ({"type": "array"}, "['a', None]", ["a", None]),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"$ref": "#/$defs/place"}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/nowhere"}, "[1]", [1]),
        ({}, "text", "text"),
        ({}, "false", False),
    ],
)
def test_a_value_is_of_the_schemas_type(schema: dict[str, Any], text: str, value: Any) -> None:
    assert json.loads(json_of(text, types_of(schema, TOOLS["get_weather"]))) == value


def test_types_of_a_schema_that_names_itself_are_unknown() -> None:
    loop = {"$defs": {"a": {"$ref": "#/$defs/a"}, "b": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}}}
    assert types_of({"$ref": "#/$defs/a"}, loop) == frozenset()
    assert types_of({"$ref": "#/$defs/b"}, loop) == frozenset()
