"""Conversion of the texts, token ids and messages of a body into the token ids of its prompts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, cast

from ...metadata.errors import RequestError
from ..node import NodeGroup
from ..text.tokenizer import TextTokenizer
from .openai_types import (
    MAX_PROMPTS,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    TokenizeResponse,
)
from .parameters import template_options
from .tools import check_history, plain_calls

Prompt = str | list[int]  # text, or token ids


class ChatPrompt(NamedTuple):
    """The prompt of a conversation."""

    text: str  # whole, also if the beginning of its tokens was cut off
    ids: list[int]


class EncodedPrompt(NamedTuple):
    """The token ids of a prompt. `text` is None if the prompt was given as ids, or if its beginning was cut off."""

    ids: list[int]
    text: str | None


def prompts_of(body: CompletionRequest) -> list[Prompt]:
    """Return each prompt of the body as it was given. Raises RequestError for mixed or too many prompts."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        try:
            max(cast("list[int]", prompt))  # a million ids may be in it, and this is quick
        except TypeError:
            raise _mixed() from None
        return [cast("list[int]", prompt)]
    prompts = cast("list[Prompt]", prompt)
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"prompt: {len(prompts)} prompts; at most {MAX_PROMPTS} a request", param="prompt")
    if any(isinstance(item, int) for item in prompts):
        raise _mixed()
    return prompts


def _mixed() -> RequestError:
    return RequestError("prompt: token ids and prompts are mixed in one list", param="prompt")


async def encoded_prompt(
    prompt: Prompt,
    group: NodeGroup,
    tokenizer: TextTokenizer,
    param: str,
    *,
    add_special_tokens: bool,
    num_kept: int | None = None,
) -> EncodedPrompt:
    """Return a prompt as token ids. If `num_kept` is given, its beginning is cut off so that at most so many are left.

    Raises RequestError if the model cannot take them.
    """
    text = prompt if isinstance(prompt, str) else None
    ids = prompt
    if isinstance(ids, str):
        ids = await encode(tokenizer, ids, group, param, add_special_tokens=add_special_tokens)
    if num_kept is not None and len(ids) > num_kept:
        ids = ids[-num_kept:]
        if text is not None:
            ids, text = await tokenizer.encode_end(text, num_kept, add_special_tokens=add_special_tokens), None
    _check_ids(ids, group, param)
    return EncodedPrompt(ids, text)


async def chat_prompt(
    body: ChatRequest, group: NodeGroup, tokenizer: TextTokenizer, tools: list[dict[str, Any]] | None = None
) -> ChatPrompt:
    """Return the prompt of a conversation. `tools`: those that the model may call. Raises RequestError if the model
    cannot take it."""
    text = chat_text(
        group,
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final=bool(body.continue_final_message),
        options=template_options(body, group),
        tools=tools,
    )
    encoded = await encoded_prompt(
        text,
        group,
        tokenizer,
        "messages",
        add_special_tokens=bool(body.add_special_tokens),
        num_kept=body.truncate_prompt_tokens,
    )
    return ChatPrompt(text, encoded.ids)


async def tokenized(body: TokenizeRequest, group: NodeGroup, tokenizer: TextTokenizer) -> TokenizeResponse:
    """Return the answer of /tokenize. Raises RequestError if the model cannot take the prompt or the messages."""
    if body.messages is not None:
        with_prompt = body.add_generation_prompt is not False
        text = chat_text(group, body.messages, add_generation_prompt=with_prompt, options={})
        param, add_special = "messages", bool(body.add_special_tokens)
    else:
        text, param, add_special = body.prompt or "", "prompt", body.add_special_tokens is not False
    ids = await encode(tokenizer, text, group, param, add_special_tokens=add_special)
    strings = [tokenizer.token_text(token_id) for token_id in ids] if body.return_token_strs else None
    return TokenizeResponse(count=len(ids), max_model_len=group.context_len, tokens=ids, token_strs=strings)


async def encode(
    tokenizer: TextTokenizer, text: str, group: NodeGroup, param: str, *, add_special_tokens: bool
) -> list[int]:
    """Return the token ids of a text. Raises RequestError, without encoding, if it cannot possibly fit the context."""
    at_least = len(text) // max(1, tokenizer.longest_token)
    if at_least > group.context_len:
        raise RequestError(
            f"{param}: a text of {len(text)} characters has at least {at_least} tokens; the model's context has "
            f"{group.context_len}",
            param=param,
        )
    return await tokenizer.encode(text, add_special_tokens=add_special_tokens)


def chat_text(
    group: NodeGroup,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool,
    continue_final: bool = False,
    options: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """Return the prompt text of a conversation. `tools`: those that the model may call.

    A developer's message becomes the system's if the template knows no developer. A message of either that stands
    behind others is joined to the message before it if the template does not write it there. Raises RequestError if
    the model has no chat template, if the tool calls of the messages do not fit together, or if the template refuses
    the messages.
    """
    check_history(messages)
    if group.template is None:
        raise RequestError(f"model {group.key.model!r} has no chat template; use /v1/completions", param="messages")
    plain = [_plain(message, knows_developer=group.template.knows_developer) for message in messages]
    plain = _joined(plain, group.template.late_roles)
    text = group.template.render(plain, add_generation_prompt=add_generation_prompt, options=options, tools=tools)
    if continue_final:
        final = str(plain[-1]["content"]).strip()
        end = text.rfind(final)
        if not final or end < 0:
            raise RequestError("continue_final_message: the final message is not in the prompt", param="messages")
        text = text[: end + len(final)]
    return text


def _check_ids(ids: Sequence[int], group: NodeGroup, param: str) -> None:
    if not ids:
        raise RequestError(f"{param}: the prompt has no tokens", param=param)
    vocab_size = group.card.vocab_size
    worst = max(ids)
    if worst >= vocab_size:
        raise RequestError(f"{param}: token id {worst} is out of range; the vocabulary has {vocab_size}", param=param)
    if len(ids) >= group.context_len:
        raise RequestError(
            f"{param}: the prompt has {len(ids)} tokens; the model's context of {group.context_len} leaves none "
            "to generate",
            param=param,
        )


def _joined(messages: list[dict[str, Any]], late_roles: Collection[str]) -> list[dict[str, Any]]:
    """Return messages of which none of system or developer stands behind others, except those of `late_roles`. Its text
    joins the system's or the user's message before it. After others it becomes the user's message."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if not joined or message["role"] not in ("system", "developer") or message["role"] in late_roles:
            joined.append(message)
        elif joined[-1]["role"] in ("system", "developer", "user"):
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append({**message, "role": "user"})
    return joined


def _plain(message: ChatMessage, *, knows_developer: bool) -> dict[str, Any]:
    """Return a message in the shape that chat templates expect: text parts joined, absent fields left out."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    role = "system" if message.role == "developer" and not knows_developer else message.role
    plain: dict[str, Any] = {"role": role, "content": content if content is not None else ""}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = plain_calls(message)
    thoughts = message.reasoning_content or message.reasoning
    if thoughts is not None and message.role == "assistant":
        plain["reasoning_content"] = thoughts
        if not (plain["content"] and message.tool_calls):
            plain["thinking"] = thoughts  # gpt-oss' name; its template refuses it beside content and calls
    return plain
