"""Reasoning parsers: they divide the text of a model into its thoughts and its answer, part by part.

The result, with neighbouring parts joined, does not depend on how the text is divided. The marks around thoughts are in
neither. White space around thoughts, and before the answer after them, is dropped. An output that ends inside thoughts
has no answer.

ThoughtBudget bounds the tokens that a model may think, as a part of Lark rules of llguidance. Rules count tokens as
tokens, whatever their text is. So the marks around the thoughts must be tokens that a grammar names by their id
(TextTokenizer.grammar_ids): llguidance cannot take back any other token that a rule names so. At each place, at most
one item of the rules fits a token: llguidance tries no second one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple


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


class ThoughtBudget(NamedTuple):
    """The most tokens of thoughts, marks not counted, for one tokenizer."""

    num_tokens: int
    token_ids: Mapping[str, int]  # of texts that a grammar names by their token
    end_ids: Sequence[int]  # tokens that end a text; thoughts have none

    def knows(self, *marks: str) -> bool:
        """Whether a grammar names each of these texts by its token."""
        return all(mark in self.token_ids for mark in marks)

    def token(self, mark: str) -> str:
        """Return the Lark item of a mark."""
        return f"<[{self.token_ids[mark]}]>"

    def other_than(self, *marks: str) -> str:
        """Return the Lark item of any one token but these marks. It may end the text."""
        return f"<[^{_listed(self.token_ids[mark] for mark in marks)}]>"

    def thoughts(self, *marks: str) -> str:
        """Return the Lark items of thoughts, in which none of these marks is; empty if the model may have none."""
        # llguidance's own max_tokens forbids rollback, which drafts need
        others = _listed((*(self.token_ids[mark] for mark in marks), *self.end_ids))
        return f"<[^{others}]>{{0,{self.num_tokens}}}" if self.num_tokens else ""


def _listed(ids: Iterable[int]) -> str:
    return ",".join(map(str, sorted(set(ids))))
