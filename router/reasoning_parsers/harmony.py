"""Thoughts in the harmony format of gpt-oss. An output is a row of messages, and each names its channel:

    <|channel|>analysis<|message|>THOUGHTS<|end|><|start|>assistant<|channel|>final<|message|>ANSWER<|return|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Messages of the channel analysis are thoughts; all others are the answer. Two of one kind in a row are divided by an
empty line. A message to a tool goes to the tool-call parser with plain marks around it:
<|channel|>commentary to=functions.NAME<|message|>{...}<|call|>. A head that is cut off is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Literal

from ..tool_parsers.base import possible_start
from .base import AnswerPart, Part, Place, ReasoningParser, Thought, ThoughtBudget

START, END, CHANNEL, MESSAGE = "<|start|>", "<|end|>", "<|channel|>", "<|message|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
_BEGINS = (START, CHANNEL)
_CLOSES = (END, CALL, RETURN)
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_RECIPIENT = re.compile(r"\sto=([^\s<]+)")


class HarmonyReasoningParser(ReasoningParser):
    """Parser of the harmony format."""

    markers = (START, END, CHANNEL, MESSAGE, CONSTRAIN, CALL, RETURN)

    def __init__(self, prompt: str) -> None:
        del prompt  # it ends where a message begins
        self._at: Literal["between", "head", "thoughts", "answer", "tool"] = "between"
        self._text: str = ""  # not yet understood
        self._given: set[str] = set()  # kinds of messages that have given text
        self._is_new = False  # the present message has given nothing yet
        self._is_last = False

    @classmethod
    def grammar(cls, prompt: str, *, literal: Callable[[str], str], budget: ThoughtBudget | None = None) -> str | None:
        """A budget is that of one message, and there may be no other one of the channel analysis."""
        del prompt
        if literal(END) == json.dumps(END):
            return None  # its marks are no special tokens: no model has such a tokenizer
        text = "/(?s:.*)/" if budget is None else budget.thoughts(*_BEGINS, *_CLOSES)
        thought = f'{literal(CHANNEL)} "analysis" {literal(MESSAGE)} {text} {literal(END)} {literal(START)} "assistant"'
        return f"thoughts: ({thought}){'*' if budget is None else '?'}"

    @classmethod
    def answer_mark(cls, literal: Callable[[str], str]) -> str:
        return f'{literal(CHANNEL)} "final" {literal(MESSAGE)}'

    @classmethod
    def any_answer(cls, budget: ThoughtBudget) -> str:
        other = budget.other_than(CHANNEL)
        return f'answer: {other}* ({budget.token(CHANNEL)} ("final" | "commentary") {other}*)*'

    @property
    def place(self) -> Place:
        if self._at in ("between", "head"):
            return "undecided"
        return "thoughts" if self._at == "thoughts" else "answer"

    def _advance(self, parts: list[Part]) -> bool:
        match self._at:
            case "between":
                return self._begin()
            case "head":
                return self._read_head(parts)
            case _:
                return self._read_body(parts)

    def _begin(self) -> bool:
        """Read the mark that begins a message. Any other text is an answer without a head."""
        rest = self._text.lstrip()
        if rest.startswith((*_BEGINS, "to=")):
            self._at = "head"
            return True
        if not self._is_last and any(mark.startswith(rest) for mark in (*_BEGINS, "to=")):
            return False
        self._at, self._is_new = "answer", True
        return True

    def _read_head(self, parts: list[Part]) -> bool:
        head, mark, rest = self._text.partition(MESSAGE)
        if not mark:
            return False
        self._text, self._is_new = rest, True
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(f" {head}")
        if recipient is not None:
            parts.append(AnswerPart(f"{CHANNEL}commentary to={recipient[1]}{MESSAGE}"))
            self._at = "tool"
        else:
            self._at = "thoughts" if channel is not None and channel[1] == "analysis" else "answer"
        return True

    def _read_body(self, parts: list[Part]) -> bool:
        marks = (*_BEGINS, *_CLOSES)
        found = min(((self._text.find(mark), mark) for mark in marks if mark in self._text), default=None)
        end = found[0] if found else len(self._text) - (0 if self._is_last else possible_start(self._text, marks))
        self._give(parts, self._text[:end])
        self._text = self._text[end:]
        if found is None:
            return False
        if found[1] in _CLOSES:
            self._text = self._text[len(found[1]) :]
        if self._at == "tool":
            parts.append(AnswerPart(CALL))
        self._at = "between"
        return True

    def _give(self, parts: list[Part], text: str) -> None:
        if not text:
            return
        if self._at != "tool":
            text = f"\n\n{text}" if self._is_new and self._at in self._given else text
            self._given.add(self._at)
            self._is_new = False
        parts.append(Thought(text) if self._at == "thoughts" else AnswerPart(text))
