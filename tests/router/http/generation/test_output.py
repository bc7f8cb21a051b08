"""Parts of one output: their order, the calls that are left out, and text that is not read. Thoughts of chats: their
field, their tokens, and the tool calls and grammars after them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import openai
import pydantic
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from baton.metadata.wire import messages
from baton.router.http.generation.output import (
    OutputPart,
    OutputReader,
    PartBegun,
    PartDelta,
    PartEnded,
    ThoughtCounter,
)
from baton.router.reasoning_parsers.think_tags import DeepSeekR1ReasoningParser, Qwen3ReasoningParser
from baton.router.text.detokenizer import make_detokenizer
from baton.router.text.tokenizer import TextTokenizer
from baton.router.tool_parsers.hermes import HermesParser

from ...conftest import RunningRouter, System
from ...dispatching.test_runner import own
from ...sites import text_tokenizer
from ..chats import NOW, QWEN3, TEMPLATE, TEXT, USER, accepts, call, num_tokens, prompt_of, say

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
MADE = ("call", '{"a": 1}')
BROKEN = '<tool_call>{"name": "f", "arguments": {"a": '


def make(*, is_parallel: bool = True, with_thoughts: bool = True) -> OutputReader:
    numbers = count()
    tools = HermesParser({"f": {}}, lambda: f"id{next(numbers)}")
    return OutputReader(Qwen3ReasoningParser(""), tools, is_parallel=is_parallel, with_thoughts=with_thoughts)


def shown(parts: list[OutputPart]) -> list[tuple[str, str]]:
    return [(part.kind, part.text) for part in parts]


def test_parts_begin_and_end_in_the_order_of_the_text() -> None:
    reader = make()
    events = reader.read(f"<think>hm</think>A{CALL}", is_last=False)
    kinds = [(type(each), each.part.kind) for each in events]
    assert kinds == [(kind, part) for part in ("thought", "text", "call") for kind in (PartBegun, PartDelta, PartEnded)]
    assert {each.part.text for each in events if isinstance(each, PartBegun)} == {""}
    assert reader.has_call
    kinds = [(type(each), each.part.is_whole) for each in reader.read(BROKEN, is_last=True)]
    assert kinds == [(PartBegun, None), (PartDelta, False), (PartEnded, False)]
    assert reader.has_call and reader.end() == []


@pytest.mark.parametrize("size", [1, 1000])
def test_calls_in_thoughts_are_none(size: int) -> None:
    text = f"<think>a{CALL}</think>b{CALL}"
    reader = make()
    for place in range(0, len(text), size):
        reader.read(text[place : place + size], is_last=place + size >= len(text))
    assert shown(reader.parts) == [("thought", f"a{CALL}"), ("text", "b"), MADE]
    (made,) = [part.call for part in reader.parts if part.call is not None]
    assert (made.index, made.call_id, made.name) == (0, "id0", "f")


def test_without_parallel_calls_only_the_first_is_left() -> None:
    reader = make(is_parallel=False)
    reader.read(f"{CALL}{CALL} B", is_last=True)
    assert [part.kind for part in reader.parts] == ["call", "text"]


def test_a_broken_call_is_no_call() -> None:
    for text, is_parallel in [(f"A{BROKEN}", True), ("A", True), (BROKEN, False)]:
        reader = make(is_parallel=is_parallel)
        reader.read(text, is_last=True)
        assert not reader.has_call


def test_either_parser_may_be_absent() -> None:
    for reader, text, parts in [
        (OutputReader(), "<think>", [("text", "<think>")]),
        (OutputReader(), "", []),
        (OutputReader(Qwen3ReasoningParser("")), "<think>a</think>b", [("thought", "a"), ("text", "b")]),
        (OutputReader(None, HermesParser({})), "<think>a", [("text", "<think>a")]),
    ]:
        reader.read(text, is_last=True)
        assert shown(reader.parts) == parts and not reader.has_call


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        (f"<think>hm</think>A{CALL}\n{CALL}B", [("thought", "hm"), ("text", "A"), *[MADE] * 2, ("text", "B")]),
        (f"A{BROKEN}", [("text", f"A{BROKEN}")]),
        (f"{CALL}{BROKEN}", [MADE, ("text", BROKEN)]),
        (f"A {BROKEN}</tool_call>{CALL}", [("text", f"A{BROKEN}</tool_call>"), MADE]),
        ("<think>hm", [("thought", "hm")]),
    ],
)
def test_the_parts_of_a_whole_output(text: str, parts: list[tuple[str, str]]) -> None:
    found = make().whole(text, is_whole=False)
    assert shown(found) == parts
    assert [part.index for part in found] == list(range(len(parts)))
    assert [part.is_whole for part in found] == [part[0] == "call" or part is not parts[-1] for part in parts]
    assert len({part.call.call_id for part in found if part.call is not None}) == parts.count(MADE)


def test_thoughts_may_be_left_out() -> None:
    assert shown(make(with_thoughts=False).whole("<think>hm</think>A")) == [("text", "A")]


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


@pytest.fixture
def make_qwen3(make_system: Callable[..., System]) -> Callable[..., System]:
    return lambda **more: make_system(**{"template": QWEN3, "context_len": 4096, **more}).up()


def ask(system: System, **more: Any) -> Any:
    with openai.OpenAI(base_url=f"{system.router.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(**{"model": "fake", "messages": [USER], **more})
        return list(answer) if more.get("stream") else answer


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_have_a_field_of_their_own(make_qwen3: Callable[..., System], field: str) -> None:
    system = make_qwen3(router={"reasoning_field": field})
    say(system, TEXT)
    answer = ask(system)
    message = answer.choices[0].message
    other = {"reasoning", "reasoning_content"} - {field}
    assert (message.content, message.model_extra[field]) == ("Yes.", "It may rain.")
    assert not other & message.model_extra.keys()
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(system.say(TEXT))
    assert answer.usage.completion_tokens_details.reasoning_tokens == num_tokens(system, TEXT.partition("\n\n")[0])


@pytest.mark.parametrize("step_tokens", [1, 4, 1000])
def test_thoughts_are_streamed(make_qwen3: Callable[..., System], step_tokens: int) -> None:
    system = make_qwen3()
    system.behaviour.step_tokens = step_tokens
    say(system, TEXT)
    chunks = ask(system, stream=True, n=2, stream_options={"include_usage": True})
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.index == 1]
    kinds = ["thought" if (each.model_extra or {}).get("reasoning_content") else "text" for each in deltas[1:-1]]
    assert "".join((each.model_extra or {}).get("reasoning_content") or "" for each in deltas) == "It may rain."
    assert "".join(each.content or "" for each in deltas) == "Yes."
    assert kinds == sorted(kinds, key=lambda kind: kind == "text")
    usage = chunks[-1].usage
    assert usage.completion_tokens_details.reasoning_tokens == 2 * num_tokens(system, TEXT.partition("\n\n")[0])


def test_thinking_can_be_off(make_qwen3: Callable[..., System]) -> None:
    system = make_qwen3()
    say(system, "Yes. </think>")
    answer = ask(system, extra_body={"chat_template_kwargs": {"enable_thinking": False}}, reasoning_effort="low")
    assert prompt_of(system).endswith("<think>\n\n</think>\n\nlow")
    assert answer.choices[0].message.content == "Yes. </think>"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_an_output_that_ends_in_thoughts_has_no_content(make_qwen3: Callable[..., System]) -> None:
    system = make_qwen3()
    ids = system.say(TEXT)[: num_tokens(system, "<think>\nIt may")]
    system.cluster.script = lambda prompt, choice: ids
    answer = ask(system, max_tokens=len(ids))
    message = answer.choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == (None, "It may")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(ids)


def test_the_parser_can_be_named_or_off(make_qwen3: Callable[..., System]) -> None:
    off = make_qwen3(router={"reasoning_parser": "none"})
    say(off, TEXT)
    answer = ask(off)
    assert answer.choices[0].message.content == TEXT
    assert answer.usage.completion_tokens_details is None
    named = make_qwen3(router={"reasoning_parser": "deepseek_r1"}, template="{{ messages }}")
    say(named, "It may rain.</think>Yes.")
    assert ask(named).choices[0].message.content == "Yes."


def test_calls_follow_thoughts(make_qwen3: Callable[..., System]) -> None:
    """A call that the model only thinks of is none."""
    system = make_qwen3()
    text = f"<think>\nI could {call('now', {})}.\n</think>\n\n{call('now', {})}"
    say(system, text)
    answer = ask(system, tools=[NOW], tool_choice="required")
    message = answer.choices[0].message
    assert message.content is None
    assert message.model_extra["reasoning_content"] == f"I could {call('now', {})}."
    assert [each.function.name for each in message.tool_calls] == ["now"]
    assert answer.choices[0].finish_reason == "tool_calls"
    grammar = own(system.cluster.by_name("p0"), messages.Prefill)[-1].request.params.grammar
    assert accepts(system, grammar, text)
    assert accepts(system, grammar, call("now", {}))
    assert not accepts(system, grammar, "<think>\nNo.\n</think>\n\nNo.")
    assert not accepts(system, grammar, "I think " + call("now", {}))


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_histories_may_hold_thoughts(make_qwen3: Callable[..., System], field: str) -> None:
    system = make_qwen3(template="{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}{% endfor %}")
    say(system, "Yes.")
    ask(system, messages=[USER, {"role": "assistant", "content": "A", field: "B"}])
    assert prompt_of(system) == "|helloB|A"


HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")


def test_marks_that_are_special_tokens_are_read_and_others_are_not_shown(
    make_router: Callable[..., RunningRouter], tokenizer_file: bytes
) -> None:
    inner = tokenizers.Tokenizer.from_buffer(tokenizer_file)
    inner.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in HARMONY])
    data = inner.to_str().encode()
    tokenizer = TextTokenizer(data)
    eos = tuple(tokenizer.special_by_text[mark] for mark in ("<|return|>", "<|call|>"))
    template = (
        TEMPLATE.replace("<|im_start|>", "<|start|>").replace("<|im_end|>", "<|end|>") + "{# <|channel|><|message|> #}"
    )
    given: Any = {"template": template, "vocab_size": 440, "context_len": 4096, "eos": eos}
    system = System(make_router(), tokenizer, data, **given)
    try:
        system.up()
        thoughts = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        ids = inner.encode(f"{thoughts}<|channel|>final<|message|>Ye<|im_end|>s.<|return|>").ids
        system.cluster.script = lambda prompt, choice: ids
        answer = ask(system)
        message = answer.choices[0].message
        assert (message.content, message.model_extra["reasoning_content"]) == ("Yes.", "Hm.")
        assert answer.usage.completion_tokens_details.reasoning_tokens == len(inner.encode(thoughts).ids) - len(
            inner.encode("<|start|>assistant").ids
        )
        text = f"{thoughts}<|channel|>commentary to=functions.now <|constrain|>json<|message|>{{}}"
        ids = inner.encode(text + "<|call|>").ids
        answer = ask(system, tools=[NOW], tool_choice="required")
        assert answer.choices[0].message.tool_calls[0].function.name == "now"
        assert answer.choices[0].finish_reason == "tool_calls"
        grammar = own(system.cluster.by_name("p0"), messages.Prefill)[-1].request.params.grammar
        matcher = LLMatcher(LLTokenizer(data.decode(), n_vocab=440, eos_token=eos[1]), grammar)
        assert matcher.try_consume_tokens(ids[:-1]) == len(ids) - 1, matcher.get_error()
        assert matcher.is_accepting()
    finally:
        system.cluster.close()


@pytest.mark.parametrize(
    "asked",
    [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json": {"type": "object"}}}],
    ids=["response_format", "structured_outputs"],
)
def test_a_chat_with_a_schema_may_think(make_qwen3: Callable[..., System], asked: dict[str, Any]) -> None:
    system = make_qwen3()
    say(system, '<think>hm</think>\n{"a": 1}')
    answer = ask(system, extra_body=asked)
    message = answer.choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ('{"a": 1}', "hm")
    grammar = own(system.cluster.by_name("p0"), messages.Prefill)[-1].request.params.grammar
    assert accepts(system, grammar, '<think>hm</think>\n{"a": 1}')
    assert not accepts(system, grammar, "<think>hm</think>\nhello")


class Rain(pydantic.BaseModel):
    a: int


def test_the_clients_own_helpers_read_an_answer_after_thoughts(make_qwen3: Callable[..., System]) -> None:
    system = make_qwen3()
    say(system, '<think>hm</think>\n{"a": 1}')
    given: Any = {"model": "fake", "response_format": Rain}
    with openai.OpenAI(base_url=f"{system.router.url}/v1", api_key="none", max_retries=0) as client:
        parsed = client.chat.completions.parse(messages=[USER], **given)
        with client.chat.completions.stream(messages=[USER], **given) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_completion()
        assert {"content.delta", "content.done"} < kinds
        for answer in (parsed, streamed):
            message: Any = answer.choices[0].message
            assert (message.parsed, message.model_extra["reasoning_content"]) == (Rain(a=1), "hm")
            client.chat.completions.parse(messages=[USER, message.model_dump(warnings=False), USER], **given)
            assert '<|im_start|>assistant\n{"a": 1}<|im_end|>' in prompt_of(system)
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(messages=[USER], max_tokens=3, **given)
