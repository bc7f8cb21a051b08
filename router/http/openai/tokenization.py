"""Tokenizers of served models: POST /tokenize and POST /detokenize, text to token ids and back; GET /tokenizer_info."""

from __future__ import annotations

from aiohttp import web

from ....metadata.errors import RequestError
from ..generation.types import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizerInfo
from ..server.api import Api, json_response


async def tokenize(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /tokenize."""
    body = await api.body(http_request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt: exactly one of prompt and messages must be given", param="prompt")
    group, tokenizer = api.group_of(body.model)
    answer = await api.side_work.tokenized(body, group, tokenizer)
    return web.Response(body=answer, content_type="application/json")


async def detokenize(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /detokenize."""
    body = await api.body(http_request, DetokenizeRequest)
    group, tokenizer = api.group_of(body.model)
    worst = max(body.tokens, default=0)
    if worst >= group.card.vocab_size:
        raise RequestError(
            f"tokens: token id {worst} is out of range; the vocabulary has {group.card.vocab_size}", param="tokens"
        )
    (text,) = await api.side_work.decoded([body.tokens], group, tokenizer)
    return json_response(DetokenizeResponse(text))


async def tokenizer_info(api: Api, http_request: web.Request) -> web.StreamResponse:
    """GET /tokenizer_info. The query names the model if several are served."""
    group, _ = api.group_of(http_request.query.get("model"))
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
