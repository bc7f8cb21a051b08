"""The two routes that generate: from a body to generations, and from those to an answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash
from aiohttp import web

from ..metadata.errors import BatonError, Overloaded, RequestError
from .answers import StreamedAnswer, WholeAnswer
from .api_types import MAX_PROMPTS, ChatMessage, ChatRequest, CommonRequest, CompletionRequest
from .forms import ChatForm, CompletionForm, Form
from .generation import Generation
from .parameters import (
    check_chat,
    check_completion,
    check_prompt,
    request_seed,
    sampling_params,
    text_options,
)
from .registry import Group
from .tokenizer import TextTokenizer

if TYPE_CHECKING:
    from .app import Api

_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_chat_decoder = msgspec.json.Decoder(ChatRequest)


async def completions(api: Api, request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    body = await api.body(request, _completion_decoder)
    check_completion(body)
    group, tokenizer = api.group_of(body.model)
    prompts = await _prompt_ids(body, group, tokenizer)
    rid = f"cmpl-{secrets.token_hex(12)}"
    rids = [rid] if len(prompts) == 1 else [f"{rid}-{place}" for place in range(len(prompts))]
    echoed = None
    if body.echo:
        texts = [text if isinstance(text, str) else tokenizer.decode(ids) for text, ids in prompts]
        echoed = dict(zip(rids, texts, strict=True))
    form = CompletionForm(
        rid,
        body.model,
        tokenizer,
        num_logprobs=body.logprobs,
        with_ids=bool(body.return_token_ids),
        prompt_texts=echoed,
    )
    wants_prompt_logprobs = bool(body.echo) and body.logprobs is not None
    return await _serve(
        api,
        request,
        body,
        group,
        form,
        list(zip(rids, (ids for _, ids in prompts), strict=True)),
        num_logprobs=body.logprobs,
        wants_prompt_logprobs=wants_prompt_logprobs,
    )


async def chat_completions(api: Api, request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    body = await api.body(request, _chat_decoder)
    check_chat(body)
    group, tokenizer = api.group_of(body.model)
    text = chat_text(
        group,
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final=bool(body.continue_final_message),
        options=body.chat_template_kwargs or {},
    )
    ids = await encode(tokenizer, text, group, "messages", add_special_tokens=bool(body.add_special_tokens))
    check_prompt(ids, group, "messages")
    rid = f"chatcmpl-{secrets.token_hex(12)}"
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    form = ChatForm(rid, body.model, tokenizer, num_logprobs=num_logprobs, with_ids=bool(body.return_token_ids))
    return await _serve(api, request, body, group, form, [(rid, ids)], num_logprobs=num_logprobs)


def chat_text(
    group: Group,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool,
    continue_final: bool = False,
    options: dict[str, Any],
) -> str:
    """The prompt text of a conversation. Raises RequestError where the model has no chat template, or it refuses."""
    if group.template is None:
        raise RequestError(f"model {group.key.model!r} has no chat template; use /v1/completions", param="messages")
    plain = [_plain(message) for message in messages]
    text = group.template.render(plain, add_generation_prompt=add_generation_prompt, options=options)
    if continue_final:
        final = str(plain[-1]["content"]).strip()
        end = text.rfind(final)
        if not final or end < 0:
            raise RequestError("continue_final_message: the final message is not in the prompt", param="messages")
        text = text[: end + len(final)]
    return text


async def encode(
    tokenizer: TextTokenizer, text: str, group: Group, param: str, *, add_special_tokens: bool
) -> list[int]:
    """Ids of a text. Raises RequestError without encoding when it cannot possibly fit the context."""
    at_least = len(text) // max(1, tokenizer.longest_token)
    if at_least > group.context_len:
        raise RequestError(
            f"{param}: a text of {len(text)} characters has at least {at_least} tokens; the model's context has "
            f"{group.context_len}",
            param=param,
        )
    return await tokenizer.encode(text, add_special_tokens=add_special_tokens)


async def _prompt_ids(
    body: CompletionRequest, group: Group, tokenizer: TextTokenizer
) -> list[tuple[str | None, list[int]]]:
    """Each prompt's text, where it was given as text, and its ids, checked."""
    prompt = body.prompt
    prompts: list[str | list[int]] = []
    if isinstance(prompt, str):
        prompts = [prompt]
    elif all(isinstance(item, int) for item in prompt):
        prompts = [[item for item in prompt if isinstance(item, int)]]
    else:
        for item in prompt:
            if isinstance(item, int):
                raise RequestError("prompt: token ids and prompts are mixed in one list", param="prompt")
            prompts.append(item)
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"prompt: {len(prompts)} prompts; at most {MAX_PROMPTS} a request", param="prompt")
    result: list[tuple[str | None, list[int]]] = []
    for item in prompts:
        if isinstance(item, str):
            add_special = body.add_special_tokens is not False
            ids = await encode(tokenizer, item, group, "prompt", add_special_tokens=add_special)
            result.append((item, ids))
        else:
            result.append((None, item))
        check_prompt(result[-1][1], group, "prompt")
    return result


async def _serve(
    api: Api,
    request: web.Request,
    body: CommonRequest,
    group: Group,
    form: Form,
    prompts: list[tuple[str, list[int]]],
    *,
    num_logprobs: int | None,
    wants_prompt_logprobs: bool = False,
) -> web.StreamResponse:
    """Submits one generation a prompt and answers; whatever happens, nothing of them is left behind."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: needs stream to be true", param="stream_options")
    life = api.life
    seed = request_seed(body)
    options = text_options(body)
    salt = xxhash.xxh3_128_hexdigest(body.cache_salt.encode()) if body.cache_salt else ""
    answer = (
        StreamedAnswer(request, form, body.stream_options, api.config.max_unread_bytes)
        if body.stream
        else WholeAnswer(form)
    )
    generations = [
        Generation(
            rid,
            group,
            ids,
            sampling_params(body, group, len(ids), num_logprobs=num_logprobs, seed=seed),
            answer,
            num_choices=body.n or 1,
            options=options,
            salt=salt,
            wants_prompt_logprobs=wants_prompt_logprobs,
            now=time.monotonic(),
        )
        for rid, ids in prompts
    ]
    reason = "the client left"
    try:
        try:
            life.admission.check_room(len(generations))
            answer.start(generations, life.submit)
        except Overloaded:
            api.metrics.count_request(group.key.model, "refused")
            raise
        return await answer.answer(generations, api.response_headers(request, form.response_id))
    except BatonError:
        reason = "a part of the same request failed"
        raise
    finally:
        for generation in generations:
            life.cancel(generation, reason)


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message as templates know it: text parts joined, absent fields absent."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    plain: dict[str, Any] = {"role": message.role, "content": content if content is not None else ""}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain
