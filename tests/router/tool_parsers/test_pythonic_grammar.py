"""The grammar of the pythonic format: what it allows, the parser reads as whole calls with valid arguments."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thinned import num_examples

from baton.router.tool_parsers.base import CallArguments, CallBegin, CallEnd
from baton.router.tool_parsers.pythonic import PythonicParser, json_of
from baton.router.tool_parsers.pythonic_grammar import pythonic_grammar, quoted

from ..sites import tokenizer_file

EOS = 1


@cache
def vocabulary() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(tokenizer_file().decode(), n_vocab=420, eos_token=EOS)


def matcher_of(tools: dict[str, Any], *, may_repeat: bool = True) -> llguidance.LLMatcher:
    rules = pythonic_grammar(tools, may_repeat=may_repeat)
    assert rules is not None
    matcher = llguidance.LLMatcher(vocabulary(), f"start: calls\n{rules}", log_level=0)
    assert not matcher.is_error(), (matcher.get_error(), rules)
    return matcher


def takes(matcher: llguidance.LLMatcher, text: str) -> bool:
    matcher = matcher.deep_copy()
    ids = vocabulary().tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(matcher: llguidance.LLMatcher, chance: random.Random) -> str | None:
    """Return a text that a model without any sense writes, None if it does not come to an end. It likes what closes."""
    closing = {each for text in ("'", '"', ")", "]", "}", "')", "']") for each in vocabulary().tokenize_str(text)}
    ids: list[int] = []
    for _ in range(400):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, matcher.get_error()
        ends = [each for each in allowed if each in closing or each == EOS]
        token_id = chance.choice(ends if ends and chance.random() < 0.3 else allowed)
        if token_id == EOS:
            return vocabulary().decode_bytes(ids).decode()
        assert matcher.consume_token(token_id)
        ids.append(token_id)
    return None


def check(tools: dict[str, Any], text: str) -> None:
    """Check that the parser reads nothing but whole calls whose arguments satisfy their schemas."""
    parser, names, arguments, num_whole = PythonicParser(tools), list[str](), list[str](), 0
    for event in [*parser.feed(text), *parser.finish()]:
        assert isinstance(event, CallBegin | CallArguments | CallEnd), (event, text)
        if isinstance(event, CallBegin):
            names.append(event.name)
            arguments.append("")
        elif isinstance(event, CallArguments):
            arguments[-1] += event.text
        else:
            num_whole += 1
    assert names and num_whole == len(names)
    for name, read in zip(names, arguments, strict=True):
        jsonschema.validate(json.loads(read), tools[name], format_checker=jsonschema.FormatChecker())


def function(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


PLACE = function({"lat": {"type": "number"}, "name": {"type": ["string", "null"]}}, "name")
TREE = function({"left": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}, "n": {"type": "integer"}}, "left")
TOOLS: dict[str, Any] = {
    "get_weather": function(
        {
            "city": {"type": "string", "description": "where", "minLength": 1},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "exact": {"type": "boolean", "default": False},
            "unit": {"enum": ["C", "it's", None, 2.5, True], "title": "Unit"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
            "place": {"$ref": "#/$defs/place"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        },
        "city",
        "exact",
        additionalProperties=False,
        **{"$defs": {"place": PLACE}},
    ),
    "plant": function({"tree": {"$ref": "#/$defs/tree"}}, "tree", **{"$defs": {"tree": TREE}}),
    "now": {"type": "object", "properties": {}},
}

TEXTS = [
    ("[get_weather(city='Paris', exact=True)]", True),
    ("[get_weather(city='l\\'île\\n', days=3, exact=False, unit='it\\'s', tags=['a', 'b'])]", True),
    ("[get_weather(city='x', exact=True, unit=None), now(), get_weather(city='y', exact=False, unit=2.5)]", True),
    ("[get_weather(city='x', exact=True, unit=True, place={'lat': -1.5, 'name': None})]", True),
    ("[get_weather(city='x', exact=True, place={'name': 'a\"b'}, code=\"FR\")]", True),
    ("[plant(tree={'left': {'left': None, 'n': 2}, 'n': 1})]", True),
    ("[now()]", True),
    ("[get_weather(city='', exact=True)]", False),
    ("[get_weather(city='Paris')]", False),
    ("[get_weather(exact=True, city='Paris')]", False),
    ("[get_weather(city='Paris', exact=true)]", False),
    ("[get_weather(city='Paris', days=10, exact=True)]", False),
    ("[get_weather(city='Paris', exact=True, unit='K')]", False),
    ("[get_weather(city='Paris', exact=True, tags=[])]", False),
    ("[get_weather(city='Paris', exact=True, tags=['a', 'b', 'c', 'd'])]", False),
    ("[get_weather(city='Paris', exact=True, tags=['abcde'])]", False),
    ("[get_weather(city='Paris', exact=True, place={'lat': 1})]", False),
    ("[get_weather(city='Paris', exact=True, code='FR')]", False),
    ("[get_weather(city='Par\nis', exact=True)]", False),
    ("[now(a=1)]", False),
    ("[]", False),
    ("now()", False),
]


@pytest.mark.parametrize(("text", "is_allowed"), TEXTS)
def test_what_the_grammar_allows(text: str, is_allowed: bool) -> None:
    assert takes(matcher_of(TOOLS), text) == is_allowed
    if is_allowed:
        check(TOOLS, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 1},
        {"type": "string", "minLength": 2, "maxLength": 1},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"enum": []},
    ],
)
def test_a_schema_without_values_does_not_compile(schema: dict[str, Any]) -> None:
    rules = pythonic_grammar({"f": function({"a": schema})}, may_repeat=False)
    assert "nsatisfiable" in llguidance.LLMatcher(vocabulary(), f"start: calls\n{rules}", log_level=0).get_error()


def test_one_call() -> None:
    one = matcher_of(TOOLS, may_repeat=False)
    assert takes(one, "[now()]") and not takes(one, "[now(), now()]")


@pytest.mark.parametrize(
    "tools",
    [
        {"a b": function({})},
        {"f": function({"a-b": {"type": "integer"}})},
        {"f": function({}, "a")},
        {"f": function({"a": True})},
        {"f": function({"a": {"items": {"$ref": "#"}}})},
        {"f": {"type": "object", "minProperties": 1}},
        {"f": {"type": "object", "anyOf": [{"required": ["a"]}]}},
        {"f": {"type": "array"}},
    ],
)
def test_what_keyword_arguments_cannot_tell_has_no_grammar(tools: dict[str, Any]) -> None:
    assert pythonic_grammar(tools, may_repeat=True) is None


@pytest.mark.parametrize("text", ["", "a'b", 'a"b', "\\d\\", "\n\t\r\b\f\x00\x1f\x7f", "é😀\u2028", "\\'", "'''"])
def test_texts_are_quoted_as_python_reads_them(text: str) -> None:
    literal = json_of(quoted(text))
    assert literal is not None and json.loads(literal) == text


numbers = st.sampled_from(["integer", "number"]).flatmap(
    lambda kind: st.fixed_dictionaries(
        {"type": st.just(kind)},
        optional={
            "minimum": st.integers(-20, 5),
            "exclusiveMaximum": st.integers(6, 40),
            "multipleOf": st.sampled_from([1, 5]),
        },
    )
)
strings = st.fixed_dictionaries(
    {"type": st.just("string")}, optional={"minLength": st.integers(0, 3), "maxLength": st.integers(3, 6)}
)
scalars = st.sampled_from([None, True, 0, -3, 2.5, "", "re'd", 'a\\"b\n'])
leaves = st.one_of(
    strings,
    strings,
    numbers,
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["integer", "null", "string"], "maxLength": 3}]),
    st.builds(lambda values: {"enum": values}, st.lists(scalars, min_size=1, max_size=3)),
    scalars.map(lambda value: {"const": value}),
    st.sampled_from([{"$ref": "#/$defs/place"}, {"type": "string", "pattern": "^[a-f]{2}$"}, {}]),  # the last two: JSON
)


def objects(inner: st.SearchStrategy[Any], *, least: int = 1) -> st.SearchStrategy[dict[str, Any]]:
    names = st.dictionaries(st.sampled_from(["a", "b", "_c", "name"]), inner, min_size=least, max_size=3)
    return st.builds(lambda known, count: function(known, *sorted(known)[:count]), names, st.integers(0, 3))


values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        objects(inner),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner},
            optional={"minItems": st.integers(0, 2), "maxItems": st.integers(2, 3)},
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
    ),
    max_leaves=5,
)


@settings(max_examples=num_examples(300), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(first=objects(values, least=0), second=objects(values, least=0), seed=st.integers(0, 1 << 30))
def test_what_a_model_writes_is_read_as_valid_calls(first: dict[str, Any], second: dict[str, Any], seed: int) -> None:
    tools = {name: {**each, "$defs": {"place": PLACE}} for name, each in (("f", first), ("g.h-2", second))}
    text = written(matcher_of(tools), random.Random(seed))
    if text is not None:
        check(tools, text)
