"""Format of answers of /v1/responses: the whole response, and the events of its stream."""

from __future__ import annotations

import itertools
from collections import abc
from typing import Any

import msgspec
from msgspec import UnsetType

from ....metadata.errors import BatonError
from ...requests.request import Delta, Request, Sequence
from ...text.tokenizer import TextTokenizer
from ..generation.output import OutputReader, OutputReading
from ..generation.types import CompletionTokensDetails, Usage
from ..openai.format import AnswerFormat
from ..server.errors import body_of
from ..server.sse import named_event
from .output import ResponseOutput
from .tools import ResponseTools
from .types import (
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    OutputItem,
    ResponseAnswer,
    ResponseEvent,
    ResponseFault,
    ResponseFunction,
    ResponsesRequest,
    ResponseTool,
    ResponseUsage,
    Status,
)

_encode = msgspec.json.Encoder().encode


class ResponsesFormat(AnswerFormat):
    """Answers of /v1/responses. They have one sequence. Its thoughts, texts and calls are items of their own."""

    def __init__(
        self,
        response_id: str,
        body: ResponsesRequest,
        tools: ResponseTools,
        tokenizer: TextTokenizer,
        reading: OutputReading | None,
    ) -> None:
        super().__init__(response_id, body.model, tokenizer, num_logprobs=None, with_ids=False)
        self._body = body
        self._reader = OutputReader(reading)
        self._numbers = itertools.count()  # of the events of a stream
        self._output = ResponseOutput(self._reader, tools, response_id, self._numbers)
        self._end: Delta | None = None  # the last output of a stream

    def usage_of(self, requests: abc.Sequence[Request]) -> Usage:
        num_thoughts = sum(self._reader.num_thoughts(request.sequences[0]) for request in requests)
        details = CompletionTokensDetails(num_thoughts)
        return msgspec.structs.replace(super().usage_of(requests), completion_tokens_details=details)

    def chunk(self, index: int, sequence: Sequence, delta: Delta, usage: Usage | UnsetType | None) -> bytes:
        del index, sequence, usage
        opening = b"" if self._end is not None else self._opening()
        self._end = delta
        return opening + _events(self._output.events(delta.text, is_last=delta.finish_reason is not None))

    def ended(self, requests: abc.Sequence[Request], *, with_usage: bool) -> bytes:
        del with_usage  # it always has it
        assert self._end is not None, f"{self.response_id} ended without output"
        status = _status_of(self._end)
        events = _events(self._output.end(status))
        response = self._response(status, self._output.items, self.usage_of(requests))
        return events + self._event(f"response.{status}", response)

    def failed(self, error: BatonError) -> bytes:
        detail = body_of(error).error
        fault = ResponseFault(detail.code or detail.type, detail.message)
        opening = b"" if self._end is not None else self._opening()  # clients take no other event as the first one
        return opening + self._event("response.failed", self._response("failed", self._output.items, None, fault))

    def whole(self, outputs: abc.Sequence[tuple[Sequence, Delta]], usage: Usage) -> bytes:
        ((_, delta),) = outputs
        status = _status_of(delta)
        return _encode(self._response(status, self._output.whole(delta.text, status), usage))

    def _opening(self) -> bytes:
        empty = self._response("in_progress", [], None)
        return self._event("response.created", empty) + self._event("response.in_progress", empty)

    def _event(self, kind: Any, response: ResponseAnswer) -> bytes:
        """Return an event about the whole response."""
        return _events([ResponseEvent(type=kind, sequence_number=next(self._numbers), response=response)])

    def _response(
        self, status: Status, output: list[OutputItem], usage: Usage | None, fault: ResponseFault | None = None
    ) -> ResponseAnswer:
        body = self._body
        text_format = body.text.format if body.text is not None and body.text.format is not None else None
        return ResponseAnswer(
            id=self.response_id,
            created_at=self._created,
            status=status,
            model=self._model,
            output=output,
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
