"""Events of /v1/messages without a router: text is written only where there is some, and reasons are Anthropic's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.metadata.errors import Overloaded
from baton.router.http.anthropic.format import MessagesFormat
from baton.router.requests.request import Delta, Request

from ...sites import make_group, make_request


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
