"""POST /v1/responses, with OpenAI's client: bodies, events, ends, counts, tools, thoughts and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import ParsedResponseFunctionToolCall

from baton.metadata.wire import messages as m

from ...conftest import System
from ...dispatching.test_runner import own
from ..chats import QWEN3, TEMPLATE, TEXT, accepts, call, num_tokens, prompt_of, say

BODY: dict[str, Any] = {"model": "fake", "input": "hello", "max_output_tokens": 100}
NOW: Any = {"type": "function", "name": "now"}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
PARIS = call("get_weather", {"city": "Paris é"})
SPACE: Any = {"type": "namespace", "name": "git", "tools": [NOW]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture
def client(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.router.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events_of(system: System, **fields: Any) -> list[dict[str, Any]]:
    status, raw, _ = system.router.request("POST", "/v1/responses", {**BODY, "stream": True, **fields})
    assert status == 200, raw
    events: list[dict[str, Any]] = []
    for block in raw.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert events[-1]["type"] == name.removeprefix("event: ")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_the_official_client_gets_a_response(system: System, client: openai.OpenAI) -> None:
    answer = client.responses.create(**BODY, instructions="be brief", metadata={"a": "b"}, store=False)
    assert answer.output_text == system.text
    assert (answer.status, answer.error, answer.incomplete_details, answer.store) == ("completed", None, None, False)  # type: ignore[attr-defined]
    assert (answer.instructions, answer.metadata, answer.max_output_tokens) == ("be brief", {"a": "b"}, 100)
    assert answer.id.startswith("resp-") and answer.output[0].id.startswith("msg_")
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(system.say(system.text))
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_the_official_client_streams_the_same(system: System, client: openai.OpenAI) -> None:
    whole = client.responses.create(**BODY)
    with client.responses.stream(**BODY) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == system.text
    assert final.usage is not None and whole.usage is not None
    assert (final.status, final.usage.output_tokens) == (whole.status, whole.usage.output_tokens)


def test_the_events_come_in_their_order(system: System) -> None:
    events = events_of(system)
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(names[4:-4]) == {"output_text.delta"} and len(names) > 10
    assert events[-4]["text"] == events[-3]["part"]["text"] == system.text
    assert events[-2]["item"] == events[-1]["response"]["output"][0]
    assert {event["item_id"] for event in events if "item_id" in event} == {events[-2]["item"]["id"]}


def test_an_output_that_is_cut_off_is_incomplete(system: System) -> None:
    status, answer, _ = system.router.request("POST", "/v1/responses", {**BODY, "max_output_tokens": 2})
    assert status == 200
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    last = events_of(system, max_output_tokens=2)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
    assert last["response"]["output"][0]["content"] == answer["output"][0]["content"]


def test_items_and_instructions_become_one_prompt(system: System, client: openai.OpenAI) -> None:
    first = client.responses.create(**BODY)
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        *(item.to_dict() for item in first.output),
        {"type": "message", "role": "user", "content": "c"},
    ]
    client.responses.create(model="fake", input=turns, instructions="s")
    as_chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": system.text},
        {"role": "user", "content": "c"},
    ]
    chat = {"model": "fake", "messages": as_chat}
    assert system.router.request("POST", "/v1/chat/completions", chat)[0] == 200
    _, second, third = own(system.cluster.by_name("p0"), m.Prefill)
    assert second.request.prompt_ids == third.request.prompt_ids
    assert second.request.params.max_tokens == third.request.params.max_tokens


def test_parameters_reach_the_nodes(system: System) -> None:
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    given = {**BODY, "temperature": 0.5, "top_p": 0.25, "text": text}
    status, answer, _ = system.router.request("POST", "/v1/responses", given)
    assert (status, answer["text"], answer["temperature"]) == (200, text, 0.5)
    (asked,) = own(system.cluster.by_name("d0"), m.Reserve)
    params = asked.request.params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.25, 100)
    assert '"integer"' in params.grammar


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store: responses are not stored"),
    ({"previous_response_id": "resp-1"}, "previous_response_id: responses are not stored; send the messages"),
    ({"conversation": "conv-1"}, "conversation: "),
    ({"background": True}, "background: "),
    ({"tools": [{"type": "function"}]}, "tools[0].name: Object missing required field"),
    (
        {"tools": [{"type": "web_search"}]},
        "tools[0].type: 'web_search' is not served; served are: function, custom, namespace; leave it out: the server",
    ),
    ({"tools": [{**NOW, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers: only the model calls tools"),
    ({"tools": [SPACE, {**NOW, "name": "git__now"}]}, "tools[1].name: 'git__now' is there twice"),
    ({"tools": [{**NOW, "name": "git__now"}, SPACE]}, "tools[1].tools[0].name: 'git__now' is there twice"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type: 'mcp' is not served"),
    ({"tools": [{**NOW, "name": "a b"}]}, "tools[0].name: Expected `str` matching regex"),
    ({"tools": [NOW, NOW]}, "tools[1].name: 'now' is there twice"),
    ({"tools": [NOW]}, "tools: the model's chat template has no place for tools, so 'fake' cannot"),
    ({"tool_choice": "required"}, "tool_choice: "),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice: there is no tool 'f'; the tools are: none"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NOW]}},
        "tool_choice.type: 'allowed_tools' is not served; served are: custom, function",
    ),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls: Expected `bool | null`"),
    ({"max_tool_calls": 1}, "max_tool_calls: calls are not counted"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]: Invalid enum value 'message.output_text.logprobs'"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary: Invalid enum value 'long'"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode: there is one mode"),
    ({"input": []}, "input: "),
    ({"input": [{"type": "item_reference", "role": "user", "content": ""}]}, "input[0].type: 'item_reference' is not"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]: images are not served (input_image)",
    ),
    ({"max_output_tokens": 10_000}, "max_output_tokens: 10000 more tokens"),
    ({"input": "word " * 1000}, "input: "),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format: type 'json_schema' needs schema"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format: type 'text' has no schema"),
    (
        {"text": {"format": {"type": "json_schema", "schema": {"properties": {"q": {"not": {"type": "null"}}}}}}},
        'text.format.schema.properties.q: "not" cannot be enforced',
    ),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options: needs stream"),
    (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": ""}]},
        "input[0].call_id: no call before it has the id 'a'; send the item of the call too",
    ),
    ({"max_tokens": 5}, "max_tokens: unknown field; the nearest known field is max_output_tokens"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_what_is_not_served_is_refused_by_its_own_name(system: System, fields: dict[str, Any], words: str) -> None:
    status, answer, _ = system.router.request("POST", "/v1/responses", {**BODY, **fields})
    assert status == 400, answer
    assert answer["error"]["message"].startswith(words), answer
    assert answer["error"]["param"] == words.partition(":")[0].partition(".")[0].partition("[")[0]


def test_stored_responses_are_refused_as_such(system: System) -> None:
    for method, path in [("GET", "/v1/responses/resp-1"), ("DELETE", "/v1/responses/resp-1")]:
        status, answer, _ = system.router.request(method, path)
        assert status == 404 and answer["error"]["message"].startswith("stored responses are not served"), answer


def test_a_stream_that_fails_ends_with_a_failed_response(make_system: Callable[..., System]) -> None:
    system = make_system(router={"request_timeout_s": 1.0})
    system.behaviour.step_s = 0.3
    system.up()
    last = events_of(system)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "timeout"
    assert last["response"]["output"][0]["status"] == "incomplete"


@pytest.fixture(params=[1, 1000])
def thinker(make_system: Callable[..., System], request: pytest.FixtureRequest) -> Iterator[System]:
    """A model that thinks and calls tools; its nodes send so many tokens at once."""
    system = make_system(template=QWEN3, context_len=4096).up()
    system.behaviour.step_tokens = request.param
    yield system
    system.router.wait_idle()


@pytest.fixture
def caller(thinker: System) -> Iterator[openai.OpenAI]:
    """A client of the thinker."""
    with openai.OpenAI(base_url=f"{thinker.router.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.responses.create(**{"model": "fake", "input": "hello", "tools": [WEATHER, NOW], **more})


def final(client: openai.OpenAI, **more: Any) -> Any:
    """Return the last response of a stream that the client's own helper has put together."""
    given: dict[str, Any] = {"model": "fake", "input": "hello", "tools": [WEATHER, NOW], **more}
    with client.responses.stream(**given) as stream:
        return stream.get_final_response()


def test_calls_are_items(thinker: System, caller: openai.OpenAI) -> None:
    say(thinker, f"Let me look.\n{PARIS}\n{call('now', {})}")
    for answer in (ask(caller), final(caller)):
        text, weather, now = answer.output
        assert (text.type, answer.output_text, answer.status) == ("message", "Let me look.", "completed")
        assert [(each.type, each.name, each.status) for each in (weather, now)] == [
            ("function_call", "get_weather", "completed"),
            ("function_call", "now", "completed"),
        ]
        assert (json.loads(weather.arguments), now.arguments) == ({"city": "Paris é"}, "{}")
        assert weather.call_id != now.call_id and weather.id.startswith("fc_")
        shown = [{name: value for name, value in tool.to_dict().items() if value is not None} for tool in answer.tools]
        assert shown == [WEATHER, NOW]
        assert (answer.tool_choice, answer.parallel_tool_calls) == ("auto", True)
    as_chat = [
        {"type": "function", "function": {k: v for k, v in each.items() if k != "type"}} for each in (WEATHER, NOW)
    ]
    shown = prompt_of(thinker).split("<|im_end|>")[0]
    assert [json.loads(line) for line in shown.splitlines()[1:]] == as_chat


def test_an_output_of_calls_has_no_message(thinker: System, caller: openai.OpenAI) -> None:
    say(thinker, PARIS)
    for answer in (ask(caller), final(caller)):
        assert [each.type for each in answer.output] == ["function_call"]
        assert answer.output_text == ""


def test_the_clients_own_events_of_a_call(thinker: System, caller: openai.OpenAI) -> None:
    say(thinker, f"<think>hm</think>{PARIS}")
    given: dict[str, Any] = {"model": "fake", "input": "hello", "tools": [WEATHER]}
    with caller.responses.stream(**given) as stream:
        events = list(stream)
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads(deltas[-1].snapshot) == {"city": "Paris é"}
    assert "".join(event.delta for event in deltas) == deltas[-1].snapshot
    assert {event.output_index for event in deltas} == {1}
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "hm"
    assert [event.sequence_number for event in events] == list(range(len(events)))


class Weather(pydantic.BaseModel):
    city: str


def test_the_clients_own_helpers_read_arguments_and_send_them_back(thinker: System, caller: openai.OpenAI) -> None:
    say(thinker, call("Weather", {"city": "Paris"}))
    tools: Any = [openai.pydantic_function_tool(Weather)]
    for answer in (caller.responses.parse(model="fake", input="hello", tools=tools), final(caller, tools=tools)):
        (made,) = answer.output
        assert isinstance(made, ParsedResponseFunctionToolCall)
        assert made.parsed_arguments == Weather(city="Paris")
        result: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "rain"}
        turns: list[Any] = [{"role": "user", "content": "hello"}, made, result]
        caller.responses.parse(model="fake", input=turns, tools=tools)
        assert '"arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n<|im_start|>tool\nrain' in prompt_of(thinker)


@pytest.mark.parametrize("ask", [ask, final])
def test_a_loop_of_two_turns(thinker: System, caller: openai.OpenAI, ask: Callable[..., Any]) -> None:
    say(thinker, f"<think>\nhm\n</think>\n\nLet me look.\n{PARIS}\n{call('now', {})}")
    turns: list[Any] = [{"role": "user", "content": "hello"}]
    first = ask(caller, input=turns)
    turns += first.output
    results = [(each.call_id, f"{each.name}: rain") for each in first.output if each.type == "function_call"]
    turns += [{"type": "function_call_output", "call_id": call_id, "output": text} for call_id, text in results]
    say(thinker, "It rains.")
    assert ask(caller, input=turns).output_text == "It rains."
    chat = [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": each.call_id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
                for each in first.output
                if each.type == "function_call"
            ],
        },
        *({"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in results),
    ]
    as_response = prompt_of(thinker)
    tools = [
        {"type": "function", "function": {k: v for k, v in each.items() if k != "type"}} for each in (WEATHER, NOW)
    ]
    body = {"model": "fake", "messages": chat, "tools": tools}
    assert thinker.router.request("POST", "/v1/chat/completions", body)[0] == 200
    assert as_response == prompt_of(thinker)
    assert (
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>\n<|im_start|>tool\nget_w' in as_response
    )


def test_a_choice_forces_a_call(thinker: System, caller: openai.OpenAI) -> None:
    say(thinker, call("now", {}))
    forced: dict[str, Any] = {"type": "function", "name": "now"}
    answer = ask(caller, tool_choice=forced)
    assert answer.tool_choice.to_dict() == forced
    grammar = own(thinker.cluster.by_name("d0"), m.Reserve)[-1].request.params.grammar
    assert accepts(thinker, grammar, f"<think>hm</think>{call('now', {})}")
    assert not accepts(thinker, grammar, PARIS) and not accepts(thinker, grammar, "No.")
    ask(caller, tool_choice="required")
    grammar = own(thinker.cluster.by_name("d0"), m.Reserve)[-1].request.params.grammar
    assert accepts(thinker, grammar, f"{call('now', {})}\n{call('get_weather', {'city': 'x'})}")
    assert not accepts(thinker, grammar, call("get_weather", {}))


def test_no_parallel_calls(thinker: System, caller: openai.OpenAI) -> None:
    say(thinker, f"{PARIS}\n{call('now', {})}")
    for answer in (ask(caller, parallel_tool_calls=False), final(caller, parallel_tool_calls=False)):
        assert [each.name for each in answer.output] == ["get_weather"]
        assert answer.parallel_tool_calls is False


def test_choice_none_leaves_tools_out(thinker: System, caller: openai.OpenAI) -> None:
    say(thinker, PARIS)
    answer = ask(caller, tool_choice="none")
    assert (answer.output_text, answer.tool_choice) == (PARIS, "none")
    assert "get_weather" not in prompt_of(thinker)


def test_a_call_that_is_cut_off(thinker: System, caller: openai.OpenAI) -> None:
    """It is text of a whole answer, and an incomplete item of a stream."""
    limit = len(thinker.say(PARIS.partition("aris")[0])) - 1
    thinker.cluster.script = lambda prompt, choice: thinker.say(PARIS)[:limit]
    answer = ask(caller, max_output_tokens=limit)
    assert (answer.status, [each.type for each in answer.output]) == ("incomplete", ["message"])
    assert PARIS.startswith(answer.output_text)
    last = list(ask(caller, max_output_tokens=limit, stream=True))[-1]
    assert last.type == "response.incomplete"
    (made,) = last.response.output
    assert (made.type, made.status, made.arguments) == ("function_call", "incomplete", '{"city": "P')


def test_thoughts_are_items_and_are_counted(thinker: System, caller: openai.OpenAI) -> None:
    say(thinker, TEXT)
    for answer in (ask(caller, tools=[]), final(caller, tools=[])):
        thoughts, text = answer.output
        assert (thoughts.type, thoughts.summary, thoughts.status) == ("reasoning", [], "completed")
        assert [(part.type, part.text) for part in thoughts.content] == [("reasoning_text", "It may rain.")]
        assert (text.type, answer.output_text) == ("message", "Yes.")
        assert answer.usage.output_tokens == len(thinker.say(TEXT))
        num_thoughts = answer.usage.output_tokens_details.reasoning_tokens
        assert num_thoughts == num_tokens(thinker, TEXT.partition("\n\n")[0])


def test_without_thoughts_none_are_counted(client: openai.OpenAI) -> None:
    usage = client.responses.create(**BODY).usage
    assert usage is not None and usage.output_tokens_details.reasoning_tokens == 0


def test_the_effort_of_reasoning_reaches_the_template(thinker: System, caller: openai.OpenAI) -> None:
    say(thinker, TEXT)
    caller.responses.create(model="fake", input="hello", reasoning={"effort": "low"})
    assert "low" in prompt_of(thinker)


def test_thoughts_are_sent_back(make_system: Callable[..., System]) -> None:
    system = make_system(template="{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}{% endfor %}").up()
    items = [
        {"role": "user", "content": "hello"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "B"}]},
        {"type": "message", "role": "assistant", "content": "A"},
    ]
    body = {"model": "fake", "input": items, "include": ["reasoning.encrypted_content"]}
    assert system.router.request("POST", "/v1/responses", body)[0] == 200
    assert prompt_of(system) == "|helloB|A"


def test_the_clients_own_parser_gets_its_model_and_its_answer_comes_back(
    thinker: System, caller: openai.OpenAI
) -> None:
    say(thinker, '<think>hm</think>\n{"city": "Paris"}')
    answer = caller.responses.parse(model="fake", input="hello", text_format=Weather)
    assert answer.output_parsed == Weather(city="Paris")
    streamed = final(caller, tools=[], text_format=Weather)
    assert streamed.output_parsed == Weather(city="Paris")
    for output in (answer.output, streamed.output):
        turns: list[Any] = [{"role": "user", "content": "hello"}, *output, {"role": "user", "content": "why?"}]
        caller.responses.create(model="fake", input=turns)
        assert '<|im_start|>assistant\n{"city": "Paris"}<|im_end|>' in prompt_of(thinker)


def test_schemas_of_tools_are_refused_by_their_place(thinker: System) -> None:
    tools = [NOW, {"type": "function", "name": "f", "parameters": {"type": "objekt"}}]
    body = {"model": "fake", "input": "hello", "tools": tools, "tool_choice": "required"}
    status, answer, _ = thinker.router.request("POST", "/v1/responses", body)
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert answer["error"]["message"].startswith("tools[1].parameters: Invalid type: objekt")


@pytest.mark.parametrize(("text", "kind"), [('{"a": 1}', "message"), (call("now", {}), "function_call")])
def test_a_format_with_tools_binds_the_answer_and_the_calls(thinker: System, text: str, kind: str) -> None:
    say(thinker, f"<think>hm</think>{text}")
    text_format = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    body = {"model": "fake", "input": "hello", "tools": [NOW], "text": {"format": text_format}}
    status, answer, _ = thinker.router.request("POST", "/v1/responses", body)
    assert status == 200 and [item["type"] for item in answer["output"]] == ["reasoning", kind], answer
    grammar = own(thinker.cluster.by_name("p0"), m.Prefill)[-1].request.params.grammar
    assert accepts(thinker, grammar, f"<think>hm</think>{text}") and accepts(thinker, grammar, text)
    assert not accepts(thinker, grammar, "<think>hm</think>text")


AGENT: Any = {  # the shape of what Codex sends, by the second turn of a session
    "model": "fake",
    "instructions": "You are an agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": None},
        {"type": "function_call", "name": "log", "namespace": "mcp__git", "arguments": "{}", "call_id": "call_1"},
        {"type": "custom_tool_call", "name": "patch", "input": "*** a", "call_id": "call_2", "status": "completed"},
        {"type": "function_call_output", "call_id": "call_1", "output": "none"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"},
    ],
    "tools": [
        {**NOW, "description": "The time", "strict": False, "parameters": {"type": "object", "properties": {}}},
        {
            "type": "custom",
            "name": "patch",
            "description": "Edit files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
        },
        {
            "type": "namespace",
            "name": "mcp__git",
            "description": "Git",
            "tools": [{"type": "function", "name": "log", "parameters": {"type": "object"}, "defer_loading": True}],
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "s",
    "client_metadata": {"x-codex-installation-id": "i"},
    "text": {"verbosity": "low"},
    "truncation": "auto",
}


def test_an_agents_turn(make_system: Callable[..., System]) -> None:
    """Hints that an agent sends in every request do not stop it, and its custom and grouped tools are called."""
    system = make_system(template=TEMPLATE, context_len=4096).up()
    say(system, call("patch", {"input": "*** b"}) + call("mcp__git__log", {}))
    events = events_of(system, **AGENT, max_output_tokens=None)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(item["type"], item["name"]) for item in done] == [("custom_tool_call", "patch"), ("function_call", "log")]
    assert done[0]["input"] == "*** b" and done[1]["namespace"] == "mcp__git"
    shown = prompt_of(system)
    assert "Edit files." in shown and "start: /x/" in shown and "You are an agent." in shown and "Sandbox." in shown
    assert f"{call('mcp__git__log', {})}{call('patch', {'input': '*** a'})}" in shown
    assert shown.endswith("tool\nnone<|im_end|>\n<|im_start|>tool\ndone<|im_end|>\n<|im_start|>assistant\n")
    turn = {"tools": AGENT["tools"], "store": False}
    with openai.OpenAI(base_url=f"{system.router.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.responses.create(model="fake", input="hello", **turn)
        assert [item.type for item in answer.output] == ["custom_tool_call", "function_call"]
        said = [item.model_dump(exclude_unset=True) for item in answer.output]
        results: Any = [
            {"type": "custom_tool_call_output", "call_id": said[0]["call_id"], "output": "done"},
            {"type": "function_call_output", "call_id": said[1]["call_id"], "output": "none"},
        ]
        say(system, "Fine.")
        history: Any = [{"role": "user", "content": "hello"}, *said, *results]
        assert client.responses.create(model="fake", input=history, **turn).output_text == "Fine."


def test_a_custom_tool_can_be_forced(make_system: Callable[..., System]) -> None:
    system = make_system(template=TEMPLATE, context_len=4096).up()
    say(system, call("patch", {"input": "*** b"}))
    choice = {"type": "custom", "name": "patch"}
    given = {**BODY, "tools": AGENT["tools"], "tool_choice": choice}
    status, answer, _ = system.router.request("POST", "/v1/responses", given)
    assert (status, answer["tool_choice"], answer["output"][0]["input"]) == (200, choice, "*** b")
    grammar = own(system.cluster.by_name("p0"), m.Prefill)[-1].request.params.grammar
    assert accepts(system, grammar, call("patch", {"input": "x"})) and not accepts(system, grammar, call("now", {}))


def test_no_effort_turns_thoughts_off(thinker: System, caller: openai.OpenAI) -> None:
    say(thinker, "A")
    caller.responses.create(model="fake", input="hello", reasoning={"effort": "none"})
    assert prompt_of(thinker).endswith("</think>\n\nnone")
