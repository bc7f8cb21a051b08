"""The OpenAPI document, generated from the types that decode and encode the bodies."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import msgspec

from ..errors import ErrorBody
from .explain import Explanation, RecentRequests
from .openai_types import (
    CancelledRequest,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    DrainRequest,
    ModelInfo,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)


class _Route(NamedTuple):
    method: str
    path: str
    summary: str
    request: type | None = None
    response: type | None = None
    piece: type | None = None  # of a stream
    statuses: tuple[int, ...] = ()  # of errors, beside those of every route and of every body

    @property
    def errors(self) -> list[int]:
        """The statuses of all errors that it answers."""
        everywhere = () if self.path == "/health" else _EVERYWHERE
        body = _OF_BODIES if self.request is not None else _OF_POSTS if self.method == "post" else ()
        return sorted({*everywhere, *body, *self.statuses})


_MEANINGS = {
    400: "The request is malformed, or asks for what cannot be; `param` names the field at fault",
    401: "The key that the route needs is missing or wrong",
    403: "The key is not enough for the route; or a web page of a foreign origin asks, or the host is a foreign one",
    404: "There is no such model, node or request",
    408: "The body did not arrive in time",
    409: "The node is leaving by itself, which cannot be undone",
    413: "The body is larger than the router accepts",
    415: "The body's Content-Type is not JSON, or its Content-Encoding is not served (see Accept-Encoding)",
    429: "Too many requests wait, or the key has too many under way; Retry-After says when to try again",
    499: "Somebody else than this client cancelled the request",
    500: "The router or a node failed at the request",
    503: "Nodes that could take the request are not there, or the router is shutting down",
    504: "The request took longer than its timeout_s, or than the router's --request-timeout-s",
}
_EVERYWHERE = (401, 403, 500)
_OF_POSTS = (415,)
_OF_BODIES = (400, 408, 413, 415, 429, 503)
_OF_GENERATIONS = (404, 499, 504)

_ROUTES = (
    _Route("post", "/v1/completions", "Continue prompts", CompletionRequest, Completion, Completion, _OF_GENERATIONS),
    _Route(
        "post",
        "/v1/chat/completions",
        "Continue a conversation",
        ChatRequest,
        ChatCompletion,
        ChatChunk,
        _OF_GENERATIONS,
    ),
    _Route("get", "/v1/models", "The models that are served", None, ModelList),
    _Route("get", "/v1/models/{model}", "One model", None, ModelInfo, statuses=(404,)),
    _Route(
        "delete",
        "/v1/requests/{id}",
        "Cancel a request by the id that its answer carries",
        None,
        CancelledRequest,
        statuses=(404,),
    ),
    _Route("post", "/tokenize", "Text to token ids", TokenizeRequest, TokenizeResponse, statuses=(404,)),
    _Route("post", "/detokenize", "Token ids to text", DetokenizeRequest, DetokenizeResponse, statuses=(404,)),
    _Route("get", "/health", "The router lives (needs no key)"),
    _Route("get", "/ready", "A canary request has passed", statuses=(503,)),
    _Route("get", "/metrics", "Figures for Prometheus"),
    _Route("get", "/debug/nodes", "Nodes, pairs and their figures"),
    _Route("get", "/debug/ledger", "The books of every node"),
    _Route("get", "/debug/handoff", "What a handoff holds, field by field and in bytes", statuses=(400,)),
    _Route(
        "get",
        "/debug/requests",
        "Live requests, and the last ones that are over",
        None,
        RecentRequests,
        statuses=(400,),
    ),
    _Route(
        "get",
        "/debug/requests/{rid}",
        "A request's life as parts that sum up to the whole",
        None,
        Explanation,
        statuses=(404,),
    ),
    _Route("post", "/admin/flush", "Empty the prefix caches"),
    _Route(
        "post",
        "/admin/nodes/{id}/drain",
        "Give a node nothing new; move what it does not finish",
        DrainRequest,
        statuses=(404,),
    ),
    _Route("post", "/admin/nodes/{id}/undrain", "Give a node requests again", statuses=(404, 409)),
)


def package_version() -> str:
    """The installed version of Baton."""
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "unknown"


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    named = {kind for route in _ROUTES for kind in (route.request, route.response, route.piece) if kind is not None}
    types = sorted(named, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(
        [*types, ErrorBody], ref_template="#/components/schemas/{name}"
    )
    by_type = dict(zip([*types, ErrorBody], schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in _ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": package_version()},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _operation(route: _Route, by_type: dict[type, dict[str, Any]]) -> dict[str, Any]:
    def content(kind: type) -> dict[str, Any]:
        return {"application/json": {"schema": by_type[kind]}}

    success: dict[str, Any] = {"description": "Success"}
    if route.response is not None:
        success["content"] = content(route.response)
    if route.piece is not None:
        success["content"]["text/event-stream"] = {"schema": by_type[route.piece]}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {"200": success}
        | {str(status): {"description": _MEANINGS[status], "content": content(ErrorBody)} for status in route.errors},
    }
    if route.request is not None:
        operation["requestBody"] = {"required": route.request is not DrainRequest, "content": content(route.request)}
    names = re.findall(r"{(\w+)}", route.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation
