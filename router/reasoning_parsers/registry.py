"""The reasoning parsers by name, and the one that fits a chat template."""

from __future__ import annotations

from functools import cache

from .base import ReasoningParser
from .harmony import HarmonyReasoningParser
from .think_tags import DeepSeekR1ReasoningParser, Gemma4ReasoningParser, Qwen3ReasoningParser

REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1ReasoningParser,
    "gemma4": Gemma4ReasoningParser,
    "harmony": HarmonyReasoningParser,
    "qwen3": Qwen3ReasoningParser,
}
_SIGNS = (  # texts of a template that all stand in it -> the parser; the first that fits counts
    (("<|channel|>", "<|message|>"), "harmony"),
    (("<\uff5cAssistant\uff5c>", "</think>"), "deepseek_r1"),
    (("<|channel>", "<channel|>"), "gemma4"),
    (("<think>", "</think>"), "qwen3"),
)


@cache
def find_parser(template: str | None, flag: str | None) -> type[ReasoningParser] | None:
    """Return the parser of a model's thoughts: that of `flag`, the value of --reasoning-parser, or the one that fits
    the source of the chat template. None: thoughts are not divided from answers."""
    if flag is not None:
        return REASONING_PARSERS.get(flag)
    for signs, name in _SIGNS:
        if all(sign in (template or "") for sign in signs):
            return REASONING_PARSERS[name]
    return None
