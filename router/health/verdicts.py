"""The vote on which nodes compute correctly: pure functions of the answers to one prompt.

Each node has one vote, the answer that it computes alone. The group's answer is the one that more than half of the
votes agree with. The canary of a pair is no vote: it is compared with the group's answer, and with what its two nodes
compute alone. The order in which answers came does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple

State = Literal["untried", "undecided", "ready", "faulty"]
MAX_NAMED = 4  # nodes, and different answers, in one sentence


class Token(NamedTuple):
    """A generated token, and the tokens that were a tie with it for the node; None: nearly all were."""

    id: int
    ties: frozenset[int] | None = frozenset()

    def is_tie(self, token_id: int) -> bool:
        """Return whether the node might as well have generated that token."""
        return self.ties is None or token_id in self.ties


Answer = tuple[Token, ...]


class Verdict(NamedTuple):
    """The verdict on a pair or on a node alone. `words` say why, unless the state is ready or untried."""

    state: State
    words: str = ""


UNTRIED = Verdict("untried")
READY = Verdict("ready")


class Votes:
    """The votes of a group: the answers that nodes compute alone, by name. `num_nodes` counts also the nodes that have
    not answered yet, `num_pending` only those of them that are about to. A single vote decides nothing before they have
    answered."""

    def __init__(self, answers: Mapping[str, Answer], num_nodes: int, num_pending: int = 0) -> None:
        self._answers = answers
        self._is_too_early = len(answers) == 1 and num_pending > 0
        counts = Counter(answers.values())  # nearly all are equal
        supports = [(sum(number for other, number in counts.items() if agree(each, other)), each) for each in counts]
        support, leader = max(supports, key=lambda each: each[0], default=(0, ()))
        self._leader = leader if 2 * support > len(answers) else None  # the group's answer
        self._has_majority = 2 * support > num_nodes
        self.are_unanimous = support == len(answers)

    def decide_as(self, other: Votes | None) -> bool:
        """Return whether these and other votes, both unanimous, come to the same verdict on every answer."""
        if other is None or not (self.are_unanimous and other.are_unanimous):
            return False
        mine, theirs = ((votes._leader, votes._is_too_early, votes._has_majority) for votes in (self, other))
        return mine == theirs

    def verdict(self, answer: Answer | None, own: Mapping[str, Answer | None]) -> Verdict:
        """Return the verdict on the answer of a pair, whose nodes alone compute `own`, or of a node alone."""
        if answer is None or None in own.values() or self._is_too_early:
            return UNTRIED
        for name, alone in own.items():
            if alone is not None and not agree(answer, alone):
                return Verdict("faulty", f"its canary gave {text(answer)}, but {name} alone computes {text(alone)}")
        if self._leader is None:
            return Verdict("undecided", f"nodes disagree, and nobody can tell yet who is right: {self._camps()}")
        if agree(answer, self._leader):
            return READY
        if self._has_majority:
            return Verdict("faulty", f"its canary gave {text(answer)}, but most nodes do not: {self._camps()}")
        return Verdict("undecided", f"nodes disagree, and not all have answered yet: {self._camps()}")

    def _camps(self) -> str:
        """Return which nodes gave which answer, the answer of most nodes first."""
        camps: dict[str, list[str]] = {}
        for name, answer in sorted(self._answers.items()):
            camps.setdefault(text(answer), []).append(name)
        sizes = sorted(camps.items(), key=lambda camp: -len(camp[1]))
        return _listed([f"{_listed(names, ', ')} gave {words}" for words, names in sizes], "; ")


def agree(one: Answer, other: Answer) -> bool:
    """Return whether two answers are equal up to their first tie, on which all later tokens depend. There the token of
    each was a tie for the other."""
    for here, there in zip(one, other, strict=False):
        if here.id != there.id:
            return here.is_tie(there.id) and there.is_tie(here.id)
    return len(one) == len(other)


def text(answer: Answer) -> str:
    """Return the token ids of an answer in words."""
    return " ".join(str(token.id) for token in answer) or "no token"


def _listed(words: list[str], separator: str) -> str:
    more = f" and {len(words) - MAX_NAMED} more" if len(words) > MAX_NAMED else ""
    return separator.join(words[:MAX_NAMED]) + more
