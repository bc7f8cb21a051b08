"""Server-sent events, written straight to the transport.

The first thing that an event-loop tick has for a stream is written at once, outside any coroutine, so that a stream
does not wait for the others of its decode step; whatever else the tick has for it follows in one write.

A client that reads too slowly is found by the transport's unsent bytes. Above `max_unread_bytes` its stream is paused:
its request is taken off the nodes, where it then holds nothing, and goes on when most of that has been read. One that
reads nothing for `max_unread_s` is cut off by the kernel (`limit_unread`), whatever it was sent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import msgspec
from aiohttp import HttpVersion11, web

from ...metadata.errors import BatonError
from ..errors import body_of

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
POLL_S = 0.05  # how often a paused stream is looked at


def event(value: object) -> bytes:
    """One event holding a JSON value."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def error_event(error: BatonError) -> bytes:
    """The event that ends a failed stream."""
    return event(body_of(error))


def limit_unread(http_request: web.Request, seconds: float) -> None:
    """The connection breaks when its client takes nothing of what it was sent for so long (where the system can)."""
    connection = http_request.get_extra_info("socket")
    if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(1000 * seconds)))


class EventStream:
    """One response of Content-Type text/event-stream. `push` may be called from anywhere on the event loop.

    `set_paused(True)` is called when too much is unread, and with False when a quarter of that is left.
    """

    def __init__(self, http_request: web.Request, max_unread_bytes: int, set_paused: Callable[[bool], None]) -> None:
        self._request = http_request
        self._max_unread = max_unread_bytes
        self._set_paused = set_paused
        self._is_paused = False
        self._loop = asyncio.get_running_loop()
        self._pending: list[bytes] = []
        self._num_pending = 0  # bytes
        self._response: web.StreamResponse | None = None
        self._is_chunked = False
        self._has_written = False  # in this tick

    def push(self, data: bytes) -> None:
        """Sends whole events, now or at the end of this tick."""
        if self._response is None or self._has_written:
            self._pending.append(data)
            self._num_pending += len(data)
            self._limit()
            return
        self._has_written = True
        self._loop.call_soon(self._end_tick)
        self._write(data)

    def comment(self) -> None:
        """Sends what no client takes for an event."""
        self.push(b":\n\n")

    async def open(self, headers: dict[str, str]) -> web.StreamResponse:
        """Sends the headers and what is queued."""
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream; charset=utf-8"})
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Accel-Buffering"] = "no"
        if self._request.version >= HttpVersion11:
            response.enable_chunked_encoding()
            self._is_chunked = True
        await response.prepare(self._request)
        self._request[STREAM] = self
        self._response = response
        self._flush()
        return response

    async def close(self) -> None:
        """Sends what is queued and ends the response."""
        assert self._response is not None, "the stream was never opened"
        self._flush()
        del self._request[STREAM]
        await self._response.write_eof()

    def _end_tick(self) -> None:
        self._has_written = False
        if self._pending:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            data = b"".join(self._pending)
            self._pending.clear()
            self._num_pending = 0
            self._write(data)

    def _write(self, data: bytes) -> None:
        transport = self._request.transport
        if transport is None or transport.is_closing():
            return
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        self._limit()

    def _limit(self) -> None:
        if not self._is_paused and self._num_unread > self._max_unread:
            self._is_paused = True
            self._loop.call_later(POLL_S, self._poll)
            self._set_paused(True)

    @property
    def _num_unread(self) -> int:
        """Bytes that the system has not taken for the client."""
        transport = self._request.transport
        return self._num_pending + (transport.get_write_buffer_size() if transport is not None else 0)

    def _poll(self) -> None:
        """While paused: has the client read?"""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            return
        if self._num_unread > self._max_unread // 4:
            self._loop.call_later(POLL_S, self._poll)
            return
        self._is_paused = False
        self._set_paused(False)


STREAM = web.RequestKey("stream", EventStream)  # of an HTTP request whose stream is open
