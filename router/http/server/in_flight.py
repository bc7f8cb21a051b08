"""Table of the HTTP requests that generate now, by the ids in their answers. A client can cancel by such an id."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ...errors import NotFound
from ...requests.request import Request
from .access import Caller


class _HttpRequest(NamedTuple):
    caller: Caller
    requests: Sequence[Request]


class InFlight:
    """The requests of all callers. `abort` ends a request with an error that states the reason."""

    def __init__(self, abort: Callable[[Request, str], None]) -> None:
        self._abort = abort
        self._by_id: dict[str, list[_HttpRequest]] = {}  # clients choose ids, so several requests may share one

    @contextmanager
    def listed(self, ids: set[str], caller: Caller, requests: Sequence[Request]) -> Generator[None]:
        """Make the requests cancellable by any of the ids while the block runs."""
        http_request = _HttpRequest(caller, requests)
        for each in ids:
            self._by_id.setdefault(each, []).append(http_request)
        try:
            yield
        finally:
            for each in ids:
                self._by_id[each].remove(http_request)
                if not self._by_id[each]:
                    del self._by_id[each]

    def cancel(self, request_id: str, caller: Caller) -> None:
        """End the caller's requests with this id; an admin ends those of any caller. Each client gets one error.

        Raises NotFound if there is none.
        """
        found = [each for each in self._by_id.get(request_id, ()) if caller.is_admin or each.caller is caller]
        running = [request for each in found for request in each.requests if not request.is_over]
        if not running:
            raise NotFound(f"no request {request_id!r} is under way: it has ended, or there never was one")
        for request in running:
            self._abort(request, "by DELETE /v1/requests")
