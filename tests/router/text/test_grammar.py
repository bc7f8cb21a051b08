"""Sources of grammars: what they are converted into, what is refused, and which part is named."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thinned import num_examples

from baton.router.reasoning_parsers.harmony import HarmonyReasoningParser
from baton.router.reasoning_parsers.think_tags import DeepSeekR1ReasoningParser, Qwen3ReasoningParser
from baton.router.text.grammar import MAX_SOURCE, Grammar, GrammarFault, GrammarKind, GrammarSource, converted
from baton.router.tool_parsers.harmony import HarmonyParser

from ..sites import tokenizer_file


@pytest.fixture(scope="module")
def vocabulary() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(tokenizer_file().decode(), n_vocab=420, eos_token=[1])


def convert(vocabulary: llguidance.LLTokenizer, kind: GrammarKind, given: Any) -> Grammar | GrammarFault:
    return converted(GrammarSource(kind, given if isinstance(given, str) else json.dumps(given)), vocabulary)


def takes(vocabulary: llguidance.LLTokenizer, grammar: Grammar | GrammarFault, text: str) -> bool:
    """Return whether a whole text is in the language of a grammar."""
    assert isinstance(grammar, Grammar), grammar
    matcher = llguidance.LLMatcher(vocabulary, grammar.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = vocabulary.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]+$"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
TAG = {"structures": [["<f=a>", {"type": "integer"}, "</f>"]], "triggers": ["<f="]}

LANGUAGES: list[tuple[GrammarKind, Any, list[str], list[str]]] = [
    ("json", SCHEMA, ['{"name":"ab"}', '{ "name": "a", "age": 3}'], ['{"age":3}', '{"name":"A"}', '{"name":"a"', "[]"]),
    ("json", {"anyOf": [{"const": 1}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "null"}}}, ["1", "null"], ["2"]),
    ("regex", r"[a-c]{2}/\d", ["ab/7"], ["ab7", "abc/7", "ab/77"]),
    ("choice", ["yes", 'n"o', "é\n😀"], ["yes", 'n"o', "é\n😀"], ["y", "yesyes", ""]),
    ("grammar", 'start: "a" | "b" start', ["a", "bba"], ["b", "aa"]),
    ("grammar", "start: <[68-99]>+ | <[2]>", ["bc"], ["b<"]),
    ("grammar", 'root ::= "a" | "b" root', ["a", "bba"], ["b", "aa"]),
    ("structural_tag", TAG, ["hello", "x <f=a>12</f> y"], ["x <f=b>", "<f=a>x</f>"]),
]


@pytest.mark.parametrize(("kind", "given", "inside", "outside"), LANGUAGES)
def test_a_grammar_takes_the_language_of_its_source(
    vocabulary: llguidance.LLTokenizer, kind: GrammarKind, given: Any, inside: list[str], outside: list[str]
) -> None:
    grammar = convert(vocabulary, kind, given)
    assert [text for text in inside if not takes(vocabulary, grammar, text)] == []
    assert [text for text in outside if takes(vocabulary, grammar, text)] == []


def nested(depth: int) -> str:
    return '{"not":' * depth + "{}" + "}" * depth


FAULTS: list[tuple[GrammarKind, Any, str, str]] = [
    ("json", {"properties": {"a": {"items": {"not": {"type": "null"}}}}}, ".properties.a.items", '"not" cannot be'),
    ("json", {"properties": {"a b": {"type": "x"}}}, '.properties."a b"', "Invalid type: x"),
    ("json", {"anyOf": [{"type": "null"}, {"uniqueItems": True}]}, ".anyOf[1]", "uniqueItems"),
    ("json", {"$ref": "#/$defs/x", "$defs": {"x": {"format": "foo", "type": "string"}}}, ".$defs.x", "format 'foo'"),
    ("json", {"$ref": "#/$defs/y"}, "", "does not exist"),
    ("json", {"$ref": "https://example.com/schema"}, "", "not present"),
    ("json", {"properties": {"q": {"type": "string", "pattern": "(?=a)"}}}, ".properties.q", "look-around"),
    ("json", {"x-guidance": {"lenient": True}, "uniqueItems": True}, ".x-guidance", "cannot be set"),
    ("json", {"type": "object", "required": ["a"], "additionalProperties": False}, "", "required property 'a'"),
    ("json", nested(101), "", "more than 100 levels"),
    ("json", nested(100_000)[:MAX_SOURCE], "", "cannot be read"),
    ("json", "[1]", "", "cannot be read"),
    ("json", " " * (MAX_SOURCE + 1), "", "at most 131072"),
    ("regex", "(a", "", "unclosed group"),
    ("regex", "a(?!b)", "", "look-around"),
    ("choice", [], "", "one or more texts"),
    ("choice", ["a", ""], "", "not empty"),
    ("choice", ["a"] * 5000, "", "at most 4096"),
    ("grammar", 'start: "a" | b', "", 'unknown name: "b"'),
    ("grammar", "nonsense", "", "neither Lark nor GBNF"),
    ("grammar", 'start: "a" <[70]> "b"', "", "names the ordinary token <[70]>"),
    ("grammar", "start: <[500]>", "", "too large"),
    ("structural_tag", {**TAG, "triggers": ["<g="]}, ".structures[0].begin", "none of the triggers"),
]


@pytest.mark.parametrize(("kind", "given", "place", "words"), FAULTS)
def test_what_cannot_be_served_is_refused_with_its_place(
    vocabulary: llguidance.LLTokenizer, kind: GrammarKind, given: Any, place: str, words: str
) -> None:
    fault = convert(vocabulary, kind, given)
    assert isinstance(fault, GrammarFault), fault
    assert fault.place == place
    assert words in fault.words
    assert len(fault.words) < 700


def fields(fixed: dict[str, Any], /, **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return schemas with fixed keywords and others that may be there."""
    return st.fixed_dictionaries({key: st.just(value) for key, value in fixed.items()}, optional=optional)


scalars = st.sampled_from([None, True, 0, -3, 2.5, "", "red", "a b"])
strings = fields({"type": "string"}, minLength=st.integers(0, 3), maxLength=st.integers(3, 6)) | fields(
    {"type": "string"},
    pattern=st.sampled_from(["^[a-f]{2}$", "[0-9]+", "^(yes|no)"]),
    format=st.sampled_from(["date", "ipv4", "uuid"]),  # in a time, jsonschema knows no leap second
)
numbers = st.sampled_from(["integer", "number"]).flatmap(
    lambda kind: fields(
        {"type": kind},
        minimum=st.integers(-20, 5),
        maximum=st.integers(5, 40),
        exclusiveMinimum=st.integers(-30, 4),
        exclusiveMaximum=st.integers(6, 50),
        multipleOf=st.sampled_from([1, 5]),
    )
)
leaves = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["integer", "null"]}]),
    strings,
    numbers,
    st.builds(lambda values: {"enum": values}, st.lists(scalars, min_size=1, max_size=3)),
    scalars.map(lambda value: {"const": value}),
)
NAMES = st.sampled_from(["a", "b", "name", "x y"])
REFUSED: dict[str, Any] = {  # keywords that llguidance does not know, with a value for each
    "not": {"type": "null"},
    "if": {"type": "null"},
    "uniqueItems": True,
    "contains": {"type": "null"},
    "propertyNames": {"minLength": 1},
    "dependentRequired": {"a": ["b"]},
    "unevaluatedProperties": False,
}


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(NAMES, inner, max_size=3)
    return properties.flatmap(
        lambda known: fields(
            {"type": "object", "properties": known},
            required=st.sets(st.sampled_from(sorted(known)) if known else NAMES, max_size=len(known)).map(sorted),
            additionalProperties=st.just(False) | inner,
            patternProperties=st.dictionaries(st.sampled_from(["^p_", "^q[0-9]$"]), inner, max_size=2),
            maxProperties=st.integers(0, 4),
        )
    )


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return fields(
        {"type": "array"},
        items=st.just(False) | inner,
        prefixItems=st.lists(inner, min_size=1, max_size=2),
        minItems=st.integers(0, 2),
        maxItems=st.integers(2, 3),
    )


def combinations(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    several = st.lists(inner, min_size=1, max_size=3)
    tagged = st.lists(inner, min_size=1, max_size=2).map(
        lambda values: [
            {"type": "object", "properties": {"kind": {"const": kind}, "value": each}, "required": ["kind"]}
            for kind, each in enumerate(values)
        ]
    )
    return st.one_of(
        st.builds(lambda each: {"anyOf": each}, several),
        st.builds(lambda each: {"allOf": each}, several),
        st.builds(lambda each: {"oneOf": each}, several | tagged),
        st.builds(lambda schema, key: {**schema, key: REFUSED[key]}, inner, st.sampled_from(sorted(REFUSED))),
    )


schemas = st.recursive(
    leaves | st.sampled_from([{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/tree"}]),
    lambda inner: st.one_of(objects(inner), objects(inner), arrays(inner), combinations(inner)),
    max_leaves=6,
)
TREE = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}, "maxItems": 2}
REASONS = re.compile(  # why a schema may be refused
    r'no value satisfies it|"[a-zA-Z]+" cannot be enforced|oneOf: its alternatives may overlap|minProperties and maxP'
    r"|its parts name each other too often"  # of schemas that name themselves
)


def written(vocabulary: llguidance.LLTokenizer, grammar: Grammar, chance: random.Random) -> str | None:
    """Return a text that a model without any sense writes under a grammar, None if it does not come to an end."""
    matcher = llguidance.LLMatcher(vocabulary, grammar.text, log_level=0)
    ids: list[int] = []
    for _ in range(400):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, (ids, grammar)
        token_id = 1 if 1 in allowed and chance.random() < 0.5 else chance.choice(allowed)
        if token_id == 1:
            return vocabulary.decode_bytes(ids).decode()
        assert matcher.consume_token(token_id)
        ids.append(token_id)
    return None


@settings(max_examples=num_examples(500), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=schemas, one=leaves, seed=st.integers(0, 1 << 30))
def test_what_a_model_writes_under_a_schema_satisfies_it(
    vocabulary: llguidance.LLTokenizer, schema: dict[str, Any], one: dict[str, Any], seed: int
) -> None:
    """Every schema is served, or refused by the keyword that cannot be."""
    schema = {**schema, "$defs": {"one": one, "tree": TREE}}
    grammar = convert(vocabulary, "json", schema)
    if isinstance(grammar, GrammarFault):
        assert REASONS.match(grammar.words), (grammar, schema)
        return
    text = written(vocabulary, grammar, random.Random(seed))
    if text is not None:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


SPECIALS = ["<s>", "<\uff5cend\uff5c>"]


@pytest.fixture(scope="module")
def special_vocabulary() -> llguidance.LLTokenizer:
    """A vocabulary in which the texts of SPECIALS are special tokens."""
    inner = tokenizers.Tokenizer.from_buffer(tokenizer_file())
    inner.add_special_tokens([tokenizers.AddedToken(each, special=True) for each in SPECIALS])
    return llguidance.LLTokenizer(inner.to_str(), n_vocab=440, eos_token=[1])


@pytest.mark.parametrize("special", [*SPECIALS, "</s>"])  # the last one ends a text
@pytest.mark.parametrize("frame", ["", "start: @answer"])
@pytest.mark.parametrize(
    ("kind", "source_of", "text_of"),
    [
        (
            "json",
            lambda special: {"const": f"a{special}b"},
            lambda special: json.dumps(f"a{special}b", ensure_ascii=False),
        ),
        ("json", lambda special: {"type": "string", "pattern": re.escape(special)}, None),
        ("regex", lambda special: f"a{re.escape(special)}b", "a{}b".format),
        ("choice", lambda special: [f"{special}b"], "{}b".format),
        ("choice", lambda special: [special], str),
        ("grammar", lambda special: f'start: "a" x\nx: {json.dumps(special)}', "a{}".format),
    ],
)
def test_the_text_of_a_special_token_is_written_in_ordinary_ones(
    special_vocabulary: llguidance.LLTokenizer,
    kind: GrammarKind,
    source_of: Callable[[str], Any],
    text_of: Callable[[str], str] | None,
    frame: str,
    special: str,
) -> None:
    given = source_of(special)
    source = GrammarSource(kind, given if isinstance(given, str) else json.dumps(given), frame)
    grammar = converted(source, special_vocabulary)
    assert isinstance(grammar, Grammar), grammar
    for seed in range(10):
        text = written(special_vocabulary, grammar, random.Random(seed))
        if text_of is not None:
            assert text == text_of(special)
        elif text is not None:
            assert special in json.loads(text)


def test_a_grammar_without_such_a_text_stays_as_it_is(special_vocabulary: llguidance.LLTokenizer) -> None:
    """Where a text has no alternative, no mask is computed: that is faster."""
    grammar = convert(special_vocabulary, "json", SCHEMA)
    assert isinstance(grammar, Grammar) and "no_forcing" not in grammar.text


@pytest.mark.parametrize(("kind", "given", "inside", "outside"), LANGUAGES)
def test_thoughts_may_come_before_every_kind(
    vocabulary: llguidance.LLTokenizer, kind: GrammarKind, given: Any, inside: list[str], outside: list[str]
) -> None:
    text = given if isinstance(given, str) else json.dumps(given)
    for parser, prompt, before in (
        (Qwen3ReasoningParser, "assistant\n", ("", "<think>\nhm {}\n</think>\n\n")),
        (Qwen3ReasoningParser, "<think>\n\n</think>\n\n", ("",)),
        (DeepSeekR1ReasoningParser, "assistant\n", ("hm</think>",)),
    ):
        frame = f"start: thoughts @answer\n{parser.grammar(prompt, literal=json.dumps)}"
        grammar = converted(GrammarSource(kind, text, frame), vocabulary)
        for lead in before:
            assert [each for each in inside if not takes(vocabulary, grammar, lead + each)] == []
            assert [each for each in outside if takes(vocabulary, grammar, lead + each)] == []
        if kind != "structural_tag":  # which allows any text around its tags
            assert not takes(vocabulary, grammar, "<think>\nhm")


def test_harmony_binds_the_final_message_and_calls_beside_it() -> None:
    inner = tokenizers.Tokenizer.from_buffer(tokenizer_file())
    inner.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in HarmonyReasoningParser.markers])
    vocabulary = llguidance.LLTokenizer(inner.to_str(), n_vocab=440, eos_token=[1])
    ids = {mark: f"<[{inner.token_to_id(mark)}]>" for mark in HarmonyReasoningParser.markers}
    literal = ids.__getitem__
    mark = HarmonyReasoningParser.answer_mark(literal)
    frame = f"start: thoughts {mark} @answer\n{HarmonyReasoningParser.grammar('', literal=literal)}"
    grammar = converted(GrammarSource("choice", '["yes"]', frame), vocabulary)
    assert isinstance(grammar, Grammar)
    analysis, final = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant", "<|channel|>final<|message|>"
    for text, is_allowed in (
        (f"{analysis}{final}yes", True),
        (f"{final}yes", True),
        (f"{final}no", False),
        ("yes", False),
    ):
        encoded, matcher = inner.encode(text).ids, llguidance.LLMatcher(vocabulary, grammar.text)
        assert (matcher.try_consume_tokens(encoded) == len(encoded) and matcher.is_accepting()) == is_allowed
    assert HarmonyReasoningParser.grammar("", literal=json.dumps) is None
    calls = HarmonyParser.grammar({"f": {"type": "object"}}, may_repeat=True, literal=literal)
    frame = frame.replace(f"{mark} @answer", f"(calls | {mark} @answer)") + f"\n{calls}"
    grammar = converted(GrammarSource("choice", '["yes"]', frame), vocabulary)
    assert isinstance(grammar, Grammar)
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    for text, is_allowed in (
        (f"{analysis}{final}yes", True),
        (f"{analysis}{call}{{}}", True),
        (f'{call}{{"a": 1}}', True),
        (f"{final}{{}}", False),
        (f"{call}yes", False),
        (call.replace("functions.f", "functions.g") + "{}", False),
    ):
        encoded, matcher = inner.encode(text).ids, llguidance.LLMatcher(vocabulary, grammar.text)
        assert (matcher.try_consume_tokens(encoded) == len(encoded) and matcher.is_accepting()) == is_allowed, text
