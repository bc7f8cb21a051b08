"""The harmony format: messages by their channels, and those to tools."""

from __future__ import annotations

import pytest

from baton.router.reasoning_parsers.base import Thought
from baton.router.reasoning_parsers.harmony import HarmonyReasoningParser

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"


def parse(texts: list[str]) -> tuple[str, str]:
    parser = HarmonyReasoningParser("<|start|>assistant")
    parts = [part for text in texts for part in parser.feed(text)] + parser.finish()
    assert all(part.text for part in parts)
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    return thoughts, "".join(part.text for part in parts if not isinstance(part, Thought))


@pytest.mark.parametrize(
    ("text", "thoughts", "answer"),
    [
        (f"{ANALYSIS}A\nB<|end|>{FINAL}C<|return|>", "A\nB", "C"),
        ("<|channel|>final<|message|>C", "", "C"),
        ("C < D", "", "C < D"),
        (f"{ANALYSIS}A<|end|><|start|>assistant{ANALYSIS}B{FINAL}C", "A\n\nB", "C"),
        (f"{ANALYSIS}cut off <|en", "cut off <|en", ""),
        (f"{ANALYSIS}A<|end|><|start|>assist", "A", ""),
        (
            f"{ANALYSIS}A<|end|><|start|>assistant<|channel|>commentary<|message|>B<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
            "A",
            f"B{CALL}",
        ),
        (f"{ANALYSIS}A<|end|><|start|>assistant to=functions.f<|channel|>analysis<|message|>{{}}<|call|>", "A", CALL),
        (" to=functions.f<|channel|>commentary<|message|>{}<|call|>", "", CALL),
    ],
)
def test_messages_by_channel(text: str, thoughts: str, answer: str) -> None:
    assert parse([text]) == (thoughts, answer)
    assert parse(list(text)) == (thoughts, answer)
    for place in range(len(text)):
        assert parse([text[:place], text[place:]]) == (thoughts, answer)
