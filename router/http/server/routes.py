"""The table of all routes. app.py serves exactly these, and the OpenAPI document describes exactly these.

To add a route, write its handler in a file of its own, and add one entry here.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta

from ....metadata.version import package_version
from ...requests.trace import Explanation, Outcome, RecentRequests, RequestText
from ..anthropic import messages
from ..anthropic.types import (
    AnthropicModel,
    AnthropicModelList,
    CountTokensRequest,
    MessageAnswer,
    MessageEvent,
    MessagesRequest,
    TokenCount,
)
from ..generation import serve
from ..generation.types import (
    CancelledRequest,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelInfo,
    ModelList,
    ServedRoutes,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
    Version,
)
from ..openai import completions, models
from ..operators import admin, explain, handoff, status
from ..operators.admin_types import (
    DrainRequest,
    HandoffAnswer,
    HealthAnswer,
    LedgersAnswer,
    NodesAnswer,
    NodeState,
    ReadyAnswer,
)
from ..page import files, live
from ..page.types import RootAnswer, Snapshot
from ..responses import responses
from ..responses.types import ResponseAnswer, ResponseEvent, ResponsesRequest
from .access import KeyLevel
from .api import Api, json_response
from .errors import MessagesErrorBody
from .openapi import document
from .route import Parameter, Route

_Name = Annotated[str, Meta(min_length=1)]
_NODE_ID = Parameter("id", _Name, "Id of the node", "path")
_REQUEST_ID = "`id` in the body of the answer, or its x-request-id"
_operators_route = partial(Route, tag="operators", needs=KeyLevel.ADMIN_KEY)


async def openapi(api: Api, _request: web.Request) -> web.StreamResponse:
    """GET /openapi.json."""
    keys = api.access
    return json_response(document(ROUTES, has_api_keys=keys.has_api_keys, has_admin_key=keys.has_admin_key))


async def served(_api: Api, _request: web.Request) -> web.StreamResponse:
    """GET /v1."""
    return json_response(ServedRoutes(package_version(), client_routes()))


def client_routes() -> list[str]:
    """Return each route that may be open without the admin key, as its method and path."""
    return [f"{route.method} {route.template}" for route in ROUTES if route.needs is not KeyLevel.ADMIN_KEY]


ROUTES: tuple[Route, ...] = (
    Route(
        method="POST",
        path="/v1/completions",
        handler=completions.completions,
        operation_id="createCompletion",
        tag="generation",
        summary="Continue prompts",
        body=CompletionRequest,
        answer=Completion,
        chunk=Completion,
    ),
    Route(
        method="POST",
        path="/v1/chat/completions",
        handler=completions.chat_completions,
        operation_id="createChatCompletion",
        tag="generation",
        summary="Continue a conversation",
        body=ChatRequest,
        answer=ChatCompletion,
        chunk=ChatChunk,
    ),
    Route(
        method="POST",
        path="/v1/messages",
        handler=messages.messages,
        operation_id="createMessage",
        tag="generation",
        summary="Continue a conversation, in Anthropic's API",
        body=MessagesRequest,
        answer=MessageAnswer,
        chunk=MessageEvent,
        error=MessagesErrorBody,
        last_event=None,
    ),
    Route(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=messages.count_tokens,
        operation_id="countTokens",
        tag="generation",
        summary="Number of tokens of a conversation, in Anthropic's API",
        body=CountTokensRequest,
        answer=TokenCount,
        statuses=(404,),
        error=MessagesErrorBody,
    ),
    Route(
        method="POST",
        path="/v1/responses",
        handler=responses.responses,
        operation_id="createResponse",
        tag="generation",
        summary="Continue a conversation, in OpenAI's Responses API",
        body=ResponsesRequest,
        answer=ResponseAnswer,
        chunk=ResponseEvent,
        last_event=None,
    ),
    Route(
        method="DELETE",
        path="/v1/requests/{id:.+}",
        handler=serve.cancel,
        operation_id="cancelRequest",
        tag="generation",
        summary="Cancel a request by the id that its answer carries",
        parameters=(Parameter("id", _Name, _REQUEST_ID, "path"),),
        answer=CancelledRequest,
        statuses=(404,),
    ),
    Route(
        method="GET",
        path="/v1",
        handler=served,
        operation_id="listRoutes",
        tag="status",
        summary="The routes that a client may use",
        answer=ServedRoutes,
    ),
    Route(
        method="GET",
        path="/v1/models",
        handler=models.models,
        operation_id="listModels",
        tag="models",
        summary="The models that are served",
        answer=ModelList,
        anthropic_answer=AnthropicModelList,
    ),
    Route(
        method="GET",
        path="/v1/models/{model:.+}",
        handler=models.model,
        operation_id="getModel",
        tag="models",
        summary="One model",
        parameters=(Parameter("model", _Name, "Name of the model", "path"),),
        answer=ModelInfo,
        anthropic_answer=AnthropicModel,
        statuses=(404,),
    ),
    Route(
        method="POST",
        path="/tokenize",
        handler=models.tokenize,
        operation_id="tokenize",
        tag="models",
        summary="Text to token ids",
        body=TokenizeRequest,
        answer=TokenizeResponse,
        statuses=(404,),
    ),
    Route(
        method="POST",
        path="/detokenize",
        handler=models.detokenize,
        operation_id="detokenize",
        tag="models",
        summary="Token ids to text",
        body=DetokenizeRequest,
        answer=DetokenizeResponse,
        statuses=(404,),
    ),
    Route(
        method="GET",
        path="/tokenizer_info",
        handler=models.tokenizer_info,
        operation_id="getTokenizer",
        tag="models",
        summary="Special tokens and chat template of a model",
        parameters=(Parameter("model", str, "Name of the model; only needed if several are served"),),
        answer=TokenizerInfo,
        statuses=(400, 404, 503),
    ),
    Route(
        method="GET",
        path="/health",
        handler=status.health,
        operation_id="getHealth",
        tag="status",
        summary="The router process answers",
        needs=KeyLevel.NOTHING,
        answer=HealthAnswer,
    ),
    Route(
        method="GET",
        path="/ready",
        handler=status.ready,
        operation_id="getReadiness",
        tag="status",
        summary="A canary request has passed, so requests can be served",
        needs=KeyLevel.NOTHING,
        answer=ReadyAnswer,
        statuses=(503,),
    ),
    Route(
        method="GET",
        path="/metrics",
        handler=status.metrics,
        operation_id="getMetrics",
        tag="status",
        summary="Metrics in Prometheus' text format",
        needs=KeyLevel.FIGURES,
        text="text/plain",
    ),
    Route(
        method="GET",
        path="/version",
        handler=status.version,
        operation_id="getVersion",
        tag="status",
        summary="Baton's version",
        answer=Version,
    ),
    Route(
        method="GET",
        path="/openapi.json",
        handler=openapi,
        operation_id="getOpenApi",
        tag="status",
        summary="This document",
        answer=dict[str, Any],
    ),
    Route(
        method="GET",
        path="/",
        handler=files.root,
        operation_id="getPage",
        tag="page",
        summary="The page that shows the service live, for browsers",
        needs=KeyLevel.NOTHING,
        answer=RootAnswer,
        text="text/html",
    ),
    Route(
        method="GET",
        path="/page/{file:.+}",
        handler=files.file,
        operation_id="getPageFile",
        tag="page",
        summary="A file of the page",
        needs=KeyLevel.NOTHING,
        parameters=(Parameter("file", _Name, "Name of the file", "path"),),
        text="*/*",
        statuses=(404,),
    ),
    Route(
        method="GET",
        path="/live",
        handler=live.live,
        operation_id="watch",
        tag="page",
        summary="State of the service, once per second as a stream of events, or once",
        parameters=(
            Parameter("once", bool, "Answer one snapshot as JSON, no stream"),
            Parameter("pages", bool, "With once: false asks no node for its pages by owner, which are then null"),
        ),
        answer=Snapshot,
        chunk=Snapshot,
        statuses=(400, 429, 503),
        last_event=None,
    ),
    _operators_route(
        method="GET",
        path="/debug/nodes",
        handler=admin.nodes,
        operation_id="listNodes",
        summary="Nodes and pairs, with their state, load and statistics",
        answer=NodesAnswer,
    ),
    _operators_route(
        method="GET",
        path="/debug/ledger",
        handler=admin.ledger,
        operation_id="getLedgers",
        summary="The page ledger of every node",
        answer=LedgersAnswer,
    ),
    _operators_route(
        method="GET",
        path="/debug/handoff",
        handler=handoff.handoff,
        operation_id="getHandoff",
        summary="Contents of a handoff, field by field and in bytes",
        parameters=(Parameter("format", handoff.Format, "Form of the answer; json by default"),),
        answer=HandoffAnswer,
        text="text/plain",
        statuses=(400,),
    ),
    _operators_route(
        method="GET",
        path="/debug/requests",
        handler=explain.recent,
        operation_id="listRequests",
        summary="Live requests and the last ones that have ended, the newest first",
        parameters=(
            Parameter("outcome", Outcome, "Only requests with this outcome"),
            Parameter("stage", str, "Only requests in this stage, such as queue, prefill or decode"),
            Parameter("model", str, "Only requests for this model"),
            Parameter("node", str, "Only requests that this node worked on"),
            Parameter("min_s", float, "Only requests that took at least so many seconds until now or their end"),
            Parameter(
                "limit",
                Annotated[int, Meta(ge=0, lt=10**9)],
                f"Largest number of requests in the answer; {explain.DEFAULT_LIMIT} by default",
            ),
        ),
        answer=RecentRequests,
        statuses=(400,),
    ),
    _operators_route(
        method="GET",
        path="/debug/requests/{rid}",
        handler=explain.one,
        operation_id="getRequest",
        summary="Where a request spent its time, in spans that sum up to the whole",
        parameters=(Parameter("rid", _Name, _REQUEST_ID, "path"),),
        answer=Explanation,
        statuses=(404,),
    ),
    _operators_route(
        method="GET",
        path="/debug/requests/{rid}/text",
        handler=explain.text,
        operation_id="getRequestText",
        summary="The text of a live request until now",
        parameters=(Parameter("rid", _Name, "`rid` in the list of requests", "path"),),
        answer=RequestText,
        statuses=(404,),
    ),
    _operators_route(
        method="POST",
        path="/admin/flush",
        handler=admin.flush,
        operation_id="flushCaches",
        summary="Empty the prefix caches, then answer the page ledgers",
        answer=LedgersAnswer,
    ),
    _operators_route(
        method="POST",
        path="/admin/nodes/{id}/drain",
        handler=admin.drain,
        operation_id="drainNode",
        summary="Give a node no new request, and move those that it does not finish in time",
        parameters=(_NODE_ID,),
        body=DrainRequest,
        is_body_required=False,
        answer=NodeState,
        statuses=(404,),
    ),
    _operators_route(
        method="POST",
        path="/admin/nodes/{id}/undrain",
        handler=admin.undrain,
        operation_id="undrainNode",
        summary="Give a node requests again",
        parameters=(_NODE_ID,),
        answer=NodeState,
        statuses=(404, 409),
    ),
)
