"""Thoughts between two tags, in the ways of three families:

    qwen3         the model writes <think>, or the prompt ends with it; otherwise there are no thoughts
    deepseek_r1   an output begins inside thoughts, with or without <think>
    gemma4        as qwen3, between <|channel>thought and <channel|>

If the prompt ends with the second tag, as templates write it when thinking is off, there are no thoughts. Only the
first thoughts count: later marks are part of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import ClassVar, Literal

from ..tool_parsers.base import possible_start
from .base import AnswerPart, Part, Place, ReasoningParser, Thought, ThoughtBudget


class ThinkTagParser(ReasoningParser):
    """Parser of thoughts between tags, if the prompt does not end with a tag: as `_default` says."""

    markers = ("<think>", "</think>")
    _begin: ClassVar[str] = "<think>"
    _end: ClassVar[str] = "</think>"
    _default: ClassVar[Place] = "undecided"

    def __init__(self, prompt: str) -> None:
        self._at: Literal["undecided", "thoughts", "behind", "answer"] = self._start(prompt)
        self._may_open = self._at == "thoughts"  # the first tag may follow, although the thoughts have begun
        self._text: str = ""  # not yet understood
        self._space: str = ""  # white space that is dropped if no thought follows
        self._has_thoughts = False
        self._is_last = False

    @classmethod
    def _start(cls, prompt: str) -> Place:
        end = prompt.rstrip()
        if end.endswith(cls._begin):
            return "thoughts"
        return "answer" if end.endswith(cls._end) else cls._default

    @classmethod
    def grammar(cls, prompt: str, *, literal: Callable[[str], str], budget: ThoughtBudget | None = None) -> str | None:
        if budget is not None:
            return cls._bounded(prompt, budget)
        start, is_special = cls._start(prompt), literal(cls._end) != json.dumps(cls._end)
        text = "/(?s:.*)/"
        closed = (
            f"thought {literal(cls._end)} /\\s*/\nthought: {text}"
            if is_special
            else f"thought /\\s*/\nthought[suffix={json.dumps(cls._end)}]: {text}"
        )
        if start == "answer":
            return 'thoughts: ""'
        if start == "thoughts":
            return f"thoughts: {closed}"
        return f"thoughts: ({cls._opening(literal)} whole)?\nwhole: {closed}"

    @classmethod
    def _opening(cls, literal: Callable[[str], str]) -> str:
        """Return the Lark items of the first tag."""
        return literal(cls._begin)

    @classmethod
    def any_answer(cls, budget: ThoughtBudget) -> str:
        return f"answer: {budget.other_than(cls.markers[0])}*"

    @classmethod
    def _bounded(cls, prompt: str, budget: ThoughtBudget) -> str | None:
        """Return the rule `thoughts` of thoughts within a budget."""
        if cls._start(prompt) == "answer":
            return 'thoughts: ""'
        if not budget.knows(cls._begin, cls._end):
            return None
        begin = budget.token(cls._begin)
        whole = f"{budget.thoughts(cls._begin, cls._end)} {budget.token(cls._end)} /\\s*/"
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
        """Read the first tag if it comes next."""
        rest = self._text.lstrip()
        if not self._is_last and self._begin.startswith(rest):
            return False
        self._may_open = False
        if rest.startswith(self._begin):
            self._at, self._text = "thoughts", rest[len(self._begin) :]
        else:
            self._at = otherwise
        return True

    def _think(self, parts: list[Part]) -> bool:
        at, ends = self._text.find(self._end), (self._end,)
        end = at if at >= 0 else len(self._text) - (0 if self._is_last else possible_start(self._text, ends))
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
        self._at, self._text = "behind", self._text[at + len(self._end) :]
        return True


class Qwen3ReasoningParser(ThinkTagParser):
    """Parser of Qwen 3's thoughts."""


class DeepSeekR1ReasoningParser(ThinkTagParser):
    """Parser of DeepSeek-R1's thoughts."""

    _default = "thoughts"


class Gemma4ReasoningParser(ThinkTagParser):
    """Parser of Gemma 4's thoughts. The first tag is a token and a word."""

    markers = ("<|channel>", "<channel|>")
    _begin, _end = "<|channel>thought", "<channel|>"

    @classmethod
    def _opening(cls, literal: Callable[[str], str]) -> str:
        return f"{literal(cls.markers[0])} {json.dumps(cls._begin.removeprefix(cls.markers[0]))}"
