"""POST /v1/responses of OpenAI's API, without a store. A body becomes that of a chat completion and is served as one
(generation/serve.py)."""

from __future__ import annotations

from aiohttp import web

from ....metadata.errors import RequestError
from ...text.tokenizer import TextTokenizer
from ..bodies.fields import renamed
from ..generation.answers import AnswerFormat
from ..generation.output import OutputReading
from ..generation.serve import serve_chat
from ..generation.types import ChatMessage, ChatRequest, JsonSchemaFormat, ResponseFormat
from ..server.api import Api
from .format import ResponsesFormat
from .tools import ResponseTools, choice_for_chat
from .types import ResponsesRequest, TextFormat

NAMES = {  # fields of a chat completion -> what they are called here
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "tools[].function": "tools[]",
}


async def responses(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /v1/responses."""
    rid = api.new_id(http_request, "resp")
    body = await api.body(http_request, ResponsesRequest)
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: needs stream to be true", param="stream_options")

    tools = ResponseTools(body.tools or ())

    def format_of(tokenizer: TextTokenizer, reading: OutputReading | None) -> AnswerFormat:
        return ResponsesFormat(rid, body, tools, tokenizer, reading)

    with renamed({**tools.paths, **NAMES}):
        messages = await api.side_work.messages_of(body)
        return await serve_chat(api, http_request, _chat_request(body, messages, tools), format_of)


def _chat_request(body: ResponsesRequest, messages: list[ChatMessage], tools: ResponseTools) -> ChatRequest:
    """Return the body as that of a chat completion."""
    return ChatRequest(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        response_format=_response_format(body.text.format) if body.text and body.text.format else None,
        tools=tools.for_chat or None,
        tool_choice=choice_for_chat(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        prompt_cache_key=body.prompt_cache_key,
    )


def _response_format(given: TextFormat) -> ResponseFormat:
    schema = None if bytes(given.schema) in (b"", b"null") else given.schema
    if (schema is not None) != (given.type == "json_schema"):
        words = "needs schema" if schema is None else "has no schema; type 'json_schema' has it"
        raise RequestError(f"text.format: type {given.type!r} {words}", param="text")
    if schema is None:
        return ResponseFormat(type=given.type)
    return ResponseFormat(type=given.type, json_schema=JsonSchemaFormat(name=given.name or "output", schema=schema))
