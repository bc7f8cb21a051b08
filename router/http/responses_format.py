"""Format of answers of /v1/responses: the whole response, and the events of its stream."""

from __future__ import annotations

from collections import abc
from typing import Any

import msgspec
from msgspec import UnsetType

from ...metadata.errors import BatonError
from ..request import Delta, Request, Sequence
from ..text.tokenizer import TextTokenizer
from .answer_format import AnswerFormat
from .bare_answer import BareAnswer
from .errors import body_of
from .openai_types import CompletionTokensDetails, Usage
from .output_reader import OutputReading
from .responses_types import (
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    OutputMessage,
    ResponseAnswer,
    ResponseEvent,
    ResponseFault,
    ResponsesRequest,
    ResponseText,
    ResponseUsage,
    Status,
)
from .sse import named_event

_encode = msgspec.json.Encoder().encode


class ResponsesFormat(AnswerFormat):
    """Answers of /v1/responses. They have one sequence, one message and one part of text. Thoughts are left out."""

    def __init__(
        self, response_id: str, body: ResponsesRequest, tokenizer: TextTokenizer, reading: OutputReading | None
    ) -> None:
        super().__init__(response_id, body.model, tokenizer, num_logprobs=None, with_ids=False)
        self._body = body
        self._text = BareAnswer(reading)
        self._item_id = f"msg-{response_id.partition('-')[2]}"
        self._place: dict[str, Any] = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._num_events = 0
        self._texts: list[str] = []  # of a stream
        self._end: Delta | None = None  # the last output of a stream

    def chunk(self, index: int, sequence: Sequence, delta: Delta, usage: Usage | UnsetType | None) -> bytes:
        del index, sequence, usage
        opening = b"" if self._end is not None else self._opening()
        self._end = delta
        text = self._text.of(delta)
        if not text:
            return opening
        self._texts.append(text)
        return opening + self._event("response.output_text.delta", delta=text, logprobs=[], **self._place)

    def usage_of(self, requests: abc.Sequence[Request]) -> Usage:
        num_thoughts = sum(self._text.num_thoughts(request.sequences[0]) for request in requests)
        details = CompletionTokensDetails(num_thoughts)
        return msgspec.structs.replace(super().usage_of(requests), completion_tokens_details=details)

    def ended(self, requests: abc.Sequence[Request], *, with_usage: bool) -> bytes:
        del with_usage  # it always has it
        assert self._end is not None, f"{self.response_id} ended without output"
        status = _status_of(self._end)
        text = "".join(self._texts)
        item = self._item(status, text)
        response = self._response(status, [item], self.usage_of(requests))
        return b"".join(
            (
                self._event("response.output_text.done", text=text, logprobs=[], **self._place),
                self._event("response.content_part.done", part=ResponseText(text), **self._place),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{status}", response=response),
            )
        )

    def failed(self, error: BatonError) -> bytes:
        detail = body_of(error).error
        output = [self._item("incomplete", "".join(self._texts))] if self._texts else []
        fault = ResponseFault(detail.code or detail.type, detail.message)
        return self._event("response.failed", response=self._response("failed", output, None, fault))

    def whole(self, outputs: abc.Sequence[tuple[Sequence, Delta]], usage: Usage) -> bytes:
        ((_, delta),) = outputs
        status = _status_of(delta)
        return _encode(self._response(status, [self._item(status, self._text.of(delta))], usage))

    def _opening(self) -> bytes:
        empty = self._response("in_progress", [], None)
        item = OutputMessage(id=self._item_id, status="in_progress", content=[])
        return b"".join(
            (
                self._event("response.created", response=empty),
                self._event("response.in_progress", response=empty),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", part=ResponseText(""), **self._place),
            )
        )

    def _event(self, kind: Any, **fields: Any) -> bytes:
        event = ResponseEvent(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return named_event(kind, event)

    def _item(self, status: Status, text: str) -> OutputMessage:
        return OutputMessage(id=self._item_id, status=status, content=[ResponseText(text)])

    def _response(
        self, status: Status, output: list[OutputMessage], usage: Usage | None, fault: ResponseFault | None = None
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
            text={"format": {"type": "text"} if text_format is None else _shown(text_format)},
            metadata=body.metadata or {},
        )


def _shown(text_format: msgspec.Struct) -> dict[str, Any]:
    """Return a format as the client gave it."""
    fields = {name: getattr(text_format, name) for name in text_format.__struct_fields__}
    return {name: value for name, value in fields.items() if value is not None and value != msgspec.Raw()}


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
