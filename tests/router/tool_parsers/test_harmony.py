"""Harmony's calls: arguments that are no object, and messages to others."""

from __future__ import annotations

import pytest

from baton.router.tool_parsers.harmony import HarmonyParser

from .calls import Call, Parsed, parse_all_ways

HEAD = "<|channel|>commentary to=functions.now<|message|>"
NOW = Call("now", "{}")
PYTHON = "<|channel|>commentary to=python<|message|>1<|call|>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"A{HEAD} {{}} <|call|>{HEAD}{{}}", "A", [NOW, NOW]),
        (f"{HEAD}5<|call|>B", "B", [Call("now", "", f"{HEAD}5<|call|>")]),
        (f"{HEAD}<|call|>{HEAD}{{}}<|ca", "", [Call("now", "", f"{HEAD}<|call|>"), NOW]),
        (f'{HEAD}{{"a": x}}<|call|>', "", [Call("now", '{"a": ', f'{HEAD}{{"a": x}}<|call|>')]),
        (PYTHON, PYTHON, []),
    ],
)
def test_unusual_texts(text: str, content: str, calls: list[Call]) -> None:
    assert parse_all_ways(HarmonyParser, text) == Parsed(content, calls)
