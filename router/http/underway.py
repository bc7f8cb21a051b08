"""HTTP requests that generate now, by the ids that their answers carry, so that they can be cancelled by id."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import NotFound
from ..request import Request
from .access import Caller


class _Request(NamedTuple):
    caller: Caller
    requests: Sequence[Request]


class UnderWay:
    """The requests of all callers. `abort` ends a request, telling its client why."""

    def __init__(self, abort: Callable[[Request, str], None]) -> None:
        self._abort = abort
        self._requests: dict[str, list[_Request]] = {}  # clients choose ids, so that one may stand for several

    @contextmanager
    def listed(self, ids: set[str], caller: Caller, requests: Sequence[Request]) -> Generator[None]:
        """The request can be cancelled by any of its ids."""
        http_request = _Request(caller, requests)
        for each in ids:
            self._requests.setdefault(each, []).append(http_request)
        try:
            yield
        finally:
            for each in ids:
                self._requests[each].remove(http_request)
                if not self._requests[each]:
                    del self._requests[each]

    def cancel(self, request_id: str, caller: Caller) -> None:
        """Ends the caller's requests of this id, each with one error to its client; the admin key ends anybody's.
        Raises NotFound where there is none."""
        found = [each for each in self._requests.get(request_id, ()) if caller.is_admin or each.caller is caller]
        running = [request for each in found for request in each.requests if not request.is_over]
        if not running:
            raise NotFound(f"no request {request_id!r} is under way: it has ended, or there never was one")
        for request in running:
            self._abort(request, "by DELETE /v1/requests")
