"""The events of one output as they come, or its parts once it is whole: thoughts, content and tool calls in the order
of the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from ...reasoning_parsers.base import Thought
from ...requests.output_parser import OutputEvent, OutputParser, ThoughtCounter
from ...requests.request import Sequence
from ...tool_parsers.base import CallArguments, CallBegin, CallBroken, CallEnd, Content

ReasoningField = Literal["reasoning_content", "reasoning"]


class OutputReading(NamedTuple):
    """How the outputs of one request are read. Each output gets parsers of its own."""

    new_parser: Callable[[], OutputParser]
    new_counter: Callable[[Sequence], ThoughtCounter] | None  # None: no thoughts
    reasoning_field: ReasoningField
    is_parallel: bool  # False: calls after the first are left out


class WholeCall(NamedTuple):
    """A tool call of an output. `arguments` is a JSON object as text."""

    call_id: str
    name: str
    arguments: str


WholePart = Thought | Content | WholeCall


class OutputReader:
    """Reader of one output. `reading`: how outputs are read; None: all text is content. Unless `with_thoughts`,
    thoughts are left out, and only counted.

    `has_call`: a whole call is among the events so far.
    """

    def __init__(self, reading: OutputReading | None, *, with_thoughts: bool = True) -> None:
        self._reading = reading
        self._with_thoughts = with_thoughts
        self._parser = OutputParser(None, None) if reading is None else reading.new_parser()
        self._counter: ThoughtCounter | None = None
        self.has_call = False

    def events(self, text: str, *, is_last: bool) -> list[OutputEvent]:
        """Return what the next part of the text brings. If parallel calls are off, calls after the first are left
        out."""
        events = self._parser.feed(text)
        if is_last:
            events += self._parser.finish()
        kept = [event for event in events if self._is_kept(event)]
        self.has_call = self.has_call or any(isinstance(event, CallEnd) for event in kept)
        return kept

    def whole(self, text: str) -> list[WholePart]:
        """Return the parts of a whole output. Neighbouring texts are one part. The text of a broken call is content."""
        parts, call = list[WholePart](), WholeCall("", "", "")
        for event in self.events(text, is_last=True):
            match event:
                case CallBegin():
                    call = WholeCall(event.call_id, event.name, "")
                case CallArguments():
                    call = call._replace(arguments=call.arguments + event.text)
                case CallEnd():
                    parts.append(call)
                case Thought() | Content() | CallBroken():
                    kind, before = (Thought if isinstance(event, Thought) else Content), parts[-1] if parts else None
                    if isinstance(before, kind):
                        parts[-1] = kind(before.text + event.text)
                    else:
                        parts.append(kind(event.text))
        return parts

    def num_thoughts(self, sequence: Sequence) -> int:
        """Return how many tokens of the output so far are thoughts. `sequence` is that of the output."""
        if self._reading is None or self._reading.new_counter is None:
            return 0
        if self._counter is None:
            self._counter = self._reading.new_counter(sequence)
        return self._counter.count(sequence.received)

    def _is_kept(self, event: OutputEvent) -> bool:
        if isinstance(event, Thought):
            return self._with_thoughts
        is_call = isinstance(event, CallBegin | CallArguments | CallEnd | CallBroken)
        return not is_call or event.index == 0 or self._reading is None or self._reading.is_parallel
