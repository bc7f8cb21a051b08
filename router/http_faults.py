"""What clients do wrong below HTTP's meaning: the HTTP server's own log lines about it, without tracebacks."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError

logger = logging.getLogger(__name__)


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
