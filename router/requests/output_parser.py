"""The parser of one output: thoughts first, then content and tool calls. Each of the two steps may be absent."""

from __future__ import annotations

from collections import abc

from ..reasoning_parsers.base import Part, ReasoningParser, Thought
from ..text.detokenizer import Detokenizer
from ..tool_parsers.base import Content, Event, ToolParser

OutputEvent = Thought | Event


class OutputParser:
    """Chain of a reasoning parser and a tool-call parser."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str) -> list[OutputEvent]:
        """Take the next part of the output's text and return what it brings."""
        if self._reasoning is None:
            return [*self._read(text)]
        return self._read_parts(self._reasoning.feed(text))

    def finish(self) -> list[OutputEvent]:
        """The output has ended. Return the rest."""
        events = self._read_parts(self._reasoning.finish()) if self._reasoning is not None else []
        return events if self._tools is None else [*events, *self._tools.finish()]

    def _read_parts(self, parts: list[Part]) -> list[OutputEvent]:
        events = list[OutputEvent]()
        for part in parts:
            events += [part] if isinstance(part, Thought) else self._read(part.text)
        return events

    def _read(self, text: str) -> list[Event]:
        if not text:
            return []
        return [Content(text)] if self._tools is None else self._tools.feed(text)


class ThoughtCounter:
    """Counts the tokens of one output that are thoughts, with the marks around them.

    A token counts if the output is inside thoughts before or after it, or in a mark that opens them. So the count does
    not depend on how many tokens arrive at once.
    """

    def __init__(self, reasoning: ReasoningParser, detokenizer: Detokenizer) -> None:
        """Both must be new: they read the output from its beginning."""
        self._reasoning = reasoning
        self._detokenizer = detokenizer
        self._num_read = 0
        self._num_undecided = 0  # tokens that may be a mark
        self._num_thoughts = 0

    def count(self, received: abc.Sequence[int]) -> int:
        """Return the number of thought tokens among all token ids of the output so far."""
        for token_id in received[self._num_read :]:
            before = self._reasoning.place
            self._reasoning.feed(self._detokenizer.step(token_id))
            self._num_undecided += 1
            if "thoughts" in (before, self._reasoning.place):
                self._num_thoughts += self._num_undecided
            if self._reasoning.place != "undecided":
                self._num_undecided = 0
        self._num_read = len(received)
        return self._num_thoughts
