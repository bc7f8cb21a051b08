"""GET /debug/requests, /debug/requests/{rid} and /debug/requests/{rid}/text: traces of live requests and of the last
finished ones, and the text of a live one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, get_args

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from ....metadata.errors import RequestError
from ...errors import Forbidden, NotFound
from ...requests.trace import MAX_FINISHED, Explanation, Outcome, RecentRequests, RequestText, TraceRecorder
from ..server.access import CALLER
from ..server.api import Api, json_response
from ..server.errors import from_validation

FILTER_WORDS = (
    f"the filters are outcome ({', '.join(get_args(Outcome))}), stage (such as queue or decode), model, node, min_s "
    "(seconds) and limit (a count)"
)
DEFAULT_LIMIT = 50
MAX_TEXT_TOKENS = 8192  # of all outputs of a request, whose texts are decoded at once


async def recent(api: Api, http_request: web.Request) -> web.StreamResponse:
    """Answers GET /debug/requests. Raises RequestError for an unknown filter, or a wrong value of one."""
    wanted, now = Filter.of(http_request.query), time.monotonic()
    found = islice((recorder for recorder in _all(api) if wanted.matches(recorder, now)), wanted.limit)
    return json_response(RecentRequests([recorder.read(now).line() for recorder in found]))


async def one(api: Api, http_request: web.Request) -> web.StreamResponse:
    """Answers GET /debug/requests/{rid}. Raises NotFound if the router does not know the id, or has dropped it."""
    wanted, now = http_request.match_info["rid"], time.monotonic()
    found = [recorder.read(now) for recorder in _all(api) if wanted in recorder.trace.ids]
    if not found:
        raise NotFound(
            f"no request {wanted!r} is known; the id is the answer's x-request-id, or `id` in its body. GET "
            f"/debug/requests lists what the router knows: live requests and the last {MAX_FINISHED} others, without "
            "those that were refused before they were queued. Another router may have taken it: ask that one "
            "(`baton explain --url URL1,URL2`)",
            param="rid",
        )
    return json_response(Explanation(found))


async def text(api: Api, http_request: web.Request) -> web.StreamResponse:
    """Answers GET /debug/requests/{rid}/text. Raises NotFound if no such request is live: texts are not kept.

    Raises Forbidden for an API key, which opens the other routes of operators on loopback: its holder may be one of
    several who send requests.
    """
    if api.access.has_api_keys and not http_request[CALLER].is_admin:
        raise Forbidden("texts of requests need the admin key: start the router with --admin-key and send that key")
    wanted = http_request.match_info["rid"]
    for request in api.dispatcher.requests.values():
        if wanted == request.rid and not request.is_canary:
            most_tokens = MAX_TEXT_TOKENS // len(request.sequences)
            texts = [sequence.last_text(most_tokens) for sequence in request.sequences]
            return json_response(RequestText(rid=request.rid, texts=texts, most_tokens=most_tokens))
    raise NotFound(f"no request {wanted!r} is live; the router keeps no text of those that have ended", param="rid")


class Filter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The filters of GET /debug/requests. A filter that is UNSET lets everything pass.

    UNSET rather than None, because a lax conversion takes the text "null" for None.
    """

    outcome: Outcome | UnsetType = UNSET
    stage: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    node: str | UnsetType = UNSET
    min_s: float = 0.0
    limit: Annotated[int, msgspec.Meta(ge=0, lt=10**9)] = DEFAULT_LIMIT

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Filter:
        try:
            return msgspec.convert(dict(query), cls, strict=False)
        except msgspec.ValidationError as error:
            problem = from_validation(error)
            raise RequestError(f"{problem}; {FILTER_WORDS}", param=problem.param) from None

    def matches(self, recorder: TraceRecorder, now: float) -> bool:
        return (
            self.outcome in (UNSET, recorder.trace.outcome)
            and self.stage in (UNSET, recorder.trace.stage)
            and self.model in (UNSET, recorder.trace.model)
            and (self.node is UNSET or self.node in {span.node for span in recorder.trace.spans} - {""})
            and recorder.total_s(now) >= self.min_s
        )


def _all(api: Api) -> list[TraceRecorder]:
    """Return the live and the kept traces, the newest first, with their figures as of now."""
    live = [request for request in api.dispatcher.requests.values() if not request.is_canary]
    for request in live:
        request.timeline.look(request)
    recorders = [*(request.timeline for request in live), *api.dispatcher.finished]
    return sorted(recorders, key=lambda recorder: recorder.begun, reverse=True)
