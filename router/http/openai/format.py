"""Formats of answers: bodies of /v1/completions and /v1/chat/completions, whole, and as the chunks of a stream.

Most chunks add only text. Such a chunk is a prepared prefix, the encoded text, and a suffix.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import abc
from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType, structs

from ....metadata.errors import BatonError
from ...requests.output_parser import ThoughtCounter
from ...requests.request import Delta, Request, Sequence
from ...text.detokenizer import TokenBytes
from ...text.tokenizer import TextTokenizer
from ..generation.output import OutputReading
from ..generation.types import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionTokensDetails,
    LegacyLogprobs,
    PromptTokensDetails,
    SpeculationDetails,
    Usage,
)
from ..server.sse import COMMENT, DONE, error_event, event
from .chat_output import ChatOutput
from .logprobs import LegacyColumns, chat_logprobs, joined

_encode = msgspec.json.Encoder().encode


def usage_of(requests: abc.Sequence[Request]) -> Usage:
    """Return the token counts of a whole answer."""
    num_prompt = sum(len(request.prompt_ids) for request in requests)
    num_generated = sum(request.num_generated for request in requests)
    num_cached = sum(request.num_cached or 0 for request in requests)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_generated,
        total_tokens=num_prompt + num_generated,
        prompt_tokens_details=PromptTokensDetails(num_cached),
        speculation=_speculation_of(requests),
    )


def _speculation_of(requests: abc.Sequence[Request]) -> SpeculationDetails | None:
    num_rounds = sum(request.num_rounds for request in requests)
    if num_rounds == 0:
        return None
    num_accepted = sum(request.num_accepted for request in requests)
    return SpeculationDetails(
        drafted_tokens=sum(request.num_drafted for request in requests),
        accepted_tokens=num_accepted,
        verify_count=num_rounds,
        accept_length=round(1 + num_accepted / num_rounds, 3),
    )


class AnswerFormat(ABC):
    """Format of one route's answers. `index` is a sequence's index in the answer. With `with_ids` answers carry token
    ids. `num_logprobs` is None if no log-probabilities are asked for. `ends_with_context`: an output that is asked for
    beyond the context ends there, and is not refused. `keep_alive` is sent in a stream that was silent."""

    ends_with_context: ClassVar[bool] = False
    keep_alive: ClassVar[bytes] = COMMENT
    _chunk_object: ClassVar[str]
    _text_start: ClassVar[bytes]  # of a chunk that adds only text: the JSON between `index` and the text
    _text_end: ClassVar[bytes]  # and between the text and `logprobs`

    def __init__(
        self, response_id: str, model: str, tokenizer: TextTokenizer, *, num_logprobs: int | None, with_ids: bool
    ) -> None:
        self.response_id = response_id
        self.num_logprobs = num_logprobs
        self._model = model
        self._created = int(time.time())
        self._tokenizer = tokenizer
        self._with_ids = with_ids
        self._prefixes: dict[int, bytes] = {}  # by index; present when the first chunk has been sent

    def usage_of(self, requests: abc.Sequence[Request]) -> Usage:
        """Return the token counts of these requests, as far as the answer shows their tokens."""
        return usage_of(requests)

    @abstractmethod
    def chunk(self, index: int, sequence: Sequence, delta: Delta, usage: Usage | UnsetType | None) -> bytes:
        """Return the events for new output of a sequence, empty if there is none to show yet."""

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the event with the token counts, which follows the output of all sequences; empty if the format has
        none."""
        del usage
        return b""

    def ended(self, requests: abc.Sequence[Request], *, with_usage: bool) -> bytes:
        """Return the events that end a stream."""
        return (self.usage_chunk(self.usage_of(requests)) if with_usage else b"") + DONE

    def failed(self, error: BatonError) -> bytes:
        """Return the event that ends a stream that fails."""
        return error_event(error)

    @abstractmethod
    def whole(self, outputs: abc.Sequence[tuple[Sequence, Delta]], usage: Usage) -> bytes:
        """Return the whole body, with sequences in order."""

    def _prepare(self, index: int) -> None:
        """Prepare the prefix of the sequence's chunks that add only text."""
        head = {"id": self.response_id, "object": self._chunk_object, "created": self._created, "model": self._model}
        self._prefixes[index] = b"data: " + _encode(head)[:-1] + b',"choices":[{"index":%d,' % index + self._text_start

    def _text_chunk(self, index: int, delta: Delta, usage: Usage | UnsetType | None) -> bytes | None:
        """Return the event if the chunk adds only text, empty if it adds nothing; None if it adds more."""
        if delta.finish_reason is not None or self.num_logprobs is not None or self._with_ids:
            return None
        if not delta.text:
            return b""
        if isinstance(usage, Usage):
            return None
        tail = b'}],"usage":null}\n\n' if usage is None else b"}]}\n\n"
        return self._prefixes[index] + _encode(delta.text) + self._text_end + tail


class CompletionFormat(AnswerFormat):
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
        prompt_texts: dict[str, str] | None,
        given_texts: abc.Container[str] = (),
        has_output: bool = True,
    ) -> None:
        super().__init__(response_id, model, tokenizer, num_logprobs=num_logprobs, with_ids=with_ids)
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

    def usage_chunk(self, usage: Usage) -> bytes:
        return event(self._body([], usage))

    def whole(self, outputs: abc.Sequence[tuple[Sequence, Delta]], usage: Usage) -> bytes:
        choices = [
            self._choice(index, sequence, self._shown(delta), is_first=True)
            for index, (sequence, delta) in enumerate(outputs)
        ]
        return _encode(self._body(choices, usage))

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


class ChatFormat(AnswerFormat):
    """Answers of /v1/chat/completions. If `reading` is given, outputs hold thoughts or tool calls, which are read."""

    _chunk_object = "chat.completion.chunk"
    _text_start = b'"delta":{"content":'
    _text_end = b'},"logprobs":null,"finish_reason":null'

    def __init__(
        self,
        response_id: str,
        model: str,
        tokenizer: TextTokenizer,
        *,
        num_logprobs: int | None,
        with_ids: bool,
        reading: OutputReading | None = None,
    ) -> None:
        super().__init__(response_id, model, tokenizer, num_logprobs=num_logprobs, with_ids=with_ids)
        self._reading = reading
        self._outputs: dict[int, ChatOutput] = {}  # by index
        self._counters: dict[Sequence, ThoughtCounter] = {}
        self._token_bytes: dict[Sequence, TokenBytes] = {}

    def usage_of(self, requests: abc.Sequence[Request]) -> Usage:
        usage = super().usage_of(requests)
        if self._reading is None or self._reading.new_counter is None:
            return usage
        num_thoughts = 0
        for sequence in (sequence for request in requests for sequence in request.sequences):
            if sequence not in self._counters:
                self._counters[sequence] = self._reading.new_counter(sequence)
            num_thoughts += self._counters[sequence].count(sequence.received)
        return structs.replace(usage, completion_tokens_details=CompletionTokensDetails(num_thoughts))

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
        )
        return event(self._body([choice], usage))

    def usage_chunk(self, usage: Usage) -> bytes:
        return event(self._body([], usage))

    def whole(self, outputs: abc.Sequence[tuple[Sequence, Delta]], usage: Usage) -> bytes:
        choices: list[ChatChoice] = []
        for index, (sequence, delta) in enumerate(outputs):
            assert delta.finish_reason is not None, f"sequence {index} of {self.response_id} has not ended"
            message, finish_reason = AssistantMessage(content=delta.text), delta.finish_reason
            if self._reading is not None:
                output = ChatOutput(self._reading)
                message, finish_reason = output.message(delta.text), output.finish_reason(delta.finish_reason)
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
        )
        return _encode(body)

    def _read_chunks(
        self, reading: OutputReading, index: int, sequence: Sequence, delta: Delta, usage: Usage | UnsetType | None
    ) -> bytes:
        """Return the events of an output that is read. Log-probabilities and ids of the new tokens are in the first."""
        output = self._outputs.setdefault(index, ChatOutput(reading))
        deltas = output.deltas(delta.text, is_last=delta.finish_reason is not None)
        if not deltas and (delta.finish_reason is not None or self.num_logprobs is not None or self._with_ids):
            deltas = [ChatDelta()]
        events = list[bytes]()
        for place, each in enumerate(deltas):
            is_first, reason = place == 0, delta.finish_reason if place == len(deltas) - 1 else None
            choice = ChatChunkChoice(
                index=index,
                delta=each,
                logprobs=self._logprobs(sequence, delta) if is_first else None,
                finish_reason=None if reason is None else output.finish_reason(reason),
                stop_reason=None if reason is None else delta.stop_reason,
                token_ids=(delta.token_ids if is_first else []) if self._with_ids else None,
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
