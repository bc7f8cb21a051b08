"""Log of refused requests: one line each, so that an operator sees why clients fail. It holds nothing of their bodies.

    refused POST /v1/chat/completions of a client: 400 RequestError at messages

An error's sentence may repeat what the client sent, so the line has the class of the error and the field instead. A
client cannot fill the disk: at most MOST_LINES per second are written, and the next line says how many are missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from aiohttp import web

from ....metadata.errors import BatonError, RequestError
from ....metadata.logs import Throttle
from .access import CALLER, Caller, label_of

MOST_LINES = 10  # per second

logger = logging.getLogger(__name__)


class RefusalLog:
    """The lines of one router. `fields`: the names of fields that may be in a line; other names are the client's."""

    def __init__(self, fields: Collection[str], throttle: Callable[[], bool] | None = None) -> None:
        self._fields = frozenset(fields)
        self._is_due = throttle or Throttle(most=MOST_LINES).is_due
        self._num_left_out = 0

    def add(self, request: web.Request, error: BatonError, status: int) -> None:
        """Log a request that is refused by a status 4xx. Other errors have lines of their own."""
        if not 400 <= status < 499:
            return
        if not self._is_due():
            self._num_left_out += 1
            return
        resource = request.match_info.route.resource
        path = "an unknown path" if resource is None else resource.canonical
        caller: Caller | None = request.get(CALLER)
        place = f" at {error.param}" if isinstance(error, RequestError) and error.param in self._fields else ""
        missing = f" ({self._num_left_out} more were refused since the last line)" if self._num_left_out else ""
        words = "refused %s %s of %s: %d %s%s%s"
        logger.info(words, request.method[:16], path, label_of(caller), status, type(error).__name__, place, missing)
        self._num_left_out = 0
