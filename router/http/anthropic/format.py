"""Format of answers of /v1/messages: the whole message, and the events of its stream."""

from __future__ import annotations

from collections import abc
from typing import ClassVar, TypeVar

import msgspec
from msgspec import UnsetType

from ....metadata.errors import BatonError
from ...requests.request import Delta, Request, Sequence
from ...text.tokenizer import TextTokenizer
from ..generation.output import OutputReader, OutputReading
from ..generation.types import CompletionTokensDetails, Usage
from ..openai.format import AnswerFormat
from ..server.errors import messages_body_of
from ..server.sse import named_event
from .blocks import MessageBlocks
from .types import (
    MessageAnswer,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputBlock,
    Ping,
    ThinkingTokens,
    WholeUsage,
)

_Usage = TypeVar("_Usage", bound=MessageUsage)
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
        super().__init__(response_id, model, tokenizer, num_logprobs=None, with_ids=False)
        self._max_tokens = max_tokens
        self._reader = OutputReader(reading, with_thoughts=shows_thoughts)
        self._blocks = MessageBlocks(self._reader)
        self._end: Delta | None = None  # the last output of a stream

    def usage_of(self, requests: abc.Sequence[Request]) -> Usage:
        num_thoughts = sum(self._reader.num_thoughts(request.sequences[0]) for request in requests)
        details = CompletionTokensDetails(num_thoughts)
        return msgspec.structs.replace(super().usage_of(requests), completion_tokens_details=details)

    def chunk(self, index: int, sequence: Sequence, delta: Delta, usage: Usage | UnsetType | None) -> bytes:
        del index, usage
        opening = b""
        if self._end is None:
            message = self._message([], None, self.usage_of([sequence.request]))
            opening = _events(MessageStart(message), Ping())
        self._end = delta
        return opening + _events(*self._blocks.events(delta.text, is_last=delta.finish_reason is not None))

    def ended(self, requests: abc.Sequence[Request], *, with_usage: bool) -> bytes:
        del with_usage  # it always has it
        assert self._end is not None, f"{self.response_id} ended without output"
        reason = self._reason_of(self._end, requests[0])
        return _events(MessageDelta(reason, _usage_of(self.usage_of(requests), MessageUsage)), MessageStop())

    def failed(self, error: BatonError) -> bytes:
        return named_event("error", messages_body_of(error, request_id=self.response_id))

    def whole(self, outputs: abc.Sequence[tuple[Sequence, Delta]], usage: Usage) -> bytes:
        ((sequence, delta),) = outputs
        content = self._blocks.whole(delta.text)
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


def _events(*events: MessageEvent) -> bytes:
    return b"".join(named_event(str(each.__struct_config__.tag), each) for each in events)


def _usage_of(usage: Usage, kind: type[_Usage]) -> _Usage:
    num_cached, thoughts = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
    return kind(
        input_tokens=usage.prompt_tokens - num_cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=ThinkingTokens(0 if thoughts is None else thoughts.reasoning_tokens),
        cache_read_input_tokens=num_cached,
    )
