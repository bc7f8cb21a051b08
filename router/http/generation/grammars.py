"""The grammar of outputs: of the format that a body asks for (response_format of OpenAI's API, structured_outputs of
vLLM's), and of all that a chat's output may hold. Thoughts come first, if the model may think; then what is asked for:

    forced calls                                   calls of those tools, one or more
    response_format, structured_outputs            that format; with tools, calls or the format
    thinking_token_budget and none of the above    anything

thinking_token_budget bounds the thoughts in all three. GrammarChecks compiles each grammar once, in another process,
and remembers the result.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
import xxhash
from msgspec import Raw

from ....metadata.errors import RequestError, Unavailable
from ...nodes.node import NodeGroup
from ...reasoning_parsers.base import ReasoningParser, ThoughtBudget
from ...requests.need import GRAMMAR_PROTOCOL
from ...tenants.fair_turns import FairTurns
from ...text.grammar import MAX_SOURCE, Grammar, GrammarFault, GrammarKind, GrammarSource, schema_of
from ...text.grammar_process import GrammarProcess, LoadTokenizer
from ...text.json_schema import SchemaFault, checked_whitespace
from ...text.tokenizer import TextTokenizer
from .tools import ToolUse
from .types import ChatRequest, CommonRequest, ResponseFormat, StructuralTag, StructuredOutputs, TagStructure

ANY_OBJECT = '{"type": "object"}'  # a JSON schema
_BUDGET = "thinking_token_budget"
_NO_THOUGHTS = 'thoughts: ""'
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


async def grammar_of(checks: GrammarChecks, asked: AskedGrammar, group: NodeGroup, frame: str = "") -> str:
    """Return the grammar that the nodes get for one that a body asks for. Raises RequestError if it cannot be served.
    `frame` is that of GrammarSource."""
    return await checks.checked(msgspec.structs.replace(asked.source, frame=frame), group, asked.place)


async def chat_grammar(
    checks: GrammarChecks,
    body: ChatRequest,
    use: ToolUse | None,
    reasoning: type[ReasoningParser] | None,
    prompt: str,
    group: NodeGroup,
    tokenizer: TextTokenizer,
) -> str | None:
    """Return the grammar of all that follows a prompt's text, None if it is free. Raises RequestError for one that
    cannot be served."""
    budget = None if body.thinking_token_budget is None else _budget(body.thinking_token_budget, group, tokenizer)
    thoughts, mark = _NO_THOUGHTS, ""
    if reasoning is not None:
        literal = literal_of(tokenizer)
        thoughts, mark = reasoning.grammar(prompt, literal=literal, budget=budget), reasoning.answer_mark(literal)
        if thoughts is None and budget is not None:
            raise RequestError(
                f"{_BUDGET}: the length of this model's thoughts cannot be set; leave it out", param=_BUDGET
            )
    elif budget is not None and not body.continue_final_message:
        raise RequestError(
            f"{_BUDGET}: the router does not know how this model writes thoughts; start it with --reasoning-parser",
            param=_BUDGET,
        )
    asked = asked_grammar(body)
    if use is not None and use.forced:
        rules = _checked_thoughts(thoughts, "tool_choice", "use auto")
        calls = await call_grammar(checks, use, "tool_choice", group, tokenizer, json_whitespace(body))
        return await checks.checked(
            GrammarSource("grammar", f"start: thoughts calls\n{rules}\n{calls}"), group, "tools"
        )
    if asked is not None:
        rules = _checked_thoughts(
            thoughts, asked.place, "start the router with --reasoning-parser none to bind the whole output"
        )
        answer = f"{mark} @answer"
        if use is not None:
            calls = await call_grammar(checks, use, asked.place, group, tokenizer, json_whitespace(body))
            rules += f"\n{calls}"
            answer = f"(calls | {answer})"
        elif reasoning is None:
            return await grammar_of(checks, asked, group)
        return await grammar_of(checks, asked, group, f"start: thoughts {answer}\n{rules}")
    if budget is None or reasoning is None or reasoning(prompt).place == "answer":
        return None
    text = f"start: thoughts answer\n{thoughts}\n{reasoning.any_answer(budget)}"
    return await checks.checked(GrammarSource("grammar", text), group, _BUDGET)


def _checked_thoughts(thoughts: str | None, place: str, hint: str) -> str:
    if thoughts is None:
        raise RequestError(
            f"{place}: a grammar cannot follow this model's thoughts; {hint}", param=place.partition(".")[0]
        )
    return thoughts


def _budget(num_tokens: int, group: NodeGroup, tokenizer: TextTokenizer) -> ThoughtBudget:
    return ThoughtBudget(num_tokens, tokenizer.grammar_ids, group.card.eos_token_ids)


async def call_grammar(
    checks: GrammarChecks, use: ToolUse, place: str, group: NodeGroup, tokenizer: TextTokenizer, whitespace: str | None
) -> str:
    """Return the Lark rule `calls` of the calls that an output may make: of the tools of which one is forced, or of
    any. `place` is the field that needs a grammar of calls. `whitespace` is that of GrammarSource.

    What cannot be enforced of a tool's schema is left out, unless the tool is strict. Raises RequestError if the format
    has no grammar, or if the schema of a strict tool cannot be one.
    """
    given, schemas = use.bound_schemas, dict[str, dict[str, Any]]()
    for index, tool in enumerate(use.tools):
        name = tool.function.name
        if name in given:
            text = msgspec.json.encode(given[name]).decode()
            source = GrammarSource("json", text, is_loose=tool.function.strict is not True, whitespace=whitespace)
            path = f"tools[{index}].function.parameters"
            schemas[name] = schema_of(await checks.checked(source, group, path, f"tool {name!r}"))
    calls = use.parser.grammar(schemas, may_repeat=use.is_parallel, literal=literal_of(tokenizer))
    if calls is None:
        hint = "use auto" if use.forced else "leave the tools out, or set tool_choice to none"
        raise RequestError(
            f"{place}: calls of these tools in the format {use.parser_name} have no grammar; {hint}",
            param=place.partition(".")[0],
        )
    return calls


def literal_of(tokenizer: TextTokenizer) -> Callable[[str], str]:
    """Return the function that gives the Lark form of a fixed text: its token if a grammar must name that by its id,
    else a string."""

    def literal(text: str) -> str:
        token_id = tokenizer.grammar_ids.get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    return literal


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


MAX_WAITING = 64  # grammars of one caller that wait for the process
MAX_KEPT = 256  # grammars that are remembered
MAX_KEPT_CHARACTERS = 16 << 20  # of their texts, all together

_Verdict = Grammar | GrammarFault


class GrammarChecks:
    """Grammars of all requests of one router. The process and its thread start when the first grammar comes."""

    def __init__(self) -> None:
        self._process = GrammarProcess()
        self._turns = FairTurns("grammars", 1, MAX_WAITING)
        self._running: dict[str, asyncio.Future[_Verdict]] = {}
        self._known: OrderedDict[str, _Verdict] = OrderedDict()
        self._num_characters = 0  # of the texts in _known

    async def checked(self, source: GrammarSource, group: NodeGroup, place: str, owner: str = "") -> str:
        """Return the text of a grammar that the group's nodes will compile. `place`: the path of the source in the
        body, such as `response_format.json_schema.schema`. `owner`: whose it is, as a refusal names it.

        Raises RequestError that names the part at fault, Overloaded if too many grammars of the caller wait, and
        Unavailable if the nodes know no grammars, or if the process does not start.
        """
        if not any(node.protocol >= GRAMMAR_PROTOCOL for node in group.nodes.values()):
            raise Unavailable(f"{place}: the model's nodes are of an earlier release, which knows no grammars")
        if not group.card.eos_token_ids:
            raise RequestError(
                f"{place}: the model names no token that ends a text, which a grammar needs; leave it out, or ask for "
                "eos_token_id in the model's generation_config.json",
                param=_field(place),
            )
        verdict = await self._verdict(source, group)
        if isinstance(verdict, GrammarFault):
            whose = f" ({owner})" if owner else ""
            raise RequestError(f"{place}{verdict.place}: {verdict.words}{whose}", param=_field(place))
        return verdict.text

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._turns.close(self._process.join)

    async def _verdict(self, source: GrammarSource, group: NodeGroup) -> _Verdict:
        eos = group.card.eos_token_ids
        name = f"{group.key.tokenizer}:{group.card.vocab_size}:{eos}"
        options = f"{source.is_loose} {source.whitespace!r} {len(source.frame)}"
        parts = "\n".join((name, source.kind, options, source.frame, source.text))
        digest = xxhash.xxh3_128_hexdigest(parts.encode("utf-8", "surrogatepass"))
        if digest in self._known:
            self._known.move_to_end(digest)
            return self._known[digest]
        running = self._running.get(digest)
        if running is None:
            assert group.tokenizer is not None, "a group that can serve has its tokenizer"
            load = LoadTokenizer(name, group.tokenizer.data, group.card.vocab_size, tuple(eos))
            convert = partial(self._process.convert, load, source)
            running = self._running[digest] = asyncio.ensure_future(self._turns.run(convert))
            running.add_done_callback(lambda done: self._learn(digest, done))
        return await asyncio.shield(running)  # others may wait for it as well

    def _learn(self, digest: str, done: asyncio.Future[_Verdict]) -> None:
        del self._running[digest]
        if done.cancelled() or done.exception() is not None:
            return
        verdict = self._known[digest] = done.result()
        self._num_characters += _num_characters(verdict)
        while len(self._known) > MAX_KEPT or self._num_characters > MAX_KEPT_CHARACTERS:
            _, oldest = self._known.popitem(last=False)
            self._num_characters -= _num_characters(oldest)


def _num_characters(verdict: _Verdict) -> int:
    return len(verdict.text) if isinstance(verdict, Grammar) else len(verdict.words) + len(verdict.place)


def _field(place: str) -> str:
    """Return the field of the body in which a path begins."""
    return re.split(r"[.\[]", place, maxsplit=1)[0]
