"""The chain of parsers, and the count of thoughts."""

from __future__ import annotations

from itertools import count

import pytest

from baton.router.reasoning_parsers.base import Thought
from baton.router.reasoning_parsers.think_tags import DeepSeekR1ReasoningParser, Qwen3ReasoningParser
from baton.router.requests.output_parser import OutputEvent, OutputParser, ThoughtCounter
from baton.router.text.detokenizer import make_detokenizer
from baton.router.tool_parsers.base import CallArguments, CallBegin, CallEnd, Content
from baton.router.tool_parsers.hermes import HermesParser

from ..sites import text_tokenizer

CALL = '<tool_call>{"name": "f"}</tool_call>'


def feed(parser: OutputParser, texts: list[str]) -> list[OutputEvent]:
    return [event for text in texts for event in parser.feed(text)] + parser.finish()


@pytest.mark.parametrize("size", [1, 1000])
def test_thoughts_come_before_calls(size: int) -> None:
    text = f"<think>a{CALL}</think>b{CALL}"
    numbers = count()
    tools = HermesParser({"f": {}}, lambda: f"id{next(numbers)}")
    events = feed(
        OutputParser(Qwen3ReasoningParser(""), tools), [text[i : i + size] for i in range(0, len(text), size)]
    )
    thoughts = "".join(event.text for event in events if isinstance(event, Thought))
    assert thoughts == f"a{CALL}"
    others = [event for event in events if not isinstance(event, Thought)]
    assert others == [Content("b"), CallBegin(0, "id0", "f"), CallArguments(0, "{}"), CallEnd(0)]


def test_either_parser_may_be_absent() -> None:
    assert feed(OutputParser(None, None), ["a", "", "b"]) == [Content("a"), Content("b")]
    assert feed(OutputParser(Qwen3ReasoningParser(""), None), ["<think>a</think>b"]) == [Thought("a"), Content("b")]
    assert feed(OutputParser(None, HermesParser({})), ["<think>a"]) == [Content("<think>a")]


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("kind", "thoughts", "answer"),
    [
        (Qwen3ReasoningParser, "<think>\nthe quick fox\n</think>", "\n\nbrown"),
        (Qwen3ReasoningParser, "", "the <think>quick</think> fox"),
        (Qwen3ReasoningParser, "<think>\nthe quick fox", ""),
        (DeepSeekR1ReasoningParser, "the quick fox\n</think>", "brown"),
    ],
)
def test_thoughts_are_counted_with_their_marks(
    kind: type[Qwen3ReasoningParser], thoughts: str, answer: str, size: int
) -> None:
    tokenizer = text_tokenizer()
    first = tokenizer.inner.encode(thoughts).ids
    ids = first + tokenizer.inner.encode(answer).ids
    counter = ThoughtCounter(kind(""), make_detokenizer(tokenizer, [], skip_special=True))
    counts = [counter.count(ids[: place + size]) for place in range(0, len(ids), size)]
    assert counts[-1] == len(first)
    assert counts == sorted(counts)
