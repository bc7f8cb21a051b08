"""The HTTP application: routes, the API key, and what all handlers share."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from ...metadata.errors import BatonError, Overloaded, RequestError, Unavailable
from ...metadata.wire.node_info import Role
from ..availability import degraded, no_node
from ..config import RouterConfig
from ..errors import HttpRefusal, NoNode, NotFound, from_malformed, from_validation, response_of
from ..metrics import CONTENT_TYPE, Metrics
from ..node import ROLES, Group
from ..runner import RunningDispatcher
from ..text.tokenizer import TextTokenizer
from . import admin as debug
from . import completions as generate
from . import explain, handoff, openapi
from .access import CALLER, Access
from .doors import Doors
from .encodings import decoded, encoding_of
from .explain import ARRIVED, RESPONSE_ID
from .faults import SERVER, reason_of
from .openai_types import (
    CancelledRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelInfo,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from .sse import limit_unread
from .underway import UnderWay

logger = logging.getLogger(__name__)

BODY_S = 30.0  # a body must have arrived after so long
MAX_BODIES = 32  # of the largest size, or more smaller ones, that are received at once

_T = TypeVar("_T")
_Handler = Callable[["Api", web.Request], Awaitable[web.StreamResponse]]
_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


class Api:
    """What handlers work with."""

    def __init__(self, config: RouterConfig, dispatcher: RunningDispatcher, metrics: Metrics) -> None:
        self.config = config
        self.dispatcher = dispatcher
        self.metrics = metrics
        self.is_draining = False
        self.ledgers = debug.LedgerDesk(dispatcher)
        self.access = Access(config)
        self.doors = Doors(config, self.access)
        self.under_way = UnderWay(dispatcher.abort)
        self._num_body_bytes = 0  # of bodies that are being received

    def application(self) -> web.Application:
        """The aiohttp application with all routes."""
        app = web.Application(client_max_size=self.config.max_body_bytes, middlewares=[self._middleware])
        app.on_response_prepare.append(self._label)
        for method, path, handler in _ROUTES:
            if method == "GET":
                app.router.add_get(path, self._bound(handler))  # answers HEAD as well
            else:
                app.router.add_route(method, path, self._bound(handler))
        return app

    async def body(self, http_request: web.Request, decoder: msgspec.json.Decoder[_T]) -> _T:
        """The request's body, decoded strictly. Raises RequestError that names the field at fault."""
        if self.is_draining:
            raise Unavailable("the router is shutting down")
        if (http_request.content_length or 0) > self.config.max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(self.config.max_body_bytes, http_request.content_length or 0)
        encoding = encoding_of(http_request.headers.getall("Content-Encoding", ()))
        data = decoded(await self._read(http_request), encoding, self.config.max_body_bytes)
        http_request[ARRIVED] = time.monotonic()
        try:
            return decoder.decode(data)
        except msgspec.ValidationError as error:
            raise from_validation(error) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise from_malformed(data, error) from None

    async def _read(self, http_request: web.Request) -> bytes:
        """The body's bytes. Raises HttpRefusal for one that is broken or does not come, Overloaded for too many."""
        size = self.config.max_body_bytes if http_request.content_length is None else http_request.content_length
        if self._num_body_bytes + size > MAX_BODIES * self.config.max_body_bytes:
            raise Overloaded("too many bodies are being received")
        self._num_body_bytes += size
        try:
            async with asyncio.timeout(BODY_S):
                return await http_request.read()
        except TimeoutError:
            raise HttpRefusal(408, f"the body did not arrive within {BODY_S:g} s") from None
        except web.RequestPayloadError as error:
            logger.info("a body cannot be read: %s", reason_of(error))
            raise HttpRefusal(400, "the body cannot be read: it is not what its headers say") from None
        finally:
            self._num_body_bytes -= size

    def group_of(self, model: str | None) -> tuple[Group, TextTokenizer]:
        """The group with the shortest queue that serves a model; None means the only one served.

        Raises NotFound for a model never seen, Unavailable when its nodes are not there.
        """
        registry = self.dispatcher.registry
        if model is None:
            served = {group.key.model for group in registry.models()}
            names = served or {group.key.model for group in registry.groups.values() if group.nodes}
            if len(names) != 1:
                words = ", ".join(sorted(served)) or "none"
                raise RequestError(f"model: must be named; served are: {words}", param="model")
            (model,) = names
        groups = registry.groups_of(model)
        if not groups:
            if not registry.nodes:
                raise Unavailable("no node has joined")
            names = ", ".join(sorted({group.key.model for group in registry.groups.values()}))
            raise NotFound(f"model {model!r} is not served here; served are: {names}", param="model")
        now = time.monotonic()
        served = [group for group in groups if self.dispatcher.queues.may_wait(group, now)]
        ready = [group for group in served if group.is_paired] or served
        if not ready:
            missing: list[Role] = [role for role in ROLES if not any(group.live(role) for group in groups)]
            why = f"it has no {' and no '.join(missing)} node" if missing else "its nodes are not ready"
            raise no_node(f"model {model!r} cannot be served now: {why}", groups, missing)
        group = min(ready, key=lambda group: len(self.dispatcher.queues.waiting_in(group)))
        assert group.tokenizer is not None, "a paired group has its tokenizer"
        return group, group.tokenizer

    def new_id(self, http_request: web.Request, kind: str) -> str:
        """An id for a request that generates; every answer to it carries one, errors too."""
        http_request[RESPONSE_ID] = f"{kind}-{secrets.token_hex(12)}"
        return http_request[RESPONSE_ID]

    def response_headers(self, http_request: web.Request, response_id: str) -> dict[str, str]:
        """The request id that the client gave, else the response's own."""
        return {"x-request-id": self.request_id(http_request, response_id)}

    @staticmethod
    def request_id(http_request: web.Request, response_id: str) -> str:
        """What the answer's header calls the request: as the client did, else as its body does."""
        return _header_id(http_request) or response_id

    def _bound(self, handler: _Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def call(http_request: web.Request) -> web.StreamResponse:
            return await handler(self, http_request)

        return call

    @web.middleware
    async def _middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            limit_unread(request, self.config.max_unread_s)
            self.doors.check(request)
            if request.method == "OPTIONS":
                response = self.doors.options(request)
            else:
                request[CALLER] = self.access.caller_of(request)
                response = await handler(request)
        except BatonError as error:
            caller = request.get(CALLER)
            response = response_of(error, may_operate=caller is not None and self.access.may_operate(caller))
        except web.HTTPException as error:
            response = response_of(_refusal(request, error))
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except (ConnectionError, TimeoutError):
            raise
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            response = response_of(BatonError("internal error; the router's log has the details"))
        self.metrics.count_http(response.status)
        request_id = _header_id(request) or request.get(RESPONSE_ID)
        if not response.prepared and request_id is not None:
            response.headers["x-request-id"] = request_id
        return response

    async def _label(self, http_request: web.Request, response: web.StreamResponse) -> None:
        """Adds the headers that every answer has, streams and errors too."""
        response.headers["Server"] = SERVER
        self.doors.label(http_request, response)


def _header_id(http_request: web.Request) -> str | None:
    given = http_request.headers.get("x-request-id", "")
    return given[:128] if given and given.isascii() and given.isprintable() else None


def _refusal(http_request: web.Request, error: web.HTTPException) -> BatonError:
    match error.status:
        case 404:
            return NotFound(f"there is no route {http_request.path}")
        case 405:
            return HttpRefusal(405, f"{http_request.path} does not take {http_request.method}")
        case 413:
            return HttpRefusal(413, "the body is larger than the router accepts")
        case _:
            return HttpRefusal(error.status, error.reason)


async def _health(_api: Api, _request: web.Request) -> web.StreamResponse:
    return web.json_response({"status": "ok"})


async def _ready(api: Api, http_request: web.Request) -> web.StreamResponse:
    health = api.dispatcher.health
    if api.is_draining:
        raise Unavailable("the router is shutting down")
    if not health.is_ready:
        raise NoNode("no request could be served now", health.reason)
    may_operate, registry = api.access.may_operate(http_request[CALLER]), api.dispatcher.registry
    found = degraded(registry.nodes.values(), registry.histories, time.monotonic()) if may_operate else []
    return _json({"status": "ready", "degraded": found} if found else {"status": "ready"})


async def _metrics(api: Api, _request: web.Request) -> web.StreamResponse:
    return web.Response(body=api.metrics.page(), headers={"Content-Type": CONTENT_TYPE})


async def _openapi(_api: Api, _request: web.Request) -> web.StreamResponse:
    return web.Response(body=msgspec.json.encode(openapi.document()), content_type="application/json")


async def _models(api: Api, _request: web.Request) -> web.StreamResponse:
    return _json(ModelList([_info(group) for group in api.dispatcher.registry.models()]))


async def _model(api: Api, http_request: web.Request) -> web.StreamResponse:
    name = http_request.match_info["model"]
    for group in api.dispatcher.registry.models():
        if group.key.model == name:
            return _json(_info(group))
    raise NotFound(f"model {name!r} is not served here", param="model")


def _info(group: Group) -> ModelInfo:
    return ModelInfo(id=group.key.model, created=group.created, max_model_len=group.context_len)


async def _tokenize(api: Api, http_request: web.Request) -> web.StreamResponse:
    body = await api.body(http_request, _tokenize_decoder)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt: exactly one of prompt and messages must be given", param="prompt")
    group, tokenizer = api.group_of(body.model)
    if body.messages is not None:
        with_prompt = body.add_generation_prompt is not False
        text = generate.chat_text(group, body.messages, add_generation_prompt=with_prompt, options={})
        add_special = bool(body.add_special_tokens)
    else:
        text, add_special = body.prompt or "", body.add_special_tokens is not False
    param = "prompt" if body.messages is None else "messages"
    ids = await generate.encode(tokenizer, text, group, param, add_special_tokens=add_special)
    strings = [tokenizer.token_text(token_id) for token_id in ids] if body.return_token_strs else None
    return _json(TokenizeResponse(count=len(ids), max_model_len=group.context_len, tokens=ids, token_strs=strings))


async def _detokenize(api: Api, http_request: web.Request) -> web.StreamResponse:
    body = await api.body(http_request, _detokenize_decoder)
    group, tokenizer = api.group_of(body.model)
    worst = max(body.tokens, default=0)
    if worst >= group.card.vocab_size:
        raise RequestError(
            f"tokens: token id {worst} is out of range; the vocabulary has {group.card.vocab_size}", param="tokens"
        )
    return _json(DetokenizeResponse(tokenizer.decode(body.tokens)))


async def _cancel(api: Api, http_request: web.Request) -> web.StreamResponse:
    request_id = http_request.match_info["id"]
    api.under_way.cancel(request_id, http_request[CALLER])
    return _json(CancelledRequest(request_id))


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


_ROUTES: tuple[tuple[str, str, _Handler], ...] = (
    ("POST", "/v1/completions", generate.completions),
    ("POST", "/v1/chat/completions", generate.chat_completions),
    ("GET", "/v1/models", _models),
    ("GET", "/v1/models/{model:.+}", _model),
    ("DELETE", "/v1/requests/{id:.+}", _cancel),
    ("POST", "/tokenize", _tokenize),
    ("POST", "/detokenize", _detokenize),
    ("GET", "/health", _health),
    ("GET", "/ready", _ready),
    ("GET", "/metrics", _metrics),
    ("GET", "/openapi.json", _openapi),
    ("GET", "/debug/nodes", debug.nodes),
    ("GET", "/debug/ledger", debug.ledger),
    ("GET", "/debug/handoff", handoff.handoff),
    ("GET", "/debug/requests", explain.recent),
    ("GET", "/debug/requests/{rid}", explain.one),
    ("POST", "/admin/flush", debug.flush),
    ("POST", "/admin/nodes/{id}/drain", debug.drain),
    ("POST", "/admin/nodes/{id}/undrain", debug.undrain),
)
