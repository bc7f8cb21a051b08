"""POST /v1/messages and POST /v1/messages/count_tokens of Anthropic's API. A body becomes that of a chat completion and
is served as one (generation/serve.py)."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from ....metadata.errors import RequestError
from ...reasoning_parsers.registry import REASONING_PARSERS
from ...text.tokenizer import TextTokenizer
from ..bodies.fields import renamed
from ..generation.answers import AnswerFormat
from ..generation.grammars import asked_grammar
from ..generation.output import OutputReading
from ..generation.serve import serve_chat
from ..generation.tool_types import FunctionChoice, FunctionTool, Tool, ToolChoice, ToolChoiceObject
from ..generation.tools import check_callers, tool_use
from ..generation.types import ChatMessage, ChatRequest, JsonSchemaFormat, ResponseFormat
from ..server.api import Api, json_response
from .format import MessagesFormat
from .turns import chat_messages, content_of
from .types import (
    AnyChoice,
    AssistantTurn,
    AutoChoice,
    ChoiceOfTools,
    CountTokensRequest,
    MessagesInput,
    MessagesRequest,
    NoChoice,
    OneChoice,
    ThinkingAdaptive,
    ThinkingConfig,
    ThinkingDisabled,
    ThinkingEnabled,
    TokenCount,
)

NAMES = {  # fields of a chat completion -> what they are called here
    "continue_final_message": "messages",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function": "tools[]",
}


async def messages(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /v1/messages."""
    rid = api.new_id(http_request, "msg")
    body = await api.body(http_request, MessagesRequest)

    def format_of(tokenizer: TextTokenizer, reading: OutputReading | None) -> AnswerFormat:
        _check_thinking(body, reading)
        return MessagesFormat(
            rid,
            body.model,
            tokenizer,
            reading,
            max_tokens=body.max_tokens,
            shows_thoughts=_shows_thoughts(body.thinking),
        )

    with renamed(NAMES):
        return await serve_chat(api, http_request, _chat_request(body), format_of)


async def count_tokens(api: Api, http_request: web.Request) -> web.StreamResponse:
    """POST /v1/messages/count_tokens."""
    body = await api.body(http_request, CountTokensRequest)
    with renamed(NAMES):
        conversation = _conversation(body)
        asked_grammar(conversation)
        group, tokenizer = await api.group_of(http_request, body.model)
        use = tool_use(conversation, group.template, api.config.tool_parser)
        prompt = await api.side_work.chat_prompt(
            conversation, group, tokenizer, None if use is None else use.for_template
        )
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
    """Return what a body says to the model: the system's message first. An assistant's last message is continued. Chat
    templates that know `enable_thinking` are told whether thinking is on."""
    messages = chat_messages(body.messages)
    if body.system:
        messages.insert(0, ChatMessage("system", content_of(body.system)))
    output_format = body.output_config.format if body.output_config is not None else None
    response_format = None
    if output_format is not None:
        schema = JsonSchemaFormat(name="output", schema=output_format.schema)
        response_format = ResponseFormat(type="json_schema", json_schema=schema)
    thinking, choice = body.thinking, body.tool_choice
    for index, tool in enumerate(body.tools or ()):
        check_callers(f"tools[{index}]", tool.allowed_callers)
    tools = [
        Tool(function=FunctionTool(tool.name, tool.description, tool.input_schema, tool.strict))
        for tool in body.tools or ()
    ]
    is_parallel = None
    if choice is not None and not isinstance(choice, NoChoice):
        is_parallel = not choice.disable_parallel_tool_use
    return ChatRequest(
        model=body.model,
        messages=messages,
        continue_final_message=isinstance(body.messages[-1], AssistantTurn),
        chat_template_kwargs=_template_options(body),
        thinking_token_budget=thinking.budget_tokens if isinstance(thinking, ThinkingEnabled) else None,
        response_format=response_format,
        tools=tools or None,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=is_parallel,
    )


def _template_options(body: MessagesInput) -> dict[str, Any]:
    """Return the variables for the chat template, which has no need to know them."""
    options: dict[str, Any] = {}
    if body.thinking is not None:
        options["enable_thinking"] = not isinstance(body.thinking, ThinkingDisabled)
    if body.output_config is not None and body.output_config.effort is not None:
        effort = body.output_config.effort
        options["reasoning_effort"] = "high" if effort in ("xhigh", "max") else effort
    return options


def _tool_choice(choice: ChoiceOfTools | None) -> ToolChoice | None:
    match choice:
        case AutoChoice():
            return "auto"
        case AnyChoice():
            return "required"
        case OneChoice():
            return ToolChoiceObject("function", FunctionChoice(choice.name))
        case NoChoice():
            return "none"
        case None:
            return None


def _shows_thoughts(thinking: ThinkingConfig | None) -> bool:
    """Return whether the answer has thoughts. They are left out unless thinking is asked for."""
    return isinstance(thinking, ThinkingEnabled | ThinkingAdaptive) and thinking.display != "omitted"


def _check_thinking(body: MessagesRequest, reading: OutputReading | None) -> None:
    """Raise RequestError for thinking that is enabled if outputs have no thoughts. `reading`: how they are read."""
    if not isinstance(body.thinking, ThinkingEnabled):
        return
    if isinstance(body.messages[-1], AssistantTurn):
        raise RequestError(
            "thinking: excludes a last message of the assistant, which is continued without thoughts", param="thinking"
        )
    if reading is None or reading.reasoning is None:
        raise RequestError(
            "thinking: the router cannot read thoughts of this model; start it with --reasoning-parser and one of "
            f"{', '.join(REASONING_PARSERS)}, or leave thinking out",
            param="thinking",
        )
