"""The output of a model as parts: thoughts, text and tool calls, in the order in which the model wrote them.

    OutputReading   one per request   which parsers read its outputs
    OutputReader    one per output    text in, events out
    formats         one per answer    events in, bytes out: format.py of openai/, responses/ and anthropic/

A part begins, gets text, and ends before the next one begins. The text of a call is its arguments, a JSON object. If a
call never becomes whole, it is broken. A stream has already sent its beginning, and ends it early. A whole answer has
all that the model wrote of it as text.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec import Struct

from ...reasoning_parsers.base import Part as Divided
from ...reasoning_parsers.base import ReasoningParser, Thought
from ...requests.request import Sequence
from ...text.detokenizer import Detokenizer, make_detokenizer
from ...text.tokenizer import TextTokenizer
from ...tool_parsers.base import CallArguments, CallBegin, CallBroken, CallEnd, Content, Event, ToolParser
from .tools import ToolUse

ReasoningField = Literal["reasoning_content", "reasoning"]
PartKind = Literal["thought", "text", "call"]


class OutputPart(Struct):
    """A part of an output. `index` counts the parts. `is_whole` is None until the part has ended."""

    kind: PartKind
    index: int
    call: CallBegin | None = None  # present if the part is a call: its id, its name, its number among the calls
    texts: list[str] = []
    is_whole: bool | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)


class PartBegun(NamedTuple):
    """A part begins. `part` is as it begins, without text."""

    part: OutputPart


class PartDelta(NamedTuple):
    """A part gets more text."""

    part: OutputPart
    text: str


class PartEnded(NamedTuple):
    """A part has ended."""

    part: OutputPart


PartEvent = PartBegun | PartDelta | PartEnded


class OutputReader:
    """Reader of one output. `parts` are its parts so far.

    Without parsers all text is text. If calls are not parallel, those after the first are left out. Unless
    `with_thoughts`, thoughts are left out.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        is_parallel: bool = True,
        with_thoughts: bool = True,
    ) -> None:
        self.parts: list[OutputPart] = []
        self._reasoning = reasoning
        self._tools = tools
        self._is_parallel = is_parallel
        self._with_thoughts = with_thoughts
        self._sources: dict[int, str] = {}  # all that the model wrote of each broken call, by the index of its part

    @property
    def has_call(self) -> bool:
        """Whether a whole call is among the parts."""
        return any(part.kind == "call" and part.is_whole for part in self.parts)

    def read(self, text: str, *, is_last: bool) -> list[PartEvent]:
        """Return what the next part of the text brings. The last part does not end before `end`, unless it is a
        call."""
        events = list[PartEvent]()
        for event in self._parsed(text, is_last=is_last):
            match event:
                case Content():
                    self._add("text", event.text, events)
                case Thought():
                    if self._with_thoughts:
                        self._add("thought", event.text, events)
                case _:
                    if event.index == 0 or self._is_parallel:
                        self._read_call(event, events)
        return events

    def end(self, *, is_whole: bool = True) -> list[PartEvent]:
        """The output has ended. Return the end of its last part, if that has not ended."""
        events = list[PartEvent]()
        self._end(events, is_whole=is_whole)
        return events

    def whole(self, text: str, *, is_whole: bool = True) -> list[OutputPart]:
        """Return the parts of a whole output. Neighbouring texts are one part. The text of a broken call is text.
        `is_whole`: the output was not cut off, so that its last part is whole too."""
        self.read(text, is_last=True)
        parts = list[OutputPart]()
        for part in self.parts:
            source = self._sources.get(part.index)
            kind, call, texts = (part.kind, part.call, part.texts) if source is None else ("text", None, [source])
            if parts and parts[-1].kind == kind != "call":
                parts[-1].texts += texts
            else:
                parts.append(OutputPart(kind, len(parts), call, [*texts], is_whole=True))
        if parts and parts[-1].kind != "call":
            parts[-1].is_whole = is_whole
        return parts

    def _parsed(self, text: str, *, is_last: bool) -> list[Thought | Event]:
        """Return the events of the parsers: thoughts first, then text and calls."""
        if self._reasoning is None:
            events: list[Thought | Event] = [*self._calls_in(text)]
        else:
            events = self._divided(self._reasoning.feed(text))
        if is_last and self._reasoning is not None:
            events += self._divided(self._reasoning.finish())
        return [*events, *self._tools.finish()] if is_last and self._tools is not None else events

    def _divided(self, parts: abc.Iterable[Divided]) -> list[Thought | Event]:
        events = list[Thought | Event]()
        for part in parts:
            events += [part] if isinstance(part, Thought) else self._calls_in(part.text)
        return events

    def _calls_in(self, text: str) -> list[Event]:
        if not text:
            return []
        return [Content(text)] if self._tools is None else self._tools.feed(text)

    def _read_call(self, event: CallBegin | CallArguments | CallEnd | CallBroken, events: list[PartEvent]) -> None:
        match event:
            case CallBegin():
                self._begin("call", events, event)
            case CallArguments():
                self._add("call", event.text, events)
            case CallEnd():
                self._end(events, is_whole=True)
            case CallBroken():
                self._sources[self.parts[-1].index] = event.text
                self._end(events, is_whole=False)

    def _begin(self, kind: PartKind, events: list[PartEvent], call: CallBegin | None = None) -> None:
        self._end(events, is_whole=True)
        events.append(PartBegun(OutputPart(kind, len(self.parts), call)))
        self.parts.append(OutputPart(kind, len(self.parts), call))

    def _add(self, kind: PartKind, text: str, events: list[PartEvent]) -> None:
        if not self.parts or self.parts[-1].is_whole is not None or self.parts[-1].kind != kind:
            self._begin(kind, events)
        self.parts[-1].texts.append(text)
        events.append(PartDelta(self.parts[-1], text))

    def _end(self, events: list[PartEvent], *, is_whole: bool) -> None:
        if self.parts and self.parts[-1].is_whole is None:
            self.parts[-1].is_whole = is_whole
            events.append(PartEnded(self.parts[-1]))


@dataclass(frozen=True, slots=True)
class OutputReading:
    """How the outputs after a prompt's text are read: the parsers of thoughts and calls that fit the model and the
    request. Each output gets parsers of its own."""

    prompt: str
    tokenizer: TextTokenizer
    use: ToolUse | None
    reasoning: type[ReasoningParser] | None
    reasoning_field: ReasoningField

    @property
    def markers(self) -> frozenset[str]:
        """The texts that must reach the parsers, also if they are special tokens."""
        of_calls = () if self.use is None else self.use.parser.markers
        return frozenset((*of_calls, *(() if self.reasoning is None else self.reasoning.markers)))

    def new_reader(self, *, with_thoughts: bool = True) -> OutputReader:
        """Return the reader of one output."""
        return OutputReader(
            None if self.reasoning is None else self.reasoning(self.prompt),
            None if self.use is None else self.use.parser(self.use.schemas),
            is_parallel=self.use is None or self.use.is_parallel,
            with_thoughts=with_thoughts,
        )

    def new_counter(self, sequence: Sequence) -> ThoughtCounter:
        """Return the counter of a sequence's thoughts."""
        assert self.reasoning is not None, "only thoughts are counted"
        prompt_ids, markers = sequence.request.prompt_ids, frozenset(self.reasoning.markers)
        detokenizer = make_detokenizer(self.tokenizer, prompt_ids, skip_special=True, markers=markers)
        return ThoughtCounter(self.reasoning(self.prompt), detokenizer)


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
