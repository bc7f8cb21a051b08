"""The OpenAPI document, generated from the route table and from the types that decode and encode bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....metadata.version import package_version
from ..bodies.fields import Ignored, NotServed, Renamed, rules_of, sent_type
from ..generation.idempotency import HEADER, MAX_LEN
from ..generation.types import EXACTLY_ONE_OF
from ..responses.types import INPUT_ITEMS, ResponsesRequest
from .access import KeyLevel
from .errors import MessagesErrorBody
from .route import Parameter, Route

_DESCRIPTION = (
    "Serves large language models with prefill and decode in separate processes. The routes under /v1 follow OpenAI's, "
    "with extensions of vLLM and of Baton. Every GET route answers HEAD too. OPTIONS on any route answers 204 with the "
    "methods in Allow; another method is answered with 405 and Allow. A body may be sent with Content-Encoding gzip."
)
_TAGS = {
    "generation": "Text from prompts and conversations",
    "models": "The models that are served, and their tokenizers",
    "status": "For probes and monitoring",
    "page": "The page in the browser, and what it shows",
    "operators": "The state of nodes and of requests; these routes need the admin key if the router has one",
}
_MEANINGS = {
    400: "The request is malformed, or cannot be served as it is; `param` names the field at fault",
    401: "The key that the route needs is missing or wrong",
    403: "The key is not enough for the route; or a web page of a foreign origin asks, or the host is a foreign one",
    404: "The model, node or request does not exist",
    408: "The body did not arrive in time",
    409: "The node is leaving by itself, which cannot be undone",
    413: "The body is larger than the router accepts",
    415: "The body's Content-Type is not JSON, or its Content-Encoding is not served (see Accept-Encoding)",
    429: "Too many requests wait, or the key has too many running; Retry-After says when to try again",
    499: "Someone other than this client cancelled the request",
    500: "The router or a node failed at the request",
    503: "The nodes that could take the request are absent, or the router is shutting down",
    504: "The request took longer than its timeout_s, or than the router's --request-timeout-s",
}
_OF_BODIES = (400, 408, 413, 415, 429, 503)
_OF_GENERATION = (404, 499, 504)
_HEADERS = {  # name -> description and JSON type
    "x-request-id": ("The client's x-request-id, else the `id` of an answer that generates", "string"),
    "x-baton-seed": ("The seed, if the request has an Idempotency-Key: it gives the same text anywhere", "string"),
    "Retry-After": ("Seconds after which the client may try again", "integer"),
    "retry-after-ms": ("The same in milliseconds", "integer"),
    "x-should-retry": ("`false`: tells OpenAI's clients not to retry by themselves", "string"),
    "WWW-Authenticate": ("`Bearer`", "string"),
    "Accept-Encoding": ("The encodings that bodies may have", "string"),
}
_HEADERS_OF = {
    401: ("WWW-Authenticate",),
    415: ("Accept-Encoding",),
    429: ("Retry-After", "retry-after-ms"),
    503: ("Retry-After",),
    504: ("x-should-retry",),
}
_STREAM = (
    "Server-sent events, sent if the request has `stream: true`. The `data` of each event is a chunk as JSON. The last "
    "event is an error as JSON if the request fails after the stream has begun. Under /v1/completions and "
    "/v1/chat/completions, a chunk without choices holds the usage if `stream_options.include_usage` is set, and the "
    "last event is `[DONE]`. Lines that begin with a colon are comments."
)


_EVENTS = "Server-sent events. The `data` of each event is a chunk as JSON. Lines that begin with a colon are comments."


def document(routes: Sequence[Route], *, has_api_keys: bool = True, has_admin_key: bool = True) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a router that has these routes and kinds of keys."""
    kinds: list[Any] = []
    for route in routes:
        of_route = (route.error, route.answer, route.anthropic_answer, route.chunk)
        kinds += [kind for kind in of_route if kind is not None and kind not in kinds]
    sent = [*(route.body for route in routes if route.body is not None), *INPUT_ITEMS.values()]
    described = [*kinds, *map(sent_type, sent)]
    kinds += sent
    schemas, components = msgspec.json.schema_components(described, ref_template="#/components/schemas/{name}")
    for component in components.values():
        if component.get("additionalProperties") is False:
            component["additionalProperties"] = {"type": "null"}  # unknown fields that are null are ignored
    for kind in kinds:
        _annotate(kind, components)
    _describe_input(components)
    writer = _Writer(dict(zip(kinds, schemas, strict=True)), has_api_keys, has_admin_key)
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.template, {})[route.method.lower()] = writer.operation(route)
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": package_version(), "description": _DESCRIPTION},
        "tags": [{"name": name, "description": words} for name, words in _TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": components,
            "headers": {
                name: {"description": words, "schema": {"type": kind}} for name, (words, kind) in _HEADERS.items()
            },
            "parameters": {"RequestId": _REQUEST_ID, "IdempotencyKey": _IDEMPOTENCY_KEY},
            "securitySchemes": {
                "api_key": bearer | {"description": "An API key of the router (--api-key, --api-keys)"},
                "admin_key": bearer | {"description": "The admin key of the router (--admin-key)"},
            },
        },
    }


_REQUEST_ID = {
    "name": "x-request-id",
    "in": "header",
    "description": "Name that the client gives to the request, up to 128 printable ASCII characters; a longer name is "
    "cut, any other is ignored. The answer carries it, and logs and traces name it.",
    "schema": {"type": "string"},
}

_IDEMPOTENCY_KEY = {
    "name": HEADER,
    "in": "header",
    "description": "Requests of one tenant with the same key and the same body, byte by byte, have one seed, and so "
    "the same text, at whatever router, unless the body has a seed. Up to 255 printable ASCII characters. No answer is "
    "kept: each such request is computed.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_LEN},
}


class _Writer:
    """Writes operations. `schemas` holds the schema of each type of a body."""

    def __init__(self, schemas: dict[Any, dict[str, Any]], has_api_keys: bool, has_admin_key: bool) -> None:
        self._schemas = schemas
        api_key: list[Any] = [{"api_key": []}, {"admin_key": []}] if has_admin_key else [{"api_key": []}]
        client = api_key if has_api_keys else []
        admin_key: list[Any] = [{"admin_key": []}]
        self._security: dict[KeyLevel, list[Any]] = {
            KeyLevel.NOTHING: [],
            KeyLevel.KEY: client,
            KeyLevel.FIGURES: admin_key if has_api_keys or has_admin_key else [],
            KeyLevel.ADMIN_KEY: admin_key if has_admin_key else client,
        }

    def operation(self, route: Route) -> dict[str, Any]:
        operation: dict[str, Any] = {
            "operationId": route.operation_id,
            "tags": [route.tag],
            "summary": route.summary,
            "security": self._security[route.needs],
            "parameters": [*map(_parameter, route.parameters), *_parameter_refs(route)],
            "responses": {"200": self._success(route)},
        }
        for status in _errors_of(route):
            operation["responses"][str(status)] = {
                "description": _MEANINGS[status],
                "headers": _header_refs(*_HEADERS_OF.get(status, ())),
                "content": self._json(route.error, route.anthropic_answer and MessagesErrorBody),
            }
        if route.body is not None:
            operation["requestBody"] = {"required": route.is_body_required, "content": self._json(route.body)}
        return operation

    def _success(self, route: Route) -> dict[str, Any]:
        content: dict[str, Any] = {}
        if route.answer is not None:
            content |= self._json(route.answer, route.anthropic_answer)
        if route.text is not None:
            content[route.text] = {"schema": {"type": "string"}}
        if route.chunk is not None:
            content["text/event-stream"] = {"schema": self._event(route)}
        return {
            "description": "Success",
            "headers": _header_refs(*(("x-baton-seed",) * _generates(route))),
            "content": content,
        }

    def _event(self, route: Route) -> dict[str, Any]:
        """Return the schema of one event. In OpenAPI 3.1 the schema of a stream is that of its events."""
        is_generated = route.body is not None
        described = {"chunk": route.chunk, "error": route.error} if is_generated else {"chunk": route.chunk}
        data: list[dict[str, Any]] = [
            {
                "title": name,
                "type": "string",
                "contentMediaType": "application/json",
                "contentSchema": self._schemas[kind],
            }
            for name, kind in described.items()
        ]
        if route.last_event is not None:
            data.append({"title": "end of the stream", "const": route.last_event})
        return {
            "description": _STREAM if is_generated else _EVENTS,
            "type": "object",
            "properties": {"data": {"anyOf": data}},
            "required": ["data"],
        }

    def _json(self, kind: Any, for_anthropic: Any = None) -> dict[str, Any]:
        if for_anthropic is None:
            return {"application/json": {"schema": self._schemas[kind]}}
        words = "The second one answers a request with the header anthropic-version."
        return {
            "application/json": {
                "schema": {"anyOf": [self._schemas[kind], self._schemas[for_anthropic]], "description": words}
            }
        }


def _errors_of(route: Route) -> list[int]:
    """Return the statuses of all errors that a route can answer."""
    statuses = {500, *route.statuses}
    if route.needs is not KeyLevel.NOTHING:
        statuses |= {401, 403}
    if route.method == "POST":
        statuses.add(415)
    if route.body is not None:
        statuses |= set(_OF_BODIES)
    if route.chunk is not None and route.body is not None:
        statuses |= set(_OF_GENERATION)
    return sorted(statuses)


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.where,
        "required": parameter.where == "path",
        "description": parameter.description,
        "schema": msgspec.json.schema(parameter.kind),
    }


def _generates(route: Route) -> bool:
    return route.body is not None and route.chunk is not None


def _parameter_refs(route: Route) -> list[dict[str, Any]]:
    names = ["RequestId", "IdempotencyKey"] if _generates(route) else ["RequestId"]
    return [{"$ref": f"#/components/parameters/{name}"} for name in names]


def _header_refs(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in ("x-request-id", *names)}


def _annotate(kind: Any, components: dict[str, Any]) -> None:
    """Add to the schema of a body what its type cannot say: fields that are refused, ignored, or exclude each other."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return
    fields = components[kind.__name__]["properties"]
    if kind in EXACTLY_ONE_OF:
        names = EXACTLY_ONE_OF[kind]
        components[kind.__name__]["oneOf"] = [
            {"required": [name], "properties": {each: _null(each != name) for each in names}} for name in names
        ]
    rules = rules_of(kind)
    for name in fields.keys() & rules.keys():
        rule = rules[name]
        if isinstance(rule, NotServed):
            fields[name] = {
                "enum": list(rule.accepted),
                "default": None,
                "deprecated": True,
                "description": f"Not served: {rule.words}. Only values that ask for nothing are accepted.",
            }
        elif isinstance(rule, Ignored):
            fields[name] = fields[name] | {"description": f"Accepted, without effect: {rule.why}."}
    for name, rule in rules.items():
        if isinstance(rule, Renamed) and rule.since is not None:
            fields[name] = {"deprecated": True, "description": f"Deprecated since {rule.since}: use {rule.to}."}


def _describe_input(components: dict[str, Any]) -> None:
    """Add the types of the items of a response's input, which are decoded one by one."""
    _, items = components[ResponsesRequest.__name__]["properties"]["input"]["anyOf"]
    items["items"] = {"anyOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in INPUT_ITEMS.values()]}


def _null(is_null: bool) -> dict[str, Any]:
    return {"type": "null"} if is_null else {"not": {"type": "null"}}
