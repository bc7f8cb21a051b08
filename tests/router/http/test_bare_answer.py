"""Thoughts of a model that has them: responses leave them out, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ..conftest import System
from .chats import prompt_of, say
from .test_output_readings import QWEN3, TEXT, num_tokens


@pytest.fixture(params=[1, 3, 1000])
def thinker(make_system: Callable[..., System], request: pytest.FixtureRequest) -> System:
    """A model that thinks before it answers; its nodes send so many tokens at once."""
    system = make_system(template=QWEN3, context_len=4096).up()
    system.behaviour.step_tokens = request.param
    say(system, TEXT)
    return system


def streamed(system: System, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    _, raw, _ = system.router.request("POST", path, {**body, "stream": True})
    return [json.loads(block.rpartition("data: ")[2]) for block in raw.decode().strip().split("\n\n")]


def test_the_effort_of_reasoning_reaches_the_template(thinker: System) -> None:
    body = {"model": "fake", "input": "hello", "reasoning": {"effort": "low"}}
    assert thinker.router.request("POST", "/v1/responses", body)[0] == 200
    assert "low" in prompt_of(thinker)


def test_responses_leave_thoughts_out_and_count_them(thinker: System) -> None:
    body = {"model": "fake", "input": "hello"}
    _, whole, _ = thinker.router.request("POST", "/v1/responses", body)
    last = streamed(thinker, "/v1/responses", body)[-1]["response"]
    for response in (whole, last):
        assert [part["text"] for part in response["output"][0]["content"]] == ["Yes."]
        assert response["usage"]["output_tokens"] == len(thinker.say(TEXT))
        num_thoughts = response["usage"]["output_tokens_details"]["reasoning_tokens"]
        assert num_thoughts == num_tokens(thinker, TEXT.partition("\n\n")[0])


def test_without_thoughts_all_text_is_the_answer(system: System) -> None:
    _, whole, _ = system.router.request("POST", "/v1/responses", {"model": "fake", "input": "hello"})
    assert whole["output"][0]["content"][0]["text"] == system.text
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
