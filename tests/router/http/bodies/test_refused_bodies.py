"""Unknown fields of bodies: null is ignored, and any other value is refused by name, as are parts that are not text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.metadata.errors import RequestError
from baton.router.http.anthropic.types import MessagesRequest, ToolUseBlock
from baton.router.http.bodies.bodies import decode
from baton.router.http.bodies.refused_bodies import MAX_NULLS, mended
from baton.router.http.generation.types import PARTS_NOT_SERVED, ChatRequest, CompletionRequest

from ...conftest import System

COMPLETION = {"model": "fake", "prompt": "hello", "max_tokens": 100}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}
BODIES = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_unknown_fields_that_are_null_are_ignored(system: System, path: str, body: dict[str, Any]) -> None:
    plain = system.router.request("POST", path, body)[1]["choices"]
    nulls = {"guided_json": None, "no_such_field": None, "stream": True, "stream_options": {"what": None}}
    status, answer, _ = system.router.request("POST", path, {**body, **nulls, "stream": False, "stream_options": None})
    assert (status, answer["choices"]) == (200, plain)
    assert system.router.request("POST", path, {**body, **nulls})[0] == 200


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_token": 5}, "max_token", "max_token: unknown field; the nearest known field is max_tokens"),
        ({"temprature": 5}, "temprature", "temprature: unknown field; the nearest known field is temperature"),
        ({"zzzz": False}, "zzzz", "zzzz: unknown field"),
        ({"zzzz": []}, "zzzz", "zzzz: unknown field"),
        ({"null_first": None, "stop_ids": [1]}, "stop_ids", "stop_ids: unknown field"),
        (
            {"stream": True, "stream_options": {"include_usages": True}},
            "stream_options",
            "stream_options.include_usages: unknown field; the nearest known field is include_usage",
        ),
        ({"z" * 70_000: 1}, "z" * 64, "z" * 64 + ": unknown field"),
        ({"": 1}, "''", "'': unknown field"),
    ],
)
def test_other_unknown_fields_are_refused_with_the_nearest_known_one(
    system: System, path: str, body: dict[str, Any], fields: dict[str, Any], param: str, message: str
) -> None:
    status, answer, _ = system.router.request("POST", path, {**body, **fields})
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert answer["error"]["message"].startswith(message), answer


def test_what_is_wrong_beside_a_null_field_is_still_refused(system: System) -> None:
    for path, body in BODIES:
        for wrong, words in (({"temperature": "hot"}, "Expected `float"), ({"n": 0}, "Expected `int` >= 1")):
            status, answer, _ = system.router.request("POST", path, {"null": None, **body, **wrong})
            assert (status, answer["error"]["param"]) == (400, next(iter(wrong))), answer
            assert words in answer["error"]["message"]
    status, answer, _ = system.router.request("POST", "/v1/completions", {"model": "fake", "null": None})
    assert (status, answer["error"]["param"]) == (400, "prompt")


def test_messages_lose_null_fields_and_free_objects_keep_them() -> None:
    body = CHAT | {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": None}], "reasoning": None},
            {"role": "assistant", "content": "b", "reasoning_content": None},
        ],
        "chat_template_kwargs": {"kept": {"too": None}},
        "logit_bias": {"7": 1.5},
    }
    got = decode(json.dumps(body).encode(), ChatRequest)
    assert [message.content for message in got.messages][1] == "b"
    assert got.chat_template_kwargs == {"kept": {"too": None}}
    assert got.logit_bias == {7: 1.5}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "contents": "x"}, "messages[1].contents: unknown field; the nearest known field is content"),
        ({"role": "user", "content": [{"type": "text", "texts": "x"}]}, "messages[1].content[0].texts: unknown field"),
    ],
)
def test_unknown_fields_of_messages_are_refused_with_their_place(message: dict[str, Any], field: str) -> None:
    body = CHAT | {"messages": [*CHAT["messages"], message]}
    with pytest.raises(RequestError, match=field.replace("[", r"\[")) as caught:
        mended(json.dumps(body).encode(), ChatRequest)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("type_first", [True, False])
@pytest.mark.parametrize("part", PARTS_NOT_SERVED)
def test_parts_that_are_not_text_are_refused_as_what_they_are(system: System, part: str, type_first: bool) -> None:
    fields = [("type", part), (part, {"url": "data:image/png;base64,AA=="})]
    content = [{"type": "text", "text": "look"}, dict(fields if type_first else fields[::-1])]
    body = CHAT | {"messages": [{"role": "user", "content": content}]}
    status, answer, _ = system.router.request("POST", "/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "messages"), answer
    assert answer["error"]["message"] == (
        f"messages[0].content[1]: {PARTS_NOT_SERVED[part]} are not served ({part}); only parts of type "
        "input_text, output_text, refusal, text are"
    )


def test_parts_of_no_known_kind_are_refused_too(system: System) -> None:
    for part in ({"type": "smell", "smell": 1}, {"type": ["image_url"]}, {"type": 5}, {"text": "x"}, "text", None):
        body = CHAT | {"messages": [{"role": "user", "content": [part]}]}
        status, answer, _ = system.router.request("POST", "/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, "messages"), answer
        assert "content[0]" in answer["error"]["message"], answer


def test_objects_that_take_any_field_keep_theirs(system: System) -> None:
    for fields in ({"schema": None}, {"schema": {"a": None}}):
        body = CHAT | {"metadata": fields, "chat_template_kwargs": fields, "no_such_field": None}
        assert system.router.request("POST", "/v1/chat/completions", body)[0] == 200


@pytest.mark.parametrize(
    "raw",
    [
        b' \n{"x": null, "model": "m", "prompt": "hello"}\t',
        b'{"model" : "m" , "x" : null , "prompt" : "hello" , "stream_options" : { "y" : null } }',
        b'{"model": "m", "prompt": "hello", "prompt\\u0000": null, "metadata": {"deep": [[{"x": null}]]}}',
    ],
)
def test_null_fields_are_found_however_the_body_is_written(raw: bytes) -> None:
    assert decode(raw, CompletionRequest).prompt == "hello"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"x": null, "model": "m", "prompt": "a\xff"}',
        b'{"x": null, "model": }',
        b'{"x": null} more',
        b'{"x": null, "model": "m", "prompt": "a"}\x0c',
    ],
)
def test_a_malformed_body_with_null_fields_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError, match="not valid"):
        decode(raw, CompletionRequest)


def test_a_body_of_very_many_null_fields_is_not_searched() -> None:
    for count, is_read in ((MAX_NULLS, True), (MAX_NULLS + 1, False)):
        body = json.dumps(COMPLETION | {f"field_{index}": None for index in range(count)}).encode()
        if is_read:
            assert decode(body, CompletionRequest).prompt == "hello"
        else:
            with pytest.raises(RequestError, match=r"field_0: .*unknown field"):
                decode(body, CompletionRequest)


def test_a_body_that_is_nested_too_deeply_names_the_field_at_fault() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    body = b'{"model": "fake", "what": null, "prompt": ' + deep + b"}"
    assert mended(body, CompletionRequest) == body
    with pytest.raises(RequestError) as refused:
        decode(b'{"model": "fake", "prompt": ' + deep + b"}", CompletionRequest)
    assert refused.value.param == "prompt"


def test_blocks_are_known_by_their_type() -> None:
    """Null fields leave blocks of each type, and an unknown field is compared with those of its block's type."""
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"kept": None}, "toolset_name": None}
    turns = [{"role": "assistant", "content": [{"type": "text", "text": "x", "parsed_output": None}, call]}]
    body = {"model": "fake", "max_tokens": 5, "messages": turns}
    got = decode(json.dumps(body).encode(), MessagesRequest)
    block = got.messages[0].content[1]
    assert isinstance(block, ToolUseBlock) and (block.id, block.name, block.input) == ("a", "f", {"kept": None})
    for field, words in {"inputs": "the nearest known field is input", "text": "unknown field"}.items():
        wrong = body | {"messages": [turns[0], {"role": "assistant", "content": [{**call, field: 1}]}]}
        with pytest.raises(RequestError, match=rf"messages\[1\].content\[0\].{field}: .*{words}"):
            mended(json.dumps(wrong).encode(), MessagesRequest)


@pytest.mark.parametrize("kind", ["smell", "x" * 1000])
def test_types_that_a_place_does_not_take_are_refused_before_their_fields(kind: str) -> None:
    for fields, place in [
        ({"tools": [{"nose": 1, "type": kind}]}, "tools[0].type"),
        ({"response_format": {"type": kind, "nose": 1}}, "response_format.type"),
        ({"messages": [{"role": "user", "content": [{"type": kind, "nose": 1}]}]}, "messages[0].content[0].type"),
    ]:
        with pytest.raises(RequestError) as refused:
            mended(json.dumps(CHAT | fields).encode(), ChatRequest)
        assert str(refused.value).startswith(f"{place}: {kind[:64]!r} is not served; served are: "), refused.value
        assert refused.value.param == place.partition("[")[0].partition(".")[0]
