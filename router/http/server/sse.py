"""Server-sent events, written straight to the transport.

A stream's first event of an event-loop tick is written at once, outside any coroutine. So a stream does not wait for
the other streams of its decode step. All further events of the tick follow in one write.

The transport's unsent bytes show when a client reads too slowly. Above `max_unread_bytes` its stream is paused: nodes
release everything that its request holds, and it continues when the client has read most of the bytes. If a client
reads nothing for `max_unread_s`, the kernel closes its connection (`limit_unread`).

A proxy ends a connection on which nothing comes for a minute or so. So a stream is never silent for much longer than
SILENCE_S.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import msgspec
from aiohttp import HttpVersion11, web

from ....metadata.errors import BatonError
from .errors import body_of

DONE = b"data: [DONE]\n\n"
COMMENT = b": the answer is not ready yet\n\n"
SILENCE_S = 10.0  # after so many seconds without an event something is sent that means nothing
POLL_S = 0.05  # between two checks of a paused stream


def event(value: object) -> bytes:
    """Return one event that holds a JSON value."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(name: str, value: object) -> bytes:
    """Return one event that has a name and holds a JSON value."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))


def error_event(error: BatonError) -> bytes:
    """Return the event that ends a failed stream."""
    return event(body_of(error))


def limit_unread(http_request: web.Request, seconds: float) -> None:
    """Let the kernel close the connection if its client acknowledges no sent bytes for so long, if the system can."""
    connection = http_request.get_extra_info("socket")
    if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(1000 * seconds)))


class EventStream:
    """One response of Content-Type text/event-stream. `push` may be called from anywhere on the event loop.

    `set_paused(True)` is called when too many bytes are unread, `set_paused(False)` when a quarter of them is left.
    `keep_alive` is sent after each SILENCE_S without an event.
    """

    __slots__ = (  # thousands of streams share the processor's caches
        "_has_written",
        "_is_chunked",
        "_is_paused",
        "_keep_alive",
        "_loop",
        "_max_unread",
        "_num_pending",
        "_pending",
        "_request",
        "_response",
        "_set_paused",
        "_timer",
        "_transport",
        "_written_at",
    )

    def __init__(
        self,
        http_request: web.Request,
        max_unread_bytes: int,
        set_paused: Callable[[bool], None],
        keep_alive: bytes,
    ) -> None:
        self._request = http_request
        self._max_unread = max_unread_bytes
        self._set_paused = set_paused
        self._keep_alive = keep_alive
        self._written_at = 0.0  # by the loop's clock
        self._timer: asyncio.TimerHandle | None = None  # while the stream is open
        self._is_paused = False
        self._loop = asyncio.get_running_loop()
        self._pending: list[bytes] = []
        self._num_pending = 0  # bytes
        self._response: web.StreamResponse | None = None
        self._transport: asyncio.Transport | None = None  # None: not open yet, or its client left before
        self._is_chunked = False
        self._has_written = False  # in this tick

    def push(self, data: bytes) -> None:
        """Send whole events, now or at the end of this tick."""
        if self._response is None or self._has_written:
            self._pending.append(data)
            self._num_pending += len(data)
            if self._num_pending > self._max_unread:
                self._limit()
            return
        self._has_written = True
        self._loop.call_soon(self._end_tick)
        self._write(data)

    def comment(self) -> None:
        """Send a comment, which clients ignore."""
        self.push(b":\n\n")

    async def open(self, headers: dict[str, str]) -> web.StreamResponse:
        """Send the headers and all queued events."""
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream; charset=utf-8"})
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Accel-Buffering"] = "no"
        if self._request.version >= HttpVersion11:
            response.enable_chunked_encoding()
            self._is_chunked = True
        await response.prepare(self._request)
        self._request[STREAM] = self
        self._response, self._transport = response, self._request.transport
        self._written_at = self._loop.time()
        self._timer = self._loop.call_later(SILENCE_S, self._break_silence)
        self._flush()
        return response

    async def close(self) -> None:
        """Send all queued events and end the response."""
        assert self._response is not None, "the stream was never opened"
        self._flush()
        self.detach()
        await self._response.write_eof()

    def detach(self) -> None:
        """End the timer, and let the HTTP request, to which the stream refers, refer to it no longer. A second call
        does nothing."""
        self._request.pop(STREAM, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _break_silence(self) -> None:
        """Send `keep_alive` if nothing has been sent for so long. A client that has too much to read gets none."""
        due_in = self._written_at + SILENCE_S - self._loop.time()
        if due_in <= 0:
            due_in = SILENCE_S
            if not self._is_paused:
                self.push(self._keep_alive)
        self._timer = self._loop.call_later(due_in, self._break_silence)

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
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        self._written_at = self._loop.time()
        if transport.get_write_buffer_size():
            self._limit()

    def _limit(self) -> None:
        if not self._is_paused and self.num_unread > self._max_unread:
            self._is_paused = True
            self._loop.call_later(POLL_S, self._poll)
            self._set_paused(True)

    @property
    def num_unread(self) -> int:
        """Bytes that are queued here or in the transport."""
        transport = self._transport
        return self._num_pending + (transport.get_write_buffer_size() if transport is not None else 0)

    def _poll(self) -> None:
        """Continue a paused stream if its client has read enough."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self.num_unread > self._max_unread // 4:
            self._loop.call_later(POLL_S, self._poll)
            return
        self._is_paused = False
        self._set_paused(False)


STREAM = web.RequestKey("stream", EventStream)  # present while the stream of an HTTP request is open
