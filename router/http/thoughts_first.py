"""A grammar binds the answer and not the thoughts: thoughts may come before what it allows."""

from __future__ import annotations

import json
from typing import Any

from ...metadata.errors import RequestError
from ...metadata.wire.request import MAX_GRAMMAR
from ..reasoning_parsers.base import ReasoningParser
from ..text.tokenizer import TextTokenizer
from .forced_calls import literal_of

_ANSWER = "answer"  # name of the grammar that binds the answer


def thoughts_first(grammar: str, reasoning: type[ReasoningParser], prompt: str, tokenizer: TextTokenizer) -> str:
    """Return the grammar of thoughts, if the model may think after this prompt, and then a text of `grammar`.

    `grammar` has been checked: it is Lark, or llguidance's JSON with a list of grammars. Raises RequestError if the
    format of the thoughts has no grammar, or if the result is too long.
    """
    literal = literal_of(tokenizer)
    thoughts = reasoning.grammar(prompt, literal=literal)
    if thoughts is None:
        raise RequestError(
            "response_format: a grammar cannot follow this model's thoughts; start the router with "
            "--reasoning-parser none to bind the whole output",
            param="response_format",
        )
    start = " ".join(part for part in ("thoughts", reasoning.answer_head(literal=literal), f"@{_ANSWER}") if part)
    first, *others = _grammars_of(grammar)
    bound = [{"lark_grammar": f"start: {start}\n{thoughts}"}, {**first, "name": _ANSWER}, *others]
    text = json.dumps({"grammars": bound}, ensure_ascii=False)
    if len(text) > MAX_GRAMMAR:
        raise RequestError(
            f"response_format: is a grammar of {len(text)} characters; at most {MAX_GRAMMAR} are allowed",
            param="response_format",
        )
    return text


def _grammars_of(grammar: str) -> list[dict[str, Any]]:
    if grammar.lstrip().startswith("{"):  # no grammar in Lark begins so
        return json.loads(grammar)["grammars"]
    return [{"lark_grammar": grammar}]
