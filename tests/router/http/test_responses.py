"""POST /v1/responses, with OpenAI's client: bodies, events, ends, counts and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from baton.metadata.wire import messages as m

from ..conftest import System
from ..test_runner import own

BODY: dict[str, Any] = {"model": "fake", "input": "hello", "max_output_tokens": 100}
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
    assert answer.id.startswith("resp-") and answer.output[0].id.startswith("msg-")
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
    ({"tools": [{"type": "function"}]}, "tools: tools are not served"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort: the model's chat template knows no effort"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary: unknown field"),
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
        {"text": {"format": {"type": "json_schema", "schema": {"properties": {"q": {"not": {}}}}}}},
        "text.format.schema.properties.q: Unimplemented keys",
    ),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options: needs stream"),
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
