"""Formats of answers: bodies of /v1/completions and /v1/chat/completions, whole, and as the chunks of a stream.

Most chunks add only text. Such a chunk is a prepared prefix, the encoded text, and a suffix. If an output is read, its
parts (generation/output.py) are fields of a chat's message:

    thoughts         reasoning_content, or reasoning
    text             content
    calls            tool_calls; a call that breaks stays incomplete in a stream, and is left out of a whole message

The finish reason is tool_calls if the model stopped by itself and made a whole call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import abc
from typing import ClassVar

import msgspec
from msgspec import UNSET, Struct, UnsetType, structs

from ....metadata.errors import BatonError
from ....metadata.wire.request import FinishReason
from ...requests.delta import Delta
from ...requests.request import Request, Sequence
from ...text.detokenizer import TokenBytes
from ...text.tokenizer import TextTokenizer
from ..generation.answers import AnswerFormat, metrics_of
from ..generation.output import (
    OutputPart,
    OutputReader,
    OutputReading,
    PartBegun,
    PartDelta,
    PartEnded,
    PartEvent,
    ReasoningField,
)
from ..generation.tool_types import FunctionDelta, MadeCall, MadeFunction, ToolCallDelta
from ..generation.types import (
    AnswerMetrics,
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    LegacyLogprobs,
    Usage,
)
from ..server.sse import DONE, error_event, event
from .logprobs import LegacyColumns, chat_logprobs, joined

_encode = msgspec.json.Encoder().encode


class _OpenAIFormat(AnswerFormat):
    """Format of chunks. With `with_ids` answers carry token ids, with `with_metrics` the figures of speculation."""

    _chunk_object: ClassVar[str]
    _text_start: ClassVar[bytes]  # of a chunk that adds only text: the JSON between `index` and the text
    _text_end: ClassVar[bytes]  # and between the text and `logprobs`

    def __init__(
        self,
        response_id: str,
        model: str,
        tokenizer: TextTokenizer,
        reading: OutputReading | None,
        *,
        num_logprobs: int | None,
        with_ids: bool,
        with_metrics: bool = False,
    ) -> None:
        super().__init__(response_id, model, tokenizer, reading, num_logprobs=num_logprobs)
        self._with_ids = with_ids
        self._with_metrics = with_metrics
        self._prefixes: dict[int, bytes] = {}  # by index; present when the first chunk has been sent

    def ended(self, requests: abc.Sequence[Request], *, with_usage: bool) -> bytes:
        if not with_usage:
            return DONE
        return self.usage_chunk(self.usage_of(requests), self._metrics_of(requests)) + DONE

    def failed(self, error: BatonError) -> bytes:
        return error_event(error)

    @abstractmethod
    def usage_chunk(self, usage: Usage, metrics: AnswerMetrics | None) -> bytes:
        """Return the event with the token counts, which follows the output of all sequences."""

    def _metrics_of(self, requests: abc.Iterable[Request]) -> AnswerMetrics | None:
        return metrics_of(list(dict.fromkeys(requests))) if self._with_metrics else None

    def _prepare(self, index: int) -> None:
        """Prepare the prefix of the sequence's chunks that add only text."""
        head = {"id": self.response_id, "object": self._chunk_object, "created": self._created, "model": self._model}
        self._prefixes[index] = b"data: " + _encode(head)[:-1] + b',"choices":[{"index":%d,' % index + self._text_start

    def _text_chunk(self, index: int, delta: Delta, usage: Usage | UnsetType | None) -> bytes | None:
        """Return the event if the chunk adds only text, empty if it adds nothing; None if it adds more."""
        if delta.finish_reason is not None or self.num_logprobs is not None or self._with_ids or delta.drafts:
            return None
        if not delta.text:
            return b""
        if isinstance(usage, Usage):
            return None
        tail = b'}],"usage":null}\n\n' if usage is None else b"}]}\n\n"
        return self._prefixes[index] + _encode(delta.text) + self._text_end + tail


class CompletionFormat(_OpenAIFormat):
    """Answers of /v1/completions. `prompt_texts` holds the prompt of each request, by its id, if prompts are echoed.
    `given_texts`: ids of those whose prompts came as texts, to which the tokenizer may have added special tokens.
    Without `has_output` the answer is the echoed prompts alone."""

    _chunk_object = "text_completion"
    _text_start = b'"text":'
    _text_end = b',"logprobs":null,"finish_reason":null'

    def __init__(
        self,
        response_id: str,
        model: str,
        tokenizer: TextTokenizer,
        *,
        num_logprobs: int | None,
        with_ids: bool,
        with_metrics: bool = False,
        prompt_texts: dict[str, str] | None,
        given_texts: abc.Container[str] = (),
        has_output: bool = True,
    ) -> None:
        super().__init__(
            response_id, model, tokenizer, None, num_logprobs=num_logprobs, with_ids=with_ids, with_metrics=with_metrics
        )
        self._prompt_texts = prompt_texts
        self._given_texts = given_texts
        self._has_output = has_output
        self._columns: dict[int, LegacyColumns] = {}  # by index

    def usage_of(self, requests: abc.Sequence[Request]) -> Usage:
        usage = super().usage_of(requests)
        if self._has_output:
            return usage
        return structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)

    def chunk(self, index: int, sequence: Sequence, delta: Delta, usage: Usage | UnsetType | None) -> bytes:
        delta = self._shown(delta)
        is_first = index not in self._prefixes
        if is_first:
            self._prepare(index)
        elif (text := self._text_chunk(index, delta, usage)) is not None:
            return text
        return event(self._body([self._choice(index, sequence, delta, is_first=is_first)], usage))

    def usage_chunk(self, usage: Usage, metrics: AnswerMetrics | None) -> bytes:
        return event(structs.replace(self._body([], usage), metrics=metrics))

    def whole(self, outputs: abc.Sequence[tuple[Sequence, Delta]], usage: Usage) -> bytes:
        choices = [
            self._choice(index, sequence, self._shown(delta), is_first=True)
            for index, (sequence, delta) in enumerate(outputs)
        ]
        metrics = self._metrics_of(sequence.request for sequence, _ in outputs)
        return _encode(structs.replace(self._body(choices, usage), metrics=metrics))

    def _body(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(
            id=self.response_id,
            object="text_completion",
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
        )

    def _shown(self, delta: Delta) -> Delta:
        """Return what the answer shows of new output."""
        if self._has_output:
            return delta
        return Delta("", [], [], "length" if delta.finish_reason is not None else None)

    def _choice(self, index: int, sequence: Sequence, delta: Delta, *, is_first: bool) -> CompletionChoice:
        request = sequence.request
        text = delta.text
        if is_first and self._prompt_texts is not None:
            text = self._prompt_texts[request.rid] + text
        logprobs: LegacyLogprobs | None = None
        if self.num_logprobs is not None:
            logprobs = self._logprobs(index, sequence, delta, self.num_logprobs, is_first=is_first)
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._with_ids else None,
            prompt_token_ids=request.prompt_ids.tolist() if self._with_ids and is_first else None,
            drafts=list(delta.drafts) or None,
        )

    def _logprobs(
        self, index: int, sequence: Sequence, delta: Delta, num_logprobs: int, *, is_first: bool
    ) -> LegacyLogprobs | None:
        """Return the columns of new output, behind those of the prompt if it is echoed; None if some are missing."""
        request, prompt = sequence.request, None
        if is_first:
            self._columns[index] = LegacyColumns(
                self._tokenizer, num_logprobs, sequence.new_token_bytes(self._tokenizer)
            )
        if is_first and self._prompt_texts is not None:
            columns = self._columns[index] = LegacyColumns(self._tokenizer, num_logprobs)
            entries = [None, *(request.prompt_logprobs or ())]
            if len(entries) != len(request.prompt_ids):
                return None
            hidden = (
                _added_places(self._tokenizer, request.prompt_ids.tolist()) if request.rid in self._given_texts else ()
            )
            prompt = columns.take(request.prompt_ids, entries, hidden)
            columns.follow(self._prompt_texts[request.rid], sequence.new_token_bytes(self._tokenizer))
        if len(delta.logprobs) != len(delta.token_ids):
            return None
        output = self._columns[index].take(delta.token_ids, delta.logprobs, sequence.hidden_places(delta))
        return output if prompt is None else joined(prompt, output)


def _added_places(tokenizer: TextTokenizer, prompt_ids: list[int]) -> list[int]:
    """Return the places of the special tokens that the tokenizer has added to a text."""
    before, behind = tokenizer.added_ids
    first = len(before) if prompt_ids[: len(before)] == before else 0
    last = len(behind) if behind and prompt_ids[first:][-len(behind) :] == behind else 0
    return [*range(first), *range(len(prompt_ids) - last, len(prompt_ids))]


class ChatFormat(_OpenAIFormat):
    """Answers of /v1/chat/completions."""

    _chunk_object = "chat.completion.chunk"
    _text_start = b'"delta":{"content":'
    _text_end = b'},"logprobs":null,"finish_reason":null'

    def __init__(
        self,
        response_id: str,
        model: str,
        tokenizer: TextTokenizer,
        reading: OutputReading | None,
        *,
        num_logprobs: int | None,
        with_ids: bool,
        with_metrics: bool = False,
    ) -> None:
        super().__init__(
            response_id,
            model,
            tokenizer,
            reading,
            num_logprobs=num_logprobs,
            with_ids=with_ids,
            with_metrics=with_metrics,
        )
        self._readers: dict[int, OutputReader] = {}  # by index
        self._token_bytes: dict[Sequence, TokenBytes] = {}

    def chunk(self, index: int, sequence: Sequence, delta: Delta, usage: Usage | UnsetType | None) -> bytes:
        if index not in self._prefixes:
            self._prepare(index)
            return self._opening(index, sequence, usage) + self.chunk(index, sequence, delta, usage)
        if self._reading is not None:
            return self._read_chunks(self._reading, index, sequence, delta, usage)
        text = self._text_chunk(index, delta, usage)
        if text is not None:
            return text
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=delta.text or None),
            logprobs=self._logprobs(sequence, delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._with_ids else None,
            drafts=list(delta.drafts) or None,
        )
        return event(self._body([choice], usage))

    def usage_chunk(self, usage: Usage, metrics: AnswerMetrics | None) -> bytes:
        return event(structs.replace(self._body([], usage), metrics=metrics))

    def whole(self, outputs: abc.Sequence[tuple[Sequence, Delta]], usage: Usage) -> bytes:
        choices: list[ChatChoice] = []
        for index, (sequence, delta) in enumerate(outputs):
            assert delta.finish_reason is not None, f"sequence {index} of {self.response_id} has not ended"
            message, finish_reason = AssistantMessage(content=delta.text), delta.finish_reason
            if self._reading is not None:
                reader = self._reading.new_reader()
                message = chat_message(reader.whole(delta.text), self._reading.reasoning_field)
                finish_reason = _finish_reason(reader, delta.finish_reason)
            choices.append(
                ChatChoice(
                    index=index,
                    message=message,
                    logprobs=self._logprobs(sequence, delta),
                    finish_reason=finish_reason,
                    stop_reason=delta.stop_reason,
                    token_ids=delta.token_ids if self._with_ids else None,
                )
            )
        body = ChatCompletion(
            id=self.response_id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_token_ids=outputs[0][0].request.prompt_ids.tolist() if self._with_ids else None,
            metrics=self._metrics_of(sequence.request for sequence, _ in outputs),
        )
        return _encode(body)

    def _read_chunks(
        self, reading: OutputReading, index: int, sequence: Sequence, delta: Delta, usage: Usage | UnsetType | None
    ) -> bytes:
        """Return the events of an output that is read. Log-probabilities and ids of the new tokens are in the first."""
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = reading.new_reader()
        is_last = delta.finish_reason is not None
        deltas = chat_deltas(reader.read(delta.text, is_last=is_last), reading.reasoning_field)
        if not deltas and (is_last or self.num_logprobs is not None or self._with_ids or delta.drafts):
            deltas = [ChatDelta()]
        events = list[bytes]()
        for place, each in enumerate(deltas):
            is_first, reason = place == 0, delta.finish_reason if place == len(deltas) - 1 else None
            choice = ChatChunkChoice(
                index=index,
                delta=each,
                logprobs=self._logprobs(sequence, delta) if is_first else None,
                finish_reason=None if reason is None else _finish_reason(reader, reason),
                stop_reason=None if reason is None else delta.stop_reason,
                token_ids=(delta.token_ids if is_first else []) if self._with_ids else None,
                drafts=(list(delta.drafts) or None) if is_first else None,
            )
            events.append(event(self._body([choice], usage)))
        return b"".join(events)

    def _opening(self, index: int, sequence: Sequence, usage: Usage | UnsetType | None) -> bytes:
        delta = ChatDelta(content="" if self._reading is None else None, role="assistant")
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)
        prompt_ids = sequence.request.prompt_ids.tolist() if self._with_ids else None
        return event(self._body([choice], None if usage is not UNSET else UNSET, prompt_ids))

    def _body(
        self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None, prompt_ids: list[int] | None = None
    ) -> ChatChunk:
        return ChatChunk(
            id=self.response_id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_ids,
        )

    def _logprobs(self, sequence: Sequence, delta: Delta) -> ChatLogprobs | None:
        if self.num_logprobs is None:
            return None
        reader = self._token_bytes.get(sequence)
        if reader is None:
            reader = self._token_bytes[sequence] = sequence.new_token_bytes(self._tokenizer)
        hidden = sequence.hidden_places(delta)
        return chat_logprobs(self._tokenizer, delta.token_ids, delta.logprobs, self.num_logprobs, reader, hidden)


class _Draft(Struct):
    """A delta that is being put together: thoughts, content and calls, which clients read in this order."""

    thoughts: str = ""
    content: str = ""
    calls: list[ToolCallDelta] = []


def chat_deltas(events: abc.Iterable[PartEvent], reasoning_field: ReasoningField) -> list[ChatDelta]:
    """Return what new events add to a message, in as few deltas as keep their order."""
    drafts = [_Draft()]
    for each in events:
        draft, part = drafts[-1], each.part
        if part.kind == "call":
            if not isinstance(each, PartEnded):
                _add_call(draft.calls, each)
        elif isinstance(each, PartDelta):
            is_thought = part.kind == "thought"
            if draft.calls or (is_thought and draft.content):
                drafts.append(draft := _Draft())
            if is_thought:
                draft.thoughts += each.text
            else:
                draft.content += each.text
    return [_delta(draft, reasoning_field) for draft in drafts if draft != _Draft()]


def chat_message(parts: abc.Sequence[OutputPart], reasoning_field: ReasoningField) -> AssistantMessage:
    """Return the message of a whole output."""
    thoughts = "".join(part.text for part in parts if part.kind == "thought")
    content = "".join(part.text for part in parts if part.kind == "text")
    calls = [
        MadeCall(id=part.call.call_id, function=MadeFunction(part.call.name, part.text))
        for part in parts
        if part.call is not None
    ]
    return AssistantMessage(
        content=content if content or not (calls or thoughts) else None,
        reasoning_content=thoughts if thoughts and reasoning_field == "reasoning_content" else UNSET,
        reasoning=thoughts if thoughts and reasoning_field == "reasoning" else UNSET,
        tool_calls=calls or UNSET,
    )


def _delta(draft: _Draft, reasoning_field: ReasoningField) -> ChatDelta:
    thoughts = draft.thoughts or None
    return ChatDelta(
        content=draft.content or None,
        reasoning_content=thoughts if reasoning_field == "reasoning_content" else None,
        reasoning=thoughts if reasoning_field == "reasoning" else None,
        tool_calls=draft.calls or None,
    )


def _add_call(calls: list[ToolCallDelta], event: PartBegun | PartDelta) -> None:
    """Add the beginning of a call, or more of its arguments, which join the delta of the same call."""
    call = event.part.call
    assert call is not None, f"part {event.part.index} is no call"
    if isinstance(event, PartBegun):
        function = FunctionDelta(name=call.name, arguments="")
        calls.append(ToolCallDelta(index=call.index, id=call.call_id, type="function", function=function))
        return
    if not calls or calls[-1].index != call.index:
        calls.append(ToolCallDelta(index=call.index, function=FunctionDelta(arguments=event.text)))
        return
    last = calls[-1]
    before = "" if last.function.arguments is UNSET else last.function.arguments
    function = FunctionDelta(name=last.function.name, arguments=f"{before}{event.text}")
    calls[-1] = ToolCallDelta(index=last.index, id=last.id, type=last.type, function=function)


def _finish_reason(reader: OutputReader, reason: FinishReason) -> ChatFinishReason:
    """Return why a message ended. `reason`: why its output did."""
    return "tool_calls" if reason == "stop" and reader.has_call else reason
