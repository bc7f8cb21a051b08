"""Connections of the HTTP server, from the sockets that accept them to clients that are gone.

HttpListener accepts them. A server of the event loop accepts all connections that wait before any of them is looked at.
A flood would then take all descriptors of the process at once. Here few are accepted in each round of the loop, so that
room for them can be made in time (metadata/bus/descriptors.py).

Connection serves their requests. A client that breaks the protocol gets an ordinary error and one line in the log.

HalfClosed detects clients that are gone. A client may close its sending side and wait for the answer
(`shutdown(SHUT_WR)`, `nc -N`), or it may be gone. Both send the same FIN. They differ when they receive bytes: a client
that is gone replies with RST. So while the request runs, the router sends bytes that a waiting client ignores, and
checks whether the connection still stands. A client that leaves later is found in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from asyncio import BaseTransport
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiohttp import HttpVersion11, StreamReader
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import BaseRequest, RequestHandler, RequestPayloadError, Server, StreamResponse

from ....metadata.bus.descriptors import Descriptors, group_of
from ....metadata.errors import BatonError
from .errors import INTERNAL, HttpRefusal, response_of
from .sse import STREAM

logger = logging.getLogger(__name__)

SERVER = "baton"  # in the Server header of every answer; aiohttp would name versions
FIRST_REQUEST_S = 30.0  # the head of a connection's first request must have arrived within so many seconds
KEEP_ALIVE_S = 75.0  # and that of the next one after the last answer; proxies keep connections for 60 s
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"  # may come any number of times before an answer (RFC 9110, 15.2)


class Connection(RequestHandler):
    """One connection. A request that fails before its route is found gets an error body of the router, not of aiohttp.

    A client that has closed its sending side still gets its answers. aiohttp alone would close the connection. One that
    sends no request is closed: the process has only so many descriptors.
    """

    __slots__ = (
        "_address",
        "_descriptors",
        "_first_request",
        "_half_closed",
        "_last_body",
        "_num_answered",
        "descriptor",
    )

    def __init__(self, server: Server, descriptors: Descriptors, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._descriptors = descriptors
        self._address = ""
        self.descriptor = 0

    def connection_made(self, transport: BaseTransport) -> None:
        """Called by asyncio when a client has connected."""
        self._half_closed: HalfClosed | None = None
        self._last_body: StreamReader | None = None  # of the last request; the bodies before it are complete
        self._num_answered = 0  # of the requests received, which aiohttp counts
        self._first_request = self._loop.call_later(FIRST_REQUEST_S, self._close_without_request)
        super().connection_made(transport)
        self._address = group_of(str((transport.get_extra_info("peername") or ("",))[0]))
        connected = transport.get_extra_info("socket")
        self.descriptor = 0 if connected is None else connected.fileno()
        self._descriptors.wait(self, self._address)

    def came_from(self, address: str) -> None:
        """Count the connection as one of this address from now on: that of the client behind a proxy."""
        self._address = group_of(address)
        self._look()

    def _look(self) -> None:
        """Say whether the connection has a complete request that is not answered yet."""
        if not self._is_idle and (self._last_body is None or self._last_body.is_eof()):
            self._descriptors.remove(self)
        elif self.transport is not None:
            self._descriptors.wait(self, self._address)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Called by asyncio when the connection has ended."""
        self._first_request.cancel()
        self._descriptors.remove(self)
        if self._half_closed is not None:
            self._half_closed.end()
        super().connection_lost(exc)
        self._half_closed = self._last_body = None  # they refer back, and would keep all until a full collection

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with received bytes."""
        super().data_received(data)
        if self._messages:
            self._last_body = self._messages[-1][1]
        self._look()

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]  asyncio takes either
        """Called when the client has closed its sending side. Return whether the connection stays open for answers."""
        if self._half_closed is not None:
            return True
        if self.transport is None or not can_look() or self._is_idle:
            return False
        if self._last_body is not None and not self._last_body.is_eof():
            self._last_body.set_exception(RequestPayloadError("the connection ended before the body did"))
            self._last_body.feed_eof()
        self._half_closed = HalfClosed(self.transport, self._loop, self._probe)
        return True

    async def finish_response(
        self, request: BaseRequest, resp: StreamResponse, start_time: float | None
    ) -> tuple[StreamResponse, bool]:
        """Send the rest of an answer, then close the connection if no further request can come."""
        finished, is_reset = await super().finish_response(request, resp, start_time)
        self._num_answered += 1
        self._look()
        if self._half_closed is not None and self._is_idle:
            finished.force_close()
        return finished, is_reset

    def _close_without_request(self) -> None:
        """aiohttp's own time, KEEP_ALIVE_S, begins with the first answer."""
        if not self._request_count:
            self.force_close()

    @property
    def _is_idle(self) -> bool:
        return self._num_answered == self._request_count

    def _probe(self) -> bool:
        """Send bytes that a waiting client ignores: an interim answer, or a comment if its stream has begun.

        Return False if the client's version of HTTP has no interim answers.
        """
        request = self._current_request
        if request is None or self.transport is None:
            return True
        if stream := request.get(STREAM):
            stream.comment()
        elif not request.writer.output_size:
            if request.version < HttpVersion11:
                return False
            self.transport.write(INTERIM)
        return True

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> StreamResponse:
        """Return the answer to a request that failed; the connection is closed after it."""
        super().handle_error(request, status, exc, message)  # logs, and raises if an answer has begun
        reason = f": {reason_of(exc)}" if isinstance(exc, HttpProcessingError) else ""
        refusal = HttpRefusal(status, f"this is no proper HTTP request{reason}")
        response = response_of(refusal if status < 500 else BatonError(INTERNAL))
        response.headers["Server"] = SERVER
        response.force_close()
        return response


class ClientErrorFilter(logging.Filter):
    """Filter for aiohttp's logger that replaces the traceback of a client's protocol error by one line at INFO.

    A client that has left before its answer begins gets no line here, because the lines of its request say so.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ConnectionError):
            return False
        if not isinstance(error, HttpProcessingError | RequestPayloadError):
            return True
        logger.info("a client sent no proper HTTP: %s", reason_of(error))
        return False


def reason_of(error: HttpProcessingError | RequestPayloadError) -> str:
    """Return the first line of the error's text, shortened."""
    text = error.message if isinstance(error, HttpProcessingError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    words = [line for line in lines if line != "400, message:"]
    return (words[0] if words else "malformed")[:200]


FIRST_S = 0.025  # until the first probe; most such requests are answered before
MAX_LOOK_S = 0.25  # between two checks
MAX_PROBE_S = 2.0  # between two probes
BLIND_S = 0.1  # a client that cannot be probed is given up after this

_CLOSE_WAIT = 8  # the kernel's TCP_CLOSE_WAIT: the peer has sent FIN and no RST


def can_look() -> bool:
    """Return whether this system reports the state of a TCP connection."""
    return hasattr(socket, "TCP_INFO")


class HalfClosed:
    """Watches one connection until `end`, and aborts it when the client is gone.

    `probe` sends bytes that a waiting client ignores. It returns False if this client would not understand them.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, probe: Callable[[], bool]
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._probe = probe
        self._look_s = self._probe_s = FIRST_S
        self._probe_at = 0.0
        self._blind_since: float | None = None
        self._timer = loop.call_later(FIRST_S, self._look)

    def end(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        now = self._loop.time()
        if not self._stands() or (self._blind_since is not None and now - self._blind_since > BLIND_S):
            self._transport.abort()
            return
        if now >= self._probe_at and not self._transport.get_write_buffer_size():  # unsent bytes are a probe too
            if self._probe():
                self._blind_since = None
                self._probe_s = min(2 * self._probe_s, MAX_PROBE_S)
                self._probe_at = now + self._probe_s
            elif self._blind_since is None:
                self._blind_since = now
        self._look_s = min(2 * self._look_s, MAX_LOOK_S)
        self._timer = self._loop.call_later(self._look_s, self._look)

    def _stands(self) -> bool:
        connection = self._transport.get_extra_info("socket")
        try:
            return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSE_WAIT
        except OSError:
            return False


BACKLOG = 1024  # connections that wait to be accepted
_PAUSE_S = 0.02  # without a free descriptor, and none that could become free
_CLOSING_S = 0.001  # until connections are closed that were told to


class HttpListener:
    """Listens on an address from `open` to `close`, in the running event loop."""

    def __init__(self, factory: Callable[[], asyncio.Protocol], descriptors: Descriptors) -> None:
        self._factory = factory
        self._descriptors = descriptors
        self._loop = asyncio.get_running_loop()
        self._opening = set[asyncio.Task[object]]()
        self.sockets: list[socket.socket] = []

    async def open(self, host: str, port: int) -> None:
        """Listen on all addresses of a host. Raises OSError for one that is taken or unknown."""
        found = await self._loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, kind, protocol, _, address in dict.fromkeys(found):
                listening = socket.socket(family, kind, protocol)
                self.sockets.append(listening)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.setblocking(False)
                listening.bind(address)
        except OSError:
            self.close()
            raise
        for listening in self.sockets:
            listening.listen(BACKLOG)
            self._loop.add_reader(listening, self._accept, listening)

    def close(self) -> None:
        """Stop listening. Connections that were accepted stay open. May be called twice."""
        for listening in self.sockets:
            if listening.fileno() >= 0:
                self._loop.remove_reader(listening)
                listening.close()
        self.sockets.clear()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(self._descriptors.accepts_per_round):
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is free, or the network has failed
                pause_s = _CLOSING_S if self._descriptors.make_room() else _PAUSE_S
                self._loop.remove_reader(listening)
                self._loop.call_later(pause_s, self._go_on, listening)
                return
            if not self._descriptors.take(connection.fileno()):
                connection.close()
                continue
            connection.setblocking(False)
            task = self._loop.create_task(self._serve(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _go_on(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening, self._accept, listening)

    async def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError):  # the client has left
            await self._loop.connect_accepted_socket(self._factory, connection)
