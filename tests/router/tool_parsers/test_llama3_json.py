"""Llama 3's JSON format: only an output that is a call of a known tool is one."""

from __future__ import annotations

import pytest

from baton.router.tool_parsers.llama3_json import Llama3JsonParser

from .calls import Call, Parsed, parse_all_ways

NOW = '{"name": "now", "parameters": {}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<|python_tag|>{NOW}; <|python_tag|>{NOW}\n{NOW}", "", [Call("now", "{}")] * 3),
        (f"{NOW} is what I call", "is what I call", [Call("now", "{}")]),
        (f"I call {NOW}", f"I call {NOW}", []),
        ('{"name": "Bob", "age": 2}', '{"name": "Bob", "age": 2}', []),
        ('{"age": 2, "name": "now"}', '{"age": 2, "name": "now"}', []),
        ('{"type": "function", "name": "now"}', "", [Call("now", "{}")]),
        ('{"name": "now", "age": 2} x', "", [Call("now", "", '{"name": "now", "age": 2} x')]),
        ('{"name": "now", "parameters": [', "", [Call("now", "", '{"name": "now", "parameters": [')]),
        ("<|python_tag|>print(1)", "print(1)", []),
        ("[1, 2]", "[1, 2]", []),
    ],
)
def test_unusual_texts(text: str, content: str, calls: list[Call]) -> None:
    assert parse_all_ways(Llama3JsonParser, text) == Parsed(content, calls)
