"""Events and items of /v1/responses without a router, from the text of a model that thinks and calls."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from baton.metadata.errors import Overloaded
from baton.router.http.generation.output import OutputReader, OutputReading
from baton.router.http.generation.tool_types import FunctionTool, Tool
from baton.router.http.generation.tools import ToolUse
from baton.router.http.responses.format import ResponseItems, ResponsesFormat
from baton.router.http.responses.tools import ResponseTools
from baton.router.http.responses.types import (
    ResponseCustomTool,
    ResponseFunction,
    ResponsesRequest,
    Status,
    ToolNamespace,
)
from baton.router.reasoning_parsers.think_tags import Qwen3ReasoningParser
from baton.router.requests.delta import Delta
from baton.router.requests.request import Request
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
    use = ToolUse([Tool(function=FunctionTool("f"))], HermesParser, "hermes", [], is_parallel=True)
    assert request_.group.tokenizer is not None
    reading = OutputReading("", request_.group.tokenizer, use, None, "reasoning")
    answers = new_format(request_, reading)
    answers.chunk(0, request_.sequences[0], Delta('A<tool_call>{"name": "f", "arguments": {"a"', [5], []), None)
    text, call = data_of(answers.failed(Overloaded("full")))[-1]["response"]["output"]
    assert (text["type"], text["status"]) == ("message", "completed")
    assert (call["type"], call["status"], call["arguments"]) == ("function_call", "incomplete", '{"a"')


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
BROKEN = '<tool_call>{"name": "f", "arguments": {"a": '
THOUGHTS = "<think>hm</think>"


TOOLS = [ResponseCustomTool(name="patch"), ToolNamespace(name="mcp__git", tools=[ResponseFunction(name="log")])]


class Stream:
    """Items and events of one output."""

    def __init__(self, *, is_parallel: bool = True) -> None:
        parsers = (Qwen3ReasoningParser(""), HermesParser({"f": {}}))
        self.reader = OutputReader(*parsers, is_parallel=is_parallel)
        self._items = ResponseItems(ResponseTools(TOOLS), "resp-9")

    @property
    def items(self) -> list[Any]:
        return [plain(self._items.item(part)) for part in self.reader.parts]

    def read(self, text: str, *, is_last: bool) -> list[Any]:
        return plain(list(self._items.events(self.reader.read(text, is_last=is_last))))

    def end(self, status: Status) -> list[Any]:
        return plain(list(self._items.events(self.reader.end(is_whole=status == "completed"))))

    def whole(self, text: str, status: Status) -> list[Any]:
        return [plain(self._items.item(part)) for part in self.reader.whole(text, is_whole=status == "completed")]


def whole(text: str, status: Status) -> list[Any]:
    return Stream().whole(text, status)


def plain(value: Any) -> Any:
    return msgspec.to_builtins(value)


def shown(items: list[Any]) -> list[tuple[str, str, str]]:
    """Return type, status and text or arguments of each item."""
    return [
        (each["type"], each["status"], each.get("arguments") or "".join(part["text"] for part in each["content"]))
        for each in items
    ]


def stream(text: str, status: Status, step: int) -> tuple[Stream, list[Any]]:
    output, events = Stream(), list[Any]()
    for start in range(0, len(text), step):
        events += output.read(text[start : start + step], is_last=start + step >= len(text))
    return output, events + output.end(status)


CASES: list[tuple[str, Status, list[tuple[str, str, str]]]] = [
    ("A", "completed", [("message", "completed", "A")]),
    ("A", "incomplete", [("message", "incomplete", "A")]),
    (THOUGHTS + "A", "completed", [("reasoning", "completed", "hm"), ("message", "completed", "A")]),
    ("<think>hm", "incomplete", [("reasoning", "incomplete", "hm")]),
    (CALL, "completed", [("function_call", "completed", '{"a": 1}')]),
    (CALL, "incomplete", [("function_call", "completed", '{"a": 1}')]),
    (
        f"{THOUGHTS}A{CALL}{CALL}B",
        "completed",
        [
            ("reasoning", "completed", "hm"),
            ("message", "completed", "A"),
            ("function_call", "completed", '{"a": 1}'),
            ("function_call", "completed", '{"a": 1}'),
            ("message", "completed", "B"),
        ],
    ),
]


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(("text", "status", "expected"), CASES)
def test_items_are_in_the_order_of_the_text(text: str, status: Status, step: int, expected: Any) -> None:
    assert shown(whole(text, status)) == expected
    output, _ = stream(text, status, step)
    assert shown(output.items) == expected


def test_a_broken_call_is_text_of_a_whole_answer_and_an_incomplete_item_of_a_stream() -> None:
    assert shown(whole(f"A{BROKEN}", "incomplete")) == [("message", "incomplete", f"A{BROKEN}")]
    assert shown(whole(f"A{CALL}{BROKEN}", "completed"))[2] == ("message", "completed", BROKEN)
    output, events = stream(f"A{BROKEN}", "incomplete", 3)
    assert shown(output.items) == [("message", "completed", "A"), ("function_call", "incomplete", '{"a": ')]
    assert (events[-1]["type"], events[-1]["item"]["status"]) == ("response.output_item.done", "incomplete")


def test_calls_that_are_left_out_leave_no_item() -> None:
    assert [kind for kind, _, _ in shown(Stream(is_parallel=False).whole(f"{CALL}{CALL}", "completed"))] == [
        "function_call"
    ]


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(("text", "status", "expected"), CASES)
def test_events_put_together_are_the_items(text: str, status: Status, step: int, expected: Any) -> None:
    """A reader of the events who trusts only their indexes and ids gets the items, each part whole before its end."""
    output, events = stream(text, status, step)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    built, names = list[Any](), list[list[str]]()
    for event in events:
        kind, index = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert (index, event["item"]["status"]) == (len(built), "in_progress")
            assert event["item"].get("content", []) == [] and event["item"].get("arguments", "") == ""
            built.append(event["item"])
            names.append([])
            continue
        assert index == len(built) - 1
        item = built[index]
        names[index].append(kind)
        match kind.split("."):
            case ["output_item", "done"]:
                assert event["item"] == {**item, "status": event["item"]["status"]}
                built[index] = event["item"]
                continue
            case ["content_part", "added"]:
                assert event["part"]["text"] == ""
                item["content"].append(event["part"])
            case ["function_call_arguments", "delta"]:
                item["arguments"] += event["delta"]
            case ["function_call_arguments", "done"]:
                assert event["arguments"] == item["arguments"]
            case [_, "delta"]:
                item["content"][event["content_index"]]["text"] += event["delta"]
            case ["content_part", "done"]:
                assert event["part"] == item["content"][event["content_index"]]
            case _:
                assert event["text"] == item["content"][event["content_index"]]["text"]
        assert event["item_id"] == item["id"]
    assert built == output.items
    assert len({item["id"] for item in built}) == len(built)
    for item, of_item in zip(built, names, strict=True):
        deltas = [name for name in of_item if name.endswith(".delta")]
        rest = [name for name in of_item if not name.endswith(".delta")]
        text_event = {
            "message": "output_text",
            "reasoning": "reasoning_text",
            "function_call": "function_call_arguments",
        }
        name = text_event[item["type"]]
        assert set(deltas) <= {f"{name}.delta"}
        ends = [f"{name}.done", "content_part.done", "output_item.done"]
        if item["type"] == "function_call":
            assert rest == [ends[0], ends[2]]
        else:
            assert rest == ["content_part.added", *ends]


def test_ids_tell_the_kind_of_an_item() -> None:
    items = whole(f"{THOUGHTS}A{CALL}", "completed")
    assert [item["id"] for item in items] == ["rs_9_0", "msg_9_1", "fc_9_2"]
    assert items[2]["call_id"].startswith("call_") and items[2]["name"] == "f"
    assert items[0]["summary"] == []


def test_an_item_that_has_not_ended_is_incomplete() -> None:
    output = Stream()
    assert output.items == []
    output.read(f"{THOUGHTS}A", is_last=False)
    assert shown(output.items) == [("reasoning", "completed", "hm"), ("message", "incomplete", "A")]


PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** a\\n\\"é"}}\n</tool_call>'
LOG = '<tool_call>\n{"name": "mcp__git__log", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_calls_are_of_the_tools_that_the_client_named(step: int) -> None:
    output, events = stream(PATCH + LOG + CALL, "completed", step)
    for custom, inner, other in (whole(PATCH + LOG + CALL, "completed"), output.items):
        assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", '*** a\n"é')
        assert (inner["type"], inner["namespace"], inner["name"]) == ("function_call", "mcp__git", "log")
        assert (other["type"], other["name"]) == ("function_call", "f") and "namespace" not in other
    first = [event for event in events if event["output_index"] == 0]
    assert [event["type"] for event in first] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert first[0]["item"]["input"] == "" and first[1]["delta"] == first[2]["input"] == first[3]["item"]["input"]


def test_a_custom_call_that_is_cut_off_is_incomplete() -> None:
    output, _ = stream(PATCH[:-30], "incomplete", 5)
    (item,) = output.items
    assert (item["type"], item["status"], item["input"]) == ("custom_tool_call", "incomplete", "")
