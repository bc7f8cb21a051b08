"""How the outputs of a request are read: the parsers of thoughts and tool calls that fit the model and the request."""

from __future__ import annotations

from ...reasoning_parsers.base import ReasoningParser
from ...reasoning_parsers.registry import REASONING_PARSERS
from ...requests.output_parser import OutputParser, ThoughtCounter
from ...requests.request import Sequence
from ...text.chat_template import ChatTemplate
from ...text.detokenizer import make_detokenizer
from ...text.tokenizer import TextTokenizer
from .output import OutputReading, ReasoningField
from .tools import NO_PARSER, ToolUse


def reasoning_parser(template: ChatTemplate | None, flag: str | None) -> type[ReasoningParser] | None:
    """Return the parser of a model's thoughts, None if it has none. `flag`: the value of --reasoning-parser."""
    name = flag or (template.reasoning_parser if template is not None else None)
    return None if name is None or name == NO_PARSER else REASONING_PARSERS[name]


def markers_of(use: ToolUse | None, reasoning: type[ReasoningParser] | None) -> frozenset[str]:
    """Return the texts that must reach the parsers, also if they are special tokens."""
    return frozenset((*(use.parser.markers if use is not None else ()), *(reasoning.markers if reasoning else ())))


def output_reading(
    use: ToolUse | None,
    reasoning: type[ReasoningParser] | None,
    prompt: str,
    tokenizer: TextTokenizer,
    reasoning_field: ReasoningField,
) -> OutputReading | None:
    """Return how outputs after a prompt's text are read; None if they hold neither thoughts nor tool calls."""
    if use is None and reasoning is None:
        return None
    schemas = {} if use is None else use.schemas

    def new_parser() -> OutputParser:
        thoughts = None if reasoning is None else reasoning(prompt)
        return OutputParser(thoughts, None if use is None else use.parser(schemas))

    def new_counter(sequence: Sequence) -> ThoughtCounter:
        assert reasoning is not None, "only thoughts are counted"
        prompt_ids = sequence.request.prompt_ids
        detokenizer = make_detokenizer(tokenizer, prompt_ids, skip_special=True, markers=frozenset(reasoning.markers))
        return ThoughtCounter(reasoning(prompt), detokenizer)

    is_parallel = use is None or use.is_parallel
    return OutputReading(new_parser, new_counter if reasoning is not None else None, reasoning_field, is_parallel)
