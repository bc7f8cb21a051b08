"""GET /v1/models and GET /v1/models/{model}: the models that are served, in OpenAI's shape or in Anthropic's."""

from __future__ import annotations

from datetime import UTC, datetime

from aiohttp import web

from ...errors import NotFound
from ...nodes.node import NodeGroup
from ..anthropic.types import AnthropicModel, AnthropicModelList
from ..generation.types import ModelInfo, ModelList
from ..server.api import Api, json_response
from ..server.errors import is_anthropic


async def models(api: Api, http_request: web.Request) -> web.StreamResponse:
    """GET /v1/models."""
    groups = api.dispatcher.registry.models()
    if is_anthropic(http_request):
        return json_response(AnthropicModelList.of([_anthropic_info(group) for group in groups]))
    return json_response(ModelList([_info(group) for group in groups]))


async def model(api: Api, http_request: web.Request) -> web.StreamResponse:
    """GET /v1/models/{model}. Raises NotFound."""
    name = http_request.match_info["model"]
    for group in api.dispatcher.registry.models():
        if group.key.model == name:
            return json_response(_anthropic_info(group) if is_anthropic(http_request) else _info(group))
    raise NotFound(f"model {name!r} is not served here", param="model")


def _info(group: NodeGroup) -> ModelInfo:
    return ModelInfo(id=group.key.model, created=group.created, max_model_len=group.context_len)


def _anthropic_info(group: NodeGroup) -> AnthropicModel:
    name, context_len = group.key.model, group.context_len
    created = datetime.fromtimestamp(group.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel(
        id=name, display_name=name, created_at=created, max_input_tokens=context_len, max_tokens=context_len
    )
