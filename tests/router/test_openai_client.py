"""The official client against the real HTTP server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from .conftest import System


@pytest.fixture
def client(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.router.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completion(system: System, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="hello", max_tokens=100)
    assert answer.choices[0].text == system.text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(system.say(system.text))
    assert answer.usage.prompt_tokens == len(system.tokenizer.inner.encode("hello").ids)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_completion_streamed(system: System, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="fake", prompt="hello", max_tokens=100, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == system.text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(system.say(system.text))
    assert all(chunk.usage is None for chunk in chunks[:-1])
