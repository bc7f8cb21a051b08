"""Formats of answers: the prepared chunks of a stream equal those that the encoder would write."""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET

from baton.router.http.openai.format import AnswerFormat, ChatFormat, CompletionFormat, usage_of
from baton.router.requests.request import Delta

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


def make(kind: str, *, with_ids: bool = False) -> AnswerFormat:
    if kind == "chat":
        return ChatFormat("id", "m", TOKENIZER, num_logprobs=None, with_ids=with_ids)
    return CompletionFormat("id", "m", TOKENIZER, num_logprobs=None, with_ids=with_ids, prompt_texts=None)


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


def test_usage_counts_a_shared_prompt_once() -> None:
    usage = usage_of([REQUEST])
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 3, 5)
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert usage.speculation is not None
    assert usage.speculation.accept_length == 1.5
    (event,) = events(make("completion").usage_chunk(usage))
    assert event["choices"] == []
    assert event["usage"]["total_tokens"] == 5


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_whole_answer_has_its_sequences_in_order(kind: str) -> None:
    outputs = [(SEQUENCE, Delta(text, [1], [], "stop", None)) for text in ("a", "b")]
    body = json.loads(make(kind).whole(outputs, usage_of([REQUEST])))
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    texts = [choice["message"]["content"] if kind == "chat" else choice["text"] for choice in body["choices"]]
    assert texts == ["a", "b"]
