"""The grammar that forces a call of a tool: thoughts, if the model may think, and then calls in the model's format."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from llguidance import LLMatcher

from ...metadata.errors import RequestError
from ...metadata.wire.request import MAX_GRAMMAR
from ..reasoning_parsers.base import ReasoningParser
from ..text.tokenizer import TextTokenizer
from ..tool_parsers.json_calls import arguments_rule
from .tools import ToolUse


async def forced_grammar(
    use: ToolUse, reasoning: type[ReasoningParser] | None, prompt: str, tokenizer: TextTokenizer
) -> str | None:
    """Return the Lark grammar of an output that must call a tool; None if it need not.

    Raises RequestError if the format has no grammar, or if a tool's schema cannot be one. The check runs in a thread.
    """
    if not use.forced:
        return None
    literal = literal_of(tokenizer)
    calls = use.parser.grammar(use.forced_schemas, may_repeat=use.is_parallel, literal=literal)
    if calls is None:
        raise RequestError(
            f"tool_choice: a call cannot be forced in the format {use.parser_name}; use auto", param="tool_choice"
        )
    rules = ["start: calls", calls]
    if reasoning is not None:
        thoughts = reasoning.grammar(prompt, literal=literal)
        if thoughts is None:
            raise RequestError(
                "tool_choice: a call cannot be forced after this model's thoughts; use auto", param="tool_choice"
            )
        rules = ["start: thoughts calls", thoughts, calls]
    grammar = "\n".join(rules)
    if len(grammar) > MAX_GRAMMAR:
        raise RequestError(
            f"tools: their schemas are a grammar of {len(grammar)} characters; at most {MAX_GRAMMAR} can be forced",
            param="tools",
        )
    for index, tool in enumerate(use.tools):
        if tool in use.forced:
            rule = arguments_rule(0, use.schemas[tool.function.name])
            await _check(f"start: arguments_0\n{rule}", f"tools[{index}].function.parameters")
    await _check(grammar, "tools")
    return grammar


def literal_of(tokenizer: TextTokenizer) -> Callable[[str], str]:
    """Return the function that gives the Lark form of a fixed text: its token if it is a special one, else a string."""

    def literal(text: str) -> str:
        token_id = tokenizer.special_by_text.get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    return literal


async def _check(grammar: str, path: str) -> None:
    """Raise RequestError if llguidance cannot compile the grammar."""
    fault = await asyncio.to_thread(LLMatcher.validate_grammar, grammar)
    if fault:
        words = fault.splitlines()[0].partition("failed to compile JSON schema: ")
        raise RequestError(f"{path}: {words[2] or words[0]}", param="tools")
