"""Formats of answers: the prepared chunks of a stream equal those that the encoder would write. Deltas tell what the
whole message tells, but for broken calls."""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET, structs

from baton.metadata.wire.request import Ended
from baton.router.http.generation.answers import usage_of
from baton.router.http.generation.output import OutputReader
from baton.router.http.generation.types import AssistantMessage, ChatDelta
from baton.router.http.openai.format import ChatFormat, CompletionFormat, chat_deltas, chat_message
from baton.router.reasoning_parsers.think_tags import Qwen3ReasoningParser
from baton.router.requests.delta import Delta
from baton.router.tool_parsers.hermes import HermesParser

from ...sites import make_group, make_request

REQUEST: Any = SimpleNamespace(
    rid="r",
    prompt_ids=array("i", [7, 8]),
    prompt_logprobs=None,
    num_generated=3,
    num_cached=None,
    num_rounds=2,
    num_accepted=1,
    num_drafted=4,
)
SEQUENCE: Any = SimpleNamespace(request=REQUEST)
TOKENIZER: Any = None


def make(kind: str, *, with_ids: bool = False, with_metrics: bool = False) -> ChatFormat | CompletionFormat:
    options: Any = {"num_logprobs": None, "with_ids": with_ids, "with_metrics": with_metrics}
    if kind == "chat":
        return ChatFormat("id", "m", TOKENIZER, None, **options)
    return CompletionFormat("id", "m", TOKENIZER, prompt_texts=None, **options)


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix("data: ")) for event in data.decode().split("\n\n")[:-1]]


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("usage", [UNSET, None])
def test_a_prepared_chunk_equals_an_encoded_one(kind: str, usage: Any) -> None:
    """With token ids every chunk is encoded whole."""
    text = 'a "quoted"\nline — naïve'
    plain, whole = make(kind), make(kind, with_ids=True)
    for each in (plain, whole):
        each.chunk(1, SEQUENCE, Delta("first", [1], [], None, None), usage)
    (prepared,) = events(plain.chunk(1, SEQUENCE, Delta(text, [2], [], None, None), usage))
    (encoded,) = events(whole.chunk(1, SEQUENCE, Delta(text, [2], [], None, None), usage))
    assert encoded["choices"][0].pop("token_ids") == [2]
    assert prepared == encoded
    assert ("usage" in prepared) == (usage is None)
    assert plain.chunk(1, SEQUENCE, Delta("", [3], [], None, None), usage) == b""


def test_a_chat_stream_opens_with_the_role() -> None:
    opening, first = events(make("chat").chunk(0, SEQUENCE, Delta("x", [1], [], None, None), UNSET))
    assert opening["choices"][0]["delta"] == {"content": "", "role": "assistant"}
    assert first["choices"][0]["delta"] == {"content": "x"}


def test_the_last_chunk_has_the_counts() -> None:
    (event,) = events(make("completion").ended([REQUEST], with_usage=True).removesuffix(b"data: [DONE]\n\n"))
    assert (event["choices"], event["usage"]["total_tokens"]) == ([], 5)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_whole_answer_has_its_sequences_in_order(kind: str) -> None:
    outputs = [(SEQUENCE, Delta(text, [1], [], "stop", None)) for text in ("a", "b")]
    body = json.loads(make(kind).whole(outputs, usage_of([REQUEST])))
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    texts = [choice["message"]["content"] if kind == "chat" else choice["text"] for choice in body["choices"]]
    assert texts == ["a", "b"]


def metrics(kind: str, *ended: Ended, asked: bool = True) -> Any:
    """Return the `metrics` of an answer whose outputs ended like this, which is that of a stream with the usage too."""
    request = make_request(make_group(), num_choices=len(ended))
    for each in ended:
        request.count(each)
    answer_format, outputs = make(kind, with_metrics=asked), list[Any]()
    for sequence in request.sequences:
        outputs.append((sequence, Delta("a", [1], [], "stop", None)))
    whole = json.loads(answer_format.whole(outputs, usage_of([request])))
    streamed = answer_format.ended([request], with_usage=True).removesuffix(b"data: [DONE]\n\n")
    assert whole.get("metrics") == events(streamed)[0].get("metrics")
    assert answer_format.ended([request], with_usage=False) == b"data: [DONE]\n\n"
    return whole.get("metrics")


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_the_result_of_speculation_is_there_on_request_as_vllm_gives_it(kind: str) -> None:
    ended = Ended("stop", 1, 3, 9, 0, num_rounds=5, num_drafted=15, num_accepted=8, accept_counts=(2, 0, 1, 2))
    assert metrics(kind, ended) == {
        "speculative_decoding": {
            "mean_acceptance_length": 2.6,
            "draft_acceptance_rate": 8 / 15,
            "acceptance_histogram": [2, 0, 1, 2],
            "num_spec_steps": 5,
            "num_accepted_draft_tokens": 8,
            "num_draft_tokens": 15,
            "num_spec_tokens": 3,
        }
    }
    assert metrics(kind, ended, asked=False) is None
    assert metrics(kind, ended, ended) is None, "vLLM, too, gives it for one output alone"
    assert metrics(kind, Ended("stop", 1, 3, 9, 0)) is None, "nothing was drafted"
    empty = Ended("stop", 1, 3, 9, 0, num_rounds=1, accept_counts=(1,))
    assert metrics(kind, empty) is None, "a node verified a round of no drafts"
    old = structs.replace(ended, accept_counts=())
    assert metrics(kind, old) is None, "a node of an older protocol gives no histogram, and none is made up"


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def read(*texts: str, is_parallel: bool = True) -> list[ChatDelta]:
    reader, deltas = new_reader(is_parallel=is_parallel), list[ChatDelta]()
    for place, text in enumerate(texts, 1):
        deltas += chat_deltas(reader.read(text, is_last=place == len(texts)), "reasoning")
    return deltas


def message(text: str, *, is_parallel: bool = True) -> AssistantMessage:
    return chat_message(new_reader(is_parallel=is_parallel).whole(text), "reasoning")


def new_reader(*, is_parallel: bool = True) -> OutputReader:
    return OutputReader(Qwen3ReasoningParser(""), HermesParser({"f": {}}), is_parallel=is_parallel)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_deltas_join_to_the_message(size: int) -> None:
    text = f"<think>hm</think>A{CALL} B {CALL}"
    whole = message(text)
    deltas = read(*(text[place : place + size] for place in range(0, len(text), size)))
    assert "".join(delta.content or "" for delta in deltas) == whole.content == "A B"
    assert "".join(delta.reasoning or "" for delta in deltas) == whole.reasoning == "hm"
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert [part.index for part in parts if part.id is not UNSET] == [0, 1]
    arguments = ["".join(p.function.arguments or "" for p in parts if p.index == index) for index in (0, 1)]
    assert whole.tool_calls is not UNSET
    assert arguments == [call.function.arguments for call in whole.tool_calls] == ['{"a": 1}'] * 2


def test_one_part_of_text_gives_few_deltas_in_the_order_of_the_text() -> None:
    first, second = read(f"<think>hm</think>A{CALL}{CALL}B")
    assert (first.reasoning, first.content, len(first.tool_calls or ())) == ("hm", "A", 2)
    assert (second.reasoning, second.content, second.tool_calls) == (None, "B", None)


def test_a_broken_call_is_content_of_a_whole_message_only() -> None:
    broken = '<tool_call>{"name": "f", "arguments": {"a": '
    whole = message(f"A {CALL}{broken}")
    assert whole.content == f"A{broken}"
    assert whole.tool_calls is not UNSET
    assert len(whole.tool_calls) == 1
    (delta,) = read(f"A {broken}")
    assert delta.content == "A"
    assert [json.loads(json.dumps(part.function.arguments)) for part in delta.tool_calls or ()] == ['{"a": ']


def test_without_parallel_calls_only_the_first_counts() -> None:
    assert len(message(f"{CALL}{CALL}", is_parallel=False).tool_calls or ()) == 1
    (delta,) = read(f"{CALL}{CALL}", is_parallel=False)
    assert len(delta.tool_calls or ()) == 1


def test_content_is_null_only_beside_something_else() -> None:
    assert message("").content == ""
    assert message(CALL).content is None
    assert message("<think>hm").content is None
