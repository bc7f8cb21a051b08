"""Incremental reading of JSON: it takes what Python's decoder takes, and no more."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import num_examples

from baton.router.tool_parsers.json_text import JsonStatus, JsonValue, parsed

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def read(text: str, size: int) -> tuple[str, str, JsonStatus]:
    """Return what a value gives of a text that comes in parts, what it leaves, and its status."""
    value, given, place = JsonValue(), "", 0
    while place < len(text) and value.status is JsonStatus.OPEN:
        part = text[place : place + size]
        end, piece = value.read(part, 0)
        given += piece
        place += end
        if end < len(part):
            assert value.status is not JsonStatus.OPEN
    return given, text[place:], value.status


@given(value=values, indent=st.none() | st.just(1), size=st.integers(1, 5), is_ascii=st.booleans())
@settings(max_examples=num_examples(200), deadline=None)
def test_every_value_is_read_to_its_end(value: Any, indent: int | None, size: int, is_ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    assert read(text + " ] tail", size) == (text, " ] tail", JsonStatus.DONE)


@given(value=values, place=st.integers(0, 40), extra=st.sampled_from(list('{}[]",:\\x1u-.e \n')))
@settings(max_examples=num_examples(300), deadline=None)
def test_a_damaged_value_is_done_only_if_it_is_valid(value: Any, place: int, extra: str) -> None:
    text = json.dumps([value], ensure_ascii=False)
    text = text[:place] + extra + text[place + 1 :]
    given, rest, status = read(text, 1)
    assert read(text, 7) == (given, rest, status)
    if status is JsonStatus.DONE:
        json.loads(given)
    else:
        with pytest.raises(ValueError):
            json.loads(text, strict=False)


@pytest.mark.parametrize("text", ["01", "+1", "1.", ".5", "1e", "NaN", "Infinity", "tru", "nulll", "1-1", "- 1"])
def test_words_that_are_no_values(text: str) -> None:
    assert read(f"[{text}]", 1)[2] is JsonStatus.BROKEN


def test_raw_control_characters_are_escaped() -> None:
    given, _, status = read('["a\tb\nc\x00"]', 2)
    assert status is JsonStatus.DONE
    assert json.loads(given) == ["a\tb\nc\x00"]


def test_parsed_refuses_what_json_has_not() -> None:
    for text in ("NaN", "-Infinity", "[" * 100_000, "'a'"):
        with pytest.raises(ValueError):
            parsed(text)
