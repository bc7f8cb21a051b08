"""The routes that generate, called by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from baton.metadata.wire import messages
from baton.metadata.wire.request import unpack_ids

from ...conftest import System
from ...dispatching.test_runner import own


@pytest.fixture
def client(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.router.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_completion_has_text_finish_reason_and_usage(system: System, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="hello", max_tokens=100)
    assert answer.choices[0].text == system.text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(system.say(system.text))
    assert answer.usage.prompt_tokens == len(system.tokenizer.inner.encode("hello").ids)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_a_streamed_completion_ends_with_finish_reason_and_usage(system: System, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="fake", prompt="hello", max_tokens=100, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == system.text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(system.say(system.text))
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_async_client_streams_chat(system: System) -> None:
    async with openai.AsyncOpenAI(base_url=f"{system.router.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            stream=True,
            stream_options={"include_usage": True},
            n=2,
        )
        texts = {0: "", 1: ""}
        roles: dict[int, list[str | None]] = {0: [], 1: []}
        usage = None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles[choice.index].append(choice.delta.role)
        assert texts == {0: system.text, 1: system.text}
        assert all(each[0] == "assistant" and not any(each[1:]) for each in roles.values())
        assert usage is not None
        assert usage.completion_tokens == 2 * len(system.say(system.text))
    assert len(own(system.cluster.by_name("p0"), messages.Prefill)) == 1  # for both choices


def test_a_chat_answer_has_text_logprobs_and_the_templated_prompt(system: System, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hello"}], logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.message.content == system.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == len(system.say(system.text))
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * len(choice.logprobs.content)
    sent = own(system.cluster.by_name("p0"), messages.Prefill)[-1].request
    prompt = system.tokenizer.decode(unpack_ids(sent.prompt_ids))
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert sent.params.max_tokens == 512 - len(unpack_ids(sent.prompt_ids))  # the rest of the context


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    """A client can send back the answer that it received, unchanged."""
    first = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hello"}])
    said = first.choices[0].message.model_dump()
    again = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hello"}, said, {"role": "user", "content": "and?"}]
    )
    assert again.choices[0].finish_reason == "stop"


def test_other_calls_of_the_client_are_answered_in_words(client: openai.OpenAI) -> None:
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError, match="embeddings are not served; the routes are: POST /v1/completions"):
        client.embeddings.create(model="fake", input="hello")
    with pytest.raises(openai.BadRequestError, match="the nearest known field is top_k"):
        client.completions.create(model="fake", prompt="hello", extra_body={"topk": 5})
    answer = client.chat.completions.create(
        model="fake",
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be kind"}]},
            {"role": "user", "content": "hello"},
        ],
        max_completion_tokens=3,
        extra_body={"guided_json": None},
    )
    assert answer.choices[0].finish_reason == "length"


def test_many_prompts_and_choices(system: System, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["hello", "a b"], n=2, max_tokens=100, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [
        text + system.text for text in ("hello", "hello", "a b", "a b")
    ]
    ids = [system.tokenizer.inner.encode(text).ids for text in ("hello", "a b")]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    listed = client.completions.create(model="fake", prompt=ids, max_tokens=100)
    assert [choice.text for choice in listed.choices] == [system.text] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(system: System, client: openai.OpenAI, stream: bool) -> None:
    given = {"model": "fake", "prompt": "hello", "max_tokens": 100, "echo": True, "logprobs": 1}
    if stream:
        chunks = list(client.completions.create(**given, stream=True))  # type: ignore[call-overload]
        parts = [choice for chunk in chunks for choice in chunk.choices]
    else:
        parts = client.completions.create(**given).choices  # type: ignore[call-overload]
    text = "".join(part.text for part in parts)
    tokens = [token for part in parts if part.logprobs for token in part.logprobs.tokens]
    values = [value for part in parts if part.logprobs for value in part.logprobs.token_logprobs]
    offsets = [offset for part in parts if part.logprobs for offset in part.logprobs.text_offset]
    assert text == "hello" + system.text
    ids = system.tokenizer.inner.encode("hello").ids + system.say(system.text)
    assert tokens == [system.tokenizer.token_text(token) for token in ids]
    assert values == [None] + [-0.5] * (len(ids) - 1)
    assert offsets == [sum(map(len, tokens[:place])) for place in range(len(tokens))]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("script", [[300, 301, 1], [1]], ids=["goes on", "ends at once"])
def test_no_output_with_echo_and_logprobs_scores_prompts(
    system: System, client: openai.OpenAI, script: list[int], num_choices: int, stream: bool
) -> None:
    system.cluster.generate_by(lambda prompt, choice: script)
    texts = ["hello there", "x"]
    given: Any = {"model": "fake", "prompt": texts, "max_tokens": 0, "n": num_choices, "echo": True, "logprobs": 1}
    given["extra_body"] = {"return_token_ids": True}
    if stream:
        given |= {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.completions.create(**given))
        parts, usage = [choice for chunk in chunks for choice in chunk.choices], chunks[-1].usage
    else:
        answer = client.completions.create(**given)
        parts, usage = answer.choices, answer.usage
    assert len(parts) == 2 * num_choices
    encoded = [system.tokenizer.inner.encode(text).ids for text in texts for _ in range(num_choices)]
    for part in parts:
        ids = encoded[part.index]
        assert part.text == texts[part.index // num_choices]
        assert part.finish_reason == "length"
        assert part.logprobs is not None
        assert part.logprobs.tokens == [system.tokenizer.token_text(token) for token in ids]
        assert part.logprobs.token_logprobs == [None] + [-0.5] * (len(ids) - 1)
        assert (part.model_extra or {})["token_ids"] == []
    num_prompt = sum(map(len, encoded)) // num_choices
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (num_prompt, 0, num_prompt)


def test_a_prompt_that_is_scored_alone_may_fill_the_context(system: System) -> None:
    for prompt_len, right in ((512, 200), (513, 400)):
        status, body, _ = system.complete(prompt=[5] * prompt_len, max_tokens=0, echo=True, logprobs=1)
        assert status == right, body
        assert right == 400 or len(body["choices"][0]["logprobs"]["token_logprobs"]) == prompt_len


def test_no_output_with_echo_alone_returns_the_prompt(system: System) -> None:
    status, body, _ = system.complete(prompt="hello", max_tokens=0, echo=True, stop=["l"])
    choice = body["choices"][0]
    assert (status, choice["text"], choice["logprobs"], choice["finish_reason"]) == (200, "hello", None, "length")
    assert "stop_reason" not in choice
    assert own(system.cluster.by_name("d0"), messages.Reserve) == []  # one token of the prefill node's is enough


def test_token_ids_are_returned(system: System, client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt="hello", max_tokens=100, extra_body={"return_token_ids": True, "top_k": 5}
    )
    extra = answer.choices[0].model_extra or {}
    assert extra["token_ids"] == system.say(system.text)
    assert extra["prompt_token_ids"] == system.tokenizer.inner.encode("hello").ids
    streamed = client.completions.create(
        model="fake", prompt="hello", max_tokens=100, stream=True, extra_body={"return_token_ids": True}
    )
    ids = [token for chunk in streamed for token in (chunk.choices[0].model_extra or {})["token_ids"]]
    assert ids == system.say(system.text)


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="x", temperature=-1)
    assert caught.value.param == "temperature"


def test_one_token_reserves_no_decode_node(system: System, client: openai.OpenAI) -> None:
    reserves = len(own(system.cluster.by_name("d0"), messages.Reserve))
    answer = client.completions.create(model="fake", prompt="hello", max_tokens=1)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    assert len(own(system.cluster.by_name("d0"), messages.Reserve)) == reserves
    assert own(system.cluster.by_name("p0"), messages.Prefill)[-1].decode is None
