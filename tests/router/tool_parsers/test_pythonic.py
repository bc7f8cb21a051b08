"""Pythonic format: literals of Python and JSON, and lists that are no calls."""

from __future__ import annotations

import pytest

from baton.router.tool_parsers.pythonic import PythonicParser, json_of

from .calls import Call, Parsed, parse_all_ways

NOW = Call("now", "{}")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("[now( )]", "", [NOW]),
        (" [ now(a = 'x'\n,b=(1, 2),) , now() ] bye", "bye", [Call("now", '{"a": "x", "b": [1, 2]}'), NOW]),
        ("[now(a='x\ny')]", "", [Call("now", '{"a": "x\\ny"}')]),
        ("[now(a='''x\ny''')]", "", [Call("now", '{"a": "x\\ny"}')]),
        ("[now(a=true, b=None)]", "", [Call("now", '{"a": true, "b": null}')]),
        ("[1, 2]", "[1, 2]", []),
        ("[unknown(a=1)]", "[unknown(a=1)]", []),
        ("now()", "now()", []),
        ("[now(), 5]", ", 5]", [NOW]),
        ("[now(1)]", "", [Call("now", "", "[now(1)]")]),
        ("[now(a=b)]", "", [Call("now", '{"a": ', "[now(a=b)]")]),
        ("[now(a=1])]", "", [Call("now", '{"a": ', "[now(a=1])]")]),
        ("[now(a={1, 2})]", "", [Call("now", '{"a": ', "[now(a={1, 2})]")]),
        ("[now(a=" + "[" * 300, "", [Call("now", '{"a": ', "[now(a=" + "[" * 300)]),
    ],
)
def test_unusual_texts(text: str, content: str, calls: list[Call]) -> None:
    assert parse_all_ways(PythonicParser, text) == Parsed(content, calls)


@pytest.mark.parametrize(
    ("text", "json"),
    [
        ("1e5", "1e5"),
        ("-1", "-1"),
        ("'\\d'", '"\\\\d"'),
        ("1e999", "1e999"),
        ("(1e999,)", None),
        ("1j", None),
        ("", None),
    ],
)
def test_literals(text: str, json: str | None) -> None:
    assert json_of(text) == json
