"""What a parser makes of a text, in a form that tests compare."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from baton.router.tool_parsers.base import (
    CallArguments,
    CallBegin,
    CallBroken,
    CallEnd,
    Content,
    Event,
    Schema,
    ToolParser,
)

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"$ref": "#/$defs/place"},
        "unit": {"type": ["string", "null"]},
    },
    "$defs": {"place": {"type": "object"}},
}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": WEATHER,
    "write_file": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    "now": {"type": "object", "properties": {}},
}


class Call(NamedTuple):
    """A call as the events tell it. `broken`: what the model wrote of a call that never became whole."""

    name: str
    arguments: str
    broken: str | None = None


class Parsed(NamedTuple):
    content: str
    calls: list[Call]


def collect(events: Iterable[Event]) -> Parsed:
    """Return content and calls of events. Fails if they are not in the order that tool_parsers/base.py promises."""
    content, calls, is_open = "", list[Call](), False
    for event in events:
        match event:
            case Content(text):
                assert text
                assert not is_open
                content += text
            case CallBegin(index, call_id, name):
                assert not is_open
                assert (index, call_id) == (len(calls), f"id{index}")
                is_open = True
                calls.append(Call(name, ""))
            case CallArguments(index, text):
                assert is_open
                assert index == len(calls) - 1
                assert text
                calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + text)
            case CallEnd(index):
                assert is_open
                assert index == len(calls) - 1
                assert isinstance(json.loads(calls[-1].arguments), dict)
                is_open = False
            case CallBroken(index, text):
                assert is_open
                assert index == len(calls) - 1
                calls[-1] = calls[-1]._replace(broken=text)
                is_open = False
                assert not is_json(calls[-1].arguments), "a broken call must not look whole"
    assert not is_open
    return Parsed(content, calls)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def parse(kind: type[ToolParser], parts: Sequence[str], tools: Mapping[str, Schema] = TOOLS) -> Parsed:
    numbers = count()
    parser = kind(tools, lambda: f"id{next(numbers)}")
    return collect([event for part in parts for event in parser.feed(part)] + parser.finish())


def parse_all_ways(kind: type[ToolParser], text: str, tools: Mapping[str, Schema] = TOOLS) -> Parsed:
    """Return what the parser makes of a text. It must be the same at every division into two parts, and by characters,
    twos, threes and sevens."""
    whole = parse(kind, [text], tools)
    for place in range(1, len(text)):
        assert parse(kind, [text[:place], text[place:]], tools) == whole, (text[:place], text[place:])
    for size in (1, 2, 3, 7):
        assert parse(kind, [text[at : at + size] for at in range(0, len(text), size)], tools) == whole, size
    return whole
