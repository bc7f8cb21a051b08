"""Base of the formats of answers, one for each dialect, and the token counts that all of them give."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import abc
from typing import ClassVar

from msgspec import UnsetType, structs

from ....metadata.errors import BatonError
from ...requests.request import Delta, Request, Sequence
from ...text.tokenizer import TextTokenizer
from ..server.sse import COMMENT
from .output import OutputReader, OutputReading, ThoughtCounter
from .types import CompletionTokensDetails, PromptTokensDetails, SpeculationDetails, Usage


class AnswerFormat(ABC):
    """Format of one route's answers. `index` is a sequence's index in the answer. `reading` is None if outputs have
    neither thoughts nor calls. `num_logprobs` is None if no log-probabilities are asked for. `ends_with_context`: an
    output that is asked for beyond the context ends there, and is not refused. `keep_alive` is sent in a stream that
    was silent."""

    ends_with_context: ClassVar[bool] = False
    keep_alive: ClassVar[bytes] = COMMENT

    def __init__(
        self,
        response_id: str,
        model: str,
        tokenizer: TextTokenizer,
        reading: OutputReading | None,
        *,
        num_logprobs: int | None = None,
    ) -> None:
        self.response_id = response_id
        self.num_logprobs = num_logprobs
        self._model = model
        self._created = int(time.time())
        self._tokenizer = tokenizer
        self._reading = reading
        self._counters: dict[Sequence, ThoughtCounter] = {}

    def usage_of(self, requests: abc.Sequence[Request]) -> Usage:
        """Return the token counts of these requests, as far as the answer shows their tokens."""
        usage = usage_of(requests)
        if self._reading is None or self._reading.reasoning is None:
            return usage
        num_thoughts = 0
        for sequence in (sequence for request in requests for sequence in request.sequences):
            if sequence not in self._counters:
                self._counters[sequence] = self._reading.new_counter(sequence)
            num_thoughts += self._counters[sequence].count(sequence.received)
        return structs.replace(usage, completion_tokens_details=CompletionTokensDetails(num_thoughts))

    @abstractmethod
    def chunk(self, index: int, sequence: Sequence, delta: Delta, usage: Usage | UnsetType | None) -> bytes:
        """Return the events for new output of a sequence, empty if there is none to show yet."""

    @abstractmethod
    def ended(self, requests: abc.Sequence[Request], *, with_usage: bool) -> bytes:
        """Return the events that end a stream."""

    @abstractmethod
    def failed(self, error: BatonError) -> bytes:
        """Return the event that ends a stream that fails."""

    @abstractmethod
    def whole(self, outputs: abc.Sequence[tuple[Sequence, Delta]], usage: Usage) -> bytes:
        """Return the whole body, with sequences in order."""

    def _new_reader(self, *, with_thoughts: bool = True) -> OutputReader:
        """Return the reader of one output."""
        return OutputReader() if self._reading is None else self._reading.new_reader(with_thoughts=with_thoughts)


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
