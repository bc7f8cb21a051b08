"""What a model may write before the answer that a grammar binds: its thoughts."""

from __future__ import annotations

from ..reasoning_parsers.base import ReasoningParser
from ..text.tokenizer import TextTokenizer
from .forced_calls import literal_of


def thoughts_first(
    reasoning: type[ReasoningParser] | None, prompt: str, tokenizer: TextTokenizer, *, of_calls: bool
) -> str | None:
    """Return the Lark rule `before` of llguidance: all that may come between a prompt and the answer, or, `of_calls`,
    the tool calls. Empty: nothing. None: the format of the thoughts has no grammar."""
    if reasoning is None:
        return ""
    literal = literal_of(tokenizer)
    thoughts = reasoning.grammar(prompt, literal=literal)
    if thoughts is None:
        return None
    head = "" if of_calls else reasoning.answer_head(literal=literal)
    return f"before: thoughts {head}\n{thoughts}"
