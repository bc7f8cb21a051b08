"""Tools in chat completions, called by OpenAI's own client. Fake nodes write texts of Hermes' format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pydantic
import pytest

from baton.metadata.wire import messages

from ...conftest import System
from ...dispatching.test_runner import own
from ..chats import NOW, TEMPLATE, USER, WEATHER, call, prompt_of, say

PARIS = call("get_weather", {"city": "Paris é"})


@pytest.fixture
def hermes(make_system: Callable[..., System]) -> Iterator[System]:
    system = make_system(template=TEMPLATE, context_len=4096).up()
    yield system
    system.router.wait_idle()


@pytest.fixture
def client(hermes: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{hermes.router.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "fake", "messages": [USER], "tools": [WEATHER, NOW], **more})


def accumulate(chunks: Any) -> tuple[str, dict[int, dict[str, str]], list[str]]:
    """Return content, calls by index, and finish reasons of a stream."""
    content, calls, reasons = "", dict[int, dict[str, str]](), list[str]()
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for delta in choice.delta.tool_calls or ():
                if delta.index not in calls:
                    assert delta.type == "function"
                    calls[delta.index] = {"id": delta.id, "name": delta.function.name, "arguments": ""}
                else:
                    assert (delta.id, delta.type, delta.function.name) == (None, None, None)
                calls[delta.index]["arguments"] += delta.function.arguments or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return content, calls, reasons


def test_calls_are_in_the_message(hermes: System, client: openai.OpenAI) -> None:
    say(hermes, f"Let me look.\n{PARIS}\n{call('now', {})}")
    answer = ask(client)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert [(each.type, each.function.name) for each in choice.message.tool_calls] == [
        ("function", "get_weather"),
        ("function", "now"),
    ]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris é"}
    assert len({each.id for each in choice.message.tool_calls}) == 2
    assert answer.usage.completion_tokens_details is None
    shown = prompt_of(hermes).split("<|im_end|>")[0]
    assert shown == "<|im_start|>system\n" + "".join(json.dumps(tool) + "\n" for tool in (WEATHER, NOW))


@pytest.mark.parametrize("step_tokens", [1, 3, 1000])
def test_calls_are_streamed(hermes: System, client: openai.OpenAI, step_tokens: int) -> None:
    hermes.behaviour.step_tokens = step_tokens
    say(hermes, f"Let me look.\n{PARIS}\n{call('now', {})}\n")
    content, calls, reasons = accumulate(ask(client, stream=True))
    assert content == "Let me look."
    assert reasons == ["tool_calls"]
    assert [each["name"] for each in calls.values()] == ["get_weather", "now"]
    assert json.loads(calls[0]["arguments"]) == {"city": "Paris é"}
    assert calls[1]["arguments"] == "{}"


def test_the_clients_own_stream_helper_puts_calls_together(hermes: System, client: openai.OpenAI) -> None:
    say(hermes, PARIS)
    given: Any = {"model": "fake", "messages": [USER], "tools": [WEATHER]}
    with client.chat.completions.stream(**given) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert message.content is None
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris é"}


class Weather(pydantic.BaseModel):
    city: str


def test_the_clients_own_helpers_read_arguments_and_send_them_back(hermes: System, client: openai.OpenAI) -> None:
    say(hermes, call("Weather", {"city": "Paris"}))
    given: Any = {"model": "fake", "tools": [openai.pydantic_function_tool(Weather)]}
    parsed = client.chat.completions.parse(messages=[USER], **given)
    with client.chat.completions.stream(messages=[USER], **given) as stream:
        streamed = stream.get_final_completion()
    for answer in (parsed, streamed):
        message: Any = answer.choices[0].message
        (made,) = message.tool_calls or ()
        assert made.function.parsed_arguments == Weather(city="Paris")
        result: Any = {"role": "tool", "tool_call_id": made.id, "content": "rain"}
        client.chat.completions.parse(messages=[USER, message, result], **given)
        assert '"arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n<|im_start|>tool\nrain' in prompt_of(hermes)


class Report(pydantic.BaseModel):
    summary: str


def test_a_loop_of_the_clients_own_helpers_ends_in_a_structured_answer(hermes: System, client: openai.OpenAI) -> None:
    given: Any = {"model": "fake", "tools": [openai.pydantic_function_tool(Weather)], "response_format": Report}
    say(hermes, call("Weather", {"city": "Paris"}))
    first = client.chat.completions.parse(messages=[USER], **given).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.parsed is None
    (made,) = first.message.tool_calls or ()
    assert made.function.parsed_arguments == Weather(city="Paris")
    say(hermes, '{"summary": "rain"}')
    told: Any = [USER, first.message, {"role": "tool", "tool_call_id": made.id, "content": "rain"}]
    assert client.chat.completions.parse(messages=told, **given).choices[0].message.parsed == Report(summary="rain")
    with client.chat.completions.stream(messages=told, **given) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Report(summary="rain")


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_two_turns(hermes: System, client: openai.OpenAI, stream: bool) -> None:
    say(hermes, PARIS)
    if stream:
        _, calls, _ = accumulate(ask(client, stream=True))
        made = {"id": calls[0]["id"], "type": "function", "function": {k: calls[0][k] for k in ("name", "arguments")}}
        said: Any = {"role": "assistant", "tool_calls": [made]}
    else:
        said = ask(client).choices[0].message.model_dump()
    say(hermes, "It rains.")
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "rain"}
    answer = ask(client, messages=[USER, said, result])
    assert answer.choices[0].message.content == "It rains."
    assert answer.choices[0].finish_reason == "stop"
    shown = prompt_of(hermes)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris é"}}\n</tool_call><|im_end|>' in shown
    assert shown.endswith("<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n")


def test_no_parallel_calls(hermes: System, client: openai.OpenAI) -> None:
    say(hermes, f"{PARIS}\n{call('now', {})}")
    assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    _, calls, _ = accumulate(ask(client, parallel_tool_calls=False, stream=True))
    assert len(calls) == 1


def test_choice_none_leaves_tools_out(hermes: System, client: openai.OpenAI) -> None:
    say(hermes, PARIS)
    answer = ask(client, tool_choice="none")
    assert answer.choices[0].message.content == PARIS
    assert answer.choices[0].message.tool_calls is None
    assert "get_weather" not in prompt_of(hermes)


def test_a_call_that_max_tokens_cuts_off(hermes: System, client: openai.OpenAI) -> None:
    """A whole answer has its text as content, a stream the beginning of its arguments."""
    num_tokens = len(hermes.say(PARIS.partition("aris")[0])) - 1
    hermes.cluster.script = lambda prompt, choice: hermes.say(PARIS)[:num_tokens]
    choice = ask(client, max_tokens=num_tokens).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert PARIS.startswith(choice.message.content)
    content, calls, reasons = accumulate(ask(client, max_tokens=num_tokens, stream=True))
    assert (content, reasons) == ("", ["length"])
    assert calls[0]["arguments"] == '{"city": "P'


def test_broken_json(hermes: System, client: openai.OpenAI) -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {oops}}\n</tool_call>'
    say(hermes, text)
    choice = ask(client).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", text, None)
    content, calls, reasons = accumulate(ask(client, stream=True))
    assert (content, calls[0]["arguments"], reasons) == ("", "{", ["stop"])


def test_log_probabilities_and_ids_of_all_tokens_are_kept(hermes: System, client: openai.OpenAI) -> None:
    say(hermes, f"So: {PARIS}")
    ids = hermes.say(f"So: {PARIS}")
    more = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = ask(client, **more).choices[0]
    assert len(whole.logprobs.content) == len(ids)
    assert whole.model_extra["token_ids"] == ids
    choices = [choice for chunk in ask(client, stream=True, **more) for choice in chunk.choices]
    assert [each for choice in choices for each in (choice.model_extra or {}).get("token_ids") or ()] == ids
    assert sum(len(choice.logprobs.content) for choice in choices if choice.logprobs) == len(ids)


ASSISTANT: Any = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
}
CUSTOM: Any = {"type": "custom", "custom": {"name": "f"}}


def function(parameters: Any) -> Any:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tools": "x"}, "tools", "array"),
        ({"tools": [CUSTOM]}, "tools", "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools[0].function.name"),
        ({"tools": [NOW, NOW]}, "tools", "tools[1].function.name: 'now' is there twice"),
        ({"tools": [function([1])]}, "tools", "parameters"),
        ({"tool_choice": "always"}, "tool_choice", "always"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "there is no tool 'f'"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "needs the name of a tool"),
        ({"tool_choice": {"type": "auto", "name": "now"}}, "tool_choice", "excludes a name"),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            "tool_choice",
            "set parallel_tool_calls of the body to false",
        ),
        (
            {"messages": [USER, {"role": "function", "name": "now", "content": "x"}]},
            "messages",
            "messages[1].role: no message before this one of a function has a call",
        ),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"response_format": {"type": "json_object"}, "tools": [NOW, function({"type": "objekt"})]},
            "tools",
            "tools[1].function.parameters: Invalid type: objekt",
        ),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos", "excludes"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "bool"),
        ({"functions": [{"name": "f"}]}, "functions", "given as tools"),
        ({"function_call": {"name": "f"}}, "function_call", "tool_choice"),
        (
            {"tool_choice": "required", "tools": [NOW, function({"type": "objekt"})]},
            "tools",
            "tools[1].function.parameters: Invalid type: objekt",
        ),
        (
            {"messages": [USER, {"role": "tool", "content": "x"}]},
            "messages",
            "messages[1].tool_call_id: a message of a tool needs it",
        ),
        (
            {"messages": [USER, ASSISTANT, {"role": "tool", "tool_call_id": "b", "content": "x"}]},
            "messages",
            "messages[2].tool_call_id: no call before it has the id 'b'",
        ),
        ({"messages": [{**USER, "tool_calls": ASSISTANT["tool_calls"]}]}, "messages", "messages[0].tool_calls"),
        ({"messages": [{**USER, "tool_call_id": "a"}]}, "messages", "messages[0].tool_call_id"),
        (
            {"messages": [{**ASSISTANT, "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[1]"}}]}]},
            "messages",
            "messages[0].tool_calls[0].function.arguments: it must be a JSON object",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages", "function"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "start it with --reasoning-parser"),
        ({"thinking_token_budget": -1}, "thinking_token_budget", ">= 0"),
        ({"thinking_token_budget": 5, "ignore_eos": True}, "ignore_eos", "excludes thinking_token_budget"),
    ],
)
def test_what_is_refused(hermes: System, more: dict[str, Any], param: str, words: str) -> None:
    body = {"model": "fake", "messages": [USER], "tools": [NOW], **more}
    status, answer, _ = hermes.router.request("POST", "/v1/chat/completions", body)
    assert status == 400, answer
    assert answer["error"]["param"] == param, answer
    assert words in answer["error"]["message"], answer


@pytest.mark.parametrize("parser", ["hermes", "pythonic"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_deep_schemas_and_arguments_never_fail_inside(
    make_system: Callable[..., System], parser: str, choice: str
) -> None:
    system = make_system(router={"tool_parser": parser}, template=TEMPLATE, context_len=4096).up()
    say(system, call("now", {}))
    for depth in (50, 200, *range(600, 1200, 20)):
        nested = '{"a":' * depth + "1" + "}" * depth
        made = {"id": "a", "function": {"name": "now", "arguments": nested}}
        body = {"model": "fake", "messages": [USER], "tool_choice": choice, "tools": [function("NESTED")]}
        arrays = '{"properties":{"a":' + '{"type":"array","items":' * depth + "{}" + "}" * (depth + 2)
        for schema in (nested, arrays):
            data = json.dumps(body).replace('"NESTED"', schema).encode()
            assert system.router.request("POST", "/v1/chat/completions", data)[0] in (200, 400), depth
        body = {"model": "fake", "messages": [{"role": "assistant", "tool_calls": [made]}], "max_tokens": 1}
        assert system.router.request("POST", "/v1/chat/completions", body)[0] in (200, 400), depth


def test_without_a_parser_tools_are_refused(make_system: Callable[..., System]) -> None:
    body = {"model": "fake", "messages": [USER], "tools": [NOW]}
    unknown = make_system(template="{{ tools }}{{ messages }}").up()
    status, answer, _ = unknown.router.request("POST", "/v1/chat/completions", body)
    assert status == 400
    assert "--tool-parser and one of gemma4, harmony, hermes, " in answer["error"]["message"]
    assert unknown.router.request("POST", "/v1/chat/completions", {**body, "tool_choice": "none"})[0] == 200
    off = make_system(router={"tool_parser": "none"}, template=TEMPLATE).up()
    assert "reads no calls" in off.router.request("POST", "/v1/chat/completions", body)[1]["error"]["message"]
    given = make_system(router={"tool_parser": "pythonic"}, template="{{ tools }}{{ messages }}").up()
    say(given, "[now()]")
    status, answer, _ = given.router.request("POST", "/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    unnamable = {"type": "function", "function": {"name": "now", "parameters": {"properties": {"a-b": {}}}}}
    forced = {**body, "tools": [unnamable], "tool_choice": "required"}
    status, answer, _ = given.router.request("POST", "/v1/chat/completions", forced)
    assert (status, answer["error"]["param"]) == (400, "tool_choice")


LANGCHAIN: Any = {  # the shapes of what libraries send, by the second turn of a session
    "model": "fake",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "id": "c", "function": {"name": "now", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ],
    "tools": [{"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.7,
    "n": 1,
}
LITELLM: Any = {
    "model": "fake",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"index": 0, "id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}},
            ],
            "function_call": None,
            "provider_specific_fields": {"refusal": None},
            "reasoning_content": "hm",
            "thinking_blocks": None,
        },
        {"role": "tool", "name": "now", "tool_call_id": "c", "content": [{"type": "text", "text": "noon"}]},
    ],
    "tools": [NOW],
    "max_tokens": 50,
    "metadata": {"user_id": "u"},
}
VERCEL: Any = {
    "model": "fake",
    "max_tokens": None,
    "temperature": 0,
    "messages": [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ],
    "tools": [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}, "strict": False}}],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.mark.parametrize("body", [LANGCHAIN, LITELLM, VERCEL], ids=["LangChain", "LiteLLM", "Vercel"])
def test_what_libraries_send_is_served(hermes: System, body: Any) -> None:
    say(hermes, "Yes.")
    status, answer, _ = hermes.router.request("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    assert f"{call('now', {})}<|im_end|>\n<|im_start|>tool\nnoon" in prompt_of(hermes)


_CALLED: Any = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function"}]}
_CALLED["tool_calls"][0]["function"] = {"name": "now", "arguments": '{"a": 1}'}
_TOLD: Any = {"role": "tool", "content": "noon", "name": "now", "tool_call_id": "c"}
_ONE: Any = {"type": "function", "function": {"name": "now"}}
_CLAUDE: Any = {"name": "get_weather", "description": "Weather of a city"}


@pytest.mark.parametrize(
    ("given", "usual"),
    [
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": None, "function_call": _CALLED["tool_calls"][0]["function"]},
                    {"role": "function", "name": "now", "content": "noon"},
                ]
            },
            {"messages": [USER, _CALLED, _TOLD]},
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "output_text", "text": "a", "id": "1"}]}]},
            {"messages": [USER, {"role": "assistant", "content": "a"}]},
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
            {"messages": [USER, {"role": "assistant", "content": "no"}]},
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "refusal": "no"}]},
            {"messages": [USER, {"role": "assistant", "content": "no"}]},
        ),
        ({"tools": [{**_CLAUDE, "input_schema": WEATHER["function"]["parameters"]}]}, {"tools": [WEATHER]}),
        ({"tools": [{"type": "function", **WEATHER["function"]}]}, {"tools": [WEATHER]}),
        ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"tool_choice": {"type": "required"}}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tool_choice": "any"}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "tool", "name": "now"}}, {"tool_choice": _ONE}),
        ({"tool_choice": {"type": "function", "name": "now"}}, {"tool_choice": _ONE}),
        ({"modalities": []}, {}),
    ],
)
def test_deprecated_and_other_forms_are_the_usual_ones(hermes: System, given: Any, usual: Any) -> None:
    """The prompt and the grammar that the nodes get are the same."""
    sent = [sent_for(hermes, each) for each in (given, usual)]
    assert sent[0] == sent[1]


def sent_for(hermes: System, fields: dict[str, Any]) -> tuple[str, str | None]:
    say(hermes, call("now", {}))
    body = {"model": "fake", "messages": [USER], "tools": [NOW], **fields}
    status, answer, _ = hermes.router.request("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    request = own(hermes.cluster.by_name("p0"), messages.Prefill)[-1].request
    return prompt_of(hermes), request.params.grammar
