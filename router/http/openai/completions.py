"""Handlers of POST /v1/completions and POST /v1/chat/completions. generation/serve.py lists their steps."""

from __future__ import annotations

from aiohttp import web

from ....metadata.errors import RequestError
from ...text.tokenizer import TextTokenizer
from ..generation.answers import AnswerFormat
from ..generation.grammars import asked_grammar, grammar_of
from ..generation.output import OutputReading
from ..generation.parameters import check_completion
from ..generation.prompts import prompts_of
from ..generation.serve import admitted, serve, serve_chat
from ..generation.types import ChatRequest, CompletionRequest
from ..server.api import Api
from .format import ChatFormat, CompletionFormat


async def completions(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    rid = api.new_id(http_request, "cmpl")
    body = await api.body(http_request, CompletionRequest)
    check_completion(body)
    asked = asked_grammar(body)
    group, tokenizer = await api.group_of(http_request, body.model)
    prompts = prompts_of(body)
    if body.received_token_ids and len(prompts) > 1:
        raise RequestError(
            f"received_token_ids: continues one output, but there are {len(prompts)} prompts",
            param="received_token_ids",
        )
    with admitted(api, http_request, body, group, len(prompts)):
        encoded = await api.side_work.encoded_prompts(
            prompts,
            group,
            tokenizer,
            add_special_tokens=body.add_special_tokens is not False,
            num_kept=body.truncate_prompt_tokens,
            is_scored_alone=body.max_tokens == 0,
        )
        rids = [rid] if len(prompts) == 1 else [f"{rid}-{index}" for index in range(len(prompts))]
        echoed = None
        if body.echo:
            unread = [prompt.ids for prompt in encoded if prompt.text is None]
            read = iter(await api.side_work.decoded(unread, group, tokenizer) if unread else ())
            texts = [next(read) if prompt.text is None else prompt.text for prompt in encoded]
            echoed = dict(zip(rids, texts, strict=True))
        answer_format = CompletionFormat(
            rid,
            body.model,
            tokenizer,
            num_logprobs=body.logprobs,
            with_ids=bool(body.return_token_ids),
            with_metrics=bool(body.return_metrics),
            prompt_texts=echoed,
            given_texts=[rid for rid, prompt in zip(rids, encoded, strict=True) if prompt.text is not None],
            has_output=body.max_tokens != 0,
        )
        return await serve(
            api,
            http_request,
            body,
            group,
            answer_format,
            [(rid, prompt.ids) for rid, prompt in zip(rids, encoded, strict=True)],
            wants_prompt_logprobs=bool(body.echo) and body.logprobs is not None,
            grammar=None if asked is None else await grammar_of(api.grammars, asked, group),
            received=body.received_token_ids or (),
        )


async def chat_completions(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    rid = api.new_id(http_request, "chatcmpl")
    body = await api.body(http_request, ChatRequest)

    def format_of(tokenizer: TextTokenizer, reading: OutputReading | None) -> AnswerFormat:
        return ChatFormat(
            rid,
            body.model,
            tokenizer,
            reading,
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            with_ids=bool(body.return_token_ids),
            with_metrics=bool(body.return_metrics),
        )

    return await serve_chat(api, http_request, body, format_of)
