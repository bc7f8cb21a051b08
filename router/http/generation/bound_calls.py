"""The grammar of tool calls: of those that the model must make, or may make instead of an answer that is bound."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from ....metadata.errors import RequestError
from ...nodes.node import NodeGroup
from ...text.grammar import GrammarSource, schema_of
from ...text.tokenizer import TextTokenizer
from ..server.api import Api
from .tools import ToolUse


async def call_grammar(
    api: Api, use: ToolUse, place: str, group: NodeGroup, tokenizer: TextTokenizer, whitespace: str | None
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
            schemas[name] = schema_of(await api.grammars.checked(source, group, path, f"tool {name!r}"))
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
