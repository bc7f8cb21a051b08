"""Thoughts of a model that has them: messages leave them out, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ..conftest import System
from .chats import USER, prompt_of, say
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


def test_messages_leave_thoughts_out(thinker: System) -> None:
    body = {"model": "fake", "messages": [USER], "max_tokens": 100}
    _, whole, _ = thinker.router.request("POST", "/v1/messages", body)
    assert [block["text"] for block in whole["content"]] == ["Yes."]
    assert whole["usage"]["output_tokens"] == len(thinker.say(TEXT))
    deltas = [
        event["delta"]["text"]
        for event in streamed(thinker, "/v1/messages", body)
        if "index" in event and "delta" in event
    ]
    assert "".join(deltas) == "Yes."


def test_disabled_thinking_reaches_the_template(thinker: System) -> None:
    body = {"model": "fake", "messages": [USER], "max_tokens": 100, "thinking": {"type": "disabled"}}
    assert thinker.router.request("POST", "/v1/messages", body)[0] == 200
    assert prompt_of(thinker).endswith("<think>\n\n</think>\n\n")
    del body["max_tokens"]
    _, count, _ = thinker.router.request("POST", "/v1/messages/count_tokens", body)
    assert count["input_tokens"] == num_tokens(thinker, prompt_of(thinker))
