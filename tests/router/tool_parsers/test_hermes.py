"""Hermes' format: texts that no template writes but models do."""

from __future__ import annotations

import pytest

from baton.router.tool_parsers.hermes import HermesParser

from .calls import Call, Parsed, parse_all_ways

NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"{NOW}\nDone. ", "Done. ", [Call("now", "{}")]),
        (NOW[:-4], "", [Call("now", "{}")]),
        (f"A\n{NOW}\nB\n{NOW}", "A\nB", [Call("now", "{}"), Call("now", "{}")]),
        ("use the <tool_call> mark", "use the <tool_call> mark", []),
        ('<tool_call>{"name":"now"}', "", [Call("now", "{}")]),
        ('<tool_call>{"name":"now","arguments":null,"id":7}</tool_call>', "", [Call("now", "{}")]),
        ('<tool_call>{"arguments":{"a":1},"name":"now"}</tool_call>', "", [Call("now", '{"a":1}')]),
        ('<tool_call>{"arguments":"{\\"a\\":1}","name":"now"}</tool_call>', "", [Call("now", '{"a":1}')]),
        ('<tool_call>{"name":"now","arguments":{"a":"x\ny"}}</tool_call>', "", [Call("now", '{"a":"x\\ny"}')]),
        ('<tool_call>{"name":"unknown","arguments":{}}</tool_call>', "", [Call("unknown", "{}")]),
        ('<tool_call>{"name":7}</tool_call>', '<tool_call>{"name":7}</tool_call>', []),
        ('<tool_call>{"name":"\\ud800"}', '<tool_call>{"name":"\\ud800"}', []),
    ],
)
def test_unusual_texts(text: str, content: str, calls: list[Call]) -> None:
    assert parse_all_ways(HermesParser, text) == Parsed(content, calls)


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("{'a': 1}", "{"),
        ('{"a": tru}', '{"a": '),
        ('{"a": 01}', '{"a": '),
        ('{"a": NaN}', '{"a": '),
        ('{"a": 1,}', '{"a": 1,'),
        ('{"a": "\\x"}', '{"a": "\\'),
        ("[1]", ""),
        ('"text"', ""),
        ("{} {}", "{"),
        ("{" + '"a":{' * 200, '{"a":' + '{"a":' * 99),
    ],
)
def test_broken_json_breaks_one_call(arguments: str, given: str) -> None:
    """Reading goes on with the next call, with or without a closing mark between."""
    begin, end = f'<tool_call>{{"name":"now","arguments":{arguments}}}', "</tool_call>"
    assert parse_all_ways(HermesParser, f"{begin}{end}\n{NOW}!") == Parsed(
        "!", [Call("now", given, begin + end), Call("now", "{}")]
    )
    assert parse_all_ways(HermesParser, begin + NOW) == Parsed("", [Call("now", given, begin), Call("now", "{}")])
