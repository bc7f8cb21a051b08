"""The grammar of a chat's outputs. Thoughts come first, if the model may think; then what the request asks for:

    forced calls                                   forced_calls.py
    response_format, structured_outputs            grammars.py
    thinking_token_budget and none of the above    anything

thinking_token_budget bounds the thoughts in all three.
"""

from __future__ import annotations

from ...metadata.errors import RequestError
from ..node import NodeGroup
from ..reasoning_parsers.base import ReasoningParser
from ..reasoning_parsers.budget import ThoughtBudget
from ..text.grammar import GrammarSource
from ..text.tokenizer import TextTokenizer
from .api import Api
from .forced_calls import forced_grammar, literal_of
from .grammars import grammar_of
from .openai_types import ChatRequest
from .tools import ToolUse

_BUDGET = "thinking_token_budget"


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
    thoughts = ""
    if reasoning is not None:
        rule_of = reasoning.answer_grammar if use is None else reasoning.grammar
        thoughts = rule_of(prompt, literal=literal_of(tokenizer), budget=budget)
        if thoughts is None and budget is not None:
            raise RequestError(f"{_BUDGET}: the length of this model's thoughts cannot be set", param=_BUDGET)
    elif budget is not None and not body.continue_final_message:
        raise RequestError(
            f"{_BUDGET}: the router does not know how this model writes thoughts; start it with --reasoning-parser",
            param=_BUDGET,
        )
    if use is None:
        grammar = await grammar_of(api, body, group, thoughts)
    else:
        grammar = await forced_grammar(api, use, thoughts, group, tokenizer)
    if grammar is not None or budget is None or reasoning is None or reasoning(prompt).place == "answer":
        return grammar
    text = f"start: thoughts answer\n{thoughts}\n{reasoning.any_answer(budget)}"
    return await api.grammars.checked(GrammarSource("grammar", text), group, _BUDGET)


def _budget(num_tokens: int, group: NodeGroup, tokenizer: TextTokenizer) -> ThoughtBudget:
    return ThoughtBudget(num_tokens, tokenizer.grammar_ids, group.card.eos_token_ids)
