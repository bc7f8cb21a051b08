"""Calls as JSON objects: the order of keys, other forms of arguments, and strict objects."""

from __future__ import annotations

import pytest

from baton.router.tool_parsers.json_calls import JsonCall
from baton.router.tool_parsers.json_text import JsonStatus


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "is_strict", "name", "arguments", "status"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', True, "f", '{"a": 1}', JsonStatus.DONE),
        ('{"parameters": {"a": 1} , "name": "f"}', True, "f", '{"a": 1}', JsonStatus.DONE),
        ('{"name": "f"}', True, "f", "{}", JsonStatus.DONE),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', True, "f", '{"a": 1}', JsonStatus.DONE),
        ('{"id": 1, "name": "f", "more": {"name": "g"}}', False, "f", "{}", JsonStatus.DONE),
        ('{"name": "f", "more": 1}', True, "f", "", JsonStatus.BROKEN),
        ('{"name": "f", "name": "g"}', False, "f", "", JsonStatus.BROKEN),
        ('{"name": "f", "arguments": {}, "parameters": {}}', False, "f", "{", JsonStatus.BROKEN),
        ('{"arguments": {}}', False, None, "{", JsonStatus.BROKEN),
        ('{"name": "f", "arguments": "\\ud800{}"}', False, "f", "", JsonStatus.BROKEN),
        ('{"name": "f",}', False, "f", "", JsonStatus.BROKEN),
        ('{"name": "f", "arguments": {"a": {}}', False, "f", '{"a": {}', JsonStatus.OPEN),
    ],
)
def test_objects(text: str, is_strict: bool, name: str | None, arguments: str, status: JsonStatus, size: int) -> None:
    call, given = JsonCall(is_strict=is_strict), ""
    for place in range(0, len(text), size):
        call.read(text[place : place + size])
        given += call.take()
        if call.status is JsonStatus.BROKEN:
            break
    assert (call.name, given, call.status) == (name, arguments, status)
