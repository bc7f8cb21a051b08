"""Mistral's format: what stands between and behind its marks."""

from __future__ import annotations

import pytest

from baton.router.tool_parsers.mistral import MistralParser

from .calls import Call, Parsed, parse_all_ways

NOW = Call("now", "{}")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hi [TOOL_CALLS] now {} bye", "Hi bye", [NOW]),
        ("[TOOL_CALLS]now[ARGS]{}\n[TOOL_CALLS]now{}", "", [NOW, NOW]),
        ('[TOOL_CALLS]{"name": "now"}', "", [NOW]),
        ('[TOOL_CALLS][{"name": "now"}, oops', "oops", [NOW]),
        ("[TOOL_CALLS] what is this", "[TOOL_CALLS] what is this", []),
        ("[TOOL_CALLS]a b{}", "[TOOL_CALLS]a b{}", []),
        (f"[TOOL_CALLS]{'x' * 700}{{}}", f"[TOOL_CALLS]{'x' * 700}{{}}", []),
        ("[TOOL_CALLS]f[ARGS]{oops}[TOOL_CALLS]now{}", "", [Call("f", "{", "[TOOL_CALLS]f[ARGS]{oops}"), NOW]),
        ('[TOOL_CALLS][{"name":"f","arguments":{]', "", [Call("f", "{", '[TOOL_CALLS][{"name":"f","arguments":{]')]),
    ],
)
def test_unusual_texts(text: str, content: str, calls: list[Call]) -> None:
    assert parse_all_ways(MistralParser, text) == Parsed(content, calls)
