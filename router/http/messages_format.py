"""Format of answers of /v1/messages: the whole message, and the events of its stream."""

from __future__ import annotations

from collections import abc

import msgspec
from msgspec import UnsetType

from ...metadata.errors import BatonError
from ..request import Delta, Request, Sequence
from ..text.tokenizer import TextTokenizer
from .answer_format import AnswerFormat
from .bare_answer import BareAnswer
from .errors import messages_body_of
from .messages_types import (
    BlockStart,
    BlockStop,
    MessageAnswer,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputText,
    Ping,
)
from .openai_types import Usage
from .output_reader import OutputReading
from .sse import named_event

_encode = msgspec.json.Encoder().encode
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta",'


class MessagesFormat(AnswerFormat):
    """Answers of /v1/messages. They have one sequence and one block of text. Thoughts are left out."""

    def __init__(self, response_id: str, model: str, tokenizer: TextTokenizer, reading: OutputReading | None) -> None:
        super().__init__(response_id, model, tokenizer, num_logprobs=None, with_ids=False)
        self._text = BareAnswer(reading)
        self._end: Delta | None = None  # the last output of a stream

    def chunk(self, index: int, sequence: Sequence, delta: Delta, usage: Usage | UnsetType | None) -> bytes:
        del index, usage
        opening = b""
        if self._end is None:
            message = self._message([], None, self.usage_of([sequence.request]))
            opening = _events(MessageStart(message), BlockStart(0, OutputText("")), Ping())
        self._end = delta
        text = self._text.of(delta)
        return opening + (_DELTA + b'"text":' + _encode(text) + b"}}\n\n" if text else b"")

    def ended(self, requests: abc.Sequence[Request], *, with_usage: bool) -> bytes:
        del with_usage  # it always has it
        assert self._end is not None, f"{self.response_id} ended without output"
        usage = _usage_of(self.usage_of(requests))
        return _events(BlockStop(0), MessageDelta(_reason_of(self._end), usage), MessageStop())

    def failed(self, error: BatonError) -> bytes:
        return named_event("error", messages_body_of(error, request_id=self.response_id))

    def whole(self, outputs: abc.Sequence[tuple[Sequence, Delta]], usage: Usage) -> bytes:
        ((_, delta),) = outputs
        text = self._text.of(delta)
        return _encode(self._message([OutputText(text)] if text else [], delta, usage))

    def _message(self, content: list[OutputText], end: Delta | None, usage: Usage) -> MessageAnswer:
        reason = None if end is None else _reason_of(end)
        return MessageAnswer(
            id=self.response_id,
            model=self._model,
            content=content,
            stop_reason=None if reason is None else reason.stop_reason,
            stop_sequence=None if reason is None else reason.stop_sequence,
            usage=_usage_of(usage),
        )


def _events(*events: MessageEvent) -> bytes:
    return b"".join(named_event(str(each.__struct_config__.tag), each) for each in events)


def _reason_of(end: Delta) -> MessageEnd:
    """Return why an output ended: at a stop string, at a stop token, or at max_tokens."""
    if end.finish_reason == "length":
        return MessageEnd("max_tokens", None)
    if isinstance(end.stop_reason, str):
        return MessageEnd("stop_sequence", end.stop_reason)
    return MessageEnd("end_turn", None)


def _usage_of(usage: Usage) -> MessageUsage:
    num_cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - num_cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=num_cached,
    )
