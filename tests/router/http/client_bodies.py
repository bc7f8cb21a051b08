"""First and second requests of client programs, as bodies of our own with the fields that each of them sends."""

from __future__ import annotations

from typing import Any

CHAT, MESSAGES, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"

_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_STRICT_CITY = {**_CITY, "additionalProperties": False, "$schema": "http://json-schema.org/draft-07/schema#"}
_FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": _CITY}
_TOOL = {"type": "function", "function": _FUNCTION}
_ASKED = {"role": "user", "content": "How is the weather?"}
_PARTS = {"role": "user", "content": [{"type": "text", "text": "How is the weather?"}]}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "City", "schema": _STRICT_CITY, "strict": True}}
_USE = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}}
_USED = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}]}
_CLAUDE_TOOL = {"name": "get_weather", "description": "Weather of a city", "input_schema": _CITY}
_ITEM_CALL = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Rome"}'}
_ITEM_RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
_FLAT_TOOL = {"type": "function", "strict": False, **_FUNCTION}


def _history(call: dict[str, Any], **message: Any) -> list[Any]:
    return [_ASKED, {"role": "assistant", "content": None, "tool_calls": [{**_CALL, **call}], **message}, _RESULT]


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-python": (CHAT, {"messages": [_ASKED], "reasoning_effort": "low", "verbosity": "low", "tools": [_TOOL]}),
    "openai-python turn 2": (
        CHAT,
        {"messages": _history({}, refusal=None, annotations=[], audio=None), "tools": [_TOOL]},
    ),
    "openai-node": (CHAT, {"messages": [_ASKED], "tools": [_TOOL], "tool_choice": "auto", "parallel_tool_calls": True}),
    "langchain": (CHAT, {"messages": _history({}), "tools": [_TOOL], "temperature": 0.5}),
    "langchain responses": (RESPONSES, {"input": [_ASKED, {**_ITEM_CALL, "id": "fc_1"}, _ITEM_RESULT]}),
    "llama-index": (CHAT, {"messages": [_ASKED], "temperature": 0.1}),
    "llama-index completion": (COMPLETIONS, {"prompt": "hello", "temperature": 0.1}),
    "litellm": (
        CHAT,
        {
            "messages": _history(
                {"provider_specific_fields": None, "index": 0},
                function_call=None,
                provider_specific_fields={"refusal": None},
                thinking_blocks=[],
            ),
            "tools": [{**_TOOL, "cache_control": {"type": "ephemeral"}}],
            "thinking": {"type": "disabled"},
            "litellm_metadata": {"a": "b"},
        },
    ),
    "ai-sdk openai": (
        RESPONSES,
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            "store": False,
            "text": {"verbosity": "low"},
            "tools": [_FLAT_TOOL],
        },
    ),
    "ai-sdk anthropic": (
        MESSAGES,
        {
            "messages": [_PARTS],
            "tools": [{**_CLAUDE_TOOL, "eager_input_streaming": True}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
    ),
    "ai-sdk compatible": (
        CHAT,
        {
            "messages": [_ASKED],
            "reasoning_effort": "low",
            "verbosity": "low",
            "user": "u",
            "tools": [_TOOL],
            "tool_choice": "auto",
        },
    ),
    "ai-sdk object": (CHAT, {"messages": [_ASKED], "response_format": _FORMAT}),
    "instructor": (
        CHAT,
        {
            "messages": [_ASKED],
            "tools": [_TOOL],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        },
    ),
    "pydantic-ai": (
        CHAT,
        {"messages": [_ASKED], "tools": [{**_TOOL, "function": {**_FUNCTION, "strict": True}}], "tool_choice": "auto"},
    ),
    "pydantic-ai responses": (RESPONSES, {"input": [_ASKED], "tools": [_FLAT_TOOL], "tool_choice": "auto"}),
    "haystack": (CHAT, {"messages": _history({}), "n": 1, "tools": [_TOOL]}),
    "smolagents": (
        CHAT,
        {
            "messages": [{**_PARTS, "role": "system"}, _PARTS],
            "stop": ["Observation:"],
            "tools": [_TOOL],
            "tool_choice": "auto",
        },
    ),
    "anthropic-python": (MESSAGES, {"messages": [_ASKED], "tools": [_CLAUDE_TOOL]}),
    "anthropic-node": (
        MESSAGES,
        {
            "messages": [_ASKED, {"role": "assistant", "content": [{**_USE, "caller": {"type": "direct"}}]}, _USED],
            "tools": [{**_CLAUDE_TOOL, "type": "custom"}],
        },
    ),
    "claude code": (
        MESSAGES,
        {
            "system": [{"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral"}}],
            "messages": [_PARTS],
            "metadata": {"user_id": "u"},
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        },
    ),
    "codex": (
        RESPONSES,
        {
            "instructions": "You code.",
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            "tools": [{"type": "function", **_FUNCTION}],
            "reasoning": {"effort": "medium", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k",
            "client_metadata": {"a": "b"},
            "store": False,
        },
    ),
    "codex turn 2": (
        RESPONSES,
        {
            "input": [
                {
                    "type": "message",
                    "id": "msg_0",
                    "role": "developer",
                    "content": [{"type": "input_text", "text": "You code."}, {"type": "input_text", "text": "Rules."}],
                },
                {
                    "type": "message",
                    "id": "msg_1",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "How is the weather?"}],
                },
                {
                    "type": "message",
                    "status": "completed",
                    "id": "msg_2",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
                },
                {**_ITEM_CALL, "id": "fc_1", "status": "completed"},
                {**_ITEM_RESULT, "id": "fco_1"},
            ],
            "tools": [
                _FLAT_TOOL,
                {"type": "namespace", "name": "agents", "description": "Other agents", "tools": [_FLAT_TOOL]},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k",
            "client_metadata": {"session_id": "s"},
            "store": False,
        },
    ),
    "claude code turn 2": (
        MESSAGES,
        {
            "system": [
                {"type": "text", "text": "billing: x"},
                {"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Reminder."}, {"type": "text", "text": "Go."}]},
                {"role": "system", "content": "Kinds of agents: none"},
                {"role": "assistant", "content": [{"type": "text", "text": "I look."}, _USE]},
                {
                    "role": "user",
                    "content": [
                        {**_USED["content"][0], "is_error": False, "cache_control": {"type": "ephemeral"}},
                    ],
                },
            ],
            "tools": [_CLAUDE_TOOL],
            "metadata": {"user_id": '{"device_id": "d"}'},
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        },
    ),
    "openai agents": (
        CHAT,
        {"messages": [{"role": "system", "content": "be brief"}, *_history({})], "tools": [_TOOL]},
    ),
    "openai agents responses": (
        RESPONSES,
        {
            "input": [_ASKED, {**_ITEM_CALL, "id": "fc_1", "status": "completed"}, _ITEM_RESULT],
            "instructions": "be brief",
            "include": [],
            "tools": [{**_FLAT_TOOL, "strict": True}],
        },
    ),
    "autogen": (
        CHAT,
        {"messages": [{**_ASKED, "name": "user"}, *_history({})[1:]], "tools": [_TOOL], "tool_choice": "auto"},
    ),
    "mistral": (
        CHAT,
        {
            "messages": _history({"index": 0}, prefix=False),
            "tools": [_TOOL],
            "tool_choice": "any",
            "random_seed": 3,
            "safe_prompt": False,
        },
    ),
    "langchain anthropic": (
        MESSAGES,
        {"messages": [_ASKED], "tools": [_CLAUDE_TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}},
    ),
    "a responses client on chat": (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "hi", "annotations": []}]},
                _ASKED,
            ],
            "tools": [_FLAT_TOOL],
            "tool_choice": {"type": "function", "name": "get_weather"},
        },
    ),
    "openrouter": (
        CHAT,
        {
            "messages": _history(
                {"index": 0}, reasoning="hm", reasoning_details=[{"type": "reasoning.text", "text": "hm"}]
            ),
            "tools": [_TOOL],
            "reasoning": {"effort": "low"},
            "usage": {"include": True},
            "provider": {"order": ["a"]},
            "transforms": [],
            "session_id": "s",
        },
    ),
    "gemini": (
        CHAT,
        {"messages": _history({"extra_content": {"google": {"thought_signature": "x"}}}), "tools": [_TOOL]},
    ),
    "vllm": (
        CHAT,
        {
            "messages": [_ASKED],
            "chat_template_kwargs": {"enable_thinking": False},
            "min_tokens": 1,
            "include_reasoning": True,
            "request_id": "r",
            "use_beam_search": False,
            "repetition_penalty": 1.1,
        },
    ),
    "sglang": (
        CHAT,
        {"messages": [_ASKED], "separate_reasoning": True, "stream_reasoning": True, "rid": "r", "min_p": 0.1},
    ),
    "llama.cpp": (
        CHAT,
        {
            "messages": [_ASKED],
            "cache_prompt": True,
            "n_predict": 20,
            "mirostat": 0,
            "typical_p": 1.0,
            "repeat_penalty": 1.1,
            "timings_per_token": True,
            "reasoning_format": "auto",
        },
    ),
    "dynamo": (CHAT, {"messages": [_ASKED], "nvext": {"agent_hints": {"priority": 1}, "ignore_eos": False}}),
}
