"""What clients do wrong below HTTP's meaning: a line in the log, no traceback, and an answer like all others."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import BaseRequest, RequestHandler, RequestPayloadError, StreamResponse

from ..metadata.errors import BatonError
from .errors import HttpRefusal, response_of

logger = logging.getLogger(__name__)


class Connection(RequestHandler):
    """One connection of the HTTP server. What fails before a route is found gets an answer of ours, not aiohttp's."""

    __slots__ = ()

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> StreamResponse:
        """The answer of a failed request, after which the connection is closed."""
        super().handle_error(request, status, exc, message)  # logs, and raises where an answer has begun
        is_encoding = "content-encoding" in (message or "").lower()
        words = "the Content-Encoding of the body is not served" if is_encoding else "this is no proper HTTP request"
        response = response_of(HttpRefusal(status, words) if status < 500 else BatonError("internal error"))
        response.force_close()
        return response


class ClientFaults(logging.Filter):
    """For aiohttp's logger: a request that is no HTTP, or whose body cannot be decoded, is a client's fault, which is
    one line at INFO here. A client that has left when its answer begins gets no line: its request's own say so.
    Everything else passes."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ConnectionError):
            return False
        if not isinstance(error, HttpProcessingError | RequestPayloadError):
            return True
        logger.info("a client sent no proper HTTP: %s", reason_of(error))
        return False


def reason_of(error: HttpProcessingError | RequestPayloadError) -> str:
    """The first line of what is wrong, shortened."""
    text = error.message if isinstance(error, HttpProcessingError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    words = [line for line in lines if line != "400, message:"]
    return (words[0] if words else "malformed")[:200]
