"""Events of one output: their order, the calls that are left out, and text that is not read."""

from __future__ import annotations

import pytest

from baton.router.http.generation.output import OutputReader, OutputReading, WholeCall, WholePart
from baton.router.reasoning_parsers.base import Thought
from baton.router.reasoning_parsers.think_tags import Qwen3ReasoningParser
from baton.router.requests.output_parser import OutputParser
from baton.router.tool_parsers.base import CallArguments, CallBegin, CallBroken, CallEnd, Content
from baton.router.tool_parsers.hermes import HermesParser

from ...sites import make_group, make_request

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
MADE = WholeCall("", "f", '{"a": 1}')
BROKEN = '<tool_call>{"name": "f", "arguments": {"a": '


def make(*, is_parallel: bool = True, with_thoughts: bool = True) -> OutputReader:
    new = lambda: OutputParser(Qwen3ReasoningParser(""), HermesParser({"f": {}}))  # noqa: E731
    return OutputReader(OutputReading(new, None, "reasoning", is_parallel), with_thoughts=with_thoughts)


def test_events_come_in_the_order_of_the_text() -> None:
    reader = make()
    kinds = [type(each) for each in reader.events(f"<think>hm</think>A{CALL}", is_last=False)]
    assert kinds == [Thought, Content, CallBegin, CallArguments, CallEnd]
    assert reader.has_call
    assert [type(each) for each in reader.events(BROKEN, is_last=True)] == [CallBegin, CallArguments, CallBroken]
    assert reader.has_call


def test_without_parallel_calls_only_the_first_is_left() -> None:
    reader = make(is_parallel=False)
    events = reader.events(f"{CALL}{CALL} B", is_last=True)
    assert [type(each) for each in events] == [CallBegin, CallArguments, CallEnd, Content]


def test_a_broken_call_is_no_call() -> None:
    for text, is_parallel in [(f"A{BROKEN}", True), ("A", True), (BROKEN, False)]:
        reader = make(is_parallel=is_parallel)
        reader.events(text, is_last=True)
        assert not reader.has_call


def test_a_reader_without_thoughts_counts_none() -> None:
    assert make().num_thoughts(make_request(make_group()).sequences[0]) == 0


def test_text_that_is_not_read_is_content() -> None:
    reader = OutputReader(None)
    assert reader.events("<think>", is_last=False) == [Content("<think>")]
    assert reader.events("", is_last=True) == []
    assert not reader.has_call


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        (f"<think>hm</think>A{CALL}\n{CALL}B", [Thought("hm"), Content("A"), *[MADE] * 2, Content("B")]),
        (f"A{BROKEN}", [Content(f"A{BROKEN}")]),
        (f"{CALL}{BROKEN}", [MADE, Content(BROKEN)]),
        (f"A {BROKEN}</tool_call>{CALL}", [Content(f"A{BROKEN}</tool_call>"), MADE]),
        ("<think>hm", [Thought("hm")]),
    ],
)
def test_the_parts_of_a_whole_output(text: str, parts: list[WholePart]) -> None:
    found = make().whole(text)
    assert [part._replace(call_id="") if isinstance(part, WholeCall) else part for part in found] == parts
    assert len({part.call_id for part in found if isinstance(part, WholeCall)}) == parts.count(MADE)


def test_thoughts_may_be_left_out() -> None:
    reader = make(with_thoughts=False)
    assert reader.events("<think>hm</think>A", is_last=False) == [Content("A")]
    assert make(with_thoughts=False).whole("<think>hm</think>A") == [Content("A")]
