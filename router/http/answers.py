"""The two ways to answer: all at once, or as a stream. Both listen to the requests of one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web
from msgspec import UNSET, UnsetType

from ...metadata.errors import BatonError
from ..request import Delta, Request, Sequence
from .openai_types import StreamOptions, Usage
from .response_format import Form, usage_of
from .sse import DONE, EventStream, error_event


class WholeAnswer:
    """Gathers everything; `finished` gives the body, or raises the error of whichever request failed first."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._requests: list[Request] = []
        self._parts: dict[Sequence, list[Delta]] = {}
        self._num_done = 0
        self._future = _new_future()

    def on_delta(self, choice: Sequence, delta: Delta) -> None:
        self._parts.setdefault(choice, []).append(delta)

    def on_done(self, _request: Request) -> None:
        self._num_done += 1
        if self._num_done == len(self._requests) and not self._future.done():
            self._future.set_result(None)

    def on_error(self, _request: Request, error: BatonError) -> None:
        if not self._future.done():
            self._future.set_exception(error)

    async def answer(self, requests: list[Request], headers: dict[str, str]) -> web.StreamResponse:
        """Waits for all requests, which have not been submitted before `start` is called with them."""
        await self._future
        outputs = [(choice, self._output(choice)) for request in requests for choice in request.sequences]
        body = self._form.whole(outputs, usage_of(requests))
        return web.Response(body=body, content_type="application/json", headers=headers)

    def start(self, requests: list[Request], submit: Callable[[Request], None]) -> None:
        """Submits all requests. Raises what submit raises."""
        self._requests = requests
        for request in requests:
            submit(request)

    def _output(self, choice: Sequence) -> Delta:
        parts = self._parts[choice]
        return Delta(
            "".join(part.text for part in parts),
            [token_id for part in parts for token_id in part.token_ids],
            [entry for part in parts for entry in part.logprobs],
            parts[-1].finish_reason,
            parts[-1].stop_reason,
        )


class StreamedAnswer:
    """Server-sent events. An error before the first event is an HTTP error, a later one ends the stream."""

    def __init__(
        self,
        http_request: web.Request,
        form: Form,
        options: StreamOptions | None,
        max_unread_bytes: int,
        set_paused: Callable[[Request, bool], None],
    ) -> None:
        self._form = form
        self._set_paused = set_paused
        self._with_usage = bool(options and options.include_usage)
        self._is_continuous = self._with_usage and bool(options and options.continuous_usage_stats)
        self._requests: list[Request] = []
        self._places: dict[Sequence, int] = {}
        self._held: list[tuple[Sequence, Delta]] = []  # of prompts whose own log-probabilities have not come yet
        self._num_done = 0
        self._has_output = asyncio.Event()
        self._has_pushed = False
        self._finished = _new_future()
        self._stream = EventStream(http_request, max_unread_bytes, self._set_all_paused)

    def start(self, requests: list[Request], submit: Callable[[Request], None]) -> None:
        """Submits all requests. Raises what submit raises."""
        self._requests = requests
        choices = [choice for request in requests for choice in request.sequences]
        self._places = {choice: place for place, choice in enumerate(choices)}
        for request in requests:
            submit(request)

    async def answer(self, requests: list[Request], headers: dict[str, str]) -> web.StreamResponse:
        """Streams until all requests have ended. Raises an error that came before any output."""
        await self._has_output.wait()
        if self._finished.done() and not self._has_pushed:
            self._finished.result()
        response = await self._stream.open(headers)
        try:
            await self._finished
        except BatonError as error:
            self._stream.push(error_event(error))
        else:
            if self._with_usage:
                self._stream.push(self._form.usage_piece(usage_of(requests)))
            self._stream.push(DONE)
        await self._stream.close()
        return response

    def on_delta(self, choice: Sequence, delta: Delta) -> None:
        request = choice.request
        if request.wants_prompt_logprobs and request.prompt_logprobs is None:
            self._held.append((choice, delta))
            return
        if self._held:
            self._release(request)
        self._emit(choice, delta)

    def on_done(self, request: Request) -> None:
        self._release(request)
        self._num_done += 1
        if self._num_done == len(self._requests):
            self._end(None)

    def on_error(self, _request: Request, error: BatonError) -> None:
        self._end(error)

    def _set_all_paused(self, is_paused: bool) -> None:
        for request in self._requests:
            self._set_paused(request, is_paused)

    def _release(self, request: Request) -> None:
        ready = [item for item in self._held if item[0].request is request]
        self._held = [item for item in self._held if item[0].request is not request]
        for choice, delta in ready:
            self._emit(choice, delta)

    def _emit(self, choice: Sequence, delta: Delta) -> None:
        usage: Usage | UnsetType | None = None if self._with_usage else UNSET
        if self._is_continuous:
            usage = usage_of([choice.request])
        data = self._form.piece(self._places[choice], choice, delta, usage)
        if data:
            self._stream.push(data)
            self._has_pushed = True
            self._has_output.set()

    def _end(self, error: BatonError | None) -> None:
        if self._finished.done():
            return
        if error is None:
            self._finished.set_result(None)
        else:
            self._finished.set_exception(error)
        self._has_output.set()


def _new_future() -> asyncio.Future[None]:
    """A future whose error nobody need collect: the client may have left before."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
