"""GET /live: a snapshot of the service once per second, as a stream of events or once as JSON."""

from __future__ import annotations

from aiohttp import web

from ....metadata.errors import BatonError, RequestError
from ..server.access import CALLER, IS_OPERATOR, KeyLevel
from ..server.api import Api
from .types import Sees

_FLAGS = {"false": False, "true": True}


async def live(api: Api, http_request: web.Request) -> web.StreamResponse:
    """GET /live. Who operates the router sees everything, all others see counts. Raises RequestError for a wrong value
    of `once` or `pages`."""
    once, with_pages = _flag(http_request, "once", default=False), _flag(http_request, "pages", default=True)
    if not once and http_request.method != "HEAD":
        return await api.feed.watch(http_request, http_request[CALLER], lambda: _sees_now(api, http_request))
    sees: Sees = "everything" if http_request[IS_OPERATOR] else "counts"
    if sees == "everything" and with_pages:
        await api.snapshots.pages.wait()
    body = api.feed.newest(sees, with_pages=with_pages)
    return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-cache"})


def _flag(http_request: web.Request, name: str, *, default: bool) -> bool:
    given = http_request.query.get(name, "")
    if given and given not in _FLAGS:
        raise RequestError(f"{name}: {given!r} is neither true nor false", param=name)
    return _FLAGS[given] if given else default


def _sees_now(api: Api, http_request: web.Request) -> Sees | None:
    """Return what the caller of a stream may see by the keys of this moment; None if its key is none any more."""
    try:
        caller = api.access.caller_of(http_request, KeyLevel.KEY)
    except BatonError:
        return None
    return "everything" if http_request[IS_OPERATOR] and api.access.may_operate(caller) else "counts"
