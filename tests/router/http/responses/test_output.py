"""Items of one response from the text of a model that thinks and calls: whole, and as events of a stream."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from baton.router.http.generation.output import OutputReader, OutputReading
from baton.router.http.responses.output import ResponseOutput
from baton.router.http.responses.tools import ResponseTools
from baton.router.http.responses.types import ResponseCustomTool, ResponseFunction, Status, ToolNamespace
from baton.router.reasoning_parsers.think_tags import Qwen3ReasoningParser
from baton.router.requests.output_parser import OutputParser
from baton.router.tool_parsers.hermes import HermesParser

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
BROKEN = '<tool_call>{"name": "f", "arguments": {"a": '
THOUGHTS = "<think>hm</think>"


TOOLS = [ResponseCustomTool(name="patch"), ToolNamespace(name="mcp__git", tools=[ResponseFunction(name="log")])]


def make(*, is_parallel: bool = True) -> ResponseOutput:
    new = lambda: OutputParser(Qwen3ReasoningParser(""), HermesParser({"f": {}}))  # noqa: E731
    reader = OutputReader(OutputReading(new, None, "reasoning", is_parallel))
    return ResponseOutput(reader, ResponseTools(TOOLS), "resp-9", itertools.count())


def plain(value: Any) -> Any:
    return msgspec.to_builtins(value)


def shown(items: list[Any]) -> list[tuple[str, str, str]]:
    """Return type, status and text or arguments of each item."""
    return [
        (each["type"], each["status"], each.get("arguments") or "".join(part["text"] for part in each["content"]))
        for each in plain(items)
    ]


def stream(text: str, status: Status, step: int) -> tuple[ResponseOutput, list[Any]]:
    output, events = make(), list[Any]()
    for start in range(0, len(text), step):
        events += output.events(text[start : start + step], is_last=start + step >= len(text))
    if not text:
        events += output.events("", is_last=True)
    return output, plain(events + output.end(status))


CASES: list[tuple[str, Status, list[tuple[str, str, str]]]] = [
    ("A", "completed", [("message", "completed", "A")]),
    ("A", "incomplete", [("message", "incomplete", "A")]),
    ("", "completed", [("message", "completed", "")]),
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
    assert shown(make().whole(text, status)) == expected
    output, _ = stream(text, status, step)
    assert shown(output.items) == expected


def test_a_broken_call_is_text_of_a_whole_answer_and_an_incomplete_item_of_a_stream() -> None:
    assert shown(make().whole(f"A{BROKEN}", "incomplete")) == [("message", "incomplete", f"A{BROKEN}")]
    assert shown(make().whole(f"A{CALL}{BROKEN}", "completed"))[2] == ("message", "completed", BROKEN)
    output, events = stream(f"A{BROKEN}", "incomplete", 3)
    assert shown(output.items) == [("message", "completed", "A"), ("function_call", "incomplete", '{"a": ')]
    assert (events[-1]["type"], events[-1]["item"]["status"]) == ("response.output_item.done", "incomplete")


def test_calls_that_are_left_out_leave_no_item() -> None:
    assert [kind for kind, _, _ in shown(make(is_parallel=False).whole(f"{CALL}{CALL}", "completed"))] == [
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
    assert built == plain(output.items)
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
    items = plain(make().whole(f"{THOUGHTS}A{CALL}", "completed"))
    assert [item["id"] for item in items] == ["rs_9_0", "msg_9_1", "fc_9_2"]
    assert items[2]["call_id"].startswith("call_") and items[2]["name"] == "f"
    assert items[0]["summary"] == []


def test_an_item_that_has_not_ended_is_incomplete() -> None:
    output = make()
    assert output.items == []
    output.events(f"{THOUGHTS}A", is_last=False)
    assert shown(output.items) == [("reasoning", "completed", "hm"), ("message", "incomplete", "A")]


PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** a\\n\\"é"}}\n</tool_call>'
LOG = '<tool_call>\n{"name": "mcp__git__log", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_calls_are_of_the_tools_that_the_client_named(step: int) -> None:
    output, events = stream(PATCH + LOG + CALL, "completed", step)
    whole = plain(make().whole(PATCH + LOG + CALL, "completed"))
    for custom, inner, other in (whole, plain(output.items)):
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
    (item,) = plain(output.items)
    assert (item["type"], item["status"], item["input"]) == ("custom_tool_call", "incomplete", "")
