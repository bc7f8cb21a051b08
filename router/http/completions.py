"""The two routes that generate: from a body to prompts. What follows is serve.py's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from ...metadata.errors import RequestError
from ..node import Group
from ..text.tokenizer import TextTokenizer
from .openai_types import MAX_PROMPTS, ChatMessage, ChatRequest, CompletionRequest
from .parameters import check_chat, check_completion, check_prompt
from .response_format import ChatForm, CompletionForm
from .serve import admitted, serve

if TYPE_CHECKING:
    from .app import Api

_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_chat_decoder = msgspec.json.Decoder(ChatRequest)


async def completions(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    rid = api.new_id(http_request, "cmpl")
    body = await api.body(http_request, _completion_decoder)
    check_completion(body)
    group, tokenizer = api.group_of(body.model)
    given = _given_prompts(body)
    with admitted(api, http_request, body, group, len(given)):
        prompt_ids = await _prompt_ids(body, given, group, tokenizer)
        rids = [rid] if len(given) == 1 else [f"{rid}-{place}" for place in range(len(given))]
        echoed = None
        if body.echo:
            texts = [item if isinstance(item, str) else tokenizer.decode(item) for item in given]
            echoed = dict(zip(rids, texts, strict=True))
        form = CompletionForm(
            rid,
            body.model,
            tokenizer,
            num_logprobs=body.logprobs,
            with_ids=bool(body.return_token_ids),
            prompt_texts=echoed,
        )
        return await serve(
            api,
            http_request,
            body,
            group,
            form,
            list(zip(rids, prompt_ids, strict=True)),
            num_logprobs=body.logprobs,
            wants_prompt_logprobs=bool(body.echo) and body.logprobs is not None,
        )


async def chat_completions(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    rid = api.new_id(http_request, "chatcmpl")
    body = await api.body(http_request, _chat_decoder)
    check_chat(body)
    group, tokenizer = api.group_of(body.model)
    with admitted(api, http_request, body, group, 1):
        text = chat_text(
            group,
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
            continue_final=bool(body.continue_final_message),
            options=body.chat_template_kwargs or {},
        )
        ids = await encode(tokenizer, text, group, "messages", add_special_tokens=bool(body.add_special_tokens))
        check_prompt(ids, group, "messages")
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        form = ChatForm(rid, body.model, tokenizer, num_logprobs=num_logprobs, with_ids=bool(body.return_token_ids))
        return await serve(api, http_request, body, group, form, [(rid, ids)], num_logprobs=num_logprobs)


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


def _given_prompts(body: CompletionRequest) -> list[str | list[int]]:
    """Each prompt as it was given: text or ids."""
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
    return prompts


async def _prompt_ids(
    body: CompletionRequest, prompts: Sequence[str | list[int]], group: Group, tokenizer: TextTokenizer
) -> list[list[int]]:
    """Each prompt's ids, checked."""
    prompt_ids: list[list[int]] = []
    for item in prompts:
        if isinstance(item, str):
            add_special = body.add_special_tokens is not False
            item = await encode(tokenizer, item, group, "prompt", add_special_tokens=add_special)
        check_prompt(item, group, "prompt")
        prompt_ids.append(item)
    return prompt_ids


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
