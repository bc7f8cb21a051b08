"""Conversion of the texts, token ids and messages of a body into the token ids of its prompts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from msgspec.structs import replace

from ....metadata.errors import RequestError
from ...nodes.node import NodeGroup
from ...text.chat_template import ChatTemplate, TemplateForm
from ...text.tokenizer import TextTokenizer
from .parameters import template_options
from .tools import check_history, in_current_form, plain_calls
from .types import MAX_PROMPTS, ChatMessage, ChatRequest, CompletionRequest, TextPart, TokenizeRequest, TokenizeResponse

Prompt = str | Sequence[int]  # text, or token ids


class ChatPrompt(NamedTuple):
    """The prompt of a conversation."""

    text: str  # whole, also if the beginning of its tokens was cut off
    ids: Sequence[int]


class EncodedPrompt(NamedTuple):
    """The token ids of a prompt. `text` is None if the prompt was given as ids, or if its beginning was cut off."""

    ids: Sequence[int]
    text: str | None


def prompts_of(body: CompletionRequest) -> list[Prompt]:
    """Return each prompt of the body as it was given. Raises RequestError for mixed or too many prompts."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):  # else its ids may be columns (side_work.py)
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
    is_scored_alone: bool = False,
) -> EncodedPrompt:
    """Return a prompt as token ids. If `num_kept` is given, its beginning is cut off so that at most so many are left.
    A prompt that is scored alone may fill the context, since no output follows it.

    Raises RequestError if the model cannot take them.
    """
    text = prompt if isinstance(prompt, str) else None
    ids = prompt
    if isinstance(ids, str):
        if num_kept is None:
            _check_length(tokenizer, ids, group, param)
        ids = await tokenizer.encode(ids, add_special_tokens=add_special_tokens)
    if num_kept is not None and len(ids) > num_kept:
        ids = ids[-num_kept:]
        if text is not None:
            ids, text = await tokenizer.encode_end(text, num_kept, add_special_tokens=add_special_tokens), None
    _check_ids(ids, group, param, num_after=0 if is_scored_alone else 1)
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
        options=template_options(body),
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
    _check_length(tokenizer, text, group, param)
    ids = await tokenizer.encode(text, add_special_tokens=add_special)
    strings = [tokenizer.token_text(token_id) for token_id in ids] if body.return_token_strs else None
    return TokenizeResponse(count=len(ids), max_model_len=group.context_len, tokens=ids, token_strs=strings)


def _check_length(tokenizer: TextTokenizer, text: str, group: NodeGroup, param: str) -> None:
    """Raise RequestError, without encoding, for a text that cannot possibly fit the context."""
    at_least = len(text) // max(1, tokenizer.longest_token)
    if at_least > group.context_len:
        raise RequestError(
            f"{param}: a text of {len(text)} characters has at least {at_least} tokens; the model's context has "
            f"{group.context_len}",
            param=param,
        )


def chat_text(
    group: NodeGroup,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool,
    continue_final: bool = False,
    options: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """Return the prompt text of a conversation. `tools`: those that the model may call. `continue_final`: the prompt
    ends with the text of the final message.

    A developer's message becomes the system's if the template knows no developer. A message of either that stands
    behind others is joined to the message before it if the template does not write it there. Raises RequestError if
    the model has no chat template, if the tool calls of the messages do not fit together, if the template refuses
    the messages, or if the final message cannot be continued.
    """
    if any(map(_is_of_tools, messages)):
        messages = in_current_form(messages)
        check_history(messages)
    template = group.template
    if template is None:
        raise RequestError(f"model {group.key.model!r} has no chat template; use /v1/completions", param="messages")
    read = _joined(messages, template)
    mark = ""
    if continue_final:
        mark = f"{secrets.randbits(128):039}"
        read[-1] = _marked(read[-1], mark)
    form = template.form(has_tools=tools is not None)
    plain = [_plain(message, template, form) for message in read]
    text = template.render(plain, add_generation_prompt=add_generation_prompt, options=options, tools=tools)
    return _cut(text, mark, plain[-1]["content"]) if continue_final else text


def _check_ids(ids: Sequence[int], group: NodeGroup, param: str, *, num_after: int) -> None:
    if not ids:
        raise RequestError(f"{param}: the prompt has no tokens", param=param)
    check_vocabulary(ids, group, param)
    if len(ids) + num_after > group.context_len:
        what = "leaves none to generate" if num_after else "is smaller"
        raise RequestError(
            f"{param}: the prompt has {len(ids)} tokens; the model's context of {group.context_len} {what}", param=param
        )


def check_vocabulary(ids: Sequence[int], group: NodeGroup, param: str) -> None:
    """Raise RequestError if an id is outside the vocabulary."""
    worst, vocab_size = max(ids, default=0), group.card.vocab_size
    if worst >= vocab_size:
        raise RequestError(f"{param}: token id {worst} is out of range; the vocabulary has {vocab_size}", param=param)


def _is_of_tools(message: ChatMessage) -> bool:
    """Whether a message has calls, is a result of one, or has a field that is read as another."""
    is_result = message.role in ("tool", "function") or message.tool_call_id is not None
    return is_result or bool(message.tool_calls or message.function_call or message.refusal)


def _joined(messages: Sequence[ChatMessage], template: ChatTemplate) -> list[ChatMessage]:
    """Return messages whose roles the template knows, of which none of system or developer stands behind others, except
    those of `late_roles`. Its text joins the system's or the user's message before it. After others it becomes the
    user's message."""
    joined: list[ChatMessage] = []
    for message in messages:
        if message.role == "developer" and not template.knows_developer:
            message = replace(message, role="system")
        if not joined or message.role not in ("system", "developer") or message.role in template.late_roles:
            joined.append(message)
        elif joined[-1].role in ("system", "developer", "user"):
            joined[-1] = replace(joined[-1], content=_behind(joined[-1], message))
        else:
            joined.append(replace(message, role="user"))
    return joined


def _behind(first: ChatMessage, second: ChatMessage) -> str | list[TextPart]:
    """Return the content of two messages: a text, or parts if one of them has parts."""
    if not isinstance(first.content, list) and not isinstance(second.content, list):
        return f"{first.content or ''}\n\n{second.content or ''}"
    texts = [*_texts(first), "\n\n" + "\n".join(_texts(second))]
    return [TextPart("text", text) for text in texts]


def _texts(message: ChatMessage) -> list[str]:
    """Return the texts of a message: one, or those of its parts."""
    content = message.content or ""
    return [content] if isinstance(content, str) else [part.text for part in content]


def _marked(message: ChatMessage, mark: str) -> ChatMessage:
    """Return the final message with a mark behind its text. Raises RequestError if it cannot be continued."""
    if message.content is None or message.content == []:
        raise RequestError(
            "continue_final_message: the final message has no content; an empty text can be continued", param="messages"
        )
    if message.tool_calls:
        raise RequestError(
            "continue_final_message: the final message ends with tool calls; leave them out", param="messages"
        )
    *first, last = _texts(message)
    last = f"{last}{mark} "  # a template that trims the text takes the space away
    if isinstance(message.content, str):
        return replace(message, content=last)
    return replace(message, content=[TextPart("text", text) for text in (*first, last)])


def _cut(text: str, mark: str, final: str | list[dict[str, str]]) -> str:
    """Return a prompt up to the mark behind its final message, as transformers cuts it: without white space before the
    mark if the template trims the message. Raises RequestError if the final content is not there as it was given."""
    last = final if isinstance(final, str) else final[-1]["text"]
    before, found, behind = text.rpartition(mark)
    if not behind.startswith(" "):
        before = before.rstrip()
    if not found or not before.rstrip().endswith(last.partition(mark)[0].strip()):
        what = "writes the final message in another way than it is given" if found else "leaves the final message out"
        raise RequestError(
            f"continue_final_message: the model's chat template {what}, so it cannot be continued", param="messages"
        )
    return before


def _plain(message: ChatMessage, template: ChatTemplate, form: TemplateForm) -> dict[str, Any]:
    """Return a message in the form that the chat template reads, with absent fields left out."""
    texts = message.content
    if isinstance(texts, list):
        texts = [part.text for part in texts]
    assert message.role != "function", "it has been made one of a tool"
    plain = form.message("calls" if message.tool_calls else message.role, message.role, texts)
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = plain_calls(message, as_text=form.text_arguments)
    thoughts = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if thoughts is not None and message.role == "assistant":
        plain["reasoning_content"] = thoughts
        if message.reasoning is not None or template.reads_reasoning:
            plain["reasoning"] = thoughts
        if not (plain.get("content") and message.tool_calls):
            plain["thinking"] = thoughts  # gpt-oss' name; its template refuses it beside content and calls
    return plain
