"""Models that are served, and their tokenizers.

GET /v1/models and GET /v1/models/{model} answer in OpenAI's shape or in Anthropic's. POST /tokenize and POST
/detokenize turn text into token ids and back; GET /tokenizer_info describes the tokenizer.
"""

from __future__ import annotations

from datetime import UTC, datetime

from aiohttp import web

from ....metadata.errors import RequestError
from ...errors import NotFound
from ...nodes.node import NodeGroup
from ..anthropic.types import AnthropicModel, AnthropicModelList
from ..generation.types import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelInfo,
    ModelList,
    TokenizeRequest,
    TokenizerInfo,
)
from ..server.api import Api, is_anthropic, json_response


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


async def tokenize(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /tokenize."""
    body = await api.body(http_request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt: exactly one of prompt and messages must be given", param="prompt")
    group, tokenizer = await api.group_of(http_request, body.model)
    answer = await api.side_work.tokenized(body, group, tokenizer)
    return web.Response(body=answer, content_type="application/json")


async def detokenize(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /detokenize."""
    body = await api.body(http_request, DetokenizeRequest)
    group, tokenizer = await api.group_of(http_request, body.model)
    (text,) = await api.side_work.decoded([body.tokens], group, tokenizer)
    return json_response(DetokenizeResponse(text))


async def tokenizer_info(api: Api, http_request: web.Request) -> web.StreamResponse:
    """GET /tokenizer_info. The query names the model if several are served."""
    group, _ = await api.group_of(http_request, http_request.query.get("model"))
    card, special = group.card, group.card.special_tokens
    return json_response(
        TokenizerInfo(
            model=card.name,
            model_max_length=group.context_len,
            vocab_size=card.vocab_size,
            bos_token=special.get("bos_token"),
            eos_token=special.get("eos_token"),
            pad_token=special.get("pad_token"),
            unk_token=special.get("unk_token"),
            bos_token_id=card.bos_token_id,
            eos_token_ids=list(card.eos_token_ids),
            chat_template=card.chat_template,
        )
    )
