"""Items of the input become messages: which ones join, what comes back from OpenAI's client, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from baton.metadata.errors import RequestError
from baton.router.http.generation.types import ChatMessage, TextPart
from baton.router.http.responses.input import messages_of
from baton.router.http.responses.types import ResponsesRequest

USER: Any = {"role": "user", "content": "hello"}


def said(text: str) -> Any:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def thought(*texts: str, **more: Any) -> Any:
    parts = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": parts, **more}


def made(call_id: str, arguments: str = "{}") -> Any:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": arguments}


def returned(call_id: str, output: Any = "out") -> Any:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def read(items: Any, **more: Any) -> list[ChatMessage]:
    body = json.dumps({"model": "m", "input": items, **more}).encode()
    return messages_of(msgspec.json.decode(body, type=ResponsesRequest))


def shown(messages: list[ChatMessage]) -> list[tuple[Any, ...]]:
    """Return what each message holds: of the assistant thoughts, text and the ids of calls."""
    return [
        (each.reasoning_content, each.content, [call.id for call in each.tool_calls or ()])
        if each.role == "assistant"
        else (each.role, each.content)
        for each in messages
    ]


def test_a_text_is_one_message_after_the_instructions() -> None:
    assert shown(read("hi")) == [("user", "hi")]
    assert shown(read("hi", instructions="be brief")) == [("system", "be brief"), ("user", "hi")]
    assert shown(read([USER], instructions="")) == [("user", "hello")]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([thought("A"), said("B"), made("1"), made("2")], [("A", "B", ["1", "2"])]),
        ([thought("A"), made("1")], [("A", None, ["1"])]),
        ([thought("A", "B"), USER], [("A\nB", None, []), ("user", "hello")]),
        ([said("A"), said("B")], [(None, "A", []), (None, "B", [])]),
        ([said("A"), thought("B"), said("C")], [(None, "A", []), ("B", "C", [])]),
        ([thought("A"), made("1"), thought("B"), said("C"), made("2")], [("A\nB", "C", ["1", "2"])]),
        (
            [thought("A"), made("1"), returned("1"), thought("B"), said("C")],
            [("A", None, ["1"]), ("tool", "out"), ("B", "C", [])],
        ),
        (
            [made("1"), said("A"), made("2"), returned("1"), returned("2"), USER],
            [(None, "A", ["1", "2"]), ("tool", "out"), ("tool", "out"), ("user", "hello")],
        ),
        ([thought(), said("")], [(None, "", [])]),
    ],
)
def test_items_of_the_assistant_that_follow_each_other_are_one_message(items: Any, expected: Any) -> None:
    assert shown(read(items)) == expected


def test_a_summary_stands_for_thoughts_that_are_not_given() -> None:
    summary = [{"type": "summary_text", "text": "S"}]
    for item in (thought(summary=summary, content=None), thought(summary=summary, encrypted_content="x")):
        assert shown(read([item, said("A")])) == [("S", "A", [])]
    assert shown(read([thought("T", summary=summary), said("A")])) == [("T", "A", [])]


def test_outputs_name_their_call_and_hold_text_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    *_, message = read([made("1", '{"x": 1}'), returned("1", parts)])
    content = [TextPart("text", "a"), TextPart("text", "b")]
    assert (message.role, message.tool_call_id, message.content) == ("tool", "1", content)


def test_fields_that_are_null_are_ignored() -> None:
    assert shown(read([{**USER, "type": None, "no_such_field": None}])) == [("user", "hello")]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "item_reference", "id": "x"}, "input[1].type: 'item_reference' is not served; served are: "),
        ({"type": "t" * 99}, f"input[1].type: {'t' * 64!r} is not served"),
        ({"type": 5}, "input[1].type: Expected `str | null`, got `int`"),
        (5, "input[1]: Expected `object`, got `int`"),
        ({"role": "user"}, "input[1].content: Object missing required field `content`"),
        ({**USER, "contents": "x"}, "input[1].contents: unknown field; the nearest known field is content"),
        ({**USER, "role": "tool"}, "input[1].role: Invalid enum value 'tool'"),
        (
            {"role": "user", "content": [{"type": "input_file", "file_id": "x"}]},
            "input[1].content[0]: files are not served (input_file)",
        ),
        (
            {"type": "function_call", "name": "f", "arguments": "{}"},
            "input[1].call_id: Object missing required field `call_id`",
        ),
        (made("1", "[1]"), "input[1].arguments: it must be a JSON object as text"),
        (made("1", '{"a": '), "input[1].arguments: it must be a JSON object as text"),
        ({**made("1"), "arguments": {}}, "input[1].arguments: Expected `str`, got `object`"),
        (returned("2"), "input[1].call_id: no call before it has the id '2'"),
        (
            returned("1", [{"type": "input_image", "image_url": "x"}]),
            "input[1].output[0]: images are not served (input_image)",
        ),
        (returned("1", None), "input[1].output: Expected `str | array`, got `null`"),
        ({"type": "reasoning", "content": "x"}, "input[1].content: Expected `array | null`, got `str`"),
        (
            {"type": "reasoning", "summary": [{"type": "text", "text": "x"}]},
            "input[1].summary[0].type: 'text' is not served; served are: reasoning_text, summary_text",
        ),
    ],
)
def test_items_are_refused_with_their_place(item: Any, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        read([USER, item])
    assert str(caught.value).startswith(words)
    assert caught.value.param == "input"


def test_a_call_that_comes_after_its_output_does_not_count() -> None:
    with pytest.raises(RequestError, match=r"^input\[0\]\.call_id: no call before it"):
        read([returned("1"), made("1")])


def test_deep_items_never_fail_inside() -> None:
    for depth in (50, 200, *range(600, 1200, 50)):
        nested = '{"a":' * depth + "1" + "}" * depth
        for item in (f'{{"role": "user", "content": {nested}}}', nested):
            body = f'{{"model": "m", "input": [{item}]}}'.encode()
            with pytest.raises((RequestError, RecursionError)):
                messages_of(msgspec.json.decode(body, type=ResponsesRequest))
