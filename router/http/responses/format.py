"""Format of answers of /v1/responses: the whole response, and the events of its stream.

A part of the output (generation/output.py) is an item:

    thoughts   reasoning
    text       message
    a call     function_call, or custom_tool_call, whose input comes when the call is whole

In a stream, the item of a broken call ends as incomplete. An output without any part is an empty message.
"""

from __future__ import annotations

import itertools
from collections import abc
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from ....metadata.errors import BatonError
from ...requests.delta import Delta
from ...requests.request import Request, Sequence
from ...text.tokenizer import TextTokenizer
from ..generation.answers import AnswerFormat
from ..generation.output import OutputPart, OutputReading, PartBegun, PartEnded, PartEvent
from ..generation.types import Usage
from ..server.errors import body_of
from ..server.sse import named_event
from .tools import ResponseTools, custom_input
from .types import (
    IncompleteDetails,
    InputDetails,
    OutputCall,
    OutputCustomCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    ResponseAnswer,
    ResponseEvent,
    ResponseFault,
    ResponseFunction,
    ResponsesRequest,
    ResponseText,
    ResponseThoughts,
    ResponseTool,
    ResponseUsage,
    Status,
)

_encode = msgspec.json.Encoder().encode


class ResponsesFormat(AnswerFormat):
    """Answers of /v1/responses. They have one sequence."""

    def __init__(
        self,
        response_id: str,
        body: ResponsesRequest,
        tools: ResponseTools,
        tokenizer: TextTokenizer,
        reading: OutputReading | None,
    ) -> None:
        super().__init__(response_id, body.model, tokenizer, reading)
        self._body = body
        self._reader = self._new_reader()
        self._items = ResponseItems(tools, response_id)
        self._end: Delta | None = None  # the last output of a stream

    def chunk(self, index: int, sequence: Sequence, delta: Delta, usage: Usage | UnsetType | None) -> bytes:
        del index, sequence, usage
        opening = b"" if self._end is not None else self._opening()
        self._end = delta
        events = self._reader.read(delta.text, is_last=delta.finish_reason is not None)
        return opening + _events(self._items.events(events))

    def ended(self, requests: abc.Sequence[Request], *, with_usage: bool) -> bytes:
        del with_usage  # it always has it
        assert self._end is not None, f"{self.response_id} ended without output"
        status = _status_of(self._end)
        parts, events = self._reader.parts, self._reader.end(is_whole=status == "completed")
        if not parts:
            parts = [_empty_message(status)]
            events = [PartBegun(parts[0]), PartEnded(parts[0])]
        last = _events(self._items.events(events))
        return last + self._event(f"response.{status}", self._response(status, parts, self.usage_of(requests)))

    def failed(self, error: BatonError) -> bytes:
        detail = body_of(error).error
        fault = ResponseFault(detail.code or detail.type, detail.message)
        opening = b"" if self._end is not None else self._opening()  # clients take no other event as the first one
        return opening + self._event("response.failed", self._response("failed", self._reader.parts, None, fault))

    def whole(self, outputs: abc.Sequence[tuple[Sequence, Delta]], usage: Usage) -> bytes:
        ((_, delta),) = outputs
        status = _status_of(delta)
        parts = self._reader.whole(delta.text, is_whole=status == "completed") or [_empty_message(status)]
        return _encode(self._response(status, parts, usage))

    def _opening(self) -> bytes:
        empty = self._response("in_progress", [], None)
        return self._event("response.created", empty) + self._event("response.in_progress", empty)

    def _event(self, kind: Any, response: ResponseAnswer) -> bytes:
        """Return an event about the whole response."""
        return _events([ResponseEvent(type=kind, sequence_number=self._items.next_number(), response=response)])

    def _response(
        self, status: Status, parts: list[OutputPart], usage: Usage | None, fault: ResponseFault | None = None
    ) -> ResponseAnswer:
        body = self._body
        text_format = body.text.format if body.text is not None and body.text.format is not None else None
        return ResponseAnswer(
            id=self.response_id,
            created_at=self._created,
            status=status,
            model=self._model,
            output=[self._items.item(part) for part in parts],
            usage=None if usage is None else _usage_of(usage),
            error=fault,
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            tool_choice=body.tool_choice or "auto",
            tools=[_shown_tool(tool) for tool in body.tools or ()],
            text={"format": {"type": "text"} if text_format is None else _shown(text_format)},
            metadata=body.metadata or {},
        )


class _Kind(NamedTuple):
    """How items of one kind are called: the beginning of their ids, and of the names of the events about their text."""

    prefix: str
    event: str


_KINDS = {
    "thought": _Kind("rs", "response.reasoning_text"),
    "text": _Kind("msg", "response.output_text"),
    "call": _Kind("fc", "response.function_call_arguments"),
}


class ResponseItems:
    """The items of one response, and the events about them. `tools` are those that the model may call."""

    def __init__(self, tools: ResponseTools, response_id: str) -> None:
        self._tools = tools
        self._id_suffix = response_id.partition("-")[2]
        self._numbers = itertools.count()

    def next_number(self) -> int:
        """Return the number of the next event of the stream."""
        return next(self._numbers)

    def item(self, part: OutputPart, status: Status | None = None) -> OutputItem:
        """Return a part as an item. Without a status it is completed if it is whole, and incomplete otherwise."""
        status = status or ("completed" if part.is_whole else "incomplete")
        item_id = self._id_of(part)
        if part.call is None:
            content: list[Any] = [] if status == "in_progress" else [_content_of(part)]
            kind = OutputReasoning if part.kind == "thought" else OutputMessage
            return kind(id=item_id, status=status, content=content)
        called = self._tools.called(part.call.name)
        names: dict[str, Any] = {"call_id": part.call.call_id, "name": called.name}
        if called.namespace is not None:
            names["namespace"] = called.namespace
        if called.is_custom:
            given = custom_input(part.text) if status == "completed" else ""
            return OutputCustomCall(id=item_id, status=status, input=given, **names)
        return OutputCall(id=item_id, status=status, arguments=part.text, **names)

    def events(self, events: abc.Iterable[PartEvent]) -> abc.Iterator[ResponseEvent]:
        """Yield the events of a stream for new events of an output."""
        for each in events:
            part = each.part
            is_custom = part.call is not None and self._tools.called(part.call.name).is_custom
            name = "response.custom_tool_call_input" if is_custom else _KINDS[part.kind].event
            if isinstance(each, PartBegun):
                yield self._of_item("response.output_item.added", part, self.item(part, "in_progress"))
                if part.call is None:
                    yield self._of_text("response.content_part.added", part, part=_content_of(part))
            elif isinstance(each, PartEnded):
                item = self.item(part)
                if isinstance(item, OutputCustomCall):
                    yield self._of_text(f"{name}.delta", part, delta=item.input)
                    yield self._of_text(f"{name}.done", part, input=item.input)
                elif isinstance(item, OutputCall):
                    yield self._of_text(f"{name}.done", part, arguments=item.arguments)
                else:
                    yield self._of_text(f"{name}.done", part, text=part.text, logprobs=_logprobs_of(part))
                    yield self._of_text("response.content_part.done", part, part=_content_of(part))
                yield self._of_item("response.output_item.done", part, item)
            elif not is_custom:
                yield self._of_text(f"{name}.delta", part, delta=each.text, logprobs=_logprobs_of(part))

    def _id_of(self, part: OutputPart) -> str:
        return f"{_KINDS[part.kind].prefix}_{self._id_suffix}_{part.index}"

    def _of_item(self, kind: Any, part: OutputPart, item: OutputItem) -> ResponseEvent:
        """Return an event about a whole item."""
        return ResponseEvent(type=kind, sequence_number=self.next_number(), output_index=part.index, item=item)

    def _of_text(self, kind: Any, about: OutputPart, **fields: Any) -> ResponseEvent:
        """Return an event about the text of an item, or the arguments."""
        return ResponseEvent(
            type=kind,
            sequence_number=self.next_number(),
            output_index=about.index,
            item_id=self._id_of(about),
            content_index=0 if about.call is None else UNSET,
            **fields,
        )


def _content_of(part: OutputPart) -> ResponseText | ResponseThoughts:
    return ResponseThoughts(part.text) if part.kind == "thought" else ResponseText(part.text)


def _logprobs_of(part: OutputPart) -> list[Any] | UnsetType:
    return [] if part.kind == "text" else UNSET


def _empty_message(status: Status) -> OutputPart:
    return OutputPart("text", 0, is_whole=status == "completed")


def _events(events: abc.Iterable[ResponseEvent]) -> bytes:
    return b"".join(named_event(event.type, event) for event in events)


def _shown(text_format: msgspec.Struct) -> dict[str, Any]:
    """Return a format as the client gave it."""
    fields = {name: getattr(text_format, name) for name in text_format.__struct_fields__}
    return {name: value for name, value in fields.items() if value is not None and value != msgspec.Raw()}


def _shown_tool(tool: ResponseTool) -> dict[str, Any]:
    """Return a tool as the client gave it. OpenAI's API gives two fields of each function, also as null."""
    always = {"parameters": None, "strict": None} if isinstance(tool, ResponseFunction) else {}
    return {**always, **msgspec.to_builtins(tool)}


def _status_of(end: Delta) -> Status:
    return "incomplete" if end.finish_reason == "length" else "completed"


def _usage_of(usage: Usage) -> ResponseUsage:
    thoughts = usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(0 if thoughts is None else thoughts.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
