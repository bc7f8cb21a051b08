"""Server-sent events, written straight to the transport.

Everything that one event-loop tick has for a stream goes out in one write, outside any coroutine. A client that reads
too slowly is found by the transport's unsent bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from aiohttp import HttpVersion11, web

from ..metadata.errors import BatonError
from .errors import body_of

DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """One event holding a JSON value."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def error_event(error: BatonError) -> bytes:
    """The event that ends a failed stream."""
    return event(body_of(error))


class EventStream:
    """One response of Content-Type text/event-stream. `push` may be called from anywhere on the event loop."""

    def __init__(self, request: web.Request, max_unread_bytes: int, on_overflow: Callable[[], None]) -> None:
        self._request = request
        self._max_unread = max_unread_bytes
        self._on_overflow = on_overflow
        self._loop = asyncio.get_running_loop()
        self._pending: list[bytes] = []
        self._response: web.StreamResponse | None = None
        self._is_chunked = False
        self._is_flush_scheduled = False

    def push(self, data: bytes) -> None:
        """Queues whole events for this tick's write."""
        self._pending.append(data)
        if self._response is not None and not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._loop.call_soon(self._flush)

    async def open(self, headers: dict[str, str]) -> web.StreamResponse:
        """Sends the headers and what is queued."""
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream; charset=utf-8"})
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Accel-Buffering"] = "no"
        if self._request.version >= HttpVersion11:
            response.enable_chunked_encoding()
            self._is_chunked = True
        await response.prepare(self._request)
        self._response = response
        self._flush()
        return response

    async def close(self) -> None:
        """Sends what is queued and ends the response."""
        assert self._response is not None, "the stream was never opened"
        self._flush()
        await self._response.write_eof()

    def _flush(self) -> None:
        self._is_flush_scheduled = False
        transport = self._request.transport
        if not self._pending or transport is None or transport.is_closing():
            return
        data = b"".join(self._pending)
        self._pending.clear()
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        if transport.get_write_buffer_size() > self._max_unread:
            self._on_overflow()
