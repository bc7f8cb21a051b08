"""POST /v1/messages and count_tokens, with Anthropic's client: bodies, events, ends, counts and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest

from baton.metadata.wire import messages as m
from baton.metadata.wire.request import unpack_ids

from ...conftest import RunningRouter, System
from ...dispatching.test_runner import own

BODY: dict[str, Any] = {"model": "fake", "max_tokens": 100, "messages": [{"role": "user", "content": "hello"}]}


_clients: list[anthropic.Anthropic] = []


def client_of(router: RunningRouter, key: str = "none") -> anthropic.Anthropic:
    _clients.append(anthropic.Anthropic(base_url=router.url, api_key=key, max_retries=0))
    return _clients[-1]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _clients:
        _clients.pop().close()


def events_of(system: System, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return name and data of each event of a stream."""
    status, raw, headers = system.router.request("POST", "/v1/messages", {**BODY, "stream": True, **fields})
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), raw
    events: list[tuple[str, dict[str, Any]]] = []
    for block in raw.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert events[-1][1]["type"] == events[-1][0]
    return events


def prompt_of(system: System) -> str:
    (asked,) = own(system.cluster.by_name("p0"), m.Prefill)
    return system.tokenizer.decode(unpack_ids(asked.request.prompt_ids))


def test_the_official_client_gets_a_message(system: System) -> None:
    answer = client_of(system.router).messages.create(**BODY)
    assert answer._request_id == answer.id
    assert answer.id.startswith("msg-") and (answer.type, answer.role, answer.model) == ("message", "assistant", "fake")
    assert [(block.type, block.text) for block in answer.content if block.type == "text"] == [("text", system.text)]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    num_prompt = client_of(system.router).messages.count_tokens(model="fake", messages=BODY["messages"]).input_tokens
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == num_prompt > 0
    assert answer.usage.output_tokens == len(system.say(system.text))


def test_the_official_client_streams_the_same(system: System) -> None:
    whole = client_of(system.router).messages.create(**BODY)
    with client_of(system.router).messages.stream(**BODY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == system.text
    assert [block.to_dict() for block in whole.content] == [{"type": "text", "text": text}]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_the_events_come_in_their_order(system: System) -> None:
    events = events_of(system)
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"} and len(names) > 8
    start, end = events[0][1]["message"], events[-2][1]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["output_tokens"] <= 1
    assert (end["delta"]["stop_reason"], end["delta"]["stop_sequence"]) == ("end_turn", None)
    assert end["usage"]["output_tokens"] == len(system.say(system.text))


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"stop_sequences": ["brown", "zzz"]}, "the quick ", ("stop_sequence", "brown")),
        ({"max_tokens": 2}, None, ("max_tokens", None)),
        ({"stop_sequences": []}, "the quick brown fox — naïve café", ("end_turn", None)),
    ],
)
def test_the_reason_of_the_end(
    system: System, fields: dict[str, Any], text: str | None, reason: tuple[str, str | None]
) -> None:
    _, whole, _ = system.router.request("POST", "/v1/messages", {**BODY, **fields})
    assert (whole["stop_reason"], whole["stop_sequence"]) == reason
    if text is not None:
        assert whole["content"] == [{"type": "text", "text": text}]
    events = events_of(system, **fields)
    end = dict(events)["message_delta"]
    assert (end["delta"]["stop_reason"], end["delta"]["stop_sequence"]) == reason
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    joined = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert joined == whole["content"][0]["text"]


def test_system_blocks_and_turns_become_one_prompt(system: System) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
    ]
    given = {**BODY, "messages": turns, "system": [{"type": "text", "text": "s"}], "thinking": {"type": "disabled"}}
    assert system.router.request("POST", "/v1/messages", given)[0] == 200
    as_chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c\nd"},
    ]
    chat = {"model": "fake", "messages": as_chat, "max_tokens": 100}
    assert system.router.request("POST", "/v1/chat/completions", chat)[0] == 200
    first, second = own(system.cluster.by_name("p0"), m.Prefill)
    assert first.request.prompt_ids == second.request.prompt_ids


def test_an_assistants_last_message_is_continued(system: System) -> None:
    turns = [*BODY["messages"], {"role": "assistant", "content": "The answer is"}]
    assert system.router.request("POST", "/v1/messages", {**BODY, "messages": turns})[0] == 200
    assert prompt_of(system).endswith("The answer is")


def test_an_output_ends_with_the_context(make_system: Callable[..., System]) -> None:
    """Agents ask for as much as the largest models can write."""
    system = make_system(context_len=48).up()
    system.cluster.script = lambda prompt, choice: system.say(system.text * 9)
    cases = {20_000: "model_context_window_exceeded", 3: "max_tokens"}
    for max_tokens, reason in cases.items():
        fields = {"max_tokens": max_tokens}
        answer = client_of(system.router).messages.create(**{**BODY, **fields})
        assert answer.stop_reason == reason
        if reason != "max_tokens":
            num_prompt = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
            assert num_prompt + answer.usage.output_tokens == 48
        *_, (_, end), _ = events_of(system, **fields)
        assert end["delta"]["stop_reason"] == reason


def test_parameters_reach_the_nodes(system: System) -> None:
    given = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "output_config": {"format": {"type": "json_schema"}}}
    given["output_config"]["format"]["schema"] = {"type": "integer"}  # type: ignore[index]
    assert system.router.request("POST", "/v1/messages", {**BODY, **given})[0] == 200
    (asked,) = own(system.cluster.by_name("d0"), m.Reserve)
    params = asked.request.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.25, 7, 100)
    assert '"integer"' in params.grammar


TOOL: Any = {"name": "f", "input_schema": {"type": "object"}}
CALL: Any = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens: Expected `int`"),
    ({"max_tokens": 0}, "max_tokens: Expected `int` >= 1"),
    ({"messages": []}, "messages: "),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].role: 'tool' is not served; served are: user, assistant, system",
    ),
    (
        {"messages": [{"role": "system", "content": [{"type": "tool_removal"}]}]},
        "messages[0].content[0].type: 'tool_removal' is not served; served are: text",
    ),
    ({"tools": [TOOL]}, "tools: the model's chat template has no place for tools, so 'fake' cannot"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name: 'f' is there twice"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema: Object missing required field"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name: "),
    ({"tools": [{**TOOL, "input_schema": True}]}, "tools[0].input_schema: Expected `object`"),
    (
        {"tools": [TOOL, {"name": "web_search", "max_uses": 5, "type": "web_search_20250305"}]},
        "tools[1].type: 'web_search_20250305' is not served; served are: custom",
    ),
    ({"tools": [{**TOOL, "defer": 1}]}, "tools[0].defer: unknown field"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: a required call needs tools"),
    ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice: there is no tool 'g'"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name: Object missing required field"),
    (
        {"tool_choice": {"type": "required"}},
        "tool_choice.type: 'required' is not served; served are: auto, any, ",
    ),
    ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name: unknown field"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking: the router cannot read thoughts"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: Object missing required field"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens: Expected `int` >= 1"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type: 'between_tools' is not served"),
    (
        {
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "messages": [*BODY["messages"], {"role": "assistant", "content": "So"}],
        },
        "thinking: excludes a last message of the assistant",
    ),
    (
        {"messages": [{"role": "user", "content": [RESULT]}]},
        "messages[0].content[0].tool_use_id: no call before it has the id 'a'",
    ),
    (
        {"messages": [*BODY["messages"], {"role": "assistant", "content": [CALL]}]},
        "messages[1].content: a last message of the assistant is continued",
    ),
    (
        {"messages": [{"role": "user", "content": [CALL]}]},
        "messages[0].content[0].type: 'tool_use' is not served; served are: text, tool_result",
    ),
    (
        {"messages": [{"role": "assistant", "content": [RESULT]}]},
        "messages[0].content[0].type: 'tool_result' is not served; served are: text, tool_use, ",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{**CALL, "input": "{}"}]}]},
        "messages[0].content[0].input: Expected `object`",
    ),
    (
        {"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "image", "source": {}}]}]}]},
        "messages[0].content[0].content[0]: images are not served (image); only parts of type text are",
    ),
    (
        {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
        "messages[0].content[0].type: Object missing required field",
    ),
    ({"system": [{"text": "x"}]}, "system[0].type: Object missing required field"),
    ({"mcp_servers": [{}]}, "mcp_servers: tools of MCP servers are not served"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema: "),
    ({"output_config": {"effort": "very high"}}, "output_config.effort: Invalid enum value"),
    ({"output_config": {"task_budget": {}}}, "output_config.task_budget: the model knows no budget"),
    (
        {"context_management": {"edits": [{"type": "compact_20260112"}]}},
        "context_management.edits[0].type: 'compact_20260112' is not served; served are: clear_thinking_20251015, ",
    ),
    ({"compaction": {"type": "summarize"}}, "compaction: conversations are not summarized"),
    ({"thread": {"id": "x"}}, "thread: conversations are not stored"),
    (
        {"tools": [{"name": "f", "input_schema": {}, "allowed_callers": ["code_execution_20250825"]}]},
        "tools[0].allowed_callers: only the model calls tools; add 'direct'",
    ),
    ({"no_such": 1}, "no_such: unknown field"),
    *(
        (
            {"messages": [{"role": "user", "content": [{"type": kind, "source": {}}]}]},
            f"messages[0].content[0]: {words} are not served ({kind}); only parts of type text, tool_result are",
        )
        for kind, words in {"image": "images", "document": "files"}.items()
    ),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_what_is_not_served_is_refused_in_anthropics_shape(system: System, fields: dict[str, Any], words: str) -> None:
    status, body, headers = system.router.request("POST", "/v1/messages", {**BODY, **fields})
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert body["error"]["message"].startswith(words), body
    assert body["request_id"] == headers["x-request-id"]
    with pytest.raises(anthropic.BadRequestError):
        client_of(system.router).messages.create(**BODY, extra_body=fields)


def test_errors_below_messages_have_anthropics_shape(system: System) -> None:
    for method, path, body, status, kind in [
        ("POST", "/v1/messages", {**BODY, "model": "other"}, 404, "not_found_error"),
        ("POST", "/v1/messages/batches", {}, 404, "not_found_error"),
        ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        ("GET", "/v1/messages", None, 405, "invalid_request_error"),
        ("POST", "/v1/messages/count_tokens", {"model": "fake"}, 400, "invalid_request_error"),
    ]:
        found, answer, _ = system.router.request(method, path, body)
        assert (found, answer["type"], answer["error"]["type"]) == (status, "error", kind), answer


def test_a_stream_that_fails_ends_with_an_error(make_system: Callable[..., System]) -> None:
    system = make_system(router={"request_timeout_s": 1.0})
    system.behaviour.step_s = 0.3
    system.up()
    events = events_of(system)
    assert events[0][0] == "message_start"
    assert events[-1][0] == "error"
    assert events[-1][1]["error"]["type"] == "timeout_error"
    with pytest.raises(anthropic.APIStatusError), client_of(system.router).messages.stream(**BODY) as stream:
        stream.until_done()


def test_the_key_may_come_in_x_api_key(make_router: Callable[..., RunningRouter]) -> None:
    router = make_router(api_key="secret", node_wait_s=0.0)
    for headers, status in [
        ({"x-api-key": "secret"}, 503),  # no node has joined
        ({"Authorization": "Bearer secret"}, 503),
        ({"Authorization": "Bearer secret", "x-api-key": "wrong"}, 503),
        ({"Authorization": "Bearer wrong", "x-api-key": "secret"}, 401),
        ({"x-api-key": "wrong"}, 401),
        ({}, 401),
    ]:
        given = {**headers, "anthropic-version": "2023-06-01"}
        found, answer, _ = router.request("POST", "/v1/messages", BODY, given)
        assert found == status, (headers, answer)
        assert answer["error"]["type"] == {503: "overloaded_error", 401: "authentication_error"}[status]
    with pytest.raises(anthropic.AuthenticationError):
        client_of(router, "wrong").messages.create(**BODY)


def test_a_runner_of_tools_goes_on_without_a_thread(system: System) -> None:
    """The client asks for a stored conversation first, and reads in the details of the refusal that there is none."""
    status, refused, _ = system.router.request("POST", "/v1/messages", {**BODY, "thread": {"type": "create"}})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["threads"]}
    assert (status, refused["error"]["details"]) == (400, details)
    runner = client_of(system.router).beta.messages.tool_runner(**BODY, tools=[])
    assert [message.stop_reason for message in runner] == ["end_turn"]


def test_what_no_route_has_is_refused_in_the_shape_of_the_client(system: System) -> None:
    for path in ("/v1/files", "/v1/messages/batches", "/v1/models/nope"):
        _, answer, _ = system.router.request("GET", path, headers={"anthropic-version": "2023-06-01"})
        assert answer["type"] == "error" and answer["error"]["type"] == "not_found_error", answer
    assert "type" not in system.router.request("GET", "/v1/files")[1]
