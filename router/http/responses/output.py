"""The output of one response: the events of its parser as events of a stream, or as the whole list of items.

    Thought                    an item of type reasoning
    Content                    a message
    CallBegin, CallArguments   an item of type function_call, or custom_tool_call, whose input comes when it is whole
    CallBroken                 stream: the item ends as incomplete
                               whole list: its text is that of a message, and the call is left out

An item ends when one of another type begins, and with its call. An output without any item is an empty message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from ...reasoning_parsers.base import Thought
from ...requests.output_parser import OutputEvent
from ...tool_parsers.base import CallArguments, CallBegin, CallBroken, CallEnd, Content
from ..generation.output import OutputReader, WholeCall, WholePart
from .tools import CalledTool, ResponseTools, custom_input
from .types import (
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    ResponseEvent,
    ResponseText,
    ResponseThoughts,
    Status,
)


class ResponseOutput:
    """The items of one response, as they come. `reader` reads its text. `tools` are those that the model may call.
    `numbers` counts the events of its stream."""

    def __init__(self, reader: OutputReader, tools: ResponseTools, response_id: str, numbers: Iterator[int]) -> None:
        self._reader = reader
        self._tools = tools
        self._id_suffix = response_id.partition("-")[2]
        self._numbers = numbers
        self._drafts: list[_Draft] = []
        self._open: _Draft | None = None  # the last item, until it ends
        self._events: list[ResponseEvent] = []

    @property
    def items(self) -> list[OutputItem]:
        """The items so far. One that has not ended is incomplete."""
        return [draft.item(draft.status or "incomplete") for draft in self._drafts]

    def events(self, text: str, *, is_last: bool) -> list[ResponseEvent]:
        """Return what the next part of the text adds to the output."""
        return self._read(self._reader.events(text, is_last=is_last))

    def end(self, status: Status) -> list[ResponseEvent]:
        """The output has ended. Return the events that end its last item. `status`: that of the response."""
        if not self._drafts:
            self._begin(_MessageDraft(self._next_suffix))
        self._end(status)
        return self._take()

    def whole(self, text: str, status: Status) -> list[OutputItem]:
        """Return the items of a whole output. `status`: that of the response."""
        self._read(self._reader.whole(text))
        self.end(status)
        return self.items

    def _read(self, events: Iterable[OutputEvent | WholePart]) -> list[ResponseEvent]:
        for event in events:
            match event:
                case Thought():
                    if not isinstance(self._open, _ReasoningDraft):
                        self._begin(_ReasoningDraft(self._next_suffix))
                    self._add(event.text)
                case Content():
                    if not isinstance(self._open, _MessageDraft):
                        self._begin(_MessageDraft(self._next_suffix))
                    self._add(event.text)
                case CallBegin():
                    self._begin_call(event)
                case CallArguments():
                    self._add(event.text)
                case CallEnd():
                    self._end("completed")
                case CallBroken():
                    self._end("incomplete")
                case WholeCall():
                    self._begin_call(event)
                    self._add(event.arguments)
                    self._end("completed")
        return self._take()

    @property
    def _next_suffix(self) -> str:
        return f"{self._id_suffix}_{len(self._drafts)}"

    def _begin_call(self, call: CallBegin | WholeCall) -> None:
        called = self._tools.called(call.name)
        kind = _CustomCallDraft if called.is_custom else _CallDraft
        self._begin(kind(self._next_suffix, call.call_id, called))

    def _begin(self, draft: _Draft) -> None:
        self._end("completed")
        self._drafts.append(draft)
        self._open = draft
        self._emit_item("response.output_item.added", draft.item("in_progress"))
        if (part := draft.part()) is not None:
            self._emit_part("response.content_part.added", part=part)

    def _add(self, text: str) -> None:
        draft = self._drafts[-1]
        draft.texts.append(text)
        if not isinstance(draft, _CustomCallDraft):
            self._emit_part(f"{draft.text_event}.delta", delta=text, logprobs=draft.logprobs)

    def _end(self, status: Status) -> None:
        """End the last item, if it has not ended."""
        draft, self._open = self._open, None
        if draft is None:
            return
        draft.status = status
        if (part := draft.part()) is not None:
            self._emit_part(f"{draft.text_event}.done", text=draft.text, logprobs=draft.logprobs)
            self._emit_part("response.content_part.done", part=part)
        elif isinstance(draft, _CustomCallDraft):
            given = draft.given(status)
            self._emit_part(f"{draft.text_event}.delta", delta=given)
            self._emit_part(f"{draft.text_event}.done", input=given)
        else:
            self._emit_part(f"{draft.text_event}.done", arguments=draft.text)
        self._emit_item("response.output_item.done", draft.item(status))

    def _emit_part(self, kind: Any, **fields: Any) -> None:
        """Add an event about the text, the part or the arguments of the last item."""
        draft = self._drafts[-1]
        self._events.append(
            ResponseEvent(
                type=kind,
                sequence_number=next(self._numbers),
                output_index=len(self._drafts) - 1,
                item_id=draft.item_id,
                content_index=draft.content_index,
                **fields,
            )
        )

    def _emit_item(self, kind: Any, item: OutputItem) -> None:
        """Add an event about the whole last item."""
        self._events.append(
            ResponseEvent(type=kind, sequence_number=next(self._numbers), output_index=len(self._drafts) - 1, item=item)
        )

    def _take(self) -> list[ResponseEvent]:
        events, self._events = self._events, []
        return events


class _Draft(ABC):
    """An item that the model has begun. `status` is None until it has ended.

    `text_event` begins the names of the events about its text, or arguments; the fields below it are theirs.
    """

    text_event: ClassVar[str]
    content_index: ClassVar[int | UnsetType] = 0
    logprobs: ClassVar[list[Any] | UnsetType] = UNSET

    def __init__(self, item_id: str) -> None:
        self.item_id = item_id
        self.status: Status | None = None
        self.texts: list[str] = []

    @property
    def text(self) -> str:
        """The text, or the arguments, so far."""
        return "".join(self.texts)

    @abstractmethod
    def part(self) -> ResponseText | ResponseThoughts | None:
        """Return the item's only part, None if it has none."""

    @abstractmethod
    def item(self, status: Status) -> OutputItem:
        """Return the item. It is empty while it is in progress."""


class _MessageDraft(_Draft):
    """A message."""

    text_event = "response.output_text"
    logprobs: ClassVar[list[Any] | UnsetType] = []

    def __init__(self, id_suffix: str) -> None:
        super().__init__(f"msg_{id_suffix}")

    def part(self) -> ResponseText:
        return ResponseText(self.text)

    def item(self, status: Status) -> OutputMessage:
        return OutputMessage(id=self.item_id, status=status, content=[] if status == "in_progress" else [self.part()])


class _ReasoningDraft(_Draft):
    """Thoughts."""

    text_event = "response.reasoning_text"

    def __init__(self, id_suffix: str) -> None:
        super().__init__(f"rs_{id_suffix}")

    def part(self) -> ResponseThoughts:
        return ResponseThoughts(self.text)

    def item(self, status: Status) -> OutputReasoning:
        return OutputReasoning(id=self.item_id, status=status, content=[] if status == "in_progress" else [self.part()])


class _CallDraft(_Draft):
    """A call of a function, which has no parts."""

    text_event = "response.function_call_arguments"
    content_index: ClassVar[int | UnsetType] = UNSET

    def __init__(self, id_suffix: str, call_id: str, called: CalledTool) -> None:
        super().__init__(f"fc_{id_suffix}")
        self._names = {"call_id": call_id, "name": called.name}
        if called.namespace is not None:
            self._names["namespace"] = called.namespace

    def part(self) -> None:
        return None

    def item(self, status: Status) -> OutputItem:
        return OutputCall(id=self.item_id, status=status, arguments=self.text, **self._names)


class _CustomCallDraft(_CallDraft):
    """A call of a custom tool. Its text is the arguments, in which the input stands."""

    text_event = "response.custom_tool_call_input"

    def given(self, status: Status) -> str:
        """Return the input. It is empty while the call is not whole."""
        return custom_input(self.text) if status == "completed" else ""

    def item(self, status: Status) -> OutputItem:
        return OutputCustomCall(id=self.item_id, status=status, input=self.given(status), **self._names)
