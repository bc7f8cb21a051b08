"""Histories of messages with tools and thoughts: what the model reads of them, and which are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest

from baton.metadata.errors import RequestError
from baton.router.http.anthropic.turns import chat_messages
from baton.router.http.anthropic.types import (
    AssistantTurn,
    MessageText,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)
from baton.router.http.generation.types import ChatMessage, TextPart

from ...conftest import RunningRouter, System
from ..chats import TEMPLATE, USER, call, marked_system, num_tokens, prompt_of, say
from .test_format import ENABLED, NOW, PARIS, WEATHER

THOUGHTS = TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}",
)


@pytest.fixture
def system(make_router: Callable[..., RunningRouter], tokenizer_file: bytes) -> Iterator[System]:
    with marked_system(make_router(), tokenizer_file, THOUGHTS) as system:
        yield system


@pytest.fixture
def client(system: System) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=system.router.url, api_key="none", max_retries=0) as client:
        yield client


TEXT: Any = {"type": "text", "text": "hello"}
RESULT: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "noon"}]}


def body_of(*turns: Any, **more: Any) -> Any:
    return {"model": "fake", "max_tokens": 400, "messages": [USER, *turns], "tools": [WEATHER, NOW], **more}


def result(call_id: str, content: Any, **more: Any) -> Any:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def turn(role: str, *messages: str) -> str:
    return "".join(f"<|im_start|>{role}\n{message}<|im_end|>\n" for message in messages)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_dumped", [False, True])
def test_a_loop_of_two_turns(system: System, client: anthropic.Anthropic, is_streamed: bool, is_dumped: bool) -> None:
    """The client sends back what it got, as objects or as what they are dumped to, and the results."""
    say(system, f"<think>\nhm\n</think>\n\nI look.\n{PARIS}\n{call('now', {})}")
    if is_streamed:
        with client.messages.stream(**body_of(thinking=ENABLED)) as stream:
            answer: Any = stream.get_final_message()
    else:
        answer = client.messages.create(**body_of(thinking=ENABLED))
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    results = [result(answer.content[2].id, "rain"), result(answer.content[3].id, [{"type": "text", "text": "noon"}])]
    said = [block.model_dump() for block in answer.content] if is_dumped else answer.content
    say(system, "It rains.")
    turns: Any = [
        {"role": "assistant", "content": said},
        {"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]},
    ]
    final = client.messages.create(**body_of(*turns, thinking=ENABLED))
    assert [block.to_dict() for block in final.content] == [{"type": "text", "text": "It rains."}]
    assert final.stop_reason == "end_turn"
    shown = prompt_of(system)
    written = PARIS + call("now", {})
    assert shown.endswith(
        turn("assistant", f"<think>hm</think>I look.{written}")
        + turn("tool", "rain", "noon")
        + turn("user", "Well?")
        + "<|im_start|>assistant\n"
    )
    counted = {name: value for name, value in body_of(*turns, thinking=ENABLED).items() if name != "max_tokens"}
    assert client.messages.count_tokens(**counted).input_tokens == num_tokens(system, shown)
    assert "get_weather" in shown
    del counted["tools"]
    assert client.messages.count_tokens(**counted).input_tokens < num_tokens(system, shown)


def test_thoughts_of_another_server_are_left_out(system: System, client: anthropic.Anthropic) -> None:
    said: Any = [
        {"type": "redacted_thinking", "data": "xyzzy"},
        {"type": "thinking", "thinking": "a", "signature": "EqQBCgIYAhIM"},
        {"type": "thinking", "thinking": "b", "signature": ""},
        {"type": "text", "text": "Yes."},
        {
            "type": "tool_use",
            "id": "toolu_1",
            "name": "now",
            "input": {},
            "caller": {"type": "direct"},
            "cache_control": {"type": "ephemeral"},
        },
    ]
    turns: Any = [{"role": "assistant", "content": said}, {"role": "user", "content": [result("toolu_1", "noon")]}]
    client.messages.create(**body_of(*turns))
    assert turn("assistant", f"<think>a\nb</think>Yes.{call('now', {})}") + turn("tool", "noon") in prompt_of(system)


AGENT: Any = {  # the shape of what Claude Code sends, by the second turn of a session
    "model": "fake",
    "max_tokens": 32000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-billing: none"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<reminder>be brief</reminder>"}, TEXT]},
        {"role": "system", "content": "Agents: none."},
        {"role": "system", "content": [TEXT], "clear_at": "next_user_message"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}, "caller": {"type": "direct"}},
            ],
        },
        {"role": "user", "content": [{**RESULT, "is_error": False, "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Hurry.", "clear_at": "next_user_message", "output_config": {"effort": "low"}},
    ],
    "tools": [
        {
            **WEATHER,
            "eager_input_streaming": True,
            "defer_loading": True,
            "input_examples": [{"city": "Paris"}],
            "allowed_callers": ["direct"],
        },
        {**NOW, "type": "custom", "strict": True},
    ],
    "thinking": {"type": "adaptive", "display": "updates", "block_binding": {}},
    "output_config": {"effort": "xhigh"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": '{"device_id": "d", "session_id": "s"}'},
    "diagnostics": {"previous_message_id": None},
    "temperature": 1,
}
BETAS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "prompt-caching-scope-2026-01-05,mid-conversation-system-2026-04-07,effort-2025-11-24",
    "x-stainless-timeout": "600",
}


def test_an_agents_turn(make_router: Callable[..., RunningRouter], tokenizer_file: bytes) -> None:
    """Hints, edits and headers that an agent sends in every request do not stop it."""
    with marked_system(make_router(), tokenizer_file, THOUGHTS + "{{ reasoning_effort }}") as system:
        say(system, f"<think>\nhm\n</think>\n\n{PARIS}")
        status, raw, _ = system.router.request("POST", "/v1/messages?beta=true", AGENT, BETAS)
        assert status == 200 and b'"stop_reason":"tool_use"' in raw and b"get_weather" in raw, raw
        shown = prompt_of(system)
        assert shown.endswith(
            turn("user", "<reminder>be brief</reminder>\nhello")
            + turn("system", "Agents: none.")
            + turn("assistant", f"<think>hm</think>{call('now', {})}")
            + turn("tool", "noon")
            + turn("system", "Hurry.")
            + "<|im_start|>assistant\nhigh"
        )
        counted = {
            name: value
            for name, value in AGENT.items()
            if name in ("model", "system", "messages", "tools", "thinking", "output_config", "context_management")
        }
        status, answer, _ = system.router.request("POST", "/v1/messages/count_tokens?beta=true", counted, BETAS)
        assert (status, answer) == (200, {"input_tokens": num_tokens(system, shown)})


@pytest.mark.parametrize(("text", "kind"), [('{"a": 1}', "text"), (PARIS, "tool_use")])
def test_a_format_may_stand_beside_tools(system: System, client: anthropic.Anthropic, text: str, kind: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    say(system, f"<think>\nhm\n</think>\n\n{text}")
    given = body_of(output_config={"format": {"type": "json_schema", "schema": schema}}, thinking=ENABLED)
    answer = client.messages.create(**given)
    assert [block.type for block in answer.content] == ["thinking", kind]
    assert client.messages.count_tokens(**{k: v for k, v in given.items() if k != "max_tokens"}).input_tokens > 0


def test_results_come_before_the_text_of_their_message() -> None:
    made = AssistantTurn([ToolUseBlock(id=name, name="now", input={"a": 1}) for name in "ab"])
    results: list[TextBlock | ToolResultBlock] = [
        ToolResultBlock(tool_use_id="b", content=[MessageText("text", "a"), MessageText("text", "b")]),
        TextBlock(text="c"),
        TextBlock(text="d"),
        ToolResultBlock(tool_use_id="a", content="broken", is_error=True),
    ]
    _, *told = chat_messages([made, UserTurn(results)])
    assert told == [
        ChatMessage("tool", [TextPart("text", "a"), TextPart("text", "b")], tool_call_id="b"),
        ChatMessage("tool", "Error: broken", tool_call_id="a"),
        ChatMessage("user", [TextPart("text", "c"), TextPart("text", "d")]),
    ]
    (_, *told) = chat_messages([made, UserTurn([ToolResultBlock(tool_use_id="a"), ToolResultBlock(tool_use_id="b")])])
    assert [(each.role, each.content, each.tool_call_id) for each in told] == [("tool", "", "a"), ("tool", "", "b")]
    assert chat_messages([UserTurn([])]) == [ChatMessage("user", "")]


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        (
            [UserTurn([TextBlock(text="x"), ToolResultBlock(tool_use_id="a")])],
            r"messages\[0\].content\[1\].tool_use_id: no call before it has the id 'a'",
        ),
        (
            [UserTurn([ToolResultBlock(tool_use_id="a")]), AssistantTurn([ToolUseBlock(id="a", name="f", input={})])],
            r"messages\[0\].content\[0\].tool_use_id: no call before it has the id 'a'",
        ),
        (
            [UserTurn("x"), AssistantTurn([ToolUseBlock(id="a", name="f", input={})])],
            r"messages\[1\].content: a last message of the assistant is continued, so it cannot hold tool_use",
        ),
    ],
)
def test_histories_that_do_not_fit_together_are_refused(turns: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        chat_messages(turns)
    assert refused.value.param == "messages"
