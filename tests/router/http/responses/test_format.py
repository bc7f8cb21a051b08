"""Events of /v1/responses without a router."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from baton.metadata.errors import Overloaded
from baton.router.http.generation.output import OutputReading
from baton.router.http.responses.format import ResponsesFormat
from baton.router.http.responses.tools import ResponseTools
from baton.router.http.responses.types import ResponsesRequest
from baton.router.requests.output_parser import OutputParser
from baton.router.requests.request import Delta, Request
from baton.router.tool_parsers.hermes import HermesParser

from ...sites import make_group, make_request


@pytest.fixture
def request_() -> Request:
    return make_request(make_group(), prompt_len=7)


def new_format(request_: Request, reading: OutputReading | None = None, **given: Any) -> ResponsesFormat:
    assert request_.group.tokenizer is not None
    body = msgspec.convert({"model": "fake", "input": "x", **given}, ResponsesRequest)
    return ResponsesFormat("resp-1", body, ResponseTools(body.tools or ()), request_.group.tokenizer, reading)


def data_of(events: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.partition("data: ")[2]) for block in events.decode().split("\n\n") if block]


def test_output_without_text_yet_writes_no_delta(request_: Request) -> None:
    answers, sequence = new_format(request_), request_.sequences[0]
    opening = data_of(answers.chunk(0, sequence, Delta("", [5], []), None))
    assert [each["type"] for each in opening] == ["response.created", "response.in_progress"]
    assert opening[0]["response"]["status"] == "in_progress" and opening[0]["response"]["usage"] is None
    assert answers.chunk(0, sequence, Delta("", [6], []), None) == b""
    added, part, delta = data_of(answers.chunk(0, sequence, Delta('é"\n', [6], []), None))
    assert (added["type"], part["type"]) == ("response.output_item.added", "response.content_part.added")
    assert (delta["delta"], delta["sequence_number"], delta["item_id"]) == ('é"\n', 4, "msg_1_0")


def test_the_end_holds_all_text_and_counts(request_: Request) -> None:
    request_.num_cached = 5
    answers, sequence = new_format(request_), request_.sequences[0]
    for text in ("a", "", "b"):
        answers.chunk(0, sequence, Delta(text, [5], [], "length"), None)
    response = data_of(answers.ended([request_], with_usage=False))[-1]["response"]
    assert response["output"][0]["content"][0]["text"] == "ab"
    assert response["usage"]["input_tokens"] == 7
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 5, "cache_write_tokens": 0}
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_an_output_without_text_is_an_empty_message(request_: Request) -> None:
    answers, sequence = new_format(request_), request_.sequences[0]
    answers.chunk(0, sequence, Delta("", [5], [], "stop"), None)
    kinds = [each["type"] for each in data_of(answers.ended([request_], with_usage=False))]
    assert kinds[0] == "response.output_item.added" and kinds[-1] == "response.completed"
    whole = json.loads(
        new_format(request_).whole([(sequence, Delta("", [5], [], "stop"))], answers.usage_of([request_]))
    )
    assert whole["output"][0]["content"][0]["text"] == ""


def test_a_response_repeats_tools_as_they_were_given(request_: Request) -> None:
    tool = {"name": "f", "parameters": {"type": "object"}, "strict": True, "type": "function"}
    given = {"tools": [tool], "tool_choice": {"name": "f", "type": "function"}, "parallel_tool_calls": False}
    answers = new_format(request_, **given)
    opening = data_of(answers.chunk(0, request_.sequences[0], Delta("", [5], []), None))
    assert {name: opening[0]["response"][name] for name in given} == given
    default = data_of(new_format(request_).chunk(0, request_.sequences[0], Delta("", [5], []), None))
    for name, value in {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}.items():
        assert default[0]["response"][name] == value


def test_a_failed_stream_ends_with_the_error(request_: Request) -> None:
    created, _, event = data_of(new_format(request_).failed(Overloaded("full")))
    assert created["type"] == "response.created"
    assert event["type"] == "response.failed"
    assert event["response"]["error"] == {"code": "overloaded", "message": "full"}
    assert event["response"]["output"] == []


def test_a_stream_that_fails_within_a_call_has_it_as_incomplete(request_: Request) -> None:
    reading = OutputReading(lambda: OutputParser(None, HermesParser({"f": {}})), None, "reasoning", is_parallel=True)
    answers = new_format(request_, reading)
    answers.chunk(0, request_.sequences[0], Delta('A<tool_call>{"name": "f", "arguments": {"a"', [5], []), None)
    text, call = data_of(answers.failed(Overloaded("full")))[-1]["response"]["output"]
    assert (text["type"], text["status"]) == ("message", "completed")
    assert (call["type"], call["status"], call["arguments"]) == ("function_call", "incomplete", '{"a"')
