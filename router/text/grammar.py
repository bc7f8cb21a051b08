"""Conversion of a client's grammar into the text that nodes compile by llguidance.

A client writes a source: a JSON schema, a regular expression, choices, a grammar or structural tags. `converted` turns
it into a grammar of llguidance (https://github.com/guidance-ai/llguidance), and compiles that to check it. This can
take long and use much memory, so the router calls it in a process of its own (grammar_process.py). A source with parts
that llguidance does not support is refused.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from decimal import Decimal
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import llguidance
import msgspec
from llguidance import StructTag
from llguidance.gbnf_to_lark import any_to_lark

from ...metadata.wire.request import MAX_GRAMMAR, MAX_STEP_ITEMS
from .json_schema import (
    DEFINITIONS,
    LISTS_OF_SUBSCHEMAS,
    OPTIONS,
    SUBSCHEMAS,
    TABLES_OF_SUBSCHEMAS,
    SchemaFault,
    prepared,
    quoted,
)

GrammarKind: TypeAlias = Literal["json", "regex", "choice", "grammar", "structural_tag"]

MAX_SOURCE = 128 * 1024  # characters of a source
MAX_DEPTH = 100  # nested objects and lists of a JSON schema; llguidance reads at most 128
MAX_CHOICES = 4096  # texts to choose from
MAX_PLACES = 100  # subschemas that are compiled alone to find the one at fault
PLACE_S = 0.2  # seconds of the processor for that
_LONGEST_WORDS = 300
_MAX_LOOSENED = 4  # parts of a schema that are left out because llguidance cannot compile them
_TOKENS = re.compile(r"<\[[0-9, -]+\]>")  # in Lark
_NO_FORCING = '%llguidance {"no_forcing": true}\n'  # in Lark, for the whole grammar
_CODE = re.compile(r"\\u([0-9a-fA-F]{4})")  # a character in JSON


_T = TypeVar("_T")


class GrammarSource(msgspec.Struct, frozen=True, array_like=True):
    """A grammar as the client wrote it. `text`: a JSON schema, a regular expression, a JSON list of texts, a grammar in
    Lark's or GBNF's notation, or a JSON object {"structures": [[begin, schema, end], ...], "triggers": [...]}.
    `frame`: Lark rules of all that the model may write, in which @answer is the text of this grammar; empty: only that
    text. `is_loose`: parts of a JSON schema that cannot be enforced are left out. `whitespace`: that of JSON, as
    json_schema.py takes it."""

    kind: GrammarKind
    text: str
    frame: str = ""
    is_loose: bool = False
    whitespace: str | None = None


class GrammarFault(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reason why a source is refused. `place` leads to the part at fault, such as `.properties.name`; empty: the
    whole."""

    words: str
    place: str = ""


class Grammar(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The text of a grammar that llguidance's LLMatcher takes."""

    text: str


class _Structure(NamedTuple):
    begin: str
    schema: dict[str, Any]
    end: str


class _Tags(msgspec.Struct):
    structures: list[_Structure]
    triggers: list[str]


class _Refused(Exception):
    def __init__(self, words: str, place: str = "") -> None:
        super().__init__(words)
        self.fault = GrammarFault(words, place)


def converted(source: GrammarSource, tokenizer: llguidance.LLTokenizer) -> Grammar | GrammarFault:
    """Return the grammar of a source, or why it is refused."""
    try:
        limit = MAX_GRAMMAR if source.kind == "grammar" else MAX_SOURCE  # the calls of many tools are one grammar
        if len(source.text) > limit:
            raise _Refused(f"has {len(source.text)} characters; at most {limit} are allowed")
        if source.kind == "json":
            return _of_schema(source, tokenizer)
        grammar = _finished(_text_of(source, tokenizer), source, tokenizer)
        words = _compile(grammar.text, tokenizer)
        return grammar if words is None else GrammarFault(_first_words(words))
    except _Refused as refused:
        return refused.fault


def schema_of(grammar: str) -> dict[str, Any]:
    """Return the schema in the grammar of a JSON schema that has no frame, as llguidance takes it."""
    return msgspec.json.decode(grammar)["grammars"][-1]["json_schema"]


def _of_schema(source: GrammarSource, tokenizer: llguidance.LLTokenizer) -> Grammar | GrammarFault:
    """Return the grammar of a JSON schema. If it is loose, parts that llguidance cannot compile allow anything."""
    schema = _prepared(_decoded(source.text, dict[str, Any]), source.text, source)
    place, words = "", ""
    for _ in range(_MAX_LOOSENED + 1):
        grammar = _finished(_schema_grammar(schema), source, tokenizer)
        compiled = _compile(grammar.text, tokenizer)
        if compiled is None:
            return grammar
        place, part = _faulty(schema, compiled, tokenizer)
        words = _of_schema_words(compiled)
        if not source.is_loose:
            break
        kept = {key: part[key] for key in ("type", OPTIONS) if key in part}
        part.clear()
        part.update(kept)
    return GrammarFault(words, place)


def _finished(text: str, source: GrammarSource, tokenizer: llguidance.LLTokenizer) -> Grammar:
    """Return a grammar with all that stands around it. Raises _Refused if it is too long."""
    text = _with_special_texts(_framed(source.frame, text), tokenizer)
    if len(text) > MAX_GRAMMAR:
        raise _Refused(f"is a grammar of {len(text)} characters; at most {MAX_GRAMMAR} are allowed")
    return Grammar(text)


def _text_of(source: GrammarSource, tokenizer: llguidance.LLTokenizer) -> str:
    match source.kind:
        case "json":
            raise AssertionError("a schema is compiled by _of_schema")
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(source.text)
        case "choice":
            return _choice_grammar(_decoded(source.text, list[str]))
        case "grammar":
            try:
                text = any_to_lark(source.text)
            except Exception as error:  # whatever the converter of GBNF raises
                raise _Refused(f"is neither Lark nor GBNF: {_first_words(str(error))}") from None
            _check_tokens(text, tokenizer)
            return text
        case "structural_tag":
            return _tag_grammar(_decoded(source.text, _Tags), source, tokenizer)


def _check_tokens(grammar: str, tokenizer: llguidance.LLTokenizer) -> None:
    """Raise _Refused for an item that is one ordinary token: if it has to come next, llguidance cannot take it back, as
    drafts need."""
    for item in _TOKENS.findall(grammar):
        ids = set(map(int, re.findall("[0-9]+", item)))
        ordinary = [each for each in ids if each < tokenizer.vocab_size and not tokenizer.is_special_token(each)]
        if len(ids) == len(ordinary) == 1:
            raise _Refused(f"names the ordinary token {item}; write its text")


def _framed(frame: str, grammar: str) -> str:
    """Return the grammar of a text with all that may stand around it."""
    if not frame:
        return grammar
    is_json = grammar.lstrip().startswith("{")  # no grammar in Lark begins so
    answer, *others = json.loads(grammar)["grammars"] if is_json else [{"lark_grammar": grammar}]
    first = {"lark_grammar": frame}
    return json.dumps({"grammars": [first, {**answer, "name": "answer"}, *others]}, ensure_ascii=False)


def _with_special_texts(grammar: str, tokenizer: llguidance.LLTokenizer) -> str:
    """Return the grammar such that the text of a special token, like `<s>`, can be written in ordinary tokens.

    Where a text has no alternative, llguidance allows only the token by which the tokenizer would begin it. That may be
    the special token, which ends the output or which llguidance then refuses. Without forcing, the model chooses."""
    written = _CODE.sub(lambda code: chr(int(code[1], 16)), grammar).replace("\\", "")
    if not any(special in written for special in _special_texts(tokenizer)):
        return grammar
    if not grammar.lstrip().startswith("{"):
        return _NO_FORCING + grammar
    first, *others = json.loads(grammar)["grammars"]
    if "lark_grammar" not in first:
        first, others = {"lark_grammar": f"start: @{first['name']}"}, [first, *others]
    first = {**first, "lark_grammar": _NO_FORCING + first["lark_grammar"]}
    return json.dumps({"grammars": [first, *others]}, ensure_ascii=False)


@lru_cache(maxsize=16)
def _special_texts(tokenizer: llguidance.LLTokenizer) -> tuple[str, ...]:
    specials = filter(tokenizer.is_special_token, range(tokenizer.vocab_size))
    return tuple(text for token_id in specials if (text := tokenizer.decode_str([token_id])))


def _decoded(text: str, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _Refused(f"cannot be read: {error}") from None


def _compile(grammar: str, tokenizer: llguidance.LLTokenizer) -> str | None:
    """Return the error of a grammar, None if it compiles and allows a first token."""
    limits = llguidance.LLParserLimits(step_max_items=MAX_STEP_ITEMS)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error() if matcher.is_error() else None


def _first_words(words: str) -> str:
    """Return the sentence of an error of llguidance that says most, shortened."""
    lines = [line.strip() for line in words.splitlines() if line.strip()] or ["it cannot be used"]
    if lines[0].startswith("NoExtension"):
        return "allows no text at all"
    inner = [line.removeprefix("error:").strip() for line in lines[1:] if line.startswith("error:")]
    return (f"{lines[0][:_LONGEST_WORDS]} {inner[0]}" if inner else lines[0])[: 2 * _LONGEST_WORDS]


def _schema_grammar(schema: dict[str, Any]) -> str:
    return json.dumps({"grammars": [{"name": "json_schema", "json_schema": schema}]}, ensure_ascii=False)


def _prepared(schema: dict[str, Any], text: str | None, source: GrammarSource) -> dict[str, Any]:
    """Return a schema as llguidance gets it. `text`: of it, if it is known; then its fractions are exact."""
    _check_depth(schema)
    try:
        exact = schema if text is None else json.loads(text, parse_float=Decimal)
        return prepared(exact, is_loose=source.is_loose, whitespace=source.whitespace)
    except SchemaFault as fault:
        raise _Refused(fault.words, fault.place) from None
    except ValueError as error:  # a number of thousands of digits
        raise _Refused(f"cannot be read: {error}") from None


def _check_depth(value: Any) -> None:
    """Raise _Refused for a value that is nested too deeply."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()  # pyright: ignore[reportUnknownArgumentType]
            elif isinstance(each, list):
                inner += each
        if not inner:
            return
        level = inner
    raise _Refused(f"is nested more than {MAX_DEPTH} levels deep")


def _choice_grammar(choices: list[str]) -> str:
    if not choices or not all(choices):
        raise _Refused("must be a list of one or more texts that are not empty")
    if len(choices) > MAX_CHOICES:
        raise _Refused(f"has {len(choices)} texts; at most {MAX_CHOICES} are allowed")
    return "start: " + " | ".join(map(json.dumps, choices))


def _tag_grammar(tags: _Tags, source: GrammarSource, tokenizer: llguidance.LLTokenizer) -> str:
    parts: list[StructTag] = []
    for index, (begin, schema, end) in enumerate(tags.structures):
        place = f".structures[{index}]"
        trigger = next((each for each in tags.triggers if begin.startswith(each)), None)
        if trigger is None:
            raise _Refused(f"{begin[:64]!r} begins with none of the triggers", f"{place}.begin")
        try:
            checked = _prepared(schema, None, source)
        except _Refused as refused:
            raise _Refused(refused.fault.words, f"{place}.schema{refused.fault.place}") from None
        parts.append(StructTag(trigger=trigger, begin=begin, grammar=checked, end=end))
    return StructTag.to_grammar(parts, assume_special=all(_is_special(each.trigger, tokenizer) for each in parts))


def _is_special(text: str, tokenizer: llguidance.LLTokenizer) -> bool:
    ids = tokenizer.tokenize_str(text, parse_special=True)
    return len(ids) == 1 and tokenizer.is_special_token(ids[0])


def _faulty(schema: dict[str, Any], words: str, tokenizer: llguidance.LLTokenizer) -> tuple[str, dict[str, Any]]:
    """Return the path to the smallest subschema that alone gives the same error, with the definitions of the whole, and
    the subschema."""
    shared = {name: schema[name] for name in ("$schema", OPTIONS, *DEFINITIONS) if name in schema}
    place, part, until, num_left = "", schema, time.process_time() + PLACE_S, MAX_PLACES
    children = chain(_tables(schema, DEFINITIONS), _children(schema))
    while (child := next(children, None)) is not None:
        name, subschema = child
        num_left -= 1
        if num_left < 0 or time.process_time() > until:
            break
        if _compile(_schema_grammar({**shared, **subschema}), tokenizer) == words:
            place, part, children = place + name, subschema, _children(subschema)
    return place, part


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the value of each subschema of a schema that is an object."""
    for name in SUBSCHEMAS:
        if isinstance(schema.get(name), dict):
            yield f".{name}", schema[name]
    for name in LISTS_OF_SUBSCHEMAS:
        if isinstance(schema.get(name), list):
            yield from ((f".{name}[{i}]", each) for i, each in enumerate(schema[name]) if isinstance(each, dict))
    yield from _tables(schema, TABLES_OF_SUBSCHEMAS)


def _tables(schema: dict[str, Any], names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        if isinstance(schema.get(name), dict):
            for key, each in schema[name].items():
                if isinstance(each, dict):
                    yield f".{name}.{quoted(key)}", each


def _of_schema_words(words: str) -> str:
    """Return an error of llguidance about a schema in the words of a schema."""
    first = _first_words(words)
    for pattern, said in _SAID.items():
        if re.match(pattern, first):
            return said.format(first)
    return first


_SAID = {  # the beginning of an error of llguidance -> what the client reads
    "oneOf constraints": "oneOf: its alternatives may overlap, which cannot be enforced; use anyOf",
    "min/maxProperties only": "minProperties and maxProperties need all `properties` to be required; leave them out",
    "patternProperty regexes": "patternProperties: two patterns match the same name; make them disjoint",
    "Failed to generate regex for": "no number lies between its bounds, or they are too large; leave them out",
    "Value for 'multipleOf'": "multipleOf has too many digits; leave it out",
    "regex parse error": "its pattern cannot be enforced: {}",
    "lookarounds not supported": "its pattern cannot be enforced: {}",
    "Unsatisfiable schema": "no value satisfies it: {}",
    "Schema intersection": "its parts name each other too often; write it without allOf",
    "Unknown format": "its format cannot be enforced; leave it out",
    "Unimplemented keys": "a keyword cannot be enforced; leave it out: {}",
}
