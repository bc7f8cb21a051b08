"""GET /v1/models and GET /v1/models/{model}: the models that are served."""

from __future__ import annotations

from aiohttp import web

from ..errors import NotFound
from ..node import NodeGroup
from .api import Api, json_response
from .openai_types import ModelInfo, ModelList


async def models(api: Api, _request: web.Request) -> web.StreamResponse:
    """GET /v1/models."""
    return json_response(ModelList([_info(group) for group in api.dispatcher.registry.models()]))


async def model(api: Api, http_request: web.Request) -> web.StreamResponse:
    """GET /v1/models/{model}. Raises NotFound."""
    name = http_request.match_info["model"]
    for group in api.dispatcher.registry.models():
        if group.key.model == name:
            return json_response(_info(group))
    raise NotFound(f"model {name!r} is not served here", param="model")


def _info(group: NodeGroup) -> ModelInfo:
    return ModelInfo(id=group.key.model, created=group.created, max_model_len=group.context_len)
