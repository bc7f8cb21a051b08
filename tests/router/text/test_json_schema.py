"""Schemas of clients: what asks for nothing is served, numbers are exact or refused, white space is bounded."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from baton.router.text.grammar import Grammar, GrammarFault, GrammarSource, converted
from baton.router.text.json_schema import SchemaFault, checked_whitespace

from ..sites import tokenizer_file


@pytest.fixture(scope="module")
def vocabulary() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(tokenizer_file().decode(), n_vocab=420, eos_token=[1])


def convert(vocabulary: llguidance.LLTokenizer, schema: Any, **options: Any) -> Grammar | GrammarFault:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return converted(GrammarSource("json", text, **options), vocabulary)


def takes(vocabulary: llguidance.LLTokenizer, grammar: Grammar | GrammarFault, text: str) -> bool:
    assert isinstance(grammar, Grammar), grammar
    matcher = llguidance.LLMatcher(vocabulary, grammar.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = vocabulary.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


EXACT = [  # schema, what it takes, what it does not take
    ('{"enum": [9007199254740991, "a"]}', ["9007199254740991", '"a"'], ["9007199254740992"]),
    ('{"const": 1152921504606846976}', ["1152921504606846976"], ["1152921504606846977"]),
    ('{"const": 1e22}', ["1" + "0" * 22], []),
    ('{"const": 0.1}', ["0.1"], ["0.10000000000000001"]),
    ('{"const": 2.0}', ["2"], ["3"]),
    ('{"type": "integer", "maximum": 9007199254740992}', ["9007199254740992"], ["9007199254740993"]),
    ('{"type": "integer", "minimum": 0, "maximum": 9223372036854775807}', ["9223372036854775807"], ["-1"]),
    ('{"type": "integer", "maximum": 9223372036854775807}', ["9223372036854775807"], ["9223372036854775808"]),
    ('{"type": "number", "maximum": 0.3}', ["0.3"], ["0.30000000000000001"]),
    ('{"type": "array", "minItems": 1.0, "maxItems": 2.0}', ["[1]"], ["[]", "[1,2,3]"]),
    ('{"type": "string", "maxLength": 18446744073709551616}', ['"abc"'], []),
    ('{"type": "array", "items": {"not": {}}}', ["[]"], ["[1]"]),
    ('{"type": "object", "properties": {"a": {}}, "unevaluatedProperties": false}', ['{"a":1}'], ['{"b":1}']),
    ('{"type": "object", "properties": {"a": {}}}', ['{"a":1}', "{}"], ['{"b":1}', '{"a":1,"b":1}']),
    ('{"type": "object", "properties": {"a": {}}, "additionalProperties": true}', ['{"b":1}'], []),
    ('{"type": "object", "properties": {"a": {}}, "required": ["b"]}', ['{"b":1}'], []),
    ('{"allOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {}}}]}', ['{"a":1,"b":2}'], ['{"a":2}']),
    ('{"properties": {"maximum": {"const": 1}, "not": {"const": 2}}}', ['{"maximum":1}', '{"not":2}'], ['{"not":1}']),
]


@pytest.mark.parametrize(("schema", "inside", "outside"), EXACT)
def test_numbers_that_are_served_are_exact(
    vocabulary: llguidance.LLTokenizer, schema: str, inside: list[str], outside: list[str]
) -> None:
    grammar = convert(vocabulary, schema)
    assert [text for text in inside if not takes(vocabulary, grammar, text)] == []
    assert [text for text in outside if takes(vocabulary, grammar, text)] == []


INEXACT = [
    ('{"enum": [1, 9007199254740993]}', ".enum[1]"),
    ('{"const": -9007199254740993}', ".const"),
    ('{"const": -9223372036854775808}', ".const"),  # llguidance itself dies of it
    ('{"const": 9223372036854775807}', ".const"),
    ('{"const": 18446744073709551615}', ".const"),
    ('{"const": 9007199254740993.0}', ".const"),
    ('{"const": -9.223372036854775808e18}', ".const"),
    ('{"const": 0.1234567890123456789}', ".const"),
    ('{"const": {"a": [9007199254740993]}}', ".const.a[0]"),
    ('{"type": "integer", "minimum": 9007199254740993}', ".minimum"),
    ('{"type": "integer", "maximum": 18446744073709551615}', ".maximum"),
    ('{"type": "number", "maximum": 9223372036854775807}', ".maximum"),
    ('{"type": "integer", "exclusiveMinimum": 9007199254740992}', ".exclusiveMinimum"),
    ('{"type": "integer", "exclusiveMaximum": -1e18}', ".exclusiveMaximum"),
    ('{"type": "integer", "multipleOf": 9007199254740993}', ".multipleOf"),
    ('{"type": "number", "minimum": 0.1234567890123456789}', ".minimum"),
    ('{"type": "string", "minLength": 1e30}', ".minLength"),
]
AROUND = [
    ("{}", ""),
    ('{"properties": {"a b": {"items": {}}}}', '.properties."a b".items'),
    ('{"anyOf": [{"type": "null"}, {}]}', ".anyOf[1]"),
    ('{"$ref": "#/$defs/x", "$defs": {"x": {}}}', ".$defs.x"),
    ('{"$ref": "#/components/schemas/X", "components": {"schemas": {"X": {}}}}', ".components.schemas.X"),
]


@pytest.mark.parametrize(("schema", "place"), INEXACT)
def test_a_number_that_would_be_rounded_is_refused_with_its_place(
    vocabulary: llguidance.LLTokenizer, schema: str, place: str
) -> None:
    for around, before in AROUND:
        head, brace, tail = around.rpartition("{}")
        fault = convert(vocabulary, head + (schema if brace else "") + tail)
        assert isinstance(fault, GrammarFault), (around, fault)
        assert fault.place == before + place
        assert "digits" in fault.words or "more than" in fault.words
        loose = convert(vocabulary, head + schema + tail, is_loose=True)
        assert isinstance(loose, Grammar), loose


NOTHING: dict[str, list[Any]] = {
    "uniqueItems": [False],
    "required": [[], None],
    "minItems": [0, 0.0, None],
    "minLength": [0],
    "minProperties": [0],
    "additionalProperties": [True, {}],
    "patternProperties": [{}],
    "nullable": [False, True],
    "deprecated": [True],
    "readOnly": [True],
    "default": [9007199254740993, None],
    "example": [{"not": 9007199254740993}],
    "examples": [[1, 0.1234567890123456789]],
    "$comment": ["x"],
    "$anchor": ["x"],
    "$dynamicAnchor": ["x"],
    "x-order": [{"not": {"type": "null"}}],
    "xml": [{"name": "x"}],
    "discriminator": [{"propertyName": "kind"}],
    "contentMediaType": ["image/png"],
    "contentSchema": [{"not": {}}],
    "format": ["int32", "int64", "float", "double", "byte", "binary", "password", None],
    "propertyNames": [{}, True, {"type": "string"}, {"type": "string", "description": "x"}],
    "not": [False, {"not": {}}],
    "if": [True, {"type": "null"}],
    "then": [{"type": "null"}],
    "minContains": [1],
    "dependentRequired": [{}, {"a": []}],
    "dependentSchemas": [{"a": {}}],
    "unevaluatedProperties": [True, {}],
    "unevaluatedItems": [True],
    "minimum": [None],
}


@pytest.mark.parametrize("key", NOTHING)
def test_a_keyword_that_asks_for_nothing_is_served(vocabulary: llguidance.LLTokenizer, key: str) -> None:
    for value in NOTHING[key]:
        for kind, text in {"string": '"x"', "array": "[1,1]", "object": '{"z":1}', "integer": "5"}.items():
            assert takes(vocabulary, convert(vocabulary, {"type": kind, key: value}), text), (kind, value)


NOT_ENFORCED = [
    ({"propertyNames": {"pattern": "^a"}}, "", '"propertyNames"'),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, ".properties.a", '"uniqueItems"'),
    ({"properties": {"a": {"type": "string", "format": "phone"}}}, ".properties.a", "format 'phone'"),
    ({"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, ".properties.a", "use anyOf"),
    ({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, ".properties.a", "pattern cannot be enforced"),
    ({"properties": {"a": {"type": "string", "pattern": r"\bx\b"}}}, ".properties.a", "pattern cannot be enforced"),
    ({"properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}}, "required": ["a"]}, "", "no value satis"),
    ({"if": {"properties": {"b": {"const": 1}}}, "then": {"required": ["a"]}}, "", '"if"'),
    ({"minProperties": 2, "properties": {"a": {}}}, "", "minProperties"),
    ({"dependentRequired": {"a": ["b"]}}, "", '"dependentRequired"'),
]


@pytest.mark.parametrize(("part", "place", "words"), NOT_ENFORCED)
def test_a_part_that_cannot_be_enforced_is_refused_or_if_loose_left_out(
    vocabulary: llguidance.LLTokenizer, part: dict[str, Any], place: str, words: str
) -> None:
    schema = {"type": "object", "additionalProperties": True, **part}
    fault = convert(vocabulary, schema)
    assert isinstance(fault, GrammarFault), fault
    assert fault.place.startswith(place) and words in fault.words
    assert "coerce_one_of" not in fault.words and "Unimplemented" not in fault.words
    loose = convert(vocabulary, schema, is_loose=True)
    assert takes(vocabulary, loose, '{"b":1,"c":2}') and not takes(vocabulary, loose, "[]")


LIST = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}
CLOSED = {"type": "object", "properties": {"a": LIST}, "required": ["a"], "additionalProperties": False}
TREE = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}


@pytest.mark.parametrize("schema", [CLOSED, {"type": "object"}, {}, {"properties": {"a": True}}])
def test_white_space_is_what_a_compact_or_an_indented_form_needs(
    vocabulary: llguidance.LLTokenizer, schema: dict[str, Any]
) -> None:
    value = {"a": [[1, 2], [3]]}
    forms = [json.dumps(value, indent=indent) for indent in (None, 1, 2, 4, "\t")]
    forms += [json.dumps(value, separators=(",", ":")), forms[2].replace("\n", "\r\n"), '{ "a" : [ [ 1 ] ] }']
    grammar = convert(vocabulary, schema)
    assert [form for form in forms if not takes(vocabulary, grammar, form)] == []
    for space in ("  ", "\n\n", "\n" + " " * 40, "\t", " \n", "\r"):
        assert not takes(vocabulary, grammar, f'{{{space}"a":[]}}'), repr(space)
        assert not takes(vocabulary, grammar, f'{{"a":{space}[]}}'), repr(space)


def test_white_space_of_a_schema_that_names_itself_is_bounded(vocabulary: llguidance.LLTokenizer) -> None:
    grammar = convert(vocabulary, TREE)
    assert takes(vocabulary, grammar, json.dumps([[[[]]]], indent=4))
    assert not takes(vocabulary, grammar, "[" + "\n" + " " * 33 + "]")


def test_white_space_can_be_set(vocabulary: llguidance.LLTokenizer) -> None:
    compact = convert(vocabulary, CLOSED, whitespace="")
    assert takes(vocabulary, compact, '{"a":[[1,2]]}') and not takes(vocabulary, compact, '{"a": [[1,2]]}')
    free = convert(vocabulary, CLOSED, whitespace=checked_whitespace(r"[\s]*"))
    assert takes(vocabulary, free, '{"a":  \n\n [[1,2]]}') and not takes(vocabulary, free, '{"a":\u00a0[]}')
    for pattern in ("a*", ".*", "[^a]", r"\S", r"\x21", "x" * 300):
        with pytest.raises(SchemaFault, match="regular expression"):
            checked_whitespace(pattern)
