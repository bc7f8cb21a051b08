"""The aiohttp application: the route table bound to an Api, the checks before every handler, errors as answers, and the
log of refusals."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

from aiohttp import web

from ....metadata.errors import BatonError, Overloaded, RequestError
from ....metadata.logs import Throttle
from ...errors import NotFound
from ...origins import Authority, is_loopback, trusted_networks
from ...tenants.fair_turns import ASKER
from ..bodies.bodies import expected, too_large
from ..bodies.fields import sent_type
from .access import CALLER, IS_OPERATOR, Caller, KeyLevel, client_address, label_of, share_of
from .api import Api, is_anthropic, request_id
from .connection import SERVER, Connection
from .cross_origin import CrossOriginChecks, Reach
from .errors import INTERNAL, HttpRefusal, response_of
from .route import Handler, Route
from .routes import ROUTES, client_routes
from .sse import limit_unread

logger = logging.getLogger(__name__)

_AiohttpHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_NOT_SERVED = {  # first segments of paths of OpenAI's that Baton does not have -> what they ask for
    "/v1/audio": "audio is",
    "/v1/batches": "batches are",
    "/v1/embeddings": "embeddings are",
    "/v1/files": "files are",
    "/v1/images": "images are",
    "/v1/moderations": "moderations are",
    "/v1/responses": "stored responses are",
}
_PROBES = frozenset({"/health", "/metrics", "/ready"})  # the paths of --ops-address; their answers are not counted
_STATUS = frozenset(route.template for route in ROUTES if route.tag == "status")
_FIELDS = {  # of bodies and queries, which the log may name
    *(name for route in ROUTES if route.body is not None for name in sent_type(route.body).__struct_encode_fields__),
    *(parameter.name for route in ROUTES for parameter in route.parameters),
}
_BY_TEMPLATE = {(route.method, route.template): route for route in ROUTES}


def application(api: Api) -> web.Application:
    """Return the aiohttp application that serves all routes."""
    return _application(api, _Wrapper(api, CrossOriginChecks(api.config, api.access)), ROUTES)


def ops_application(api: Api, address: Authority) -> web.Application:
    """Return the application of --ops-address: probes and metrics, without a key."""
    config = dataclasses.replace(api.config, host=address.host)
    checks = CrossOriginChecks(config, Reach(is_local=is_loopback(address.host), has_api_keys=False))
    routes = [route for route in ROUTES if route.path in _PROBES]
    return _application(api, _Wrapper(api, checks, is_ops=True), routes)


def _application(api: Api, wrapper: _Wrapper, routes: Sequence[Route]) -> web.Application:
    app = web.Application(client_max_size=api.config.max_body_bytes, middlewares=[wrapper.handle])
    app.on_response_prepare.append(wrapper.label)
    for route in routes:
        handler = _bound(route.handler, api)
        if route.method == "GET":
            app.router.add_get(route.path, handler, expect_handler=expected)  # answers HEAD as well
        else:
            app.router.add_route(route.method, route.path, handler, expect_handler=expected)
    return app


def needs_of(http_request: web.Request) -> KeyLevel:
    """Return the key that a request needs.

    A path or method that no route has needs what its neighbours need, which are the routes with the same first
    segment. So nobody learns without the admin key which paths exist under /admin.
    """
    resource = http_request.match_info.route.resource
    if resource is not None:
        method = "GET" if http_request.method == "HEAD" else http_request.method
        return _BY_TEMPLATE[method, resource.canonical].needs
    path = http_request.path
    same = [route.needs for route in ROUTES if route.path == path]
    if same:
        return max(same)
    neighbours = [route.needs for route in ROUTES if path.startswith(f"/{route.path.split('/')[1]}/")]
    return max([KeyLevel.KEY, *neighbours])


class _Wrapper:
    """Steps around every handler."""

    def __init__(self, api: Api, checks: CrossOriginChecks, *, is_ops: bool = False) -> None:
        """`is_ops`: no route needs a key, and nobody is an operator."""
        self._api = api
        self._checks = checks
        self._is_ops = is_ops
        self._refusals = RefusalLog(_FIELDS)
        self._trusted = trusted_networks(api.config.trusted_proxy)

    @web.middleware
    async def handle(self, request: web.Request, handler: _AiohttpHandler) -> web.StreamResponse:
        """Check a request, call its handler, and turn errors into answers."""
        access = self._api.access
        try:
            limit_unread(request, self._api.config.max_unread_s)
            needs = KeyLevel.NOTHING if self._is_ops else needs_of(request)
            self._check_descriptor(request)
            is_foreign = self._checks.check(request, KeyLevel.KEY if self._is_ops else needs)
            if request.method == "OPTIONS":
                response = self._checks.options(request)
            else:
                caller = request[CALLER] = access.caller_of(request, needs)
                request[IS_OPERATOR] = not (self._is_ops or is_foreign) and access.may_operate(caller)
                ASKER.set(share_of(caller))
                response = await handler(request)
        except BatonError as error:
            response = self._failed(request, error, may_operate=request.get(IS_OPERATOR, False))
        except web.HTTPException as error:
            response = self._failed(request, _refusal(request, error))
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except (ConnectionError, TimeoutError):
            raise
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            response = self._failed(request, BatonError(INTERNAL))
        if request.path not in _PROBES:
            self._api.metrics.count_http(response.status)
        called = request_id(request)
        if not response.prepared and called is not None:
            response.headers["x-request-id"] = called
        return response

    def _check_descriptor(self, request: web.Request) -> None:
        """Count the connection as the client's behind a proxy. Raises Overloaded if few descriptors are left: then only
        the router's status is served, and the connection is closed."""
        connection = request.protocol
        if not isinstance(connection, Connection):
            return
        if self._trusted:
            peer = request.remote or ""
            connection.came_from(client_address(peer, request.headers, self._trusted))
        if self._api.descriptors.is_reserved(connection.descriptor):
            connection.keep_alive(False)
            resource = request.match_info.route.resource
            if resource is None or resource.canonical not in _STATUS:
                raise Overloaded("the router has too many connections")

    def _failed(self, request: web.Request, error: BatonError, *, may_operate: bool = False) -> web.StreamResponse:
        in_anthropics, called = is_anthropic(request), request_id(request)
        response = response_of(error, may_operate=may_operate, in_anthropics=in_anthropics, request_id=called)
        self._refusals.add(request, error, response.status)
        return response

    async def label(self, http_request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers that every answer has, streams and errors too."""
        response.headers["Server"] = SERVER
        if is_anthropic(http_request) and "x-request-id" in response.headers:
            response.headers["request-id"] = response.headers["x-request-id"]  # Anthropic's clients read this
        self._checks.label(http_request, response)


def _bound(handler: Handler, api: Api) -> _AiohttpHandler:
    async def call(http_request: web.Request) -> web.StreamResponse:
        return await handler(api, http_request)

    return call


def _refusal(http_request: web.Request, error: web.HTTPException) -> BatonError:
    """Return the error of the router for one that aiohttp has raised."""
    match error.status:
        case 404:
            return NotFound(_no_route(http_request))
        case 405:
            return HttpRefusal(405, f"{http_request.path} does not take {http_request.method}")
        case 413:
            return too_large(http_request.client_max_size)
        case _:
            return HttpRefusal(error.status, error.reason)


def _no_route(http_request: web.Request) -> str:
    what = _NOT_SERVED.get("/".join(http_request.path.split("/")[:3]))
    words = f"there is no route {http_request.path}" if what is None else f"{what} not served"
    here = {resource.canonical for resource in http_request.app.router.resources()}
    routes = [route for route in client_routes() if route.split()[1] in here]
    return f"{words}; the routes are: {', '.join(routes)}"


MOST_LINES = 10  # per second


class RefusalLog:
    """Log of refused requests: one line each, so that an operator sees why clients fail.

        refused POST /v1/chat/completions of a client: 400 RequestError at messages

    An error's sentence may repeat what the client sent in its body, so the line has the class of the error and the
    field instead. `fields`: the names of fields that may be in a line; other names are the client's. A client cannot
    fill the disk: at most MOST_LINES per second are written, and the next line says how many are missing.
    """

    def __init__(self, fields: Collection[str]) -> None:
        self._fields = frozenset(fields)
        self._throttle = Throttle(most=MOST_LINES)
        self._num_left_out = 0

    def add(self, request: web.Request, error: BatonError, status: int) -> None:
        """Log a request that is refused by a status 4xx. Other errors have lines of their own."""
        if not 400 <= status < 499:
            return
        if not self._throttle.is_due():
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
