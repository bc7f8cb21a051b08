"""Two ways to answer an HTTP request: all at once, or as a stream. Both receive the output of all its Requests, and
write it in the format of one dialect. AnswerFormat is the base of these formats."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from aiohttp import web
from msgspec import UNSET, UnsetType, structs

from ....metadata.errors import BatonError
from ...requests.delta import Delta
from ...requests.request import Request, Sequence
from ...text.tokenizer import TextTokenizer
from ..server.sse import COMMENT, EventStream
from .output import OutputReader, OutputReading, ThoughtCounter
from .types import (
    AnswerMetrics,
    CompletionTokensDetails,
    PromptTokensDetails,
    SpeculationDetails,
    SpeculativeDecoding,
    StreamOptions,
    Usage,
)


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


def metrics_of(requests: abc.Sequence[Request]) -> AnswerMetrics | None:
    """Return the result of speculation under vLLM's names. None: there are several outputs, nothing was drafted, or a
    node of an older protocol did not say how many drafts each verification accepted."""
    request = requests[0]
    counts, num_rounds = request.accept_counts, request.num_rounds
    has_drafted = num_rounds > 0 and request.num_drafted > 0  # both come from nodes
    if len(requests) > 1 or len(request.sequences) > 1 or not has_drafted or sum(counts) != num_rounds:
        return None
    return AnswerMetrics(
        SpeculativeDecoding(
            mean_acceptance_length=1 + request.num_accepted / num_rounds,
            draft_acceptance_rate=request.num_accepted / request.num_drafted,
            acceptance_histogram=counts,
            num_spec_steps=num_rounds,
            num_accepted_draft_tokens=request.num_accepted,
            num_draft_tokens=request.num_drafted,
            num_spec_tokens=len(counts) - 1,
        )
    )


LOOK_S = 1.0  # between two looks at whether a stream without output is opened
LONGEST_WAIT_S = 10.0  # for nodes; then a stream is opened in any case, because proxies end a silent connection


class WholeAnswer:
    """One JSON body, sent when all requests have ended. The first error of a request is raised instead."""

    def __init__(self, answer_format: AnswerFormat) -> None:
        self._format = answer_format
        self._requests: list[Request] = []
        self._deltas: dict[Sequence, list[Delta]] = {}
        self._num_done = 0
        self._future = _new_future()

    def on_delta(self, sequence: Sequence, delta: Delta) -> None:
        self._deltas.setdefault(sequence, []).append(delta)

    def on_done(self, _request: Request) -> None:
        self._num_done += 1
        if self._num_done == len(self._requests) and not self._future.done():
            self._future.set_result(None)

    def on_error(self, _request: Request, error: BatonError) -> None:
        if not self._future.done():
            self._future.set_exception(error)

    async def answer(self, requests: list[Request], headers: dict[str, str]) -> web.StreamResponse:
        """Wait for all requests and return the response. Raises the first error of a request."""
        await self._future
        outputs = [(sequence, self._output(sequence)) for request in requests for sequence in request.sequences]
        body = self._format.whole(outputs, self._format.usage_of(requests))
        return web.Response(body=body, content_type="application/json", headers=headers)

    def start(self, requests: list[Request], submit: Callable[[Request], None]) -> None:
        """Submit all requests. Raises the errors of `submit`."""
        self._requests = requests
        for request in requests:
            submit(request)

    def _output(self, sequence: Sequence) -> Delta:
        deltas = self._deltas[sequence]
        return Delta(
            "".join(delta.text for delta in deltas),
            [token_id for delta in deltas for token_id in delta.token_ids],
            [entry for delta in deltas for entry in delta.logprobs],
            deltas[-1].finish_reason,
            deltas[-1].stop_reason,
        )


class StreamedAnswer:
    """Server-sent events. An error before the headers is an HTTP error; a later one is the last event.

    The headers are sent with the first output. If that takes longer, they are sent when nodes hold all requests, or
    after LONGEST_WAIT_S: until then a refusal has its status and Retry-After.
    """

    __slots__ = (
        "_finished",
        "_format",
        "_has_pushed",
        "_held",
        "_indices",
        "_is_continuous",
        "_may_open",
        "_num_done",
        "_requests",
        "_stream",
        "_with_usage",
    )

    def __init__(
        self,
        http_request: web.Request,
        answer_format: AnswerFormat,
        options: StreamOptions | None,
        max_unread_bytes: int,
        set_paused: Callable[[Request, bool], None],
    ) -> None:
        self._format = answer_format
        self._with_usage = bool(options and options.include_usage)
        self._is_continuous = self._with_usage and bool(options and options.continuous_usage_stats)
        self._requests: list[Request] = []
        self._indices: dict[Sequence, int] = {}
        self._held: list[tuple[Sequence, Delta]] = []  # until the log-probabilities of their prompt are known
        self._num_done = 0
        self._may_open = asyncio.Event()
        self._has_pushed = False
        self._finished = _new_future()
        self._stream = EventStream(
            http_request,
            max_unread_bytes,
            partial(_set_all_paused, self._requests, set_paused),
            answer_format.keep_alive,
        )

    def start(self, requests: list[Request], submit: Callable[[Request], None]) -> None:
        """Submit all requests. Raises the errors of `submit`."""
        self._requests += requests
        sequences = [sequence for request in requests for sequence in request.sequences]
        self._indices = {sequence: index for index, sequence in enumerate(sequences)}
        for request in requests:
            submit(request)

    async def answer(self, requests: list[Request], headers: dict[str, str]) -> web.StreamResponse:
        """Send events until all requests have ended. Raises an error that precedes all output."""
        opener = _Opener(requests, self._may_open)
        try:
            await self._may_open.wait()
        finally:
            opener.end()
        if self._finished.done() and not self._has_pushed:
            self._finished.result()
        response = await self._stream.open(headers)
        try:
            try:
                await self._finished
            except BatonError as error:
                self._stream.push(self._format.failed(error))
            else:
                self._stream.push(self._format.ended(requests, with_usage=self._with_usage))
            await self._stream.close()
        finally:
            self._stream.detach()
        return response

    def on_delta(self, sequence: Sequence, delta: Delta) -> None:
        request = sequence.request
        if request.wants_prompt_logprobs and request.prompt_logprobs is None:
            self._held.append((sequence, delta))
            return
        if self._held:
            self._release(request)
        self._emit(sequence, delta)

    def on_done(self, request: Request) -> None:
        self._release(request)
        self._num_done += 1
        if self._num_done == len(self._requests):
            self._end(None)

    def on_error(self, _request: Request, error: BatonError) -> None:
        self._end(error)

    def _release(self, request: Request) -> None:
        ready = [item for item in self._held if item[0].request is request]
        self._held = [item for item in self._held if item[0].request is not request]
        for sequence, delta in ready:
            self._emit(sequence, delta)

    def _emit(self, sequence: Sequence, delta: Delta) -> None:
        usage: Usage | UnsetType | None = None if self._with_usage else UNSET
        if self._is_continuous:
            usage = self._format.usage_of([sequence.request])
        data = self._format.chunk(self._indices[sequence], sequence, delta, usage)
        if data:
            self._stream.push(data)
            if not self._has_pushed:
                self._has_pushed = True
                self._may_open.set()

    def _end(self, error: BatonError | None) -> None:
        if self._finished.done():
            return
        if error is None:
            self._finished.set_result(None)
        else:
            self._finished.set_exception(error)
        self._may_open.set()


class _Opener:
    """Timer that lets a stream without output begin when nodes hold all its requests, or have not for too long."""

    def __init__(self, requests: list[Request], may_open: asyncio.Event) -> None:
        self._requests = requests
        self._may_open = may_open
        self._loop = asyncio.get_running_loop()
        self._latest = self._loop.time() + LONGEST_WAIT_S
        self._timer = self._loop.call_later(min(LOOK_S, LONGEST_WAIT_S), self._look)

    def end(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def _look(self) -> None:
        left = self._latest - self._loop.time()
        if left <= 0 or all(request.dispatched_at is not None for request in self._requests):
            self._may_open.set()
        else:
            self._timer = self._loop.call_later(min(LOOK_S, left), self._look)


def _set_all_paused(requests: list[Request], set_paused: Callable[[Request, bool], None], is_paused: bool) -> None:
    """Pause or continue all requests of an answer. No method of the answer: a stream that refers to its answer would
    keep both until a full collection of garbage."""
    for request in requests:
        set_paused(request, is_paused)


def _new_future() -> asyncio.Future[None]:
    """Return a future whose error need not be read, since the client may leave before."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
