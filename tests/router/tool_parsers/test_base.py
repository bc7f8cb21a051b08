"""Marks that a text may begin."""

from __future__ import annotations

import pytest

from baton.router.tool_parsers.base import possible_start


@pytest.mark.parametrize(
    ("text", "markers", "length"),
    [
        ("a <tool", ("<tool_call>",), 5),
        ("a <tool_call>", ("<tool_call>",), 0),
        ("a <<", ("<tool_call>", "<<<"), 2),
        ("aab", ("aabc", "bd"), 3),
        ("", ("<",), 0),
    ],
)
def test_the_longest_beginning_counts(text: str, markers: tuple[str, ...], length: int) -> None:
    assert possible_start(text, markers) == length
