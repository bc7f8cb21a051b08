"""The reasoning parsers by name, and the one that fits a chat template."""

from __future__ import annotations

from functools import cache

from .base import ReasoningParser
from .harmony import HarmonyReasoningParser
from .think_tags import DeepSeekR1ReasoningParser, Qwen3ReasoningParser

REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1ReasoningParser,
    "harmony": HarmonyReasoningParser,
    "qwen3": Qwen3ReasoningParser,
}
_SIGNS = (  # texts of a template that all stand in it -> the parser; the first that fits counts
    (("<|channel|>", "<|message|>"), "harmony"),
    (("<\uff5cAssistant\uff5c>", "</think>"), "deepseek_r1"),
    (("<think>", "</think>"), "qwen3"),
)


@cache
def parser_for_template(source: str) -> str | None:
    """Return the name of the parser for models with this chat template; None if it is not known."""
    for signs, name in _SIGNS:
        if all(sign in source for sign in signs):
            return name
    return None
