"""Format of answers of /v1/messages: the whole message, and the events of its stream.

A part of the output (generation/output.py) is a block: of type thinking, text, or tool_use. In a stream, the block of a
broken call ends with incomplete input.
"""

from __future__ import annotations

from collections import abc
from typing import ClassVar, TypeVar

import msgspec
from msgspec import Raw, UnsetType

from ....metadata.errors import BatonError
from ...requests.delta import Delta
from ...requests.request import Request, Sequence
from ...text.tokenizer import TextTokenizer
from ..generation.answers import AnswerFormat
from ..generation.output import OutputPart, OutputReading, PartBegun, PartDelta, PartEvent
from ..generation.types import Usage
from ..server.errors import messages_body_of
from ..server.sse import named_event
from .types import (
    BlockDelta,
    BlockEvent,
    BlockStart,
    BlockStop,
    InputDelta,
    MessageAnswer,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputBlock,
    OutputText,
    OutputThinking,
    OutputToolUse,
    Ping,
    SignatureDelta,
    TextDelta,
    ThinkingDelta,
    ThinkingTokens,
    WholeUsage,
)

_Usage = TypeVar("_Usage", bound=MessageUsage)
_DELTAS = {"thought": ThinkingDelta, "text": TextDelta, "call": InputDelta}
_encode = msgspec.json.Encoder().encode


class MessagesFormat(AnswerFormat):
    """Answers of /v1/messages. They have one sequence. Unless `shows_thoughts`, thoughts are left out, and counted.
    `max_tokens` is what the client asked for."""

    ends_with_context: ClassVar[bool] = True
    keep_alive: ClassVar[bytes] = named_event("ping", Ping())

    def __init__(
        self,
        response_id: str,
        model: str,
        tokenizer: TextTokenizer,
        reading: OutputReading | None,
        *,
        max_tokens: int,
        shows_thoughts: bool,
    ) -> None:
        super().__init__(response_id, model, tokenizer, reading)
        self._max_tokens = max_tokens
        self._reader = self._new_reader(with_thoughts=shows_thoughts)
        self._end: Delta | None = None  # the last output of a stream

    def chunk(self, index: int, sequence: Sequence, delta: Delta, usage: Usage | UnsetType | None) -> bytes:
        del index, usage
        opening = b""
        if self._end is None:
            message = self._message([], None, self.usage_of([sequence.request]))
            opening = _events([MessageStart(message), Ping()])
        self._end = delta
        is_last = delta.finish_reason is not None
        events = self._reader.read(delta.text, is_last=is_last)
        return opening + _events(block_events([*events, *self._reader.end()] if is_last else events))

    def ended(self, requests: abc.Sequence[Request], *, with_usage: bool) -> bytes:
        del with_usage  # it always has it
        assert self._end is not None, f"{self.response_id} ended without output"
        reason = self._reason_of(self._end, requests[0])
        return _events([MessageDelta(reason, _usage_of(self.usage_of(requests), MessageUsage)), MessageStop()])

    def failed(self, error: BatonError) -> bytes:
        return named_event("error", messages_body_of(error, request_id=self.response_id))

    def whole(self, outputs: abc.Sequence[tuple[Sequence, Delta]], usage: Usage) -> bytes:
        ((sequence, delta),) = outputs
        content = [block_of(part) for part in self._reader.whole(delta.text)]
        return _encode(self._message(content, self._reason_of(delta, sequence.request), usage))

    def _message(self, content: list[OutputBlock], reason: MessageEnd | None, usage: Usage) -> MessageAnswer:
        return MessageAnswer(
            id=self.response_id,
            model=self._model,
            content=content,
            stop_reason=None if reason is None else reason.stop_reason,
            stop_sequence=None if reason is None else reason.stop_sequence,
            usage=_usage_of(usage, WholeUsage),
        )

    def _reason_of(self, end: Delta, request: Request) -> MessageEnd:
        """Return why an output ended: at max_tokens or the end of the context, after a whole call, at a stop string, or
        at a stop token."""
        if end.finish_reason == "length":
            is_full = request.params.max_tokens < self._max_tokens
            return MessageEnd("model_context_window_exceeded" if is_full else "max_tokens", None)
        if self._reader.has_call:
            return MessageEnd("tool_use", None)
        if isinstance(end.stop_reason, str):
            return MessageEnd("stop_sequence", end.stop_reason)
        return MessageEnd("end_turn", None)


def block_events(events: abc.Iterable[PartEvent]) -> abc.Iterator[BlockEvent]:
    """Yield the events of a stream for new events of an output."""
    for each in events:
        part = each.part
        if isinstance(each, PartBegun):
            yield BlockStart(part.index, block_of(part))
        elif isinstance(each, PartDelta):
            yield BlockDelta(part.index, _DELTAS[part.kind](each.text))
        else:
            if part.kind == "thought":
                yield BlockDelta(part.index, SignatureDelta())
            yield BlockStop(part.index)


def block_of(part: OutputPart) -> OutputBlock:
    """Return a part as a block. One that has only begun has an empty text, or no input."""
    if part.call is not None:
        return OutputToolUse(part.call.call_id, part.call.name, Raw(part.text.encode() or b"{}"))
    return OutputThinking(part.text) if part.kind == "thought" else OutputText(part.text)


def _events(events: abc.Iterable[MessageEvent]) -> bytes:
    return b"".join(named_event(str(each.__struct_config__.tag), each) for each in events)


def _usage_of(usage: Usage, kind: type[_Usage]) -> _Usage:
    num_cached, thoughts = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
    return kind(
        input_tokens=usage.prompt_tokens - num_cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=ThinkingTokens(0 if thoughts is None else thoughts.reasoning_tokens),
        cache_read_input_tokens=num_cached,
    )
