"""HTTP requests that generate now, by the ids that their answers carry, so that they can be cancelled by id."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from .access import Caller
from .errors import NotFound
from .generation import Generation


class _Request(NamedTuple):
    caller: Caller
    generations: Sequence[Generation]


class UnderWay:
    """The requests of all callers. `abort` ends a generation, telling its client why."""

    def __init__(self, abort: Callable[[Generation, str], None]) -> None:
        self._abort = abort
        self._requests: dict[str, list[_Request]] = {}  # clients choose ids, so that one may stand for several

    @contextmanager
    def listed(self, ids: set[str], caller: Caller, generations: Sequence[Generation]) -> Generator[None]:
        """The request can be cancelled by any of its ids."""
        request = _Request(caller, generations)
        for each in ids:
            self._requests.setdefault(each, []).append(request)
        try:
            yield
        finally:
            for each in ids:
                self._requests[each].remove(request)
                if not self._requests[each]:
                    del self._requests[each]

    def cancel(self, request_id: str, caller: Caller) -> None:
        """Ends the caller's requests of this id, each with one error to its client; the admin key ends anybody's.
        Raises NotFound where there is none."""
        found = [each for each in self._requests.get(request_id, ()) if caller.is_admin or each.caller is caller]
        running = [generation for each in found for generation in each.generations if not generation.is_over]
        if not running:
            raise NotFound(f"no request {request_id!r} is under way: it has ended, or there never was one")
        for generation in running:
            self._abort(generation, "by DELETE /v1/requests")
