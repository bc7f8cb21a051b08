"""Reasoning parsers: they divide the text of a model into its thoughts and its answer, part by part.

The result, with neighbouring parts joined, does not depend on how the text is divided. The marks around thoughts are in
neither. White space around thoughts, and before the answer after them, is dropped. An output that ends inside thoughts
has no answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

from .budget import ThoughtBudget


class Thought(NamedTuple):
    """A part of the thoughts."""

    text: str


class AnswerPart(NamedTuple):
    """A part of the answer. It may hold tool calls, which a tool-call parser reads."""

    text: str


Part = Thought | AnswerPart
Place = Literal["undecided", "thoughts", "answer"]  # undecided: a mark may be incomplete, and no answer has begun


class ReasoningParser(ABC):
    """Parser of one output. `markers`: texts of the format that may be special tokens, which the parser must see."""

    markers: ClassVar[tuple[str, ...]] = ()
    _text = ""  # that is not read yet
    _is_last = False  # no text follows

    @abstractmethod
    def __init__(self, prompt: str) -> None:
        """`prompt`: the prompt's text, whose end may open or close the thoughts."""

    @classmethod
    def grammar(cls, prompt: str, *, literal: Callable[[str], str], budget: ThoughtBudget | None = None) -> str | None:
        """Return the Lark rule `thoughts` of llguidance: all that may stand between this prompt and the answer.

        None: this format has no grammar, or none that keeps to the budget. `literal` returns the Lark form of a fixed
        text or of its token.
        """
        del prompt, literal, budget
        return None

    @classmethod
    def answer_mark(cls, literal: Callable[[str], str]) -> str:
        """Return the Lark items of the mark that stands between the thoughts and an answer without calls, if there is
        one. `literal` is that of `grammar`."""
        del literal
        return ""

    @classmethod
    @abstractmethod
    def any_answer(cls, budget: ThoughtBudget) -> str:
        """Return the Lark rule `answer` of all that may follow the thoughts of this budget, if nothing else binds the
        answer: any tokens that begin no thoughts."""

    @property
    @abstractmethod
    def place(self) -> Place:
        """Where the text so far ends."""

    def feed(self, text: str) -> list[Part]:
        """Take the next part of the text and return what it brings."""
        self._text += text
        parts = list[Part]()
        while self._text and self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """The output has ended. Return the rest."""
        self._is_last = True
        return self.feed("")

    @abstractmethod
    def _advance(self, parts: list[Part]) -> bool:
        """Read the beginning of `_text`. Return False if more text is needed to go on."""
