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
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import llguidance
import msgspec
from llguidance import StructTag
from llguidance.gbnf_to_lark import any_to_lark

from ...metadata.wire.request import MAX_GRAMMAR, MAX_STEP_ITEMS

GrammarKind: TypeAlias = Literal["json", "regex", "choice", "grammar", "structural_tag"]

MAX_SOURCE = 128 * 1024  # characters of a source
MAX_DEPTH = 100  # nested objects and lists of a JSON schema; llguidance reads at most 128
MAX_CHOICES = 4096  # texts to choose from
MAX_PLACES = 100  # subschemas that are compiled alone to find the one at fault
PLACE_S = 0.2  # seconds of the processor for that
_LONGEST_WORDS = 300
_DEFINITIONS = ("$defs", "definitions")
_SUBSCHEMAS = ("not", "if", "then", "else", "contains", "propertyNames", "items", "additionalProperties")
_LISTS_OF_SUBSCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_TABLES_OF_SUBSCHEMAS = ("properties", "patternProperties", "dependentSchemas")
_OPTIONS = "x-guidance"  # key of a schema's root by which llguidance takes options
_TOKENS = re.compile(r"<\[[0-9, -]+\]>")  # in Lark
_STRICT = {"lenient": False, "coerce_one_of": False}
_NO_FORCING = '%llguidance {"no_forcing": true}\n'  # in Lark, for the whole grammar
_CODE = re.compile(r"\\u([0-9a-fA-F]{4})")  # a character in JSON


_T = TypeVar("_T")


class GrammarSource(msgspec.Struct, frozen=True, array_like=True):
    """A grammar as the client wrote it. `text`: a JSON schema, a regular expression, a JSON list of texts, a grammar in
    Lark's or GBNF's notation, or a JSON object {"structures": [[begin, schema, end], ...], "triggers": [...]}.
    `frame`: Lark rules of all that the model may write, in which @answer is the text of this grammar; empty: only that
    text."""

    kind: GrammarKind
    text: str
    frame: str = ""


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
        if len(source.text) > MAX_SOURCE:
            raise _Refused(f"has {len(source.text)} characters; at most {MAX_SOURCE} are allowed")
        text = _with_special_texts(_framed(source.frame, _text_of(source, tokenizer)), tokenizer)
        if len(text) > MAX_GRAMMAR:
            raise _Refused(f"is a grammar of {len(text)} characters; at most {MAX_GRAMMAR} are allowed")
        words = _compile(text, tokenizer)
        if words is None:
            return Grammar(text)
        place = _place(_decoded(source.text, dict[str, Any]), words, tokenizer) if source.kind == "json" else ""
        return GrammarFault(_first_words(words), place)
    except _Refused as refused:
        return refused.fault


def _text_of(source: GrammarSource, tokenizer: llguidance.LLTokenizer) -> str:
    match source.kind:
        case "json":
            return _schema_grammar(_checked_schema(_decoded(source.text, dict[str, Any])))
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
            return _tag_grammar(_decoded(source.text, _Tags), tokenizer)


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
    given = {**schema, _OPTIONS: _STRICT}
    return json.dumps({"grammars": [{"name": "json_schema", "json_schema": given}]}, ensure_ascii=False)


def _checked_schema(schema: dict[str, Any]) -> dict[str, Any]:
    if _OPTIONS in schema:
        raise _Refused("options of the compiler cannot be set", f".{_OPTIONS}")
    _check_depth(schema)
    return schema


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


def _tag_grammar(tags: _Tags, tokenizer: llguidance.LLTokenizer) -> str:
    parts: list[StructTag] = []
    for index, (begin, schema, end) in enumerate(tags.structures):
        place = f".structures[{index}]"
        trigger = next((each for each in tags.triggers if begin.startswith(each)), None)
        if trigger is None:
            raise _Refused(f"{begin[:64]!r} begins with none of the triggers", f"{place}.begin")
        try:
            checked = {**_checked_schema(schema), _OPTIONS: _STRICT}
        except _Refused as refused:
            raise _Refused(refused.fault.words, f"{place}.schema{refused.fault.place}") from None
        parts.append(StructTag(trigger=trigger, begin=begin, grammar=checked, end=end))
    return StructTag.to_grammar(parts, assume_special=all(_is_special(each.trigger, tokenizer) for each in parts))


def _is_special(text: str, tokenizer: llguidance.LLTokenizer) -> bool:
    ids = tokenizer.tokenize_str(text, parse_special=True)
    return len(ids) == 1 and tokenizer.is_special_token(ids[0])


def _place(schema: dict[str, Any], words: str, tokenizer: llguidance.LLTokenizer) -> str:
    """Return the path to the smallest subschema that alone gives the same error, with the definitions of the whole."""
    definitions = {name: schema[name] for name in ("$schema", *_DEFINITIONS) if name in schema}
    place, until, num_left = "", time.process_time() + PLACE_S, MAX_PLACES
    children = chain(_tables(schema, _DEFINITIONS), _children(schema))
    while (child := next(children, None)) is not None:
        name, subschema = child
        num_left -= 1
        if num_left < 0 or time.process_time() > until:
            break
        if _compile(_schema_grammar({**definitions, **subschema}), tokenizer) == words:
            place, children = place + name, _children(subschema)
    return place


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the value of each subschema of a schema that is an object."""
    for name in _SUBSCHEMAS:
        if isinstance(schema.get(name), dict):
            yield f".{name}", schema[name]
    for name in _LISTS_OF_SUBSCHEMAS:
        if isinstance(schema.get(name), list):
            yield from ((f".{name}[{i}]", each) for i, each in enumerate(schema[name]) if isinstance(each, dict))
    yield from _tables(schema, _TABLES_OF_SUBSCHEMAS)


def _tables(schema: dict[str, Any], names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        if isinstance(schema.get(name), dict):
            for key, each in schema[name].items():
                if isinstance(each, dict):
                    yield f".{name}.{_quoted(key)}", each


def _quoted(key: str) -> str:
    return key if re.fullmatch(r"[\w$-]{1,64}", key) else json.dumps(key[:64])
