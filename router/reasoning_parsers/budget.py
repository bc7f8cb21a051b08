"""Budget of thoughts: the most tokens that a model may think, as a part of Lark rules of llguidance.

Rules count tokens as tokens, whatever their text is. So the marks around the thoughts must be tokens that a grammar
names by their id (TextTokenizer.grammar_ids): llguidance cannot take back any other token that a rule names so. At each
place, at most one item of the rules fits a token: llguidance tries no second one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


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
