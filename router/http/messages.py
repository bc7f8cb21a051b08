"""POST /v1/messages and POST /v1/messages/count_tokens of Anthropic's API. A body becomes that of a chat completion and
is served as one (completions.py)."""

from __future__ import annotations

import msgspec
from aiohttp import web

from ..text.tokenizer import TextTokenizer
from .answer_format import AnswerFormat
from .api import Api, json_response
from .completions import serve_chat
from .grammars import asked_grammar
from .messages_format import MessagesFormat
from .messages_types import CountTokensRequest, MessagesInput, MessagesRequest, MessageText, TokenCount
from .openai_types import ChatMessage, ChatRequest, JsonSchemaFormat, ResponseFormat
from .output_reader import OutputReading
from .parameters import check_served
from .prompts import chat_prompt
from .renamed import renamed

NAMES = {  # fields of a chat completion -> what they are called here
    "response_format.json_schema.schema": "output_config.format.schema",
    "stop": "stop_sequences",
}
_messages_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountTokensRequest)


async def messages(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /v1/messages."""
    rid = api.new_id(http_request, "msg")
    body = await api.body(http_request, _messages_decoder)
    check_served(body)

    def format_of(tokenizer: TextTokenizer, reading: OutputReading | None) -> AnswerFormat:
        return MessagesFormat(rid, body.model, tokenizer, reading)

    with renamed(NAMES):
        return await serve_chat(api, http_request, _chat_request(body), format_of)


async def count_tokens(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /v1/messages/count_tokens."""
    body = await api.body(http_request, _count_decoder)
    check_served(body)
    group, tokenizer = api.group_of(body.model)
    conversation = _conversation(body)
    with renamed(NAMES):
        asked_grammar(conversation)
    prompt = await chat_prompt(conversation, group, tokenizer)
    return json_response(TokenCount(len(prompt.ids)))


def _chat_request(body: MessagesRequest) -> ChatRequest:
    return msgspec.structs.replace(
        _conversation(body),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
    )


def _conversation(body: MessagesInput) -> ChatRequest:
    """Return the messages of a body, the system's first. An assistant's last message is continued. Templates that let
    the model think, unless `enable_thinking` is false, are told when thinking is disabled."""
    messages = [ChatMessage(each.role, _text_of(each.content)) for each in body.messages]
    if body.system:
        messages.insert(0, ChatMessage("system", _text_of(body.system)))
    output_format = body.output_config.format if body.output_config is not None else None
    response_format = None
    if output_format is not None:
        schema = JsonSchemaFormat(name="output", schema=output_format.schema)
        response_format = ResponseFormat(type="json_schema", json_schema=schema)
    return ChatRequest(
        model=body.model,
        messages=messages,
        continue_final_message=body.messages[-1].role == "assistant",
        chat_template_kwargs=None if body.thinking is None else {"enable_thinking": False},
        response_format=response_format,
    )


def _text_of(content: str | list[MessageText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
