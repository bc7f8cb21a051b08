"""The size of a body is counted outside of its texts, whatever they hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.metadata.errors import RequestError
from baton.router.http.bodies.body_size import (
    MAX_IDS,
    MAX_PLAIN,
    MAX_VALUES,
    BodySize,
    exact_size,
    most_plain,
    quick_size,
)
from baton.router.http.generation.types import ChatRequest, CompletionRequest, DetokenizeRequest

MESSAGE = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    "body",
    [
        {
            "messages": [MESSAGE] * 4096,
            "tools": [{"type": "function", "function": {"name": f"t{i}"}} for i in range(512)],
        },
        {"prompt": '{"a": [1, 2]}, \\' * 400_000},
        {"prompt": "\\" * 7 + '"' * 300_000},
        {"prompt": ["\\", '"', '\\"', '[,{"' * 400_000]},
        {"prompt": [12345] * (1 << 20)},
        {"prompt": "," * 8_000_000},
    ],
    ids=["messages", "code", "quotes", "ends", "ids", "commas"],
)
def test_bodies_that_fit_a_context_are_served(body: dict[str, Any]) -> None:
    data = json.dumps(body, separators=(",", ":")).encode()
    size = quick_size(data, MAX_IDS) or exact_size(data, MAX_IDS)
    assert size.num_bytes == len(data)
    assert size.num_values <= MAX_VALUES


@pytest.mark.parametrize(
    "value", [[[]] * MAX_VALUES, [{}] * MAX_VALUES, ["\\"] * MAX_VALUES, {str(i): 0 for i in range(MAX_VALUES)}]
)
def test_too_many_values_are_refused_before_decoding(value: Any) -> None:
    with pytest.raises(RequestError, match=f"at most {MAX_VALUES} are served"):
        exact_size(json.dumps({"user": "[" * MAX_VALUES, "prompt": value}).encode(), MAX_PLAIN)
    with pytest.raises(RequestError, match=f"at most {MAX_PLAIN} are served"):
        exact_size(json.dumps([1] * (MAX_PLAIN + 2), separators=(",", ":")).encode(), MAX_PLAIN)


def test_a_small_body_is_served_in_the_loop() -> None:
    size = quick_size(json.dumps({"messages": [MESSAGE] * 500}).encode(), MAX_PLAIN)
    assert size is not None and size.is_small
    assert quick_size(b"[" * (MAX_VALUES + 1), MAX_PLAIN) is None
    assert [most_plain(kind) for kind in (CompletionRequest, DetokenizeRequest, ChatRequest)] == [
        MAX_IDS,
        MAX_IDS,
        MAX_PLAIN,
    ]
    assert not BodySize(1 << 20, 3).is_small
