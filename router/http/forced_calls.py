"""The grammar that forces a call of a tool: thoughts, if the model may think, and then calls in the model's format."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec

from ...metadata.errors import RequestError
from ..node import NodeGroup
from ..text.grammar import GrammarSource
from ..text.tokenizer import TextTokenizer
from .api import Api
from .tools import ToolUse


async def forced_grammar(
    api: Api, use: ToolUse, thoughts: str | None, group: NodeGroup, tokenizer: TextTokenizer
) -> str | None:
    """Return the grammar of an output that must call a tool; None if it need not. `thoughts` are as for `grammar_of`.

    Raises RequestError if the format has no grammar, or if a tool's schema cannot be one.
    """
    if not use.forced:
        return None
    calls = use.parser.grammar(use.forced_schemas, may_repeat=use.is_parallel, literal=literal_of(tokenizer))
    if calls is None:
        raise RequestError(
            f"tool_choice: a call of these tools cannot be forced in the format {use.parser_name}; use auto",
            param="tool_choice",
        )
    if thoughts is None:
        raise RequestError(
            "tool_choice: a call cannot be forced after this model's thoughts; use auto", param="tool_choice"
        )
    for index, tool in enumerate(use.tools):
        if tool in use.forced:
            schema = GrammarSource("json", msgspec.json.encode(use.schemas[tool.function.name]).decode())
            await api.grammars.checked(schema, group, f"tools[{index}].function.parameters")
    return await api.grammars.checked(GrammarSource("grammar", f"start: calls\n{calls}", thoughts), group, "tools")


def literal_of(tokenizer: TextTokenizer) -> Callable[[str], str]:
    """Return the function that gives the Lark form of a fixed text: its token if a grammar must name that by its id,
    else a string."""

    def literal(text: str) -> str:
        token_id = tokenizer.grammar_ids.get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    return literal
