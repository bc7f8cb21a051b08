"""The tool-call parsers by name, and the one that fits a chat template."""

from __future__ import annotations

from functools import cache

from .base import ToolParser
from .gemma4 import Gemma4Parser
from .harmony import HarmonyParser
from .hermes import HermesParser
from .llama3_json import Llama3JsonParser
from .mistral import MistralParser
from .pythonic import PythonicParser
from .qwen3_coder import Qwen3CoderParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "gemma4": Gemma4Parser,
    "harmony": HarmonyParser,
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
}
_SIGNS = (  # texts of a template that all stand in it -> the parser; the first that fits counts
    (("<|channel|>", "<|message|>"), "harmony"),
    (("<|tool_call>", "call:"), "gemma4"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>", "arg_key"), None),  # GLM's, which no parser here reads
    (("<tool_call>", "arguments"), "hermes"),
    (("<TOOLCALL>",), None),  # Nemotron's
    (("[TOOL_CALLS]",), "mistral"),
    (("func_name1(",), "pythonic"),
    (("<|python_start|>",), "pythonic"),
    (("<|start_header_id|>", "parameters"), "llama3_json"),
    (("<|python_tag|>", "parameters"), "llama3_json"),
)


@cache
def parser_for_template(source: str) -> str | None:
    """Return the name of the parser for models with this chat template; None if it is not known."""
    for signs, name in _SIGNS:
        if all(sign in source for sign in signs):
            return name
    return None
