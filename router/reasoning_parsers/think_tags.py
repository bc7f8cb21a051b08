"""Thoughts between <think> and </think>, in the ways of two families:

    qwen3         the model writes <think>, or the prompt ends with it; otherwise there are no thoughts
    deepseek_r1   an output begins inside thoughts, with or without <think>

If the prompt ends with </think>, as templates write it when thinking is off, there are no thoughts. Only the first
thoughts count: later marks are part of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import ClassVar, Literal

from ..tool_parsers.base import possible_start
from .base import AnswerPart, Part, Place, ReasoningParser, Thought, ThoughtBudget

BEGIN, END = "<think>", "</think>"


class ThinkTagParser(ReasoningParser):
    """Parser of thoughts between tags, if the prompt does not end with a tag: as `_default` says."""

    markers = (BEGIN, END)
    _default: ClassVar[Place] = "undecided"

    def __init__(self, prompt: str) -> None:
        self._at: Literal["undecided", "thoughts", "behind", "answer"] = self._start(prompt)
        self._may_open = self._at == "thoughts"  # <think> may follow, although the thoughts have begun
        self._text: str = ""  # not yet understood
        self._space: str = ""  # white space that is dropped if no thought follows
        self._has_thoughts = False
        self._is_last = False

    @classmethod
    def _start(cls, prompt: str) -> Place:
        end = prompt.rstrip()
        if end.endswith(BEGIN):
            return "thoughts"
        return "answer" if end.endswith(END) else cls._default

    @classmethod
    def grammar(cls, prompt: str, *, literal: Callable[[str], str], budget: ThoughtBudget | None = None) -> str | None:
        if budget is not None:
            return cls._bounded(prompt, budget)
        start, is_special = cls._start(prompt), literal(END) != json.dumps(END)
        text = "/(?s:.*)/"
        closed = (
            f"thought {literal(END)} /\\s*/\nthought: {text}"
            if is_special
            else f"thought /\\s*/\nthought[suffix={json.dumps(END)}]: {text}"
        )
        if start == "answer":
            return 'thoughts: ""'
        if start == "thoughts":
            return f"thoughts: {closed}"
        return f"thoughts: ({literal(BEGIN)} whole)?\nwhole: {closed}"

    @classmethod
    def any_answer(cls, budget: ThoughtBudget) -> str:
        return f"answer: {budget.other_than(BEGIN)}*"

    @classmethod
    def _bounded(cls, prompt: str, budget: ThoughtBudget) -> str | None:
        """Return the rule `thoughts` of thoughts within a budget."""
        if cls._start(prompt) == "answer":
            return 'thoughts: ""'
        if not budget.knows(BEGIN, END):
            return None
        begin, whole = budget.token(BEGIN), f"{budget.thoughts(BEGIN, END)} {budget.token(END)} /\\s*/"
        return f"thoughts: {begin}? {whole}" if cls._start(prompt) == "thoughts" else f"thoughts: ({begin} {whole})?"

    @property
    def place(self) -> Place:
        return "answer" if self._at == "behind" else self._at

    def _advance(self, parts: list[Part]) -> bool:
        match self._at:
            case "undecided":
                return self._open(otherwise="answer")
            case "thoughts":
                return self._open(otherwise="thoughts") if self._may_open else self._think(parts)
            case "behind":
                self._text = self._text.lstrip()
                self._at = "answer" if self._text else "behind"
                return bool(self._text)
            case "answer":
                parts.append(AnswerPart(self._text))
                self._text = ""
                return False

    def _open(self, *, otherwise: Literal["answer", "thoughts"]) -> bool:
        """Read <think> if it comes next."""
        rest = self._text.lstrip()
        if not self._is_last and BEGIN.startswith(rest):
            return False
        self._may_open = False
        if rest.startswith(BEGIN):
            self._at, self._text = "thoughts", rest[len(BEGIN) :]
        else:
            self._at = otherwise
        return True

    def _think(self, parts: list[Part]) -> bool:
        at = self._text.find(END)
        end = at if at >= 0 else len(self._text) - (0 if self._is_last else possible_start(self._text, (END,)))
        text = self._space + self._text[:end]
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not self._has_thoughts:
            kept = kept.lstrip()
        if kept:
            parts.append(Thought(kept))
            self._has_thoughts = True
        if at < 0:
            self._text = self._text[end:]
            return False
        self._at, self._text = "behind", self._text[at + len(END) :]
        return True


class Qwen3ReasoningParser(ThinkTagParser):
    """Parser of Qwen 3's thoughts."""


class DeepSeekR1ReasoningParser(ThinkTagParser):
    """Parser of DeepSeek-R1's thoughts."""

    _default = "thoughts"
