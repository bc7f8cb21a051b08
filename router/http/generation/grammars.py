"""Grammars that a body asks for: response_format of OpenAI's API, and structured_outputs of vLLM's."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Raw

from ....metadata.errors import RequestError
from ...nodes.node import NodeGroup
from ...text.grammar import MAX_SOURCE, GrammarKind, GrammarSource
from ...text.json_schema import SchemaFault, checked_whitespace
from ..server.api import Api
from .types import CommonRequest, ResponseFormat, StructuralTag, StructuredOutputs, TagStructure

ANY_OBJECT = '{"type": "object"}'  # a JSON schema
_encode = msgspec.json.Encoder().encode
_T = TypeVar("_T")


class AskedGrammar(NamedTuple):
    """A grammar that a body asks for, and its path in the body."""

    source: GrammarSource
    place: str


def asked_grammar(body: CommonRequest) -> AskedGrammar | None:
    """Return the grammar that a body asks for, None if it asks for none. Raises RequestError for fields that exclude
    each other, or that do not fit the type."""
    asked: list[AskedGrammar] = []
    if body.response_format is not None:
        asked += _of_format(body.response_format)
    if body.structured_outputs is not None:
        asked += _of_outputs(body.structured_outputs)
    if len(asked) > 1:
        raise RequestError(f"{asked[1].place}: excludes {asked[0].place}", param=asked[1].place.partition(".")[0])
    if not asked:
        return None
    if body.ignore_eos:
        raise RequestError(
            f"ignore_eos: excludes {asked[0].place}, whose end is the end of the text", param="ignore_eos"
        )
    source, place = asked[0]
    return AskedGrammar(msgspec.structs.replace(source, whitespace=json_whitespace(body)), place)


def json_whitespace(body: CommonRequest) -> str | None:
    """Return the white space of JSON that a body asks for, as GrammarSource takes it. Raises RequestError for a pattern
    that may match anything else."""
    given = body.structured_outputs
    if given is None:
        return None
    place, pattern = "structured_outputs.whitespace_pattern", given.whitespace_pattern
    if given.disable_any_whitespace and pattern is not None:
        raise RequestError(f"{place}: excludes disable_any_whitespace", param="structured_outputs")
    if pattern is None:
        return "" if given.disable_any_whitespace else None
    try:
        return checked_whitespace(pattern)
    except SchemaFault as fault:
        raise RequestError(f"{place}: {fault.words}", param="structured_outputs") from None


async def grammar_of(api: Api, asked: AskedGrammar, group: NodeGroup, frame: str = "") -> str:
    """Return the grammar that the nodes get for one that a body asks for. Raises RequestError if it cannot be served.
    `frame` is that of GrammarSource."""
    return await api.grammars.checked(msgspec.structs.replace(asked.source, frame=frame), group, asked.place)


def _of_format(given: ResponseFormat) -> list[AskedGrammar]:
    fields = {"json_schema": ("json_schema",), "structural_tag": ("structures", "triggers")}
    for kind, names in fields.items():
        for name in names:
            if (getattr(given, name) is not None) != (kind == given.type):
                words = f"needs {name}" if kind == given.type else f"has no {name}; type {kind!r} has it"
                raise RequestError(f"response_format: type {given.type!r} {words}", param="response_format")
    match given.type:
        case "text":
            return []
        case "json_object":
            return [AskedGrammar(GrammarSource("json", ANY_OBJECT), "response_format")]
        case "json_schema":
            assert given.json_schema is not None
            place = "response_format.json_schema.schema"
            return [AskedGrammar(_schema(given.json_schema.schema, place), place)]
        case "structural_tag":
            assert given.structures is not None and given.triggers is not None
            text = _tags(given.structures, given.triggers)
            return [AskedGrammar(_source("structural_tag", text, "response_format"), "response_format")]


def _of_outputs(given: StructuredOutputs) -> list[AskedGrammar]:
    asked: list[AskedGrammar] = []
    schema = bytes(given.json)
    if schema not in (b"", b"null"):
        place = "structured_outputs.json"
        text = _decoded(schema, str, place) if schema[:1] == b'"' else given.json
        asked.append(AskedGrammar(_schema(text, place), place))
    if given.json_object:
        asked.append(AskedGrammar(GrammarSource("json", ANY_OBJECT), "structured_outputs.json_object"))
    tag = given.structural_tag
    if isinstance(tag, str):
        tag = _decoded(tag, StructuralTag, "structured_outputs.structural_tag")
    texts: tuple[tuple[GrammarKind, str | bytes | None], ...] = (
        ("regex", given.regex),
        ("choice", None if given.choice is None else _encode(given.choice)),
        ("grammar", given.grammar),
        ("structural_tag", None if tag is None else _tags(tag.structures, tag.triggers)),
    )
    for kind, text in texts:
        if text is not None:
            place = f"structured_outputs.{kind}"
            asked.append(AskedGrammar(_source(kind, text, place), place))
    options = (given.disable_any_whitespace, given.whitespace_pattern, given.disable_fallback)
    if not asked and options == (None, None, None):
        names = ", ".join(name for name in StructuredOutputs.__struct_fields__)
        raise RequestError(f"structured_outputs: needs one of {names}", param="structured_outputs")
    return asked


def _tags(structures: list[TagStructure], triggers: list[str]) -> bytes:
    return _encode({"structures": [(each.begin, each.schema, each.end) for each in structures], "triggers": triggers})


def _schema(schema: Raw | str, place: str) -> GrammarSource:
    text = schema if isinstance(schema, str) else bytes(schema).decode()
    if not text.lstrip(" \t\r\n").startswith("{"):
        raise RequestError(f"{place}: must be a JSON schema, which is an object", param=place.partition(".")[0])
    return _source("json", text, place)


def _source(kind: GrammarKind, text: str | bytes, place: str) -> GrammarSource:
    if len(text) > MAX_SOURCE:
        raise RequestError(
            f"{place}: has {len(text)} bytes; at most {MAX_SOURCE} are allowed", param=place.partition(".")[0]
        )
    return GrammarSource(kind, text if isinstance(text, str) else text.decode())


def _decoded(text: str | bytes, kind: type[_T], place: str) -> _T:
    """Return what a JSON text within a body stands for."""
    param = place.partition(".")[0]
    if len(text) > 2 * MAX_SOURCE:
        raise RequestError(f"{place}: has {len(text)} bytes; at most {MAX_SOURCE} are allowed", param=param)
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{place}: {error}", param=param) from None
