"""Answers of /v1/messages: calls and thoughts in their order, whole and streamed, read by Anthropic's own client."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import msgspec
import pytest

from baton.metadata.errors import Overloaded
from baton.metadata.wire import messages as m
from baton.router.http.anthropic.format import MessagesFormat, block_events, block_of
from baton.router.http.generation.output import OutputReader
from baton.router.reasoning_parsers.think_tags import Qwen3ReasoningParser
from baton.router.requests.delta import Delta
from baton.router.requests.request import Request
from baton.router.tool_parsers.hermes import HermesParser

from ...conftest import RunningRouter, System
from ...dispatching.test_runner import own
from ...sites import make_group, make_request
from ..chats import QWEN3, TEMPLATE, TEXT, USER, accepts, call, marked_system, num_tokens, prompt_of, say

WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NOW: Any = {"name": "now", "input_schema": {"type": "object"}, "type": "custom", "cache_control": {"type": "ephemeral"}}
PARIS = call("get_weather", {"city": "Paris é"})
ENABLED: Any = {"type": "enabled", "budget_tokens": 1024}
BROKEN = '<tool_call>\n{"name": "now", "arguments": {"a": '


@pytest.fixture
def hermes(make_system: Callable[..., System]) -> System:
    return make_system(template=TEMPLATE, context_len=4096).up()


@pytest.fixture
def thinker(make_router: Callable[..., RunningRouter], tokenizer_file: bytes) -> Iterator[System]:
    with marked_system(make_router(), tokenizer_file, QWEN3 + "{{ enable_thinking }}") as system:
        yield system


@pytest.fixture
def clients() -> Iterator[Callable[[System], anthropic.Anthropic]]:
    opened = list[anthropic.Anthropic]()

    def client_of(system: System) -> anthropic.Anthropic:
        opened.append(anthropic.Anthropic(base_url=system.router.url, api_key="none", max_retries=0))
        return opened[-1]

    yield client_of
    for client in opened:
        client.close()


Clients = Callable[[System], anthropic.Anthropic]


def body_of(**more: Any) -> Any:
    return {"model": "fake", "max_tokens": 400, "messages": [USER], **more}


def events_of(system: System, **more: Any) -> list[dict[str, Any]]:
    """Return the events of a stream that concern blocks, and the last two."""
    status, raw, _ = system.router.request("POST", "/v1/messages", body_of(stream=True, **more))
    assert status == 200, raw
    events = [json.loads(block.partition("data: ")[2]) for block in raw.decode().strip().split("\n\n")]
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    return events[2:]


def test_calls_are_blocks_behind_the_text(hermes: System, clients: Clients) -> None:
    say(hermes, f"Let me look.\n{PARIS}\n{call('now', {})}")
    answer = clients(hermes).messages.create(**body_of(tools=[WEATHER, NOW]))
    text, weather, now = answer.content
    assert (text.type, text.text) == ("text", "Let me look.")
    assert (weather.type, weather.name, weather.input) == ("tool_use", "get_weather", {"city": "Paris é"})
    assert (now.type, now.name, now.input) == ("tool_use", "now", {})
    assert weather.id != now.id
    assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)
    shown = prompt_of(hermes).split("<|im_end|>")[0].splitlines()[1:]
    assert [json.loads(line) for line in shown] == [
        {"type": "function", "function": {"name": name, **more, "parameters": tool["input_schema"]}}
        for name, more, tool in (
            ("get_weather", {"description": "Weather of a city"}, WEATHER),
            ("now", {}, NOW),
        )
    ]


@pytest.mark.parametrize("step_tokens", [1, 3, 1000])
def test_the_client_puts_a_stream_together(hermes: System, clients: Clients, step_tokens: int) -> None:
    hermes.behaviour.step_tokens = step_tokens
    say(hermes, f"Let me look.\n{PARIS}\n{call('now', {})}")
    with clients(hermes).messages.stream(**body_of(tools=[WEATHER, NOW])) as stream:
        text, inputs = "", list[str]()
        for event in stream:
            if event.type == "text":
                text += event.text
            elif event.type == "input_json":
                inputs.append(event.partial_json)
        final = stream.get_final_message()
    assert text == "Let me look."
    assert "".join(inputs) == '{"city": "Paris é"}{}'
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"city": "Paris é"}, {}]
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens == num_tokens(hermes, f"Let me look.\n{PARIS}\n{call('now', {})}") + 1


def test_each_block_has_an_index_and_its_own_deltas(thinker: System) -> None:
    say(thinker, f"<think>\nhm\n</think>\n\nA\n{PARIS}\nB")
    events = events_of(thinker, tools=[WEATHER], thinking=ENABLED)
    by_block = [[event for event in events if event.get("index") == index] for index in range(4)]
    assert list(itertools.chain(*by_block)) == events[:-2]  # one block after the other
    starts = [block[0]["content_block"] for block in by_block]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[1] == starts[3] == {"type": "text", "text": ""}
    assert {**starts[2], "id": ""} == {
        "type": "tool_use",
        "id": "",
        "name": "get_weather",
        "input": {},
        "caller": {"type": "direct"},
    }
    for block, kind in zip(by_block, ("thinking", "text", "input_json", "text"), strict=True):
        assert [event["type"] for event in block] == [
            "content_block_start",
            *["content_block_delta"] * (len(block) - 2),
            "content_block_stop",
        ]
        kinds = {event["delta"]["type"] for event in block[1:-1]}
        assert kinds == {f"{kind}_delta"} | ({"signature_delta"} if kind == "thinking" else set())
    assert by_block[0][-2]["delta"] == {"type": "signature_delta", "signature": ""}
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-2]["delta"]["stop_sequence"] is None


@pytest.mark.parametrize(
    ("choice", "allowed", "forbidden"),
    [
        ({"type": "any"}, [PARIS, call("now", {}), f"{PARIS}\n{PARIS}"], ["hello"]),
        ({"type": "any", "disable_parallel_tool_use": True}, [PARIS], [f"{PARIS}\n{PARIS}"]),
        ({"type": "tool", "name": "now"}, [call("now", {})], [PARIS, "hello"]),
    ],
)
def test_calls_are_forced(
    hermes: System, clients: Clients, choice: Any, allowed: list[str], forbidden: list[str]
) -> None:
    say(hermes, allowed[0])
    answer = clients(hermes).messages.create(**body_of(tools=[WEATHER, NOW], tool_choice=choice))
    assert [block.type for block in answer.content] == ["tool_use"]
    grammar: Any = own(hermes.cluster.by_name("p0"), m.Prefill)[-1].request.params.grammar
    assert all(accepts(hermes, grammar, text) for text in allowed)
    assert not any(accepts(hermes, grammar, text) for text in forbidden)


def test_calls_that_are_not_parallel_or_not_wanted(hermes: System, clients: Clients) -> None:
    say(hermes, f"{PARIS}\n{call('now', {})}")
    tools: Any = {"tools": [WEATHER, NOW]}
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    answer = clients(hermes).messages.create(**body_of(**tools, tool_choice=choice))
    assert [block.type for block in answer.content] == ["tool_use"]
    answer = clients(hermes).messages.create(**body_of(**tools, tool_choice={"type": "none"}))
    assert [block.type for block in answer.content] == ["text"]
    assert answer.stop_reason == "end_turn"
    assert "get_weather" not in prompt_of(hermes)


def test_a_call_that_is_cut_off_is_text_of_a_whole_message(hermes: System, clients: Clients) -> None:
    say(hermes, f"A\n{BROKEN}")
    answer = clients(hermes).messages.create(**body_of(tools=[NOW]))
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": f"A{BROKEN}"}]
    assert answer.stop_reason == "end_turn"
    events = events_of(hermes, tools=[NOW])
    assert [event["type"] for event in events if event.get("index") == 1][-1] == "content_block_stop"
    inputs = [event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"]
    assert "".join(inputs) == '{"a": '
    assert events[-2]["delta"]["stop_reason"] == "end_turn"


@pytest.mark.parametrize("step_tokens", [1, 3, 1000])
@pytest.mark.parametrize(
    ("thinking", "is_shown"),
    [
        (None, False),
        (ENABLED, True),
        ({"type": "adaptive"}, True),
        ({"type": "adaptive", "display": "summarized"}, True),
        ({**ENABLED, "display": "omitted"}, False),
    ],
)
def test_thoughts_are_a_block_if_they_are_asked_for(
    thinker: System, clients: Clients, thinking: Any, is_shown: bool, step_tokens: int
) -> None:
    thinker.behaviour.step_tokens = step_tokens
    say(thinker, TEXT)
    body = body_of() if thinking is None else body_of(thinking=thinking)
    answer = clients(thinker).messages.create(**body)
    with clients(thinker).messages.stream(**body) as stream:
        assert "".join(stream.text_stream) == "Yes."
        final = stream.get_final_message()
    thought = {"type": "thinking", "thinking": "It may rain.", "signature": ""}
    expected = [thought] * is_shown + [{"type": "text", "text": "Yes."}]
    for message in (answer, final):
        assert [block.to_dict() for block in message.content] == expected
        assert message.stop_reason == "end_turn"
        assert message.usage.output_tokens == len(thinker.say(TEXT))
        assert message.usage.output_tokens_details is not None
        assert message.usage.output_tokens_details.thinking_tokens == num_tokens(thinker, TEXT.partition("\n\n")[0])


@pytest.mark.parametrize(("kind", "is_on"), [(None, None), ("disabled", False), ("adaptive", True), ("enabled", True)])
def test_the_template_is_told_whether_thinking_is_on(thinker: System, kind: str | None, is_on: bool | None) -> None:
    say(thinker, TEXT)
    thinking = {"type": kind, **({"budget_tokens": 9} if kind == "enabled" else {})}
    body = body_of() if kind is None else body_of(thinking=thinking)
    assert thinker.router.request("POST", "/v1/messages", body)[0] == 200
    shown = prompt_of(thinker)
    assert shown.endswith("" if is_on is None else str(is_on))
    assert shown.endswith("<think>\n\n</think>\n\nFalse") == (is_on is False)
    del body["max_tokens"]
    _, count, _ = thinker.router.request("POST", "/v1/messages/count_tokens", body)
    assert count["input_tokens"] == num_tokens(thinker, shown)


def test_a_budget_is_that_of_chat_completions(thinker: System) -> None:
    say(thinker, TEXT)
    grammars = list[str | None]()
    for path, more in (
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 7}}),
        ("/v1/chat/completions", {"thinking_token_budget": 7, "chat_template_kwargs": {"enable_thinking": True}}),
    ):
        assert thinker.router.request("POST", path, body_of(**more))[0] == 200
        grammars.append(own(thinker.cluster.by_name("p0"), m.Prefill)[-1].request.params.grammar)
    assert grammars[0] == grammars[1] is not None


def test_adaptive_thinking_needs_no_thoughts(hermes: System, clients: Clients) -> None:
    answer = clients(hermes).messages.create(**body_of(thinking={"type": "adaptive"}))
    assert [block.type for block in answer.content] == ["text"]


def test_an_output_that_ends_in_thoughts_has_no_text(thinker: System, clients: Clients) -> None:
    ids = thinker.say(TEXT)[: num_tokens(thinker, "<think>\nIt may")]
    thinker.cluster.script = lambda prompt, choice: ids
    answer = clients(thinker).messages.create(**{**body_of(thinking=ENABLED), "max_tokens": len(ids)})
    assert [(block.type, block.to_dict().get("thinking")) for block in answer.content] == [("thinking", "It may")]
    assert answer.stop_reason == "max_tokens"
    events = events_of(thinker, thinking=ENABLED, max_tokens=len(ids))
    assert [event["type"] for event in events[-4:]] == [
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def make(*, shows_thoughts: bool = True) -> OutputReader:
    tools = HermesParser({"f": {}, "now": {}})
    return OutputReader(Qwen3ReasoningParser(""), tools, with_thoughts=shows_thoughts)


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("shows_thoughts", [True, False])
def test_a_streams_blocks_are_those_of_the_whole(size: int, shows_thoughts: bool) -> None:
    text = f"<think>hm\n</think>A {call('f', {'a': [1, {}]})} B {call('now', {})}{call('f', {})}"
    reader, events = make(shows_thoughts=shows_thoughts), list[Any]()
    for place in range(0, len(text), size):
        events += block_events(reader.read(text[place : place + size], is_last=place + size >= len(text)))
    events += block_events(reader.end())
    streamed = list[dict[str, Any]]()
    for event in map(json.loads, map(msgspec.json.encode, events)):
        if event["type"] == "content_block_start":
            assert event["index"] == len(streamed)
            streamed.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            kind = event["delta"].pop("type")
            (value,) = event["delta"].values()
            name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}.get(kind)
            if name is not None:
                streamed[event["index"]][name] += value
    for block in streamed:
        given = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(given)
    parts = make(shows_thoughts=shows_thoughts).whole(text)
    whole = [json.loads(msgspec.json.encode(block_of(part))) for part in parts]
    assert [block.pop("id", None) is None for block in whole] == [block.pop("id", None) is None for block in streamed]
    assert whole == streamed
    kinds = ["text", "tool_use", "text", "tool_use", "tool_use"]
    assert [block["type"] for block in whole] == ["thinking"] * shows_thoughts + kinds


@pytest.fixture
def request_() -> Request:
    return make_request(make_group(), prompt_len=7)


def data_of(events: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.partition("data: ")[2]) for block in events.decode().split("\n\n") if block]


def new_format(request_: Request) -> MessagesFormat:
    assert request_.group.tokenizer is not None
    return MessagesFormat("msg-1", "fake", request_.group.tokenizer, None, max_tokens=8, shows_thoughts=False)


def test_output_without_text_yet_writes_no_delta(request_: Request) -> None:
    answers, sequence = new_format(request_), request_.sequences[0]
    first = data_of(answers.chunk(0, sequence, Delta("", [5], []), None))
    assert [each["type"] for each in first] == ["message_start", "ping"]
    assert first[0]["message"]["usage"]["input_tokens"] == 7
    assert answers.chunk(0, sequence, Delta("", [6], []), None) == b""
    start, delta = data_of(answers.chunk(0, sequence, Delta('é"\n', [6], []), None))
    assert (start["type"], start["index"]) == ("content_block_start", 0)
    assert delta == {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": 'é"\n'}}


def test_cached_tokens_are_counted_once(request_: Request) -> None:
    request_.num_cached = 5
    answers = new_format(request_)
    answers.chunk(0, request_.sequences[0], Delta("x", [5], [], "stop", 1), None)
    usage = data_of(answers.ended([request_], with_usage=False))[0]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (2, 5)


def test_a_failed_stream_ends_with_the_error(request_: Request) -> None:
    (event,) = data_of(new_format(request_).failed(Overloaded("full")))
    assert event == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "full"},
        "request_id": "msg-1",
    }
