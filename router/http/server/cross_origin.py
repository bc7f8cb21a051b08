"""Checks of the origin, host and content type of requests, against foreign web pages. access.py checks keys.

A web page can make its visitor's browser send requests to a server that only the visitor reaches, such as a router on
loopback. Three checks refuse such requests on every route that needs a key. They refuse nothing that other programs
send.

Origin         Browsers name the page's origin in every request that changes something, and in each request whose answer
               the page may read. It must be the router's own origin or one of --allow-origin.
Host           The owner of a page can let its host name point to 127.0.0.1. The page then has the router's own origin
               (DNS rebinding). So Host must be a name of loopback, --host, or one of --allow-host. The check applies
               only if the router listens on loopback and has no API key. Otherwise a request needs a key, or is meant
               to come from anywhere.
Content-Type   A page may send some types without asking. A body must be JSON, which is not one of them.

A page of an allowed origin asks with an OPTIONS request before it sends JSON or a key (preflight). Headers of the
answers let it read them (CORS).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from aiohttp import web

from ...config import RouterConfig
from ...errors import Foreign
from ...origins import Authority, Origin, allowed_hosts, allowed_origins, is_loopback
from .access import Access, KeyLevel
from .errors import HttpRefusal

# headers of answers that pages of allowed origins may read
EXPOSED = "x-request-id, x-baton-seed, Retry-After, retry-after-ms, x-should-retry"
MAX_AGE_S = 600  # for so long a browser may remember the answer to a preflight

_FORM = "application/x-www-form-urlencoded"
_JSON = re.compile(r"application/(json|[a-z0-9!#$&^_.-]+\+json)")
_CHARSETS = ("utf-8", "utf8", "us-ascii")
_ALLOWED = web.RequestKey("allowed_origin", str)  # origin of the page, if it is foreign and allowed


class Reach(NamedTuple):
    """Facts about a listener that the checks need."""

    is_local: bool  # it is on loopback only
    has_api_keys: bool


class CrossOriginChecks:
    """Checks of one listener. `access` knows whether it asks for keys and is on loopback."""

    def __init__(self, config: RouterConfig, access: Access | Reach) -> None:
        self._access = access
        self._origins = allowed_origins(config.allow_origin)
        self._hosts = allowed_hosts(config.allow_host)
        own = Authority.parse(f"[{config.host}]" if ":" in config.host else config.host)
        self._own_host = own.host if own is not None else None

    def check(self, http_request: web.Request, needs: KeyLevel) -> bool:
        """Raise Foreign for a foreign host or page, HttpRefusal (415) for a body that is not JSON. Return whether the
        host or the page is foreign, where that is no error: on routes that need no key."""
        is_foreign = False
        try:
            self._check_host(http_request)
            self._check_page(http_request)
        except Foreign:
            if needs is not KeyLevel.NOTHING:
                raise
            is_foreign = True
        if http_request.method == "POST" and http_request.match_info.http_exception is None:
            _check_content_type(http_request)
        return is_foreign

    def options(self, http_request: web.Request) -> web.StreamResponse:
        """Return the answer to OPTIONS, which needs no key. Raises HTTPNotFound for an unknown path."""
        error = http_request.match_info.http_exception
        if not isinstance(error, web.HTTPMethodNotAllowed):
            raise error or web.HTTPNotFound
        methods = ", ".join(sorted({*error.allowed_methods, "OPTIONS"}))
        response = web.Response(status=204, headers={"Allow": methods})
        if _ALLOWED in http_request and "Access-Control-Request-Method" in http_request.headers:
            response.headers["Access-Control-Allow-Methods"] = methods
            response.headers["Access-Control-Max-Age"] = str(MAX_AGE_S)
            wanted = http_request.headers.get("Access-Control-Request-Headers")
            if wanted:
                response.headers["Access-Control-Allow-Headers"] = wanted
            if http_request.headers.get("Access-Control-Request-Private-Network") == "true":
                response.headers["Access-Control-Allow-Private-Network"] = "true"
        return response

    def label(self, http_request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers that let pages of allowed origins read an answer. Call it before its headers are sent."""
        if self._origins is None or self._origins:
            response.headers.add("Vary", "Origin")
        if _ALLOWED in http_request:
            response.headers["Access-Control-Allow-Origin"] = http_request[_ALLOWED]
            response.headers["Access-Control-Expose-Headers"] = EXPOSED

    def _check_host(self, http_request: web.Request) -> None:
        """Raise Foreign for a foreign Host. A request without Host is HTTP/1.0, which no browser speaks."""
        if self._hosts is None or self._access.has_api_keys or not self._access.is_local:
            return
        for given in http_request.headers.getall("Host", ()):
            host = Authority.parse(given)
            if host is None or not (is_loopback(host.host) or host.host == self._own_host or host.host in self._hosts):
                name = host.host if host is not None else given
                raise Foreign(
                    f"host {name!r} is not this server's; if it should be, start the router with --allow-host {name}"
                )

    def _check_page(self, http_request: web.Request) -> None:
        site = http_request.headers.get("Sec-Fetch-Site", "none")
        given = http_request.headers.getall("Origin", ())
        if not given:
            # A page can send a GET without Origin by <img>, <script> or a frame, and cannot read its answer.
            # A link or address that a person opens is a navigation to a document; it is allowed.
            is_opened = http_request.headers.get("Sec-Fetch-Dest") == "document" and http_request.method in (
                "GET",
                "HEAD",
            )
            if site not in ("none", "same-origin") and self._origins is not None and not is_opened:
                raise Foreign("pages of other origins may not use this server; --allow-origin lets them")
            return
        if len(given) == 1 and self._is_allowed(given[0]):
            http_request[_ALLOWED] = given[0]
        elif site != "same-origin" and not (len(given) == 1 and _is_own(http_request, given[0])):
            raise Foreign(
                f"pages of origin {given[0]!r} may not use this server; if they should, start the router with "
                f"--allow-origin {given[0]}"
            )

    def _is_allowed(self, origin: str) -> bool:
        return self._origins is None or Origin.parse(origin) in self._origins


def _is_own(http_request: web.Request, origin: str) -> bool:
    """Return whether an origin is the router's own, as the client addresses it.

    If a proxy has changed Host or removed TLS, the caller relies on `Sec-Fetch-Site: same-origin`, which the browser
    writes and no page can forge.
    """
    host = Authority.parse(http_request.headers.get("Host", ""))
    return host is not None and Origin.parse(origin) == Origin.of(http_request.scheme, host)


def _check_content_type(http_request: web.Request) -> None:
    given = http_request.headers.get("Content-Type", "").strip().lower()
    if not given:
        return  # a browser sends Origin with every POST, so _check_page has refused foreign pages
    kind, *parameters = (part.strip() for part in given.split(";"))
    if kind == _FORM and not any(
        name.lower() == "origin" or name.lower().startswith("sec-fetch-") for name in http_request.headers
    ):
        return  # `curl -d` sends JSON under this type by default; a browser would send Origin with it
    if _JSON.fullmatch(kind) is None:
        raise HttpRefusal(
            415, f"a body of type {kind!r} is not served; send JSON with `Content-Type: application/json`"
        )
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name == "charset" and value.strip('"') not in _CHARSETS:
            raise HttpRefusal(415, f"a body in charset {value} is not served; send JSON in UTF-8")
