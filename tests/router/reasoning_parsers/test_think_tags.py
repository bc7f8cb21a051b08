"""Thoughts between tags: they and the answer come back at every division of the text."""

from __future__ import annotations

import pytest

from baton.router.reasoning_parsers.base import AnswerPart, Part, Thought
from baton.router.reasoning_parsers.registry import REASONING_PARSERS


def joined(parts: list[Part]) -> tuple[str, str]:
    """Return thoughts and answer. No thought may follow an answer of these formats."""
    kinds = [type(part) for part in parts]
    assert kinds == sorted(kinds, key=lambda kind: kind is AnswerPart)
    assert all(part.text for part in parts)
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    return thoughts, "".join(part.text for part in parts if isinstance(part, AnswerPart))


def parse(name: str, prompt: str, texts: list[str]) -> tuple[str, str]:
    parser = REASONING_PARSERS[name](prompt)
    return joined([part for text in texts for part in parser.feed(text)] + parser.finish())


@pytest.mark.parametrize(
    ("name", "prompt", "text", "thoughts", "answer"),
    [
        ("qwen3", "assistant\n", "<think>\nA < B\n\nC\n</think>\n\nYes.\n", "A < B\n\nC", "Yes.\n"),
        ("qwen3", "assistant\n", "No thoughts. </think> <think>", "", "No thoughts. </think> <think>"),
        ("qwen3", "assistant\n", "  <thin air", "", "  <thin air"),
        ("qwen3", "assistant\n", "<think>\n\n</think>\n\nYes", "", "Yes"),
        ("qwen3", "assistant\n", "<think>cut off </thi", "cut off </thi", ""),
        ("qwen3", "assistant\n", "<thi", "", "<thi"),
        ("qwen3", "assistant\n<think>\n", "A\n</think>\n\nB <think>c</think>", "A", "B <think>c</think>"),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", "\nB</think>", "", "\nB</think>"),
        ("deepseek_r1", "<\uff5cAssistant\uff5c>", "<think>\nA</think>B", "A", "B"),
        ("deepseek_r1", "<\uff5cAssistant\uff5c>", "A <think> B</think>C", "A <think> B", "C"),
        ("deepseek_r1", "<\uff5cAssistant\uff5c><think>\n", "A\n", "A", ""),
        ("deepseek_r1", "<\uff5cAssistant\uff5c></think>", "B", "", "B"),
        ("gemma4", "model\n", "<|channel>thought\nA < B\n<channel|>Yes.", "A < B", "Yes."),
        ("gemma4", "model\n<|channel>thought\n<channel|>", "Yes.", "", "Yes."),
        ("gemma4", "model\n<|channel>thought\n", "A<channel|>\nB", "A", "B"),
        ("gemma4", "model\n", "<|channel>tho", "", "<|channel>tho"),
    ],
)
def test_thoughts_and_answer(name: str, prompt: str, text: str, thoughts: str, answer: str) -> None:
    assert parse(name, prompt, [text]) == (thoughts, answer)
    assert parse(name, prompt, list(text)) == (thoughts, answer)
    for place in range(len(text)):
        assert parse(name, prompt, [text[:place], text[place:]]) == (thoughts, answer)


def test_the_grammar_of_gemma_begins_thoughts_with_a_token_and_a_word() -> None:
    grammar = REASONING_PARSERS["gemma4"].grammar("model\n", literal=lambda text: f"<{text.strip('<>|')}>")
    assert grammar is not None and grammar.startswith(
        'thoughts: (<channel> "thought" whole)?\nwhole: thought <channel> '
    )
