"""A refusal for unlike weights names both fingerprints, and the quantization of both if one has any."""

from __future__ import annotations

import pytest

from baton.metadata.handoff.schema.weights import difference


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        ("1", "1", []),
        ("1 fp8 online", "1 fp8 online", []),
        (None, None, []),
        ("1", "2", ["weights: 1 here, 2 there"]),
        (None, "2", ["weights: None here, 2 there"]),
        ("1 fp8 online", "2", ["weights: 1 (fp8 online) here, 2 (not quantized) there"]),
        (None, "2 mxfp4", ["weights: None here, 2 (mxfp4) there"]),
        ("1 mxfp4", "2 fp8 online", ["weights: 1 (mxfp4) here, 2 (fp8 online) there"]),
    ],
)
def test_both_values_are_named(here: str | None, there: str | None, words: list[str]) -> None:
    assert difference("weights", here, there) == words
