"""The grammar of a chat's outputs. Thoughts come first, if the model may think; then what the request asks for:

    forced calls                                   calls of those tools, one or more
    response_format, structured_outputs            that format (grammars.py); with tools, calls or the format
    thinking_token_budget and none of the above    anything

thinking_token_budget bounds the thoughts in all three.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from ....metadata.errors import RequestError
from ...nodes.node import NodeGroup
from ...reasoning_parsers.base import ReasoningParser
from ...reasoning_parsers.budget import ThoughtBudget
from ...text.grammar import GrammarSource, schema_of
from ...text.tokenizer import TextTokenizer
from ..server.api import Api
from .grammars import asked_grammar, grammar_of, json_whitespace
from .tools import ToolUse
from .types import ChatRequest

_BUDGET = "thinking_token_budget"
_NO_THOUGHTS = 'thoughts: ""'


async def chat_grammar(
    api: Api,
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
            raise RequestError(f"{_BUDGET}: the length of this model's thoughts cannot be set", param=_BUDGET)
    elif budget is not None and not body.continue_final_message:
        raise RequestError(
            f"{_BUDGET}: the router does not know how this model writes thoughts; start it with --reasoning-parser",
            param=_BUDGET,
        )
    asked = asked_grammar(body)
    if use is not None and use.forced:
        rules = _checked_thoughts(thoughts, "tool_choice", "use auto")
        calls = await call_grammar(api, use, "tool_choice", group, tokenizer, json_whitespace(body))
        return await api.grammars.checked(
            GrammarSource("grammar", f"start: thoughts calls\n{rules}\n{calls}"), group, "tools"
        )
    if asked is not None:
        rules = _checked_thoughts(
            thoughts, asked.place, "start the router with --reasoning-parser none to bind the whole output"
        )
        answer = f"{mark} @answer"
        if use is not None:
            calls = await call_grammar(api, use, asked.place, group, tokenizer, json_whitespace(body))
            rules += f"\n{calls}"
            answer = f"(calls | {answer})"
        elif reasoning is None:
            return await grammar_of(api, asked, group)
        return await grammar_of(api, asked, group, f"start: thoughts {answer}\n{rules}")
    if budget is None or reasoning is None or reasoning(prompt).place == "answer":
        return None
    text = f"start: thoughts answer\n{thoughts}\n{reasoning.any_answer(budget)}"
    return await api.grammars.checked(GrammarSource("grammar", text), group, _BUDGET)


def _checked_thoughts(thoughts: str | None, place: str, hint: str) -> str:
    if thoughts is None:
        raise RequestError(
            f"{place}: a grammar cannot follow this model's thoughts; {hint}", param=place.partition(".")[0]
        )
    return thoughts


def _budget(num_tokens: int, group: NodeGroup, tokenizer: TextTokenizer) -> ThoughtBudget:
    return ThoughtBudget(num_tokens, tokenizer.grammar_ids, group.card.eos_token_ids)


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
