"""Events as deltas and as a message: both tell the same, but for broken calls."""

from __future__ import annotations

import json

import pytest
from msgspec import UNSET

from baton.router.http.generation.output import OutputReading
from baton.router.http.openai.chat_output import ChatOutput
from baton.router.reasoning_parsers.think_tags import Qwen3ReasoningParser
from baton.router.requests.output_parser import OutputParser
from baton.router.tool_parsers.hermes import HermesParser

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def make(*, is_parallel: bool = True) -> ChatOutput:
    new = lambda: OutputParser(Qwen3ReasoningParser(""), HermesParser({"f": {}}))  # noqa: E731
    return ChatOutput(OutputReading(new, None, "reasoning", is_parallel))


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_deltas_join_to_the_message(size: int) -> None:
    text = f"<think>hm</think>A{CALL} B {CALL}"
    whole = make().message(text)
    output = make()
    deltas = [
        delta
        for place in range(0, len(text), size)
        for delta in output.deltas(text[place : place + size], is_last=place + size >= len(text))
    ]
    assert "".join(delta.content or "" for delta in deltas) == whole.content == "A B"
    assert "".join(delta.reasoning or "" for delta in deltas) == whole.reasoning == "hm"
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert [part.index for part in parts if part.id is not UNSET] == [0, 1]
    arguments = ["".join(p.function.arguments or "" for p in parts if p.index == index) for index in (0, 1)]
    assert whole.tool_calls is not UNSET
    assert arguments == [call.function.arguments for call in whole.tool_calls] == ['{"a": 1}'] * 2
    assert output.finish_reason("stop") == "tool_calls"
    assert output.finish_reason("length") == "length"


def test_one_part_of_text_gives_few_deltas_in_the_order_of_the_text() -> None:
    first, second = make().deltas(f"<think>hm</think>A{CALL}{CALL}B", is_last=True)
    assert (first.reasoning, first.content, len(first.tool_calls or ())) == ("hm", "A", 2)
    assert (second.reasoning, second.content, second.tool_calls) == (None, "B", None)


def test_a_broken_call_is_content_of_a_whole_message_only() -> None:
    broken = '<tool_call>{"name": "f", "arguments": {"a": '
    output = make()
    message = output.message(f"A {CALL}{broken}")
    assert message.content == f"A{broken}"
    assert message.tool_calls is not UNSET
    assert len(message.tool_calls) == 1
    (delta,) = make().deltas(f"A {broken}", is_last=True)
    assert delta.content == "A"
    assert [json.loads(json.dumps(part.function.arguments)) for part in delta.tool_calls or ()] == ['{"a": ']


def test_without_parallel_calls_only_the_first_counts() -> None:
    output = make(is_parallel=False)
    assert len(output.message(f"{CALL}{CALL}").tool_calls or ()) == 1
    (delta,) = make(is_parallel=False).deltas(f"{CALL}{CALL}", is_last=True)
    assert len(delta.tool_calls or ()) == 1


def test_content_is_null_only_beside_something_else() -> None:
    assert make().message("").content == ""
    assert make().message(CALL).content is None
    assert make().message("<think>hm").content is None
