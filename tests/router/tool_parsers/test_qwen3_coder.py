"""Qwen3-Coder's format: values by the schema, marks inside values, and missing marks."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from baton.router.tool_parsers.base import CallArguments, CallBegin, CallEnd
from baton.router.tool_parsers.qwen3_coder import Qwen3CoderParser, json_of, types_of, values_of

from ..sites import tokenizer_file
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
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": "true"}, "true", "true"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"enum": ["true", False]}, "true", "true"),
        ({"enum": ["true", False]}, "False", False),
        ({"enum": ["1", None]}, "null", None),
        ({"enum": ["1", None]}, "1", "1"),
        ({"type": ["string", "integer"], "enum": ["1", 2]}, "1", "1"),
        ({"anyOf": [{"const": "1"}, {"const": "2"}]}, "2", "2"),
        ({"anyOf": [{"enum": ["1"]}, {"type": "null"}]}, "1", "1"),
        ({"oneOf": [{"enum": ["1"]}, {"type": "null"}]}, "None", None),
        ({"allOf": [{"enum": ["1"]}, {"description": "x"}]}, "1", "1"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "1", "1"),
        ({"$ref": "#/$defs/code"}, "1", "1"),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"enum": ["1"], "nullable": True}, "null", None),
        ({"enum": ["1"], "nullable": True}, "1", "1"),
        ({"pattern": "^[0-9]+$"}, "12", "12"),
        ({"const": 1.5}, "1.5", 1.5),
        ({"enum": [[1], {"a": 2}]}, '{"a": 2}', {"a": 2}),
    ],
)
def test_a_value_is_of_the_schemas_type(schema: dict[str, Any], text: str, value: Any) -> None:
    root = {"$defs": {**TOOLS["get_weather"]["$defs"], "code": {"enum": ["1", "2"]}}}
    read = json.loads(json_of(text, types_of(schema, root), values_of(schema, root)))
    assert (read, type(read)) == (value, type(value))


UNTYPED = {
    "q": {"type": "object", "properties": {"a": {"enum": ["1", "2"]}, "n": {"type": "integer"}, "b": {"const": "true"}}}
}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<parameter=a>\n1\n</parameter>\n<parameter=b>\ntrue\n</parameter>\n", {"a": "1", "b": "true"}),
        ("<parameter=a>\n1\n<parameter=b>\ntrue\n</parameter>\n", {"a": "1", "b": "true"}),
        ("<parameter=n>\n1\n<parameter=b>\ntrue\n", {"n": 1, "b": "true"}),
        ("<parameter=n>1<parameter=a>2</parameter>", {"n": 1, "a": "2"}),
        ("<parameter=n>\n1\n", {"n": 1}),
        ("<parameter=a>\n<parameter=b>\nx\n</parameter>\n", {"a": "", "b": "x"}),
        ("<parameter=a>\n1\n<parameter=z>\n2\n</parameter>\n", {"a": "1\n<parameter=z>\n2"}),  # not known
        ("<parameter=a>\n1\n<parameter=a>\n2\n</parameter>\n", {"a": "1\n<parameter=a>\n2"}),  # has come
        ("<parameter=a>\nx <parameter=b>\n2\n</parameter>\n", {"a": "x <parameter=b>\n2"}),  # within a line
        ("<parameter=a>\n1\n</function> 2\n</parameter>\n", {"a": "1\n</function> 2"}),
    ],
)
def test_a_value_without_its_closing_mark_ends_before_the_next_known_parameter(
    text: str, arguments: dict[str, Any]
) -> None:
    for before, behind in (("<tool_call>\n", "\n</tool_call>"), ("", "")):
        whole = f"{before}<function=q>\n{text}</function>{behind}"
        parsed = parse_all_ways(Qwen3CoderParser, whole, UNTYPED)
        assert [(call.name, json.loads(call.arguments), call.broken) for call in parsed.calls] == [
            ("q", arguments, None)
        ]


def test_a_grammar_that_may_allow_more_leaves_out_what_plain_text_cannot_tell() -> None:
    loose = {"x-guidance": {"lenient": True}, "type": "object"}
    properties = {"a": {"type": "string", "pattern": "x"}, "b": {"type": ["string", "null"]}, "c": {}}
    schema = {**loose, "properties": properties, "required": ["a", "z"], "minProperties": 1}
    rules = Qwen3CoderParser.grammar({"f": schema}, may_repeat=False, literal=json.dumps)
    matcher = LLMatcher(LLTokenizer(tokenizer_file().decode(), n_vocab=420, eos_token=1), f"start: calls\n{rules}")
    ids = Tokenizer.from_str(tokenizer_file().decode()).encode(written("f", a="y", b="null", c="5")).ids
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_types_of_a_schema_that_names_itself_are_unknown() -> None:
    loop = {"$defs": {"a": {"$ref": "#/$defs/a"}, "b": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}}}
    assert types_of({"$ref": "#/$defs/a"}, loop) == frozenset()
    assert types_of({"$ref": "#/$defs/b"}, loop) == frozenset()


FORCED: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "x"},
            "unit": {"enum": ["C", "F"], "type": "string"},
            "days": {"type": "integer", "maximum": 9},
            "place": {"$ref": "#/$defs/place"},
            "note": {"type": ["null", "boolean"]},
        },
        "required": ["text", "days"],
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}


def written(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        (written("f", text="a\n b </parameter>", days="3"), True),
        (written("f", text="", unit="C", days="3", place='{"x": 1.5}', note="null"), True),
        (f"{written('now')}\n{written('f', text='a', days='3')}", True),
        (written("now"), True),
        (written("f", days="3"), False),
        (written("f", text="a", days="10"), False),
        (written("f", text="a", unit="K", days="3"), False),
        (written("f", text="a", days="3", place="{}"), False),
        (written("f", text="a", days="three"), False),
        (written("now", a="1"), False),
        (written("g"), False),
        ("hello", False),
    ],
)
def test_the_grammar_allows_calls_that_fit_the_schema(text: str, is_allowed: bool) -> None:
    """What it allows, the parser reads as valid arguments."""
    rules = Qwen3CoderParser.grammar(FORCED, may_repeat=True, literal=json.dumps)
    tokenizer = tokenizer_file().decode()
    matcher = LLMatcher(LLTokenizer(tokenizer, n_vocab=420, eos_token=1), f"start: calls\n{rules}")
    assert not matcher.get_error()
    ids = Tokenizer.from_str(tokenizer).encode(text).ids
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == is_allowed
    if is_allowed:
        parser = Qwen3CoderParser(FORCED)
        events = [*parser.feed(text), *parser.finish()]
        names = [event.name for event in events if isinstance(event, CallBegin)]
        arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
        jsonschema.validate(json.loads(arguments.removeprefix("{}") or "{}"), FORCED[names[-1]])
        assert sum(isinstance(event, CallEnd) for event in events) == len(names) == text.count("<tool_call>")


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "string", "pattern": "x"}}},
        {"properties": {"a": {"type": ["string", "integer"]}}},
        {"properties": {"a": {}}},
        {"properties": {"a b": {"type": "integer"}}},
        {"properties": {}, "required": ["a"]},
        {"properties": {}, "minProperties": 1},
        {"anyOf": [{"required": ["a"]}]},
    ],
)
def test_schemas_that_plain_text_cannot_tell_have_no_grammar(parameters: dict[str, Any]) -> None:
    assert Qwen3CoderParser.grammar({"f": parameters}, may_repeat=False, literal=json.dumps) is None
