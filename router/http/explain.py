"""GET /debug/requests and /debug/requests/{rid}: the lives of requests, live ones and the last that are over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, get_args

import msgspec
from aiohttp import web
from msgspec import Struct

from ...metadata.errors import RequestError
from ..errors import NotFound
from ..parts import Part, RequestTimeline, timeline_of
from ..trace import KEPT_CHOICES, Outcome, Timeline

if TYPE_CHECKING:
    from .api import Api

FILTERS = ("outcome", "model", "node", "min_s", "limit")
DEFAULT_LIMIT = 50


class Explanation(Struct, frozen=True):
    """GET /debug/requests/{rid}: the timelines of an id, the newest first: several prompts of one HTTP request have
    one each, and a client may use its own x-request-id more than once."""

    requests: list[RequestTimeline]


class RequestLine(Struct, frozen=True):
    """One request among others."""

    rid: str
    client_id: str | None
    model: str
    outcome: str
    received_at: float
    total_s: float
    ttft_s: float | None
    num_prompt: int
    num_tokens: int
    num_moves: int
    longest: str  # name of the part that took longest, over all choices
    longest_s: float


class RecentRequests(Struct, frozen=True):
    """GET /debug/requests: live requests and those kept of the others, the newest first."""

    requests: list[RequestLine]


async def recent(api: Api, http_request: web.Request) -> web.StreamResponse:
    """GET /debug/requests. Raises RequestError for a filter that is none."""
    for name in http_request.query:
        if name not in FILTERS:
            raise RequestError(f"{name}: there is no such filter; there are {', '.join(FILTERS)}", param=name)
    chosen = _Filter.of(http_request)
    now = time.monotonic()
    found: list[RequestLine] = []
    for timeline in _all(api):
        if len(found) == chosen.limit:
            break
        if chosen.takes(timeline, now):
            found.append(_line(timeline, now))
    return _json(RecentRequests(found))


async def one(api: Api, http_request: web.Request) -> web.StreamResponse:
    """GET /debug/requests/{rid}. Raises NotFound for an id that is not known, or not any more."""
    wanted = http_request.match_info["rid"]
    now = time.monotonic()
    found = [timeline_of(timeline, now) for timeline in _all(api) if _is_called(timeline, wanted)]
    if not found:
        raise NotFound(
            f"no request {wanted!r} is known; the id is the answer's x-request-id, or `id` in its body. Kept are live "
            f"requests and the last {KEPT_CHOICES} others since the router's start, without those that were refused "
            "before they were queued: GET /debug/requests lists them",
            param="rid",
        )
    return _json(Explanation(found))


class _Filter(NamedTuple):
    """What GET /debug/requests was asked for; None: anything."""

    outcome: str | None
    model: str | None
    node: str | None
    min_s: float
    limit: int

    @classmethod
    def of(cls, http_request: web.Request) -> _Filter:
        query = http_request.query
        outcome = query.get("outcome")
        if outcome is not None and outcome not in get_args(Outcome):
            raise RequestError(f"outcome: {outcome!r} is none of {', '.join(get_args(Outcome))}", param="outcome")
        try:
            min_s = float(query.get("min_s", 0))
        except ValueError:
            raise RequestError(f"min_s: {query['min_s']!r} is no number of seconds", param="min_s") from None
        limit = query.get("limit", str(DEFAULT_LIMIT))
        if not (limit.isdecimal() and limit.isascii() and 0 < len(limit) < 10):
            raise RequestError(f"limit: {limit!r} is no number of requests", param="limit")
        return cls(outcome, query.get("model"), query.get("node"), min_s, int(limit))

    def takes(self, timeline: Timeline, now: float) -> bool:
        return (
            self.outcome in (None, timeline.outcome)
            and self.model in (None, timeline.model)
            and (self.node is None or self.node in timeline.nodes)
            and (timeline.ended_at or now) - timeline.begun >= self.min_s
        )


def _all(api: Api) -> list[Timeline]:
    """Live and kept ones, the newest first, with their figures as of now."""
    live = [request for request in api.dispatcher.requests.values() if not request.is_canary]
    for request in live:
        request.timeline.look(request)
    timelines = [*(request.timeline for request in live), *api.dispatcher.finished]
    return sorted(timelines, key=lambda timeline: timeline.begun, reverse=True)


def _is_called(timeline: Timeline, wanted: str) -> bool:
    """The request's own id, its HTTP request's where that had several prompts, or what the client called it."""
    return wanted in (timeline.rid, timeline.response_id, timeline.client_id)


def _line(timeline: Timeline, now: float) -> RequestLine:
    life = timeline_of(timeline, now)
    parts = [part for choice in life.choices for part in choice.parts]
    longest = max(parts, key=lambda part: part.seconds, default=Part("receive"))
    return RequestLine(
        rid=life.rid,
        client_id=life.client_id,
        model=life.model,
        outcome=life.outcome,
        received_at=life.received_at,
        total_s=life.total_s,
        ttft_s=life.ttft_s,
        num_prompt=life.num_prompt,
        num_tokens=sum(choice.num_tokens for choice in life.choices),
        num_moves=timeline.num_moves,
        longest=longest.name,
        longest_s=longest.seconds,
    )


def _json(value: Explanation | RecentRequests) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
