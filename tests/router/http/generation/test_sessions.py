"""Ids of sessions: which header or field names the session of a request."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from baton.router.http.generation.sessions import HEADERS, MAX_ID, session_id


@pytest.mark.parametrize(
    ("headers", "key", "expected"),
    [
        ({}, None, None),
        ({}, "", None),
        ({}, "k", "k"),
        *(({name.title(): " s "}, "k", "s") for name in HEADERS),
        ({"X-SMG-Routing-Key": "later", "X-Session-ID": "first"}, None, "first"),
        ({"X-Session-ID": "  "}, "k", "k"),
        ({"X-Session-ID": "s" * (MAX_ID + 1)}, "k", None),
        ({}, "k" * (MAX_ID + 1), None),
    ],
)
def test_the_first_header_counts_then_the_body(headers: dict[str, str], key: str | None, expected: str | None) -> None:
    assert session_id(CIMultiDict(headers), key) == expected
